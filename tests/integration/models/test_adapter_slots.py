"""Traced decoders with slots for LoRA adapters: every row of a batch as the plain model with its adapter merged in."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nxd_infer.errors import AdapterError, InputRangeError, ModelConfigError, ParallelConfigError
from nxd_infer.modules.lora import LoraConfig, LoRAModel, add_adapter_slots
from nxd_infer.parallel_layers import ColumnParallelLinear
from nxd_infer.trace import parallel_model_load, parallel_model_save, parallel_model_trace
from nxd_models import registry
from nxd_models.hf import weights as hf
from nxd_models.serving import tasks
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
from tests.support.needs import needs_inductor
from tests.support.tiny_models import write_tiny

BUCKET, MAX_LEN, NEW, RANK = 8, 40, 5, 4
LENGTHS = (3, 11, BUCKET, 7)
ROWS = [1, 0, 2, 1]
"""The slot of each row: two adapters and none in one batch."""
NO_END = {"bias_ids": 2, "bias_values": [[-1e9] + [0.0] * 299] * len(LENGTHS)}
FAMILIES = {"llama": {**ODD, "num_hidden_layers": 1}, "qwen2": {"num_key_value_heads": 1, "num_hidden_layers": 1}}
"""Heads that are padded at degree 2 and an inner size that is too; one key/value head that both ranks hold, biases."""


class Case:
    """A tiny model, two adapters for it, and the plain models that they make."""

    def __init__(self, root, family):
        self.base = write_tiny(family, root / "base", **FAMILIES[family])
        narrow = ("q_proj", "v_proj", "down_proj")
        self.adapters = [
            write_adapter(root / "wide", self.base, rank=RANK, alpha=6, seed=1),
            write_adapter(root / "narrow", self.base, rank=2, targets=narrow, seed=2, use_rslora=True),
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

    def plan(self, slots=2, **more):
        lora = {"lora_slots": slots, "lora_rank": RANK} if slots else {}
        sizes = {"batch_sizes": [len(ROWS)], "prompt_buckets": [BUCKET], "max_len": MAX_LEN, "dtype": torch.float32}
        return without_mixed(tasks.plan(self.base, **{**sizes, **lora, **more}))

    def trace(self, degree, slots=2, backend="eager", **more):
        plan = self.plan(slots, **more)
        return parallel_model_trace(**plan.trace_arguments(), tp_degree=degree, backend=backend), step_of(plan)

    def generate(self, model, step, rows=ROWS, piece=BUCKET):
        with_slots = {"adapter": list(rows)} if step.adapter_slots is not None else {}
        run = traced_run(model, step)
        return generate_eager(step, self.prompts, NEW, piece=piece, run=run, **NO_END, **with_slots)


def step_of(plan):
    return hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return functools.cache(lambda family: Case(tmp_path_factory.mktemp(family), family))


def check_mixed(case, model, step, piece=BUCKET):
    """Rows with adapters as transformers on merged weights; rows without as if there were no slots."""
    for slot, path in enumerate(case.adapters, 1):
        model.load_adapter(slot, path)
    rows = case.generate(model, step, piece=piece)
    for found, (tokens, gaps, logprobs) in zip(rows, case.expected, strict=True):
        assert_greedy(found.tokens, tokens, gaps)
        wanted = torch.tensor([float(row[token]) for row, token in zip(logprobs, tokens, strict=True)])
        assert relative_difference(torch.tensor(found.logprobs), wanted) < 1e-5
        for top, row in zip(found.top, logprobs, strict=True):
            values = torch.tensor(list(top.values()))
            assert relative_difference(values, row[list(top)]) < 1e-5


def test_the_adapters_change_the_answers(case):
    """Else equal answers would show nothing."""
    for family in FAMILIES:
        first, _, second, _ = (tokens for tokens, _, _ in case(family).expected)
        for prompt, changed in ((case(family).prompts[0], first), (case(family).prompts[2], second)):
            assert greedy_reference(case(family).base, prompt, NEW)[0] != changed


@pytest.mark.parametrize("degree", [1, 2])
def test_rows_of_a_mixed_batch_equal_plain_merged_models(case, degree):
    case = case("qwen2")
    model, step = case.trace(degree)
    with model:
        check_mixed(case, model, step)


@pytest.mark.parametrize("degree", [1, 2])
def test_rows_without_an_adapter_have_the_numbers_of_the_plain_model(case, degree):
    case = case("llama")
    model, step = case.trace(degree)
    plain, plain_step = case.trace(degree, slots=0)
    with model, plain:
        base = case.generate(plain, plain_step)
        assert case.generate(model, step, [0] * len(ROWS)) == base, "no adapter: the very numbers of the base model"
        check_mixed(case, model, step)
        mixed = case.generate(model, step)
        assert mixed[ROWS.index(0)] == base[ROWS.index(0)], "a row without one, beside rows with adapters"
        model.restart()
        assert case.generate(model, step) == mixed, "a restart keeps the adapters"
        model.load_adapter(1, None)
        emptied = case.generate(model, step)
        assert [emptied[row] for row, slot in enumerate(ROWS) if slot != 2] == [
            base[row] for row, slot in enumerate(ROWS) if slot != 2
        ]
        assert emptied[ROWS.index(2)] == mixed[ROWS.index(2)]


def test_adapters_over_weights_in_eight_bits(case):
    """Rows with adapters come as near to the merged models as the rounding lets them, the others as without slots."""
    case = case("qwen2")
    models = []
    for slots in (2, 0):
        plan = case.plan(slots)
        arguments = {**plan.trace_arguments(), "backend": "eager", "compiler_args": {"nxd_packed": 1}}
        models.append((parallel_model_trace(**arguments, quantize="int8"), step_of(plan)))
    (model, step), (plain, plain_step) = models
    with model, plain:
        assert sum(spec.encoding == "packed32-int8" for spec in model.manifest.weights) > 5
        for slot, path in enumerate(case.adapters, 1):
            model.load_adapter(slot, path)
        rows, base = case.generate(model, step), case.generate(plain, plain_step)
    for row, (found, (_, _, logprobs)) in enumerate(zip(rows, case.expected, strict=True)):
        near, far = (
            relative_difference(torch.tensor(list(top.values())), logprobs[0][list(top)])
            for top in (found.top[0], base[row].top[0])
        )
        assert found == base[row] if ROWS[row] == 0 else near < far / 3
        assert near < 0.06


@needs_inductor
def test_compiled_graphs_load_adapters_without_a_compiler(case, tmp_path, monkeypatch):
    case = case("llama")
    model, step = case.trace(2, backend="inductor", prompt_buckets=[1])  # one graph
    with model:
        parallel_model_save(model, tmp_path / "artifact")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with parallel_model_load(tmp_path / "artifact") as loaded:
        entry = loaded.manifest.layout["adapters"]["model.layers.0.self_attn.q_proj.adapter.B"]
        assert entry["logical"] == {"model.layers.0.self_attn.q_proj.lora_B.weight": [3, 48, RANK]}
        assert loaded.manifest.metadata["lora"] == {"slots": 2, "rank": RANK, "targets": list(ALL)}
        check_mixed(case, loaded, step, piece=1)


def test_an_adapter_that_the_trainer_saved(case, tmp_path):
    torch.manual_seed(0)  # of one adapter in sixty the first token would end the text, which is not asked for here
    case = case("llama")
    module = LoRAModel(registry.load_model(case.base), LoraConfig(lora_rank=3, target_modules=["q_proj", "o_proj"]))
    with torch.no_grad():
        for name, param in module.named_parameters():
            if name.endswith("lora_B.weight"):
                nn.init.normal_(param, std=0.5)
    module.save_adapter(tmp_path / "trained")
    with torch.no_grad():
        logits = module(torch.tensor([case.prompts[0]]))[0, -1]
    model, step = case.trace(1)
    with model:
        model.load_adapter(2, tmp_path / "trained")
        found = case.generate(model, step, [2, 0, 0, 0])[0]
    assert found.tokens[0] == int(logits.argmax())
    ids, values = zip(*found.top[0].items(), strict=True)
    assert relative_difference(torch.tensor(values), logits.log_softmax(-1)[list(ids)]) < 1e-5


@pytest.fixture(scope="module")
def one_slot(case):
    """A model of which only q_proj and v_proj have slots, one of rank 4."""
    made = case("llama")
    plan = made.plan(1, lora_targets=["q_proj", "v_proj"])
    with parallel_model_trace(**plan.trace_arguments(), tp_degree=1, backend="eager") as model:
        yield made, model, step_of(plan)


def changed_config(adapter, **changes):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def changed_tensors(adapter, change):
    path = adapter / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}  # the file is mapped
    change(tensors)
    save_file(tensors, path)


def test_an_adapter_whose_configuration_lies_in_its_weights(one_slot, tmp_path):
    """As ``save_lora_config_adapter=True`` saves it in a checkpoint."""
    case, model, step = one_slot
    adapter = write_adapter(tmp_path / "a", case.base, rank=4, targets=("q_proj", "v_proj"), seed=9)
    model.load_adapter(1, adapter)
    expected = case.generate(model, step, [1] * len(ROWS))
    model.load_adapter(1, None)
    path = adapter / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}  # the file is mapped
    save_file(tensors, path, {"format": "pt", "adapter_config": (adapter / "adapter_config.json").read_text()})
    (adapter / "adapter_config.json").unlink()
    model.load_adapter(1, adapter)
    assert case.generate(model, step, [1] * len(ROWS)) == expected


Q, O = (f"{PREFIX}model.layers.0.self_attn.{name}_proj" for name in "qo")
REFUSED = {
    "rank": (lambda a: changed_config(a, r=5), "rank is 5 .* at most 4.*--lora-rank 5"),
    "dora": (lambda a: changed_config(a, use_dora=True), "use_dora"),
    "pattern": (lambda a: changed_config(a, rank_pattern={"q_proj": 2}), "rank_pattern"),
    "kind": (lambda a: changed_config(a, peft_type="IA3"), "IA3"),
    "no rank": (lambda a: changed_config(a, r="four"), "'four'"),
    "target": (
        lambda a: changed_tensors(a, lambda t: t.update({O + ".lora_A.weight": t.pop(Q + ".lora_A.weight")})),
        "model.layers.0.self_attn.o_proj, which has no slots .*q_proj, v_proj.*--lora-targets",
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
    "no config": (lambda a: (a / "adapter_config.json").unlink(), "no adapter_config.json"),
    "damaged": (lambda a: (a / "adapter_model.safetensors").write_bytes(b"\xff" * 64), "adapter_model.safetensors"),
    "not json": (lambda a: (a / "adapter_config.json").write_text("{"), "adapter_config.json cannot be read"),
}  # fmt: skip


def test_adapters_that_do_not_fit_are_refused_and_change_nothing(one_slot, tmp_path):
    case, model, step = one_slot
    fits = {"rank": 4, "targets": ("q_proj", "v_proj"), "seed": 9}
    model.load_adapter(1, write_adapter(tmp_path / "good", case.base, **fits))
    before = case.generate(model, step, [1] * len(ROWS))
    for what, (spoil, message) in REFUSED.items():
        adapter = write_adapter(tmp_path / what, case.base, **{**fits, "seed": 10})
        spoil(adapter)
        with pytest.raises(AdapterError, match=message):
            model.load_adapter(1, adapter)
        assert case.generate(model, step, [1] * len(ROWS)) == before, what
    for slot in (0, 2, -1, True, "1"):
        with pytest.raises(AdapterError, match=f"slot {slot!r} is none of this model's, which are 1 to 1"):
            model.load_adapter(slot, tmp_path / "good")
    with pytest.raises(InputRangeError, match="'adapter' holds the value 2"):
        case.generate(model, step, [2] * len(ROWS))


def test_a_model_without_slots_says_how_to_get_them(case, tmp_path):
    model, _ = case("llama").trace(1, slots=0)
    with model, pytest.raises(AdapterError, match="--lora-slots"):
        model.load_adapter(1, case("llama").adapters[0])


def test_new_weights_leave_the_adapters_alone(one_slot, case, tmp_path):
    made, model, step = one_slot
    model.load_adapter(1, write_adapter(tmp_path / "one", made.base, rank=4, targets=("q_proj",), seed=3))
    before = made.generate(model, step, [1] * len(ROWS))
    model.update_weights(hf.named_weights(step, hf.weights(made.base)))
    assert made.generate(model, step, [1] * len(ROWS)) == before


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
