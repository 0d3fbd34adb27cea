"""Models traced with weights in four bits: what they compute, which weights have the form, new weights, tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import native
from nxd_infer.backends import registry as backends
from nxd_infer.backends.base import check_quantize
from nxd_infer.backends.cpu import lower
from nxd_infer.backends.cpu.encodings import INT4, PACKED, PACKED_INT8, PACKED_OPTION, QUANTIZATIONS, QUANTIZE
from nxd_infer.errors import TraceConfigError
from nxd_infer.graph.export import Step
from nxd_infer.hugging_face import weights as hf
from nxd_infer.ops import expert_linear, int4
from nxd_infer.ops.packed import quantize
from nxd_infer.runtime.load import load_artifact
from nxd_infer.trace import parallel_model_load, parallel_model_save
from nxd_infer.verify.accuracy import RoundedSource
from nxd_models import registry
from nxd_server import LLM, SamplingParams
from tests.support.backends import packed_models, small_traces
from tests.support.e2e.command import here
from tests.support.graph.exporting import entries
from tests.support.models.helpers import prompts_of
from tests.support.needs import needs_native
from tests.support.tiny_models import write_tiny

TOKENS = torch.tensor([[1, 5, 63], [0, 7, 32]])
LAYERS = ("up.weight", "gate.weight", "down.weight")


def trace(form: str = "int4", **more: Any) -> Any:
    options = {"compiler_args": {"nxd_packed": 1}, "backend": "eager", **more}
    return small_traces.trace(packed_models.tied, TOKENS, packed_models.tied_checkpoint, quantize=form, **options)


def expected(seed: int, degree: int, form: str) -> Tensor:
    """What the plain model gives with the weights of ``degree`` ranks, whose layers round their part of the input."""
    model, (group, zeros) = packed_models.tied(seed), INT4[form]
    with torch.no_grad():
        for name in packed_models.PACKED_OF_TIED:
            parts, dim = (degree, 1) if name == "down.weight" else (1, 0)
            weight, cut = model.get_parameter(name), []
            for part in weight.chunk(parts, dim):
                if name in LAYERS:
                    size, _ = int4.form_of(int4.pack(part, group, zeros))
                    cut.append(int4.dequantize(*int4.quantize(part, size, zeros))[:, : part.shape[1]])
                else:
                    q, scale = quantize(part.contiguous())
                    cut.append(q * scale[:, None])
            weight.copy_(torch.cat(cut, dim))
            if name in LAYERS:
                layer = model.get_submodule(name.removesuffix(".weight"))
                layer.register_forward_pre_hook(
                    lambda _, args, parts=parts: torch.cat(
                        [int4.rounded_input(x) for x in args[0].chunk(parts, -1)], -1
                    )
                )
    return model(TOKENS).detach()


def close(model: Any, seed: int, degree: int, form: str = "int4") -> None:
    torch.testing.assert_close(model(TOKENS), expected(seed, degree, form), rtol=1e-5, atol=1e-5)


@pytest.mark.smoke
@needs_native
@pytest.mark.parametrize(("form", "degree"), [("int4", 2), ("int4-asym", 1), ("int4-128-asym", 2), ("int4-64", 1)])
def test_a_traced_model_computes_with_four_bits(tmp_path: Path, form: str, degree: int) -> None:
    with trace(form, tp_degree=degree) as model:
        encodings = {spec.name: spec.encoding for spec in model.manifest.weights if spec.encoding}
        assert encodings == {**dict.fromkeys(LAYERS, QUANTIZATIONS[form].encoding), "embed.weight": PACKED_INT8}
        close(model, 0, degree, form)
        plain = packed_models.tied(0)(TOKENS).detach()
        apart = float((model(TOKENS) - plain).abs().max()) / float(plain.abs().max())
        assert 2e-3 < apart < 0.2
        model.update_weights(packed_models.tied_weights(5))
        close(model, 5, degree, form)
        model.restart()
        close(model, 5, degree, form)
        parallel_model_save(model, tmp_path / "saved")
    nxd.trace.parallel_model_recompile(tmp_path / "saved", tmp_path / "again", compiler_args={"nxd_packed": 1})
    with parallel_model_load(tmp_path / "again") as model:
        assert {spec.name: spec.encoding for spec in model.manifest.weights if spec.encoding} == encodings
        close(model, 5, degree, form)


def test_without_a_compiler_the_backend_computes_the_same(tmp_path: Path) -> None:
    code = (
        "from tests.integration.trace import test_int4 as test\n"
        "from nxd_infer import native\n"
        "assert native.load_if_possible() is None\n"
        "with test.trace('int4-asym') as model:\n"
        "    test.close(model, 0, 1, 'int4-asym')\n"
    )
    environment = {**os.environ, "NXD_INFER_CACHE": str(tmp_path), "CXX": "no-such-compiler"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_large_model_in_four_bits_is_refused_without_native_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "MOST_WITHOUT_OPERATORS", 32 * 64)
    options, x = {PACKED_OPTION: 1, QUANTIZE: "int4"}, torch.randn(4, 32)

    def lowered(inner: int) -> None:
        entries([Step(nn.Sequential(nn.Linear(32, inner), nn.Linear(inner, 8)), {"input": x})], None, options)

    lowered(64)
    with pytest.raises(TraceConfigError, match=r"quantize='int4' needs native operators .* or quantize to int8"):
        lowered(65)


class Routed(nn.Module):
    """A layer, a router, experts, and a head; a state that a layer writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.key, self.router = (nn.Linear(32, n, bias=False) for n in (32, 32, 5))
        self.head = nn.Linear(32, 64, bias=False)
        self.experts = nn.Parameter(torch.randn(5, 32, 32))
        self.register_buffer("seen", torch.zeros(4, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.seen.copy_(self.key(x))
        x = x + self.seen
        return self.head(expert_linear(x, self.experts, self.router(x).argmax(-1)))


@needs_native
def test_heads_and_experts_have_eight_bits_and_routers_their_type() -> None:
    options = {PACKED_OPTION: 1, QUANTIZE: "int4"}
    (entry,) = entries([Step(Routed(), {"x": torch.randn(4, 32)})], native.load(), options)
    found = {spec.name: spec.encoding for spec in entry.graph.weights}
    four = QUANTIZATIONS["int4"].encoding
    eight = dict.fromkeys(("head.weight", "experts"), PACKED_INT8)
    assert found == {"inner.weight": four, "key.weight": four, "router.weight": PACKED, **eight}


@needs_native
def test_what_is_no_form_is_refused_with_the_list() -> None:
    for bad in ("int4-16", "int4-asym-64", "INT4"):
        with pytest.raises(
            TraceConfigError, match=r"is not one of 'int8', 'int4', 'int4-64', .*'int4-128-asym', or None"
        ):
            trace(bad)
    for other in ("xla", "neuron"):
        with pytest.raises(
            TraceConfigError, match=f"the {other} backend keeps weights as they are, got quantize='int4'"
        ):
            check_quantize(backends.get(other), "int4")


@needs_native
@pytest.mark.parametrize(("degree", "stages"), [(1, 1), (2, 1), (1, 2)])
def test_a_model_is_traced_verified_and_generates_what_the_rounded_model_does(
    tmp_path: Path, degree: int, stages: int
) -> None:
    path, out = write_tiny("llama", tmp_path / "model"), tmp_path / "artifact"
    sizes = ("--dtype", "float32", "--batch-sizes", "1,4", "--prompt-buckets", "16", "--max-len", 40)
    options = ("--tp", degree, "--pp", stages, "--quantize", "int4", "--compiler-args", "nxd_packed=1")
    done = here("trace", path, "--out", out, *sizes, *options)
    assert done.status == 0 and "inputs are rounded to eight bits" in done.out.replace("\n", " "), done.out + done.err
    manifest = load_artifact(out).manifest
    four = {spec.name for spec in manifest.weights if spec.encoding == QUANTIZATIONS["int4"].encoding}
    assert {f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")} <= four
    assert next(spec for spec in manifest.weights if spec.name == "lm_head.weight").encoding == PACKED_INT8
    done = here("verify", out, path)
    assert done.status == 0 and "rounded to int4" in done.out, done.out + done.err
    with torch.device("meta"):
        model = registry.build(path, "generate", torch.float32)
    model, _ = RoundedSource(manifest, hf.named_weights(model, registry.weights(path))).load(model)
    prompts = prompts_of((1, 15, 33), 280, seed=3)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with LLM(out) as llm:
        answers = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
    for prompt, tokens in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
