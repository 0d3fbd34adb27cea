"""Packed weights in traced models: which are chosen, that nothing but speed changes, loading, updating, refusing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import native
from nxd_infer.backends.cpu.backend import packed_option
from nxd_infer.backends.cpu.encodings import PACKED, PACKED_ACROSS, PACKED_INT8, PACKED_OPTION, QUANTIZE
from nxd_infer.context import LOCAL
from nxd_infer.errors import ArtifactVersionError, ModelClosedError, TraceConfigError
from nxd_infer.graph.export import Step
from nxd_infer.graph.ir import Program
from nxd_infer.ops import expert_linear, packed
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import parallel_model_save
from nxd_infer.runtime.rank_process.rank import Rank, Runtime
from nxd_infer.runtime.updates.weights import WeightUpdate
from tests.support.backends import packed_models, small_traces
from tests.support.backends.manifests import changed
from tests.support.backends.packed_models import Siblings, three_of_one_input, with_and_without_a_bias
from tests.support.graph.exporting import entries, joined_calls
from tests.support.needs import needs_native

pytestmark = needs_native

Forward = Callable[[Any, Tensor], Tensor]


class Form(nn.Module):
    """A weight [6, 8], a bias [6] and a table [10, 8], used as ``forward`` says."""

    def __init__(self, forward: Forward):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 8, generator=generator))
        self.bias = nn.Parameter(torch.randn(6, generator=generator))
        self.square = nn.Parameter(torch.randn(8, 8, generator=generator))
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def held(weight: Tensor, encoding: str) -> Tensor:
    plain = weight.mT.contiguous() if encoding == PACKED_ACROSS else weight
    return packed.pack(plain) if encoding else plain


def encoded(module: nn.Module, *inputs: dict[str, Tensor]) -> tuple[dict[str, str], list[Tensor]]:
    """What is chosen over buckets with these inputs, and what each bucket's graph returns with the packed weights."""
    results = []
    plain, packs = (
        entries([Step(module, one) for one in inputs], native.load(), {PACKED_OPTION: minimum}) for minimum in (0, 1)
    )
    chosen: dict[str, str] = {}
    tensors = dict(module.named_parameters())
    for one, before, lowered in zip(inputs, plain, packs, strict=True):
        changed = {spec.name: spec.encoding for spec in lowered.graph.weights if spec.encoding}
        chosen.update(changed)
        assert (lowered.digest != before.digest) == bool(changed)
        values = [held(tensors[spec.name].detach(), spec.encoding) for spec in lowered.graph.weights]
        states = [module.get_buffer(spec.name).clone() for spec in lowered.graph.states]
        results += Program(lowered.ir)(*states, *one.values(), *values)
    return chosen, results


LINEARS: dict[str, Forward] = {
    "linear": lambda m, x: F.linear(x, m.weight, m.bias),
    "linear without bias": lambda m, x: F.linear(x, m.weight),
    "linear + add": lambda m, x: F.linear(x, m.weight) + m.bias,
    "addmm": lambda m, x: torch.addmm(m.bias, x.reshape(-1, 8), m.weight.t()),
    "addmm with a whole matrix": lambda m, x: torch.addmm(torch.ones(15, 6), x.reshape(-1, 8), m.weight.t()),
    "t + mm": lambda m, x: x.reshape(-1, 8).mm(m.weight.t()),
    "T + matmul": lambda m, x: x @ m.weight.T,
    "mT + matmul": lambda m, x: x @ m.weight.mT,
    "transpose + matmul": lambda m, x: torch.matmul(x, m.weight.transpose(-1, -2)),
    "permute + matmul": lambda m, x: torch.matmul(x, m.weight.permute(1, 0)),
    "einsum": lambda m, x: torch.einsum("bsk,nk->bsn", x, m.weight),
    "einsum, weight first": lambda m, x: torch.einsum("oi, ...i -> ...o", m.weight, x),
    "twice": lambda m, x: F.linear(x, m.weight) + x @ m.weight.T,
    "without gradients": lambda m, x: _without_gradients(m, x),
    "condition": lambda m, x: torch.cond(
        x.sum() > 0, lambda y, w: F.linear(y, w), lambda y, w: y @ w.t(), (x, m.weight)
    ),
}


def _without_gradients(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return F.linear(x, module.weight, module.bias)


class Each(nn.Module):
    """Every form with weights of its own, of an input of its own."""

    def __init__(self, forms: Iterable[nn.Module]):
        super().__init__()
        self.forms = nn.ModuleList(forms)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [form(x + number) for number, form in enumerate(self.forms)]


def check(forms: dict[str, nn.Module], x: Tensor) -> tuple[nn.Module, dict[str, str]]:
    """All forms as one module, and what is packed in them; the results are those of the module."""
    module = Each(forms.values())
    chosen, results = encoded(module, {"x": x})
    with torch.no_grad():
        for name, one, other in zip(forms, results, module(x), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    return module, chosen


def test_every_form_of_a_linear_is_packed() -> None:
    _, chosen = check({name: Form(forward) for name, forward in LINEARS.items()}, torch.randn(3, 5, 8))
    assert chosen == {f"forms.{number}.weight": PACKED for number in range(len(LINEARS))}, list(LINEARS)


ACROSS: dict[str, Forward] = {
    "x @ W": lambda m, x: x[..., :6] @ m.weight,
    "mm": lambda m, x: x[0, :, :6].mm(m.weight),
    "addmm, as in GPT-2": lambda m, x: torch.addmm(m.square[0], x.reshape(-1, 8)[:, :6], m.weight),
    "linear of the transpose": lambda m, x: F.linear(x[..., :6], m.weight.T, m.square[0]),
    "twice": lambda m, x: x[..., :6] @ m.weight + F.linear(x[..., 2:], m.weight.t()),
    "condition": lambda m, x: torch.cond(
        x.sum() > 0, lambda y, w: y @ w, lambda y, w: 2 * torch.matmul(y, w), (x[..., :6].contiguous(), m.weight)
    ),
}


def test_a_weight_that_is_not_transposed_is_packed_across() -> None:
    _, chosen = check({name: Form(forward) for name, forward in ACROSS.items()}, torch.randn(3, 5, 8))
    assert chosen == {f"forms.{number}.weight": PACKED_ACROSS for number in range(len(ACROSS))}, list(ACROSS)


OTHERS: dict[str, Forward] = {
    "both ways": lambda m, x: x @ m.square + F.linear(x, m.square),
    "element-wise": lambda m, x: F.linear(x, m.square) + m.square.sum(),
    "the weight times itself": lambda m, x: F.linear(m.square, m.square) + x[0, :1, :1],
    "einsum over the other axis": lambda m, x: torch.einsum("bsk,kn->bsn", x, m.square),
    "einsum that sums more": lambda m, x: torch.einsum("bsk,nk->bn", x, m.square),
    "a slice": lambda m, x: F.linear(x, m.square[:4]),
    "another dtype": lambda m, x: F.linear(x.double(), m.square.double()),
    "addmm with a factor": lambda m, x: torch.addmm(x[0, 0], x[0], m.square.t(), alpha=2),
    "an embedding alone": lambda m, x: F.embedding(x.abs().long().clamp(max=7), m.square),
    "returned": lambda m, x: F.linear(x, m.square) + m.square.t()[0],
    "one branch only": lambda m, x: torch.cond(
        x.sum() > 0, lambda y, w: F.linear(y, w), lambda y, w: y @ w, (x, m.square)
    ),
}


class Mixed(nn.Module):
    """Experts [5, 6, 8], used as ``forward`` says."""

    def __init__(self, forward: Forward):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(0)))
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def experts_of(x: Tensor) -> Tensor:
    return x[:, 0].abs().mul(3).long() - 1  # -1 to 6: some rows have none


EXPERTS: dict[str, tuple[Forward, bool]] = {
    "rows": (lambda m, x: expert_linear(x[:, 0], m.weight, experts_of(x[:, 0])), True),
    "more rows than experts": (
        lambda m, x: expert_linear(x.flatten(0, 1), m.weight, experts_of(x.flatten(0, 1))),
        True,
    ),
    "of the transpose": (lambda m, x: expert_linear(x[:, 0, :6], m.weight.mT, experts_of(x[:, 0])), True),
    "of both": (
        lambda m, x: expert_linear(
            expert_linear(x[:, 0], m.weight, experts_of(x[:, 0])), m.weight.mT, experts_of(x[:, 0])
        ),
        False,
    ),
    "of another transpose": (
        lambda m, x: expert_linear(x[:, 0], m.weight.permute(1, 0, 2), experts_of(x[:, 0])),
        False,
    ),
    "and added": (lambda m, x: expert_linear(x[:, 0], m.weight, experts_of(x[:, 0])) + m.weight.sum(), False),
    "a batch of products": (lambda m, x: torch.matmul(m.weight, x[0, 0]), False),
}


def test_the_matrices_of_experts_are_packed_and_others_of_three_dimensions_are_not() -> None:
    forms: dict[str, nn.Module] = {name: Mixed(forward) for name, (forward, _) in EXPERTS.items()}
    _, chosen = check(forms, torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)))
    assert list(chosen) == [f"forms.{i}.weight" for i, (_, packs) in enumerate(EXPERTS.values()) if packs]


def test_what_chooses_experts_is_packed_whatever_its_size_and_is_never_rounded() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.other = nn.Linear(8, 5, bias=False), nn.Linear(8, 5, bias=False)
            self.weight = nn.Parameter(torch.randn(5, 64, 8))

        def forward(self, x: Tensor) -> Tensor:
            best = self.router(x).softmax(-1).topk(1).indices[:, 0]
            return expert_linear(x, self.weight, torch.where(x[:, 0] > 0, best, -1)) + self.other(x).sum()

    options = {PACKED_OPTION: 4096, QUANTIZE: "int8"}
    (entry,) = entries([Step(Routed(), {"x": torch.randn(4, 8)})], native.load(), options)
    found = {spec.name: spec.encoding for spec in entry.graph.weights}
    assert found == {"router.weight": PACKED, "other.weight": "", "weight": PACKED_INT8}


def test_any_other_use_keeps_a_weight_plain() -> None:
    _, chosen = check({name: Form(forward) for name, forward in OTHERS.items()}, torch.randn(3, 5, 8))
    assert chosen == {}, list(OTHERS)


JOINED: dict[str, tuple[Forward, list[int]]] = {
    "three of one input": (three_of_one_input, [3]),
    "one of them twice": (lambda m, x: torch.cat((m.a(x), m.b(m.c(x).repeat(1, 2)), m.c(x)), -1), [3]),
    "with and without a bias": (with_and_without_a_bias, [2]),
    "each of its own": (lambda m, x: m.b(m.c(x).repeat(1, 2)), []),
}


def around(write: Callable[[Tensor], object]) -> Forward:
    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = x * 2
        before = (m.a(hidden), m.b(hidden))
        write(hidden)
        return torch.cat((*before, m.b(hidden), m.c(hidden)), -1)

    return forward


def _of_a_changing_state(m: Any, x: Tensor) -> Tensor:
    before = m.a(m.seen)
    m.seen.add_(x)
    return torch.cat((before, m.b(m.seen)), -1)


APART: dict[str, tuple[Forward, list[int]]] = {
    "a slice is set": (around(lambda h: h[:, 0].fill_(0)), [2, 2]),
    "a slice is multiplied": (around(lambda h: h[:, :4].mul_(3)), [2, 2]),
    "a flat view is zeroed": (around(lambda h: h.view(-1)[3:7].zero_()), [2, 2]),
    "the whole is added to": (around(lambda h: h.add_(1)), [2, 2]),
    "a state between them": (_of_a_changing_state, []),
}


@pytest.mark.parametrize("forms", [JOINED, APART], ids=["joined", "on their side of a write"])
def test_linears_of_one_input_become_one_call(forms: dict[str, tuple[Forward, list[int]]]) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    module, _ = check({name: Siblings(forward) for name, (forward, _) in forms.items()}, x)
    library = native.load()
    (lowered,) = entries([Step(module, {"x": x})], library, {PACKED_OPTION: 1})
    expected = [size for _, sizes in forms.values() for size in sizes]
    together = [size for size in joined_calls(lowered, library.op("packed_linears")) if size > 1]
    assert sorted(together) == sorted(expected)


def test_autocast_keeps_a_weight_of_another_type_plain_and_packs_one_of_its_own() -> None:
    def under_autocast(module: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(x, module.weight, module.bias)

    x = torch.randn(3, 5, 8)
    assert encoded(Form(under_autocast), {"x": x})[0] == {}
    module = Form(under_autocast).bfloat16()
    chosen, (found,) = encoded(module, {"x": x.bfloat16()})
    assert chosen == {"weight": PACKED}
    torch.testing.assert_close(found, module(x.bfloat16()).detach(), rtol=2e-2, atol=2e-2)


def test_one_encoding_for_all_buckets() -> None:
    """A weight that one bucket multiplies by and another uses otherwise stays plain in both."""

    def by_size(module: Any, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, module.square), module.weight) if len(x) == 2 else x @ module.square

    module = Form(by_size)
    small, large = torch.randn(2, 8), torch.randn(3, 8)
    chosen, found = encoded(module, {"x": small}, {"x": large})
    assert chosen == {"weight": PACKED}
    for result, x in zip(found, (small, large), strict=True):
        torch.testing.assert_close(result, module(x).detach(), rtol=1e-5, atol=1e-5)
    assert encoded(module, {"x": small})[0] == {"weight": PACKED, "square": PACKED}


def test_small_weights_stay_plain_unless_asked_for() -> None:
    module = nn.Linear(128, 128, bias=False)  # 64 KiB
    step = Step(module, {"x": torch.randn(2, 128)})
    for option, encoding in ((True, PACKED), ((64 << 10) + 1, ""), (False, "")):
        (entry,) = entries([step], native.load(), {PACKED_OPTION: packed_option(option)})
        assert [spec.encoding for spec in entry.graph.weights] == [encoding]
    with pytest.raises(TraceConfigError, match="nxd_packed='yes' must be True, False"):
        packed_option("yes")
    with pytest.raises(TraceConfigError, match="takes no compiler_args but 'nxd_packed'"):
        nxd.trace.parallel_model_trace(
            packed_models.tied, torch.zeros(1, dtype=torch.int64), compiler_args={"other": 1}, backend="eager"
        )


# --- whole models ---------------------------------------------------------------------------------------


def trace(func: Any, example: Any, loader: Any, *, packed: Any = 1, tp_degree: int = 1) -> Any:
    options = {"compiler_args": {"nxd_packed": packed}, "tp_degree": tp_degree, "backend": "eager"}
    return small_traces.trace(func, example, loader, **options)


TOKENS = torch.tensor([[1, 5, 63], [0, 7, 32]])


@pytest.fixture(scope="module")
def small() -> Iterator[Any]:
    """At degree 1, in this process."""
    with trace(packed_models.tied, TOKENS, packed_models.tied_checkpoint) as model:
        yield model


def test_a_rank_whose_packing_failed_half_way_does_not_run_again(small: Any, tmp_path: Path) -> None:
    model = small
    with WeightUpdate(model.manifest, packed_models.tied_weights(5)).write(0) as file:
        copy = tmp_path / "new.safetensors"
        file.seek(0)
        copy.write_bytes(file.read())
    rank = Rank(model.artifact, 0, Runtime(LOCAL, 1, model.artifact))
    rank.bind(0, [TOKENS])()
    rank.prepare_weights([copy])
    os.truncate(copy, 0)
    with pytest.raises(Exception, match="cannot be read as safetensors"):
        rank.commit_weights()
    with pytest.raises(ModelClosedError, match="replaced only some of the old ones"):
        rank.bind(0, [TOKENS])()
    rank.close()


def test_one_copy_of_a_packed_weight_is_held() -> None:
    """The file's pages are given back once they are packed, at load and when the weights are updated."""
    x = torch.randn(2, 2048).bfloat16()
    with trace(packed_models.wide, x, packed_models.wide_checkpoint, packed=True) as model:
        assert model.in_process
        torch.testing.assert_close(model(x), packed_models.wide()(x).detach(), rtol=2e-2, atol=2e-2)
        own = str(model.artifact.weight_file(0).resolve())  # other tests may have left other files mapped
        assert resident(own) < 1 << 20
        weights = {name: tensor.detach() for name, tensor in packed_models.wide(1).state_dict().items()}
        before = resident("(deleted)")  # the new weights come in a file without a name
        model.update_weights(weights)
        torch.testing.assert_close(model(x), packed_models.wide(1)(x).detach(), rtol=2e-2, atol=2e-2)
        assert resident("(deleted)") - before < 1 << 20
        (big,) = [spec for spec in model.manifest.weights if spec.encoding]
        assert big.name == "big.weight" and big.nbytes == 16 << 20


def test_new_weights_are_read_before_the_first_call() -> None:
    """A call's time limit is not for reading them: the swap, which has a start's, does that in the ranks."""
    x = torch.randn(2, 2048).bfloat16()
    with trace(packed_models.wide, x, packed_models.wide_checkpoint, packed=False) as model:
        before = resident("(deleted)")
        model.update_weights({name: tensor.detach() for name, tensor in packed_models.wide(1).state_dict().items()})
        assert resident("(deleted)") - before >= 16 << 20


def resident(name: str) -> int:
    """Bytes of this process's mappings of files whose name contains ``name``."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            counts = name in line
        elif counts and head[0] == "Pss:":
            total += int(head[1]) << 10
    return total


def test_an_unknown_encoding_is_refused_by_name(small: Any, tmp_path: Path) -> None:
    parallel_model_save(small, tmp_path / "saved")
    with changed(tmp_path / "saved") as manifest:
        assert "packed-weights" in manifest["requires"]  # for readers that know no encodings at all
        weight = next(entry for entry in manifest["weights"] if entry["name"] == "up.weight")
        weight["encoding"] = "packed99"
    with pytest.raises(ArtifactVersionError, match=r"'up\.weight' as 'packed99'.*upgrade"):
        load_artifact(tmp_path / "saved")
    with pytest.raises(ArtifactVersionError, match=r"'up\.weight' as 'packed99'.*upgrade"):
        nxd.trace.parallel_model_recompile(tmp_path / "saved", tmp_path / "again")
