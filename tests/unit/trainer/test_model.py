"""The model wrapper, how a model is built, and activation checkpointing."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer.errors import InputMismatchError, ParallelConfigError
from nxd_infer.parallel_layers.layer_norm import mark_sequence_parallel
from nxd_infer.pipeline import NxDPPModel
from nxd_infer.pipeline.stage import take_stage
from nxd_infer.trainer import NxDModel
from nxd_infer.trainer.activation_checkpoint import apply_activation_checkpoint, transformer_layers
from nxd_models.llama.model import Attention, CausalLM, DecoderLayer, FeedForward
from tests.support.trainer.jobs import wrapped
from tests.support.trainer.models import MLP, decoder, llama, mlp, tokens, vectors


def test_it_has_the_local_modules_names():
    torch.manual_seed(0)
    model = wrapped(decoder, "tied")  # model_args arrive
    plain = model.local_module()
    assert isinstance(plain, CausalLM) and model.local_modules() == [plain]
    for kind in ("parameters", "modules", "children", "buffers"):
        ours, theirs = ([id(one) for one in getattr(of, kind)()] for of in (model, plain))
        assert ours == theirs
        assert list(dict(getattr(model, f"named_{kind}")())) == list(dict(getattr(plain, f"named_{kind}")()))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.config is plain.config and model.dtype == torch.float32
    assert model.nxd_config["tensor_parallel_size"] == 1
    assert model.model is plain.model  # forwarded
    with pytest.raises(AttributeError, match="name_or_path"):
        _ = model.name_or_path
    plain.name_or_path = "tiny"
    assert model.name_or_path == "tiny"
    assert all(param.nxd_name == name for name, param in model.named_parameters())


def test_it_behaves_like_the_module():
    torch.manual_seed(0)
    model = wrapped(mlp)
    batch = vectors()
    assert torch.equal(model(**batch), model.local_module()(**batch))
    model.eval()
    assert not model.training and not model.local_module().up.training
    model.double()
    assert model.dtype == torch.float64 == next(model.parameters()).dtype
    model.train().float().requires_grad_(False)
    assert model.training and not any(p.requires_grad for p in model.parameters())
    seen: list = []
    model.apply(lambda module: seen.append(type(module)))
    assert MLP in seen and NxDModel not in seen
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**batch), model(**batch))


class Marked(nn.Module):
    """Its norm knows nothing of sequence parallelism."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        mark_sequence_parallel(self.norm.weight)


def test_marks_of_parameters_are_those_of_what_replaces_them():
    model = wrapped(Marked)
    mark_sequence_parallel(model.norm.bias)  # also one that is marked after it was wrapped
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model]
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    for twin in (*twins, copy.deepcopy(model).to("meta")):
        marked = [name for name, p in twin.named_parameters() if getattr(p, "sequence_parallel_enabled", False)]
        assert marked == ["norm.weight", "norm.bias"]
        assert all(param.nxd_name == name for name, param in twin.named_parameters())


@pytest.mark.parametrize("disabled", [torch.no_grad, torch.inference_mode])
def test_training_without_gradients_is_refused(disabled: Any):
    for model in (wrapped(mlp), NxDPPModel(mlp())):
        with disabled(), pytest.raises(ParallelConfigError, match=r"run_train\(\) computes gradients"):
            model.run_train(**vectors())


def test_what_is_set_on_it_is_set_on_the_module():
    model = wrapped(Wrapping, "tensor")
    inner = model.local_module()
    model.head = nn.Linear(1, 2)
    model.how = "dict"
    model.scale = nn.Parameter(torch.ones(1))
    model.register_parameter("shift", nn.Parameter(torch.zeros(1)))
    model.register_buffer("count", torch.zeros(2))
    assert inner.head is model.head and inner.how == "dict"
    names = {"weight", "head.weight", "head.bias", "scale", "shift", "count"}
    assert set(model.state_dict()) == names and set(inner.state_dict()) == names
    model.note = "own"
    assert not hasattr(inner, "note")


class Wrapping(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.how = how

    def forward(self, x: Tensor) -> Any:
        loss = (self.weight * x).sum()
        if self.how == "attribute":
            return type("Output", (), {"loss": loss})()
        forms = {"tensor": loss, "tuple": (loss, x), "dict": {"loss": loss}, "none": x, "text": "a"}
        forms["nested"] = {"x": x, "losses": (x, {"main": loss})}
        return forms[self.how]


@pytest.mark.parametrize("how", ["tensor", "tuple", "dict", "attribute", "nested"])
def test_run_train_finds_the_loss(how: str):
    spec = {"output_loss_value_spec": {"x": False, "losses": (False, {"main": True})}}
    model = wrapped(Wrapping, how, **({"pipeline_config": spec} if how == "nested" else {}))
    x = torch.tensor([3.0, 4.0])
    loss = model.run_train(x)
    assert loss == 14 and not loss.requires_grad
    assert model.weight.grad == 7
    model.run_train(x=x)
    assert model.weight.grad == 14  # accumulated
    assert model.run_eval(x) == 14 and model.weight.grad == 14 and model.training
    model.zero_grad()
    assert model.weight.grad is None


def test_evaluation_leaves_each_module_in_its_mode():
    """Such as a part of a model that is not trained."""
    inner = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(2, 1)))
    model = wrapped(lambda: inner)
    inner[1].eval()
    model.run_eval(torch.ones(2))
    assert [module.training for module in (model, inner, inner[0], *inner[1].modules())] == [True] * 3 + [False] * 3
    model.eval()
    model.run_eval(torch.ones(2))
    assert not any(module.training for module in (model, *inner.modules()))


@pytest.mark.parametrize(
    ("how", "message"), [("none", r"a tensor of shape \(2,\)"), ("text", "str has no loss .found NoneType")]
)
def test_a_model_without_loss(how: str, message: str):
    with pytest.raises(InputMismatchError, match=message):
        wrapped(Wrapping, how).run_train(torch.ones(2))


def test_what_a_model_function_returns():
    with pytest.raises(ParallelConfigError, match=r"'<lambda>' must return a torch.nn.Module, got int"):
        wrapped(lambda: 3)
    with pytest.raises(ParallelConfigError, match="nxd_config is what neuronx_distributed_config"):
        nxd.initialize_parallel_model(llama, llama)  # pyright: ignore[reportArgumentType]


def test_meta_device():
    torch.manual_seed(3)
    plain = decoder("tied")
    torch.manual_seed(3)
    built = wrapped(decoder, "tied", model_init_config={"meta_device_init": True})
    assert len(list(built.parameters())) == len(list(plain.parameters()))
    assert list(built.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(built.state_dict()[name], value), name
    assert built(tokens()["input_ids"]).shape == (4, 12, 61)  # buffers that no state dict holds are there too


class Buffered(nn.Module):
    """A buffer with values wherever it is built, and one that is computed on the device in force."""

    def __init__(self, whole: bool = True):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("steps", torch.arange(4.0, device="cpu") + 1)
        if not whole:
            self.turn = nn.Module()
            self.turn.register_buffer("inv_freq", torch.ones(4) / 3, persistent=False)


def test_meta_device_keeps_buffers_or_says_that_it_cannot():
    model = wrapped(Buffered, model_init_config={"meta_device_init": True})
    assert torch.equal(model.steps, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    with pytest.raises(ParallelConfigError, match="meta_device_init=True: turn cannot initialise itself"):
        wrapped(Buffered, False, model_init_config={"meta_device_init": True})
    with pytest.raises(ParallelConfigError, match="meta_device_init=True: Wrapping cannot initialise itself"):
        wrapped(Wrapping, "tensor", model_init_config={"meta_device_init": True})

    def fill(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(2.0)

    model = wrapped(Buffered, False, model_init_config={"meta_device_init": True, "param_init_fn": fill})
    assert torch.equal(model.turn.inv_freq, torch.full((4,), 2.0))

    def fill_layers(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            fill(module)

    with pytest.raises(ParallelConfigError, match=r"turn \(Module\) has no values in inv_freq; fill them"):
        wrapped(Buffered, False, model_init_config={"meta_device_init": True, "param_init_fn": fill_layers})
    with pytest.raises(ParallelConfigError, match=r"Held \(Held\) has no values in freqs"):
        wrapped(Held, model_init_config={"meta_device_init": True, "param_init_fn": fill_layers})


class Rotary(nn.Module):
    """Its child exists only when it has been filled, as in models that make their rotary tables late."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.group = nn.Module()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.group.frequencies


def test_param_init_fn_gets_every_module_and_the_device_if_it_takes_one():
    seen: list[tuple[nn.Module, Any]] = []

    def fill(module: nn.Module, device: torch.device) -> None:
        seen.append((module, device))
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        if len(list(module.children())) == 0 and not isinstance(module, nn.Linear):  # without weights
            module.register_buffer("frequencies", torch.arange(4.0, device=device), persistent=False)

    model = wrapped(Rotary, model_init_config={"meta_device_init": True, "param_init_fn": fill})
    assert [one for one, _ in seen] == list(model.local_module().modules())
    assert {str(device) for _, device in seen} == {"cpu"}
    assert model(torch.ones(2, 4)).isfinite().all() and model.group.frequencies.tolist() == [0, 1, 2, 3]

    def by_std(module: nn.Module, std: float = 0.5) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.fill_(std)

    model = wrapped(Rotary, model_init_config={"meta_device_init": True, "param_init_fn": by_std})
    assert bool((model.layer.weight == 0.5).all())


def test_include_buffers_is_no_argument_of_the_model():
    config = nxd.neuronx_distributed_config()
    wide = lambda size=3: nn.Linear(2, size)  # noqa: E731
    for arguments in ((True, 5), (5,), (False, 5)):
        assert nxd.initialize_parallel_model(config, wide, *arguments).out_features == 5
    assert nxd.initialize_parallel_model(config, lambda: nn.Linear(2, 3), True).out_features == 3
    assert nxd.initialize_parallel_model(config, wide, include_buffers=True).out_features == 3
    assert nxd.initialize_parallel_model(config, nn.Linear, 2, 3, False).bias is None
    with pytest.raises(TypeError, match="positional argument"):
        nxd.initialize_parallel_model(config, wide, 1, 2)


def test_buffers_have_their_values_where_the_meta_device_does_not_include_them():
    config = nxd.neuronx_distributed_config(model_init_config={"meta_device_init": True})
    for arguments, named in (((False,), {}), ((), {"include_buffers": False})):
        model = nxd.initialize_parallel_model(config, Rotary, *arguments, **named)
        assert all(torch.equal(one, kept) for one, kept in zip(model.buffers(), Rotary().buffers(), strict=True))


class Held(nn.Module):
    """A tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.freqs = nn.Linear(4, 4), torch.arange(4.0)


class Named(nn.Module):
    def forward(self, x: Tensor, early_stop: bool = False, preserve_rng_state: float = 1.0, debug: int = 0) -> Tensor:
        return x * (preserve_rng_state + debug) if early_stop else x


def test_forwards_that_are_wrapped():
    layers = nn.Sequential(Named(), nn.Linear(2, 2))
    layers[1].forward = lambda x: x * 3
    apply_activation_checkpoint(layers, [Named, nn.Linear])
    x = torch.ones(1, requires_grad=True)
    assert float(layers[0](x, early_stop=True, preserve_rng_state=2.0, debug=3).detach()) == 5.0
    assert float(layers[1](x).detach()) == 3.0


def test_which_modules_are_checkpointed():
    model = decoder("llama")
    layers = [m for m in model.modules() if isinstance(m, DecoderLayer)]
    assert transformer_layers(model) == layers
    assert len(transformer_layers(model, FeedForward)) == 2
    model._no_split_modules = ["Attention"]  # pyright: ignore[reportAttributeAccessIssue]
    assert all(isinstance(m, Attention) for m in transformer_layers(model))
    with pytest.raises(ParallelConfigError, match=r"found no transformer layers, which .*MLP"):
        wrapped(mlp, activation_checkpoint_config="full")
    with pytest.raises(ParallelConfigError, match=r"found no transformer layers of the class 'Layer', .* one of .*MLP"):
        transformer_layers(mlp(), "Layer")
    with pytest.raises(ParallelConfigError, match=r"the model has no Conv2d; its classes are .*DecoderLayer"):
        wrapped(llama, activation_checkpoint_config=nn.Conv2d)


def test_a_stage_without_layers_checkpoints_nothing():
    """Such as one with the head alone: it does not fail where the other stages go on."""
    stages = [take_stage(decoder("llama"), ["model.layers.1"], rank, 2).module for rank in range(2)]
    for config, options in (("full", {"transformer_layer_cls": "DecoderLayer"}), (FeedForward, None)):
        assert [apply_activation_checkpoint(stage, config, options) for stage in stages] == [2, 0]
    with pytest.raises(ParallelConfigError, match=r"found no transformer layers of the class 'Layer', .*DecoderLayer"):
        apply_activation_checkpoint(stages[1], "full", {"transformer_layer_cls": "Layer"})


def test_a_checkpointed_model_is_the_same_model():
    torch.manual_seed(0)
    model = wrapped(llama, activation_checkpoint_config="full")
    torch.manual_seed(0)
    plain = llama()
    assert list(model.state_dict()) == list(plain.state_dict())
    batch = tokens()
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.run_train(**batch)
        assert all(p.grad is not None for p in twin.parameters())
    with torch.no_grad():
        assert torch.equal(model(batch["input_ids"]), plain(batch["input_ids"]))


def test_checkpointing_keeps_less():
    """What the backward pass keeps of a deep model falls by more than half."""

    def kept(option: Any) -> int:
        torch.manual_seed(0)
        model = wrapped(decoder, "llama", activation_checkpoint_config=option)
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(**tokens(8, 32))
        return sum(size for at, size in sizes.items() if at not in own)

    assert kept("full") < kept(None) / 2
