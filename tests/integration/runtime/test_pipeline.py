"""Pipeline stages in processes: numbers of one stage, save and load, several steps in flight, weights, lost stages."""

from __future__ import annotations

import os
import shutil
import signal

import numpy as np
import pytest
import torch

import nxd_infer as nxd
from nxd_infer import native
from nxd_infer.artifact.manifest import MANIFEST_NAME
from nxd_infer.errors import (
    ArtifactCorruptError,
    ArtifactVersionError,
    InputMismatchError,
    InputRangeError,
    RankDiedError,
    StepsPendingError,
    TraceConfigError,
)
from nxd_infer.hugging_face import weights as hf
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import TensorParallelModel
from nxd_infer.trace.options import TraceOptions
from nxd_infer.trace.ranks.stages import stage_cuts
from nxd_models.serving import tasks
from nxd_models.serving.decoder_step import step_inputs
from nxd_models.serving.eager_generation import generate_eager
from tests.support import traced_models
from tests.support.adapter_files import write_adapter
from tests.support.backends import plugins
from tests.support.backends.manifests import changed
from tests.support.models.helpers import prompts_of, traced_run
from tests.support.tiny_models import write_tiny

BUCKET, MAX_LEN, NEW, ROWS = 8, 32, 5, 2
DRAWN = {"temperature": [0.0, 0.9], "top_k": [0, 20], "seed": [1, 2], "frequency_penalty": 0.4}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def model_dir(root):
    """Tied, so that the first and the last stage read one logical weight."""
    return write_tiny("llama3", root / "model", num_hidden_layers=3)


def plan_of(model_dir, **more):
    sizes = {"batch_sizes": [ROWS], "prompt_buckets": [BUCKET], "max_len": MAX_LEN, "slots": ROWS}
    return tasks.plan(model_dir, dtype=torch.float32, **{**sizes, **more})


def trace(plan, out, **more):
    nxd.trace.parallel_model_trace(**plan.trace_arguments(), backend="eager", artifact_dir=out, **more).close()
    return out


@pytest.fixture(scope="module")
def artifact(root, model_dir):
    return trace(plan_of(model_dir, lora_slots=1, lora_rank=4), root / "pp2", pp_degree=2)


@pytest.fixture(scope="module")
def plain(root, model_dir):
    """The same without a pipeline."""
    return trace(plan_of(model_dir, lora_slots=1, lora_rank=4), root / "pp1")


@pytest.fixture(scope="module")
def started(artifact):
    with TensorParallelModel(load_artifact(artifact), start_timeout=600, call_timeout=60) as model:
        yield model


def generated(model, step, **sampling):
    model.reset_states()
    return generate_eager(
        step, prompts_of((3, 13), 280, seed=4), NEW, piece=BUCKET, run=traced_run(model, step), **sampling
    )


def tokens_of(results):
    return [result.tokens for result in results]


def decode(model, number=0):
    """A decode step of the token ``number`` in slot 0."""
    meta = model.manifest.metadata
    adapter = "lora" in meta
    inputs = {n: t.numpy() for n, t in step_inputs(meta["vocab_size"], ROWS, 1, ROWS, adapter=adapter).items()}
    inputs["tokens"][0], inputs["length"][0], inputs["block_table"][0] = number, 1, 0
    return inputs


@pytest.mark.smoke
def test_tokens_equal_those_of_one_stage_drawn_and_greedy(model, plain, model_dir):
    plan = plan_of(model_dir, lora_slots=1, lora_rank=4)
    step = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
    with TensorParallelModel(load_artifact(plain), call_timeout=60) as whole:
        for sampling in ({}, DRAWN):
            found, wanted = generated(model, step, **sampling), generated(whole, step, **sampling)
            assert tokens_of(found) == tokens_of(wanted)
            assert [result.logprobs for result in found] == [result.logprobs for result in wanted]
    with pytest.raises(InputRangeError, match="'tokens' holds the value -1; it must be 0 to 287"):
        model.run_bucket(f"decode_b{ROWS}", decode(model, -1))


def test_each_stage_holds_its_own_weights_and_states(artifact, plain):
    manifest, whole = load_artifact(artifact).manifest, load_artifact(plain).manifest
    assert (manifest.pp_degree, manifest.tp_degree, manifest.requires) == (2, 1, ["pipeline"])
    first, last = (manifest.of_rank(rank) for rank in range(2))
    tied = "model.embed_tokens.weight"
    names = [{spec.name for spec in stage.weights} for stage in (first, last)]
    assert tied in names[0] and f"{tied}@stage_1" in names[1] and not names[0] & names[1]
    alike = {spec.name for spec in first.weights + last.weights if spec.name.endswith("rotary.inv_freq")}
    assert (names[0] | names[1]) - {f"{tied}@stage_1"} - alike == {spec.name for spec in whole.weights} - alike
    states = [{spec.name for spec in stage.states} for stage in (first, last)]
    assert states[0] | states[1] | {"last_token"} == {spec.name for spec in whole.states}
    assert not states[0] & states[1] and {"token_counts", "prompt_seen"} < states[1]
    for bucket in manifest.buckets:
        assert [len(stage.takes) for stage in bucket.stages] == [0, 1], "only the hidden state is handed on"
        rows, length = bucket.inputs[0].shape
        assert [spec.shape for spec in bucket.handed] == [[rows, length, 32]]
    sizes = [(artifact / f"weights/rank_{rank:02d}.safetensors").stat().st_size for rank in range(2)]
    assert max(sizes) < 0.75 * (plain / "weights/rank_00.safetensors").stat().st_size


def test_a_saved_copy_gives_the_same_and_other_versions_refuse_it(model, artifact, root, monkeypatch):
    nxd.trace.parallel_model_save(model, root / "saved")
    nxd.trace.parallel_model_recompile(root / "saved", root / "copy", backend="eager")
    with nxd.trace.parallel_model_load(root / "copy", call_timeout=60) as copy:
        for name, value in copy.run_bucket(f"decode_b{ROWS}", decode(copy, 5)).items():
            np.testing.assert_array_equal(value, model.run_bucket(f"decode_b{ROWS}", decode(model, 5))[name])
    monkeypatch.setattr("nxd_infer.artifact.reader.KNOWN_REQUIREMENTS", frozenset({"blake3", "inline-weights"}))
    with pytest.raises(ArtifactVersionError, match="requires pipeline, which this version of nxd_infer does not know"):
        load_artifact(artifact)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(pp_degree=1), "has 2 graphs for 1 ranks"),
        (lambda m: m.update(requires=[]), "pp degree 2 without requiring 'pipeline'"),
        (lambda m: m["buckets"][0]["stages"][0].update(takes=["handed:0"]), "stage 0 of bucket .* takes 'handed:0'"),
        (lambda m: m["buckets"][0]["stages"][1].update(gives=[]), "do not give each output and handed value once"),
    ],
)
def test_a_manifest_whose_stages_do_not_fit_is_refused(artifact, root, change, words):
    damaged = root / "damaged"
    damaged.mkdir(exist_ok=True)
    shutil.copy(artifact / MANIFEST_NAME, damaged)
    with changed(damaged) as manifest:
        change(manifest)
    with pytest.raises(ArtifactCorruptError, match=words):
        load_artifact(damaged)


def test_a_step_per_stage_and_one_more_are_in_flight_and_come_back_in_order(model):
    name = f"decode_b{ROWS}"
    wanted = []
    for number in range(6):
        wanted.append(model.run_bucket(name, decode(model, number))["token"].copy())
    model.reset_states()
    begun = [model.begin_bucket(name, decode(model, number)) for number in range(3)]
    with pytest.raises(StepsPendingError, match="three steps were begun already"):
        model.begin_bucket(name, decode(model, 3))
    found = []
    for number in range(3, 9):
        found.append(begun.pop(0).result()["token"])
        if number < 6:
            begun.append(model.begin_bucket(name, decode(model, number)))
    np.testing.assert_array_equal(found, wanted)
    ranks = model.health()
    assert len(ranks) == 2 and len({rank.pid for rank in ranks}) == 2 and len({rank.steps for rank in ranks}) == 1


def test_new_weights_reach_every_stage_and_an_adapter_its_tables(model, plain, root, model_dir):
    other = write_tiny("llama3", root / "other", num_hidden_layers=3, seed=5)
    name = f"decode_b{ROWS}"
    with TensorParallelModel(load_artifact(plain), call_timeout=60) as whole:
        whole.update_weights(other)
        wanted = whole.run_bucket(name, {n: torch.from_numpy(a) for n, a in decode(whole, 7).items()})
    before = model.run_bucket(name, decode(model, 7))
    model.load_adapter(1, write_adapter(root / "adapter", model_dir, rank=4, seed=3))
    adapted = model.run_bucket(name, {**decode(model, 7), "adapter": np.array([1, 0])})
    assert abs(adapted["logprob"][0] - before["logprob"][0]) > 1e-4
    model.load_adapter(1, None)
    try:
        model.update_weights(other)
        for _ in range(2):
            found = model.run_bucket(name, decode(model, 7))
            np.testing.assert_array_equal(found["top_ids"][0], wanted["top_ids"][0])
            np.testing.assert_allclose(found["logprob"][0], wanted["logprob"][0], rtol=1e-5)
            model.restart()
        nxd.trace.parallel_model_save(model, root / "swapped")
    finally:
        model.update_weights(model_dir)
    with nxd.trace.parallel_model_load(root / "swapped", call_timeout=60) as saved:
        np.testing.assert_array_equal(saved.run_bucket(name, decode(saved, 7))["top_ids"][0], wanted["top_ids"][0])


def test_a_stage_that_dies_ends_the_others_with_its_name(model):
    name = f"decode_b{ROWS}"
    expected = model.run_bucket(name, decode(model, 7))["token"].copy()
    pid = model.health()[0].pid
    os.kill(pid, signal.SIGSTOP)
    step = model.begin_bucket(name, decode(model, 7))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankDiedError, match="rank 0 of 2"):
        step.result()
    model.restart()
    np.testing.assert_array_equal(model.run_bucket(name, decode(model, 7))["token"], expected)


def check_net(model) -> None:
    """The small net of traced_models, several steps of it."""
    steps = [(torch.tensor([i, i + 3]), torch.tensor([i, (2 * i) % traced_models.LENGTH])) for i in range(4)]
    for (tokens, position), want in zip(steps, traced_models.expected(steps), strict=True):
        torch.testing.assert_close(model(tokens, position)[0], want, rtol=1e-5, atol=1e-5)


def trace_net(**arguments):
    return nxd.trace.parallel_model_trace(traced_models.net, traced_models.inputs(), backend="eager", **arguments)


def test_stages_of_tensor_parallel_ranks_without_native_operators_use_gloo(tmp_path, monkeypatch):
    """A process group per stage, as on a machine without a compiler."""
    monkeypatch.setenv("NXD_INFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(native, "_loaded", {})
    assert not native.availability().ok
    with trace_net(tp_degree=2, pp_degree=2, pipeline_cuts=["embed"]) as net:
        check_net(net)
        assert not net.manifest.ops and [rank.collectives for rank in net.health()] == [0] * 4


def test_stages_of_tensor_parallel_ranks(root, model_dir):
    """tp 2 x pp 2, traced from a checkpoint."""
    plan = plan_of(model_dir)
    step = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
    wanted = generate_eager(step, prompts_of((3, 13), 280, seed=4), NEW, piece=BUCKET, **DRAWN)
    path = trace(plan, root / "tp2_pp2", tp_degree=2, pp_degree=2)
    with TensorParallelModel(load_artifact(path), call_timeout=60) as model:
        assert tokens_of(generated(model, step, **DRAWN)) == tokens_of(wanted)
        collectives = [rank.collectives for rank in model.health()]
        assert collectives[0] == collectives[1] and collectives[2] == collectives[3]
        assert all(collectives) == native.availability().ok  # it is these that are counted


def test_three_stages_in_processes_that_build_the_model_at_cuts_by_name():
    with trace_net(pp_degree=3, pipeline_cuts=["embed", "down"]) as net:
        check_net(net)
        assert [stage.takes for stage in net.buckets[0].stages] == [[], ["handed:0"], ["handed:1"]]
        with pytest.raises(InputMismatchError, match=r"this artifact has degree 3 \(3 pipeline stages\)"):
            TensorParallelModel(net.artifact, in_process=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pp_degree": 2, "pipeline_cuts": ["embed", "up"]}, "pp_degree=2 takes 1, got 2"),
        ({"pp_degree": 2, "pipeline_cuts": ["embeds"]}, "pp_degree=2: pipeline_cuts: the model has no module 'embeds'"),
        ({"pp_degree": 100}, "tp_degree x pp_degree: a degree of 100"),
        ({"pipeline_cuts": ["embed"]}, "pp_degree=1 takes 0, got 1"),
        (
            {"pp_degree": 2, "pipeline_cuts": ["embed"], "spmd_mode": True, "serialization_path": "/tmp/x",
             "checkpoint_loader_callable": traced_models.state_dict, "inline_weights_to_neff": False},
            "serialization_path writes one file per tensor parallel rank",
        ),
    ],
)  # fmt: skip
def test_a_pipeline_that_cannot_be_is_refused_by_name(arguments, words):
    with pytest.raises(TraceConfigError, match=words):
        nxd.trace.parallel_model_trace(
            traced_models.net, traced_models.inputs(), backend="eager", max_parallel_compilations=1, **arguments
        )


def test_a_model_without_a_list_of_layers_needs_cuts_and_a_backend_of_one_process_has_no_stages(artifact, root):
    with pytest.raises(TraceConfigError, match=r"pp_degree=2: .*Net has no list of layers"):
        stage_cuts(TraceOptions(traced_models.net, None, pp_degree=2), traced_models.net()[0])
    words = "the lockstep backend runs all ranks in one process"
    with plugins.installed():
        with pytest.raises(TraceConfigError, match=words):
            nxd.trace.parallel_model_trace(traced_models.net, traced_models.inputs(), backend="lockstep", pp_degree=2)
        with pytest.raises(TraceConfigError, match=words):
            nxd.trace.parallel_model_recompile(artifact, root / "lockstep", backend="lockstep")


def test_a_tied_table_in_eight_bits_is_refused_because_one_stage_would_round_it(model_dir, root):
    """Without a pipeline both of its uses read the rounded values."""
    plan = plan_of(model_dir).trace_arguments()
    with pytest.raises(TraceConfigError, match=r"'model\.embed_tokens\.weight' is a table in one pipeline stage"):
        nxd.trace.parallel_model_trace(
            **plan, backend="eager", pp_degree=2, quantize="int8", compiler_args={"nxd_packed": 1}
        )
