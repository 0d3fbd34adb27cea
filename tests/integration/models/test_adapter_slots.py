"""Traced decoders with slots for LoRA adapters: every row of a batch as the plain model with its adapter merged in."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nxd_infer.errors import AdapterError, InputRangeError, ModelConfigError, ParallelConfigError
from nxd_infer.hugging_face import weights as hf
from nxd_infer.modules.lora import LoraConfig, LoRAModel, add_adapter_slots
from nxd_infer.parallel_layers import ColumnParallelLinear
from nxd_infer.trace import parallel_model_trace
from nxd_models import registry
from nxd_models.serving import tasks
from nxd_models.serving.decoder_step import step_inputs
from nxd_models.serving.eager_generation import generate_eager
from tests.support.adapter_files import ALL, PREFIX, merge, write_adapter
from tests.support.models.helpers import (
    ODD,
    assert_greedy,
    greedy_reference,
    prompts_of,
    reference,
    relative_difference,
    traced_run,
    without_mixed,
)
from tests.support.tiny_models import write_tiny

BUCKET, MAX_LEN, NEW, RANK = 8, 40, 5, 4
LENGTHS = (3, 11, BUCKET, 7)
ROWS = [1, 0, 2, 1]
"""The slot of each row: two adapters and none in one batch."""
NONE = [0] * len(ROWS)
NO_END = {"bias_ids": 2, "bias_values": [[-1e9] + [0.0] * 299] * len(LENGTHS)}
FEW = ("q_proj", "v_proj", "down_proj")
FAMILIES = {
    "llama": ({**ODD, "num_hidden_layers": 1}, ALL),
    "qwen2": ({"num_key_value_heads": 1, "num_hidden_layers": 1}, FEW),
}
"""Heads that are padded at degree 2 and an inner size that is too; one key/value head that both ranks hold, biases. And
the layers that have slots."""


class Case:
    """A tiny model, two adapters for it, and the plain models that they make."""

    def __init__(self, root, family):
        sizes, self.targets = FAMILIES[family]
        self.base = write_tiny(family, root / "base", **sizes)
        self.adapters = [
            write_adapter(root / "wide", self.base, rank=RANK, targets=self.targets, alpha=6, seed=1),
            write_adapter(root / "narrow", self.base, rank=2, targets=FEW, seed=2, use_rslora=True),
        ]
        merged = [merge(self.base, path, root / f"merged{i}") for i, path in enumerate(self.adapters)]
        self.models = [self.base, *merged]
        self.prompts = prompts_of(LENGTHS, 280, seed=4)

    @functools.cached_property
    def expected(self):
        """Tokens, gaps and log-probabilities of each row by transformers, on the merged weights."""
        rows = []
        for prompt, slot in zip(self.prompts, ROWS, strict=True):
            tokens, gaps = greedy_reference(self.models[slot], prompt, NEW)
            with torch.no_grad():
                logits = reference(self.models[slot], "CausalLM")(torch.tensor([prompt + tokens])).logits[0]
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            rows.append((tokens, gaps, logprobs))
        return rows

    def trace(self, degree, slots=2, **more):
        lora = {"lora_slots": slots, "lora_rank": RANK, "lora_targets": list(self.targets)} if slots else {}
        sizes = {"batch_sizes": [len(ROWS)], "prompt_buckets": [BUCKET], "max_len": MAX_LEN, "dtype": torch.float32}
        plan = without_mixed(tasks.plan(self.base, **sizes, **lora))
        step = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
        return parallel_model_trace(**plan.trace_arguments(), tp_degree=degree, backend="eager", **more), step

    def generate(self, model, step, rows=ROWS):
        with_slots = {"adapter": list(rows)} if step.adapter_slots is not None else {}
        run = traced_run(model, step)
        return generate_eager(step, self.prompts, NEW, piece=BUCKET, run=run, **NO_END, **with_slots)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return functools.cache(lambda family: Case(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def traced(case):
    """The Llama at degree 2, with slots in every layer."""
    model, step = case("llama").trace(2)
    with model:
        yield model, step


def check_mixed(case, model, step):
    """Rows with adapters as transformers on merged weights; rows without as if there were no slots."""
    first, _, second, _ = (tokens for tokens, _, _ in case.expected)
    for prompt, changed in ((case.prompts[0], first), (case.prompts[2], second)):
        assert greedy_reference(case.base, prompt, NEW)[0] != changed, "equal answers would show nothing"
    for slot, path in enumerate(case.adapters, 1):
        model.load_adapter(slot, path)
    rows = case.generate(model, step)
    for found, (tokens, gaps, logprobs) in zip(rows, case.expected, strict=True):
        assert_greedy(found.tokens, tokens, gaps)
        wanted = torch.tensor([float(row[token]) for row, token in zip(logprobs, tokens, strict=True)])
        assert relative_difference(torch.tensor(found.logprobs), wanted) < 1e-5
        for top, row in zip(found.top, logprobs, strict=True):
            values = torch.tensor(list(top.values()))
            assert relative_difference(values, row[list(top)]) < 1e-5


def test_slots_in_some_layers_with_a_head_that_all_ranks_hold(case):
    case = case("qwen2")
    model, step = case.trace(2)
    with model:
        assert model.manifest.metadata["lora"] == {"slots": 2, "rank": RANK, "targets": list(FEW)}
        check_mixed(case, model, step)


def test_rows_without_an_adapter_have_the_numbers_of_the_plain_model(case, traced):
    case, (model, step) = case("llama"), traced
    plain, plain_step = case.trace(2, slots=0)
    with plain:
        base = case.generate(plain, plain_step)
        with pytest.raises(AdapterError, match="--lora-slots"):
            plain.load_adapter(1, case.adapters[0])
    assert case.generate(model, step, NONE) == base, "no adapter: the very numbers of the base model"
    check_mixed(case, model, step)
    mixed = case.generate(model, step)
    assert mixed[ROWS.index(0)] == base[ROWS.index(0)], "a row without one, beside rows with adapters"
    model.restart()
    model.update_weights(hf.named_weights(step, hf.weights(case.base)))
    assert case.generate(model, step) == mixed, "a restart and new weights leave the adapters alone"
    model.load_adapter(1, None)
    emptied = case.generate(model, step)
    assert [emptied[row] for row, slot in enumerate(ROWS) if slot != 2] == [
        base[row] for row, slot in enumerate(ROWS) if slot != 2
    ]
    assert emptied[ROWS.index(2)] == mixed[ROWS.index(2)]


@pytest.mark.parametrize(("form", "limit", "share"), [("int8", 0.06, 1 / 3), ("int4-asym", 0.3, 2 / 3)])
def test_adapters_over_rounded_weights(case, form, limit, share):
    """Rows come as near to the merged models as the rounding lets them."""
    case = case("qwen2")
    model, step = case.trace(1, quantize=form, compiler_args={"nxd_packed": 1})
    with model:
        assert sum(spec.encoding == f"packed32-{form}" for spec in model.manifest.weights) > 5
        for slot, path in enumerate(case.adapters, 1):
            model.load_adapter(slot, path)
        rows = case.generate(model, step)
    for prompt, slot, found, (_, _, logprobs) in zip(case.prompts, ROWS, rows, case.expected, strict=True):
        ids = list(found.top[0])
        near = relative_difference(torch.tensor(list(found.top[0].values())), logprobs[0][ids])
        with torch.no_grad():
            base = reference(case.base, "CausalLM")(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        assert near < limit and (slot == 0 or near < relative_difference(base[ids], logprobs[0][ids]) * share)


def test_an_adapter_that_the_trainer_saved(case, traced, tmp_path):
    torch.manual_seed(0)  # of one adapter in sixty the first token would end the text, which is not asked for here
    case, (model, step) = case("llama"), traced
    module = LoRAModel(registry.load_model(case.base), LoraConfig(lora_rank=3, target_modules=["q_proj", "o_proj"]))
    with torch.no_grad():
        for name, param in module.named_parameters():
            if name.endswith("lora_B.weight"):
                nn.init.normal_(param, std=0.5)
    module.save_adapter(tmp_path / "trained")
    with torch.no_grad():
        logits = module(torch.tensor([case.prompts[0]]))[0, -1]
    model.load_adapter(2, tmp_path / "trained")
    found = case.generate(model, step, [2, 0, 0, 0])[0]
    assert found.tokens[0] == int(logits.argmax())
    ids, values = zip(*found.top[0].items(), strict=True)
    assert relative_difference(torch.tensor(values), logits.log_softmax(-1)[list(ids)]) < 1e-5


def changed_config(adapter, **changes):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def changed_tensors(adapter, change, **metadata):
    path = adapter / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}  # the file is mapped
    change(tensors)
    save_file(tensors, path, {"format": "pt", **metadata})


def test_an_adapter_whose_configuration_lies_in_its_weights(case, traced, tmp_path):
    """As ``save_lora_config_adapter=True`` saves it in a checkpoint."""
    case, (model, step) = case("llama"), traced
    adapter = write_adapter(tmp_path / "a", case.base, rank=4, targets=("q_proj", "v_proj"), seed=9)
    model.load_adapter(1, adapter)
    expected = case.generate(model, step, [1] * len(ROWS))
    model.load_adapter(1, None)
    changed_tensors(adapter, lambda tensors: None, adapter_config=(adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").unlink()
    model.load_adapter(1, adapter)
    assert case.generate(model, step, [1] * len(ROWS)) == expected


Q, NORM = PREFIX + "model.layers.0.self_attn.q_proj", PREFIX + "model.norm"
REFUSED = {
    "rank": (lambda a: changed_config(a, r=5), "rank is 5 .* at most 4.*--lora-rank 5"),
    "kind": (lambda a: changed_config(a, peft_type="IA3"), "IA3"),
    "target": (
        lambda a: changed_tensors(a, lambda t: t.update({NORM + ".lora_A.weight": t.pop(Q + ".lora_A.weight")})),
        "model.norm, which has no slots .*down_proj, .*--lora-targets",
    ),
    "magnitude": (
        lambda a: changed_tensors(a, lambda t: t.update({Q + ".lora_magnitude_vector": torch.ones(3)})),
        "lora_magnitude_vector, which is not a factor",
    ),
    "half": (lambda a: changed_tensors(a, lambda t: t.pop(Q + ".lora_B.weight")), "lora_A.weight without .*lora_B"),
    "shape": (
        lambda a: changed_tensors(a, lambda t: t.update({Q + ".lora_B.weight": torch.ones(7, 4)})),
        r"\[7, 4\], and \[48, 4\] fits",
    ),
    "whole numbers": (
        lambda a: changed_tensors(a, lambda t: t.update({Q + ".lora_A.weight": torch.ones(4, 36, dtype=torch.int64)})),
        "int64",
    ),
    "empty": (lambda a: changed_tensors(a, dict.clear), "no tensors"),
    "no file": (lambda a: (a / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors.*never loaded"),
    "damaged": (lambda a: (a / "adapter_model.safetensors").write_bytes(b"\xff" * 64), "adapter_model.safetensors"),
}  # fmt: skip


def test_adapters_that_do_not_fit_are_refused_and_change_nothing(case, traced, tmp_path):
    case, (model, step) = case("llama"), traced
    fits = {"rank": 4, "targets": ("q_proj", "v_proj"), "seed": 9}
    model.load_adapter(1, write_adapter(tmp_path / "good", case.base, **fits))
    before = case.generate(model, step, [1] * len(ROWS))
    for what, (spoil, message) in REFUSED.items():
        adapter = write_adapter(tmp_path / what, case.base, **{**fits, "seed": 10})
        spoil(adapter)
        with pytest.raises(AdapterError, match=message):
            model.load_adapter(1, adapter)
    for slot in (0, 3, -1, True, "1"):
        with pytest.raises(AdapterError, match=f"slot {slot!r} is none of this model's, which are 1 to 2"):
            model.load_adapter(slot, tmp_path / "good")
    inputs = step_inputs(step.config.vocab_size, len(ROWS), 1, step.slots, adapter=True)
    most = {"tokens": step.config.vocab_size - 1, "start": MAX_LEN - 1, "block_table": step.slots, "adapter": 2}
    for name, value in most.items():
        with pytest.raises(InputRangeError, match=f"'{name}' holds the value {value + 1}; it must be .* to {value}"):
            model.run_bucket(f"decode_b{len(ROWS)}", {**inputs, name: torch.full_like(inputs[name], value + 1)})
    assert case.generate(model, step, [1] * len(ROWS)) == before


def test_an_encoder_and_impossible_slots_are_refused(case, tmp_path):
    with pytest.raises(ModelConfigError, match="embed"):
        tasks.plan(write_tiny("bert", tmp_path / "bert"), "embed", lora_slots=1)
    plan = tasks.plan(case("llama").base, max_len=MAX_LEN, lora_slots=1, lora_targets=["q_proj", "query"])
    with pytest.raises(ModelConfigError, match=r"no layer is named 'query'; layers that can .*down_proj"):
        plan.func(**plan.func_kwargs)
    for name, value, least in (("lora_rank", 0, 1), ("lora_slots", -1, 0)):
        with pytest.raises(ModelConfigError, match=f"{name} must be a whole number of at least {least}, got {value}"):
            tasks.plan(case("llama").base, **{name: value})
    with pytest.raises(ParallelConfigError, match="the adapters' rank must be a whole number of at least 1, got 0"):
        add_adapter_slots(nn.Sequential(), ["0"], 1, 0)
    with pytest.raises(ParallelConfigError, match="layers that can have slots are none"):
        add_adapter_slots(nn.Sequential(ColumnParallelLinear(4, 4, gather_output=True)), ["0"], 1, 1)
