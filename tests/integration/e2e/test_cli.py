"""The command line as a user meets it: real processes, a real model directory, real artifacts."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nxd_infer.artifact.writer import CHECKSUM_KEY, manifest_checksum
from nxd_infer.cli.console import bar
from nxd_infer.cli.trace import TraceProgress
from nxd_infer.verify.cases import generation_cases
from tests.support import toy_artifacts as toy
from tests.support.e2e.command import nxd_infer, nxd_infer_here, refused
from tests.support.engine.toy_model import ToyModel
from tests.support.needs import needs_inductor
from tests.support.processes import wait_until
from tests.support.tiny_models import write_tiny

BUCKETS = ("decode_b1", "decode_b2", "mixed_b18", "prefill_s8", "prefill_s16")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("cli") / "model", num_hidden_layers=1)


@pytest.fixture(scope="module")
def artifact(model_dir) -> Path:
    out = model_dir.parent / "artifact"
    done = nxd_infer(
        *("trace", model_dir, "--tp", 2, "--out", out, "--batch-sizes", "1,2", "--prompt-buckets", "8,16"),
        *("--max-len", 64, "--dtype", "float32", "--backend", "eager"),
    )
    assert done.status == 0, done.err
    assert "trace ranks 0 of " in done.out and "5 graphs" in done.out
    for word in (*BUCKETS, "weights", "states", "peak memory"):
        assert word in done.out, (word, done.out)
    return out


def test_generate_answers_each_prompt_the_same_way_twice_and_prints_it_as_it_is(artifact, capsys, monkeypatch):
    """One prompt is wider than the terminal, has a tab, and has what rich would draw as a picture."""
    prompts = ["def f", "[bold]\tx :warning: def f"]
    asked = ("generate", artifact, prompts[0], prompts[1], "--max-tokens", 24)
    done = nxd_infer_here(capsys, monkeypatch, *asked, "--json")
    assert done.status == 0, done.err
    records = [json.loads(line) for line in done.out.splitlines()]
    assert [record["prompt"] for record in records] == prompts
    assert all(1 <= record["tokens"] <= 24 for record in records)
    plain = nxd_infer(*asked, "--temperature", 0, columns=20)
    assert plain.out == "".join(f"{record['prompt']}{record['text']}\n" for record in records)
    # What is no answer goes to the error stream.
    told = " ".join(plain.err.split())
    for record in records:
        assert f"[{record['tokens']} tokens, finish reason {record['finish_reason']}]" in told, plain.err
    assert "loading" not in plain.err  # a spinner is for who looks


def test_generate_binds_an_answer_to_a_form(artifact, tmp_path, capsys, monkeypatch):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}')
    forms = [
        (("--choice", "left", "--choice", "right"), ("left", "right")),
        (("--regex", "[0-9]{4}"), [f"{number:04}" for number in range(10_000)]),
        (("--json-schema", schema, "--temperature", 1, "--seed", 1), None),
        (("--json-schema", '{"const": [true]}'), None),
    ]
    for words, right in forms:
        done = nxd_infer_here(capsys, monkeypatch, "generate", artifact, "def", *words, "--max-tokens", 50, "--json")
        assert done.status == 0, done.err
        record = json.loads(done.out)
        assert record["finish_reason"] == "stop"
        assert record["text"] in right if right else isinstance(json.loads(record["text"]), list)
    for words, why in (
        (("--regex", "a", "--choice", "b"), "alternatives"),
        (("--json-schema", tmp_path / "none.json"), "--json-schema"),
        (("--regex", "(a"), "unclosed group"),
    ):
        done = nxd_infer_here(capsys, monkeypatch, "generate", artifact, "def", *words)
        assert done.status != 0 and why in done.err and "Traceback" not in done.err


def test_the_demo_leaves_a_directory_alone_that_is_not_of_a_demo(tmp_path, capsys, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_text("precious")
    done = nxd_infer_here(capsys, monkeypatch, "demo", "--dir", tmp_path, "--seconds", 1)
    refused(done, "is left alone", "--dir")
    assert (tmp_path / "model" / "model.safetensors").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_generate_refuses_what_does_not_fit_and_cuts_only_its_default(artifact, capsys, monkeypatch):
    """The artifact's longest prompt and answer are 64 tokens together."""
    asked = (capsys, monkeypatch, "generate", artifact, "def f", "--json")
    done = nxd_infer_here(*asked, "--max-tokens", 64)
    refused(done, "max_tokens: 64 tokens do not fit", "maximum context length is 64 tokens", "which leaves")
    done = nxd_infer_here(*asked)
    assert done.status == 0, done.err
    assert 1 <= json.loads(done.out)["tokens"] < 64


def test_generate_says_what_to_do_about_an_artifact_without_a_tokenizer(artifact, tmp_path, capsys, monkeypatch):
    bare = shutil.copytree(artifact, tmp_path / "bare")
    manifest = json.loads((bare / "manifest.json").read_text())
    del manifest["files"]["tokenizer.json"]
    manifest[CHECKSUM_KEY] = manifest_checksum(manifest)
    (bare / "manifest.json").write_text(json.dumps(manifest))
    refused(
        nxd_infer_here(capsys, monkeypatch, "generate", bare, "def f"),
        f"{bare} has no tokenizer.json: put the tokenizer's files into the model's directory and trace again",
    )


def test_verify_refuses_a_wrong_path_before_it_loads_the_artifact(artifact, model_dir, tmp_path, capsys, monkeypatch):
    from nxd_infer import trace

    monkeypatch.setattr(trace, "parallel_model_load", None)
    missing = tmp_path / "nothere"
    refused(nxd_infer_here(capsys, monkeypatch, "verify", artifact, missing), f"{missing}")
    asked = ("verify", artifact, model_dir, "--checkpoint", missing)
    refused(nxd_infer_here(capsys, monkeypatch, *asked), f"{missing}")


def test_verify_accepts_the_model_it_was_traced_from(artifact, model_dir):
    done = nxd_infer("verify", artifact, model_dir)
    assert done.status == 0, done.out + done.err
    for bucket in BUCKETS:
        assert bucket in done.out


def test_verify_feeds_no_position_behind_the_last():
    """Rows beyond the slots feed further tokens of them, of which few may be left behind the shortest piece."""
    manifest = ToyModel(slots=2, max_len=18, prompt_buckets=(16,), batch_sizes=(1, 18)).manifest
    for _, steps in generation_cases(manifest, torch.Generator()):
        for _, inputs in steps:
            assert (inputs["start"] < 18).all() and (inputs["start"] + inputs["length"] <= 18).all()


def test_recompile_writes_an_artifact_that_verifies(artifact, model_dir, tmp_path, capsys, monkeypatch):
    done = nxd_infer_here(capsys, monkeypatch, "recompile", artifact, "--out", tmp_path / "again")
    assert done.status == 0, done.err
    assert "5 graphs (0 compiled now) for eager" in done.out
    done = nxd_infer_here(capsys, monkeypatch, "verify", tmp_path / "again", model_dir)
    assert done.status == 0, done.out + done.err


def test_verify_rejects_another_model(artifact, tmp_path, capsys, monkeypatch):
    other = write_tiny("llama", tmp_path / "other", seed=7, num_hidden_layers=1)
    done = nxd_infer_here(capsys, monkeypatch, "verify", artifact, other)
    assert done.status == 1
    assert "Traceback" not in done.err
    assert "differs" in done.out
    assert f"compares with the weights of {other}" in done.out and "--checkpoint" in done.out


def test_verify_takes_the_checkpoint_that_was_traced(model_dir, tmp_path, capsys, monkeypatch):
    from nxd_infer.trainer import save_checkpoint
    from nxd_models import registry

    trained = registry.load_model(model_dir)
    for tag in ("first", "second"):
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(1.5)
        save_checkpoint(tmp_path / "ckpts", tag, trained)
    out, source = tmp_path / "artifact", ("--checkpoint", tmp_path / "ckpts", "--tag", "first")
    done = nxd_infer_here(
        *(capsys, monkeypatch, "trace", model_dir, *source, "--out", out, "--batch-sizes", "1", "--backend", "eager"),
        *("--prompt-buckets", "8", "--max-len", 64, "--dtype", "float32"),
    )
    assert done.status == 0, done.err
    done = nxd_infer_here(capsys, monkeypatch, "verify", out, model_dir, *source)
    assert done.status == 0, done.out + done.err
    assert f"{tmp_path / 'ckpts'}(first)" in "".join(done.out.split())  # wherever the title is cut into lines
    for others in ((), source[:2]):  # the directory's, and the newest checkpoint
        assert nxd_infer_here(capsys, monkeypatch, "verify", out, model_dir, *others).status == 1
    refused(nxd_infer_here(capsys, monkeypatch, "verify", out, model_dir, "--tag", "first"), "--checkpoint")


@pytest.mark.parametrize("command", ["serve", "generate", "verify"])
def test_code_that_chooses_buckets_can_be_refused(command, model_dir, tmp_path, capsys, monkeypatch):
    def kernel(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        return tensors, torch.tensor([0])

    path = toy.build(tmp_path / "kernel", degree=1, kernel=kernel)
    more = {"serve": ["--port", 0], "generate": ["x"], "verify": [model_dir]}[command]
    arguments = (command, path, *more, "--no-kernel")
    # One that serves sets up logging: in a process of its own.
    done = nxd_infer(*arguments) if command == "serve" else nxd_infer_here(capsys, monkeypatch, *arguments)
    assert done.status == 1 and "bucket_kernel.pt, which is code, and" in done.err, done


def test_plan_only_compiles_and_writes_nothing(model_dir, tmp_path, capsys, monkeypatch):
    done = nxd_infer_here(
        *(capsys, monkeypatch, "trace", model_dir, "--tp", 4, "--out", tmp_path / "a", "--max-len", 64),
        *("--plan-only", "--prompt-buckets", "16"),
    )
    assert done.status == 0, done.err
    assert "graphs to compile" in done.out
    assert not (tmp_path / "a").exists()


STEPS = ((0, ""), (1, " (decode_b1)"), (2, ""))


@pytest.mark.parametrize(
    ("terminal", "line_every", "lines"),
    [
        (False, 0.0, [f"compile graphs {n} of 2{note}" for n, note in STEPS] + ["write artifact"]),
        (False, 3600.0, ["compile graphs 0 of 2", "compile graphs 2 of 2", "write artifact"]),
        (True, 0.0, []),
    ],
)
def test_a_trace_into_a_log_says_how_far_it_is(terminal, line_every, lines):
    out = io.StringIO()
    with bar(Console(file=out, force_terminal=terminal, width=100, highlight=False), drawn=terminal) as display:
        progress = TraceProgress(display, line_every=line_every)
        progress("compile graphs", 0, 2)
        progress("compile graphs", 1, 2, "decode_b1")
        progress("compile graphs", 2, 2)
        if line_every:  # an end that was said is not said again
            progress("compile graphs", 2, 2)
        progress("write artifact", 0, 0)
    if terminal:
        assert "100%" in out.getvalue() and " of 2" not in out.getvalue()
    else:
        assert out.getvalue().splitlines() == lines


@needs_inductor
def test_trace_says_before_it_begins_what_a_model_lacks(capsys, monkeypatch, tmp_path):
    model = write_tiny("llama", tmp_path / "model")
    trace = ("trace", model, "--out", tmp_path / "a", "--max-len", 64, "--prompt-buckets", 16)
    assert "tokenizer.json" not in nxd_infer_here(capsys, monkeypatch, *trace, "--plan-only").out
    (model / "tokenizer.json").unlink()
    done = nxd_infer_here(capsys, monkeypatch, *trace, "--plan-only")
    assert done.status == 0 and "has no tokenizer.json" in done.out and "save_pretrained" in done.out
    (model / "vocab.json").write_text("{}")  # half of GPT-2's
    assert "has no tokenizer.json" in nxd_infer_here(capsys, monkeypatch, *trace, "--plan-only").out
    (model / "merges.txt").write_text("")
    assert "has no tokenizer.json" not in nxd_infer_here(capsys, monkeypatch, *trace, "--plan-only").out
    (model / "model.safetensors").unlink()
    done = nxd_infer_here(capsys, monkeypatch, *trace)
    refused(done, f"{model} has no safetensors file")
    assert "graphs to compile" not in done.out
    assert nxd_infer_here(capsys, monkeypatch, *trace, "--plan-only").status == 0  # a plan needs no weights


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trace", "/no/such/model", "--out", "a"], ["/no/such/model", "config.json"]),
        (["trace", "MODEL", "--out", "a", "--batch-sizes", "1,x"], ["1,x"]),
        (["trace", "MODEL", "--out", "a", "--batch-sizes", "0"], ["--batch-sizes", "from 1 to 1048576, got [0]"]),
        (["trace", "MODEL", "--out", "a", "--max-len", "100000"], ["100000", "256"]),
        (["trace", "MODEL", "--out", "a", "--tp", "0"], ["--tp", "0", "1"]),
        (["trace", "MODEL", "--out", "a", "--tp", "two"], ["--tp", "it must be a whole number, got 'two'"]),
        (["ckpt", "reshard", "a", "b", "--tp", "0"], ["--tp", "it must be at least 1, got '0'"]),
        (["trace", "MODEL", "--out", "a", "--dtype", "float16"], ["'float16' is not one of", "bfloat16"]),
        (["serve", "MODEL", "--port", "99999"], ["--port", "99999", "65535"]),
        (["generate", "MODEL", "x", "--temperature", "-1"], ["--temperature", "-1", "0"]),
        (["generate", "MODEL", "x", "--seed", "late"], ["--seed", "it must be a whole number, got 'late'"]),
        (["serve", "/no/such/artifact"], ["/no/such/artifact", "`nxd-infer trace --out` wrote"]),
        (["generate", "/no/such/artifact", "x"], ["/no/such/artifact"]),
        (["generate", "/no/such/artifact", "x", ""], ["a prompt is empty"]),
        (["generate", "/no/such/artifact", "x", "--temperature", "9"], ["--temperature", "9", "from 0 to 2"]),
        (["generate", "MODEL", "x"], ["a model to trace", "nxd-infer trace"]),
        (["generate", "MODEL"], ["PROMPT", "give the text to continue"]),
        (["verify", "/no/such/artifact", "MODEL"], ["/no/such/artifact"]),
        (["verify", "/etc", "MODEL", "--tolerance", "nan"], ["--tolerance", "nan", "at least 0"]),
        (["verify", "/etc", "MODEL", "--tolerance", "-1"], ["--tolerance", "at least 0", "-1"]),
        (["verify", "/etc", "MODEL", "--seed", "9" * 20], ["--seed", "9" * 20]),
        (["trace", "MODEL", "--out", "a", "--batch-sizes", "1," + "9" * 20], ["--batch-sizes", "from 1 to 1048576"]),
        (["trace", "MODEL", "--out", "a", "--prompt-buckets", "9" * 20], ["--prompt-buckets", "from 1 to 1048576"]),
        (["ckpt", "reshard", "a", "b", "--tp", "100000"], ["tp must be", "from 1 to 4096, got 100000"]),
        (["ckpt", "reshard", "a", "b", "--tp", "1", "--pp", "100000"], ["pp must be", "from 1 to 4096, got 100000"]),
        (["pipeline", "plan", "MODEL", "--microbatches", "200000"], ["--microbatches", "200000"]),
        (
            ["trace", "MODEL", "--out", "/etc/hostname/a"],
            ["/etc/hostname is not a directory", "choose another"],
        ),
        (["demo", "--dir", "/etc/hostname", "--seconds", "1"], ["is not a directory", "/etc/hostname"]),
        (["recompile", "/no/such/artifact", "--out", "a"], ["/no/such/artifact"]),
        (["recompile", "MODEL", "--out", "a"], ["is not an artifact"]),
        (
            ["recompile", "MODEL", "--out", "/etc/hostname/a"],
            ["/etc/hostname is not a directory", "choose another"],
        ),
        pytest.param(["trace", "MODEL", "--out", "a", "--target", "z80"], ["z80", "x86-64-v3"], marks=needs_inductor),
        (["frobnicate"], ["frobnicate"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_user_errors_name_the_value_and_exit_without_a_traceback(
    arguments, words, model_dir, tmp_path, capsys, monkeypatch
):
    arguments = [str(model_dir) if a == "MODEL" else a for a in arguments]
    monkeypatch.chdir(tmp_path)
    if arguments[0] in ("serve", "frobnicate"):  # one that sets up logging, and one for the way of a whole process
        refused(nxd_infer(*arguments, cwd=tmp_path), *words)
    else:
        refused(nxd_infer_here(capsys, monkeypatch, *arguments), *words)
    assert not (tmp_path / "a").exists()


def test_a_missing_extra_is_named_with_the_way_to_install_it(artifact):

    code = (
        f"import sys; sys.argv = ['nxd-infer', 'generate', {str(artifact)!r}, 'x']\n"
        "sys.modules['tokenizers'] = None  # as if it were not installed\n"
        "from nxd_infer.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "tokenizers" in done.stderr and "nxd-infer[server]" in done.stderr


def test_a_directory_of_somebody_else_is_refused_before_anything_is_traced(model_dir, tmp_path, capsys, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    done = nxd_infer_here(
        capsys, monkeypatch, "trace", model_dir, "--out", mine, "--max-len", 64, "--prompt-buckets", 8
    )
    refused(done, "mine", "not an artifact")
    assert "plan" not in done.out
    assert (mine / "notes.txt").read_text() == "keep"


def test_a_trace_that_is_told_to_end_leaves_nothing_behind(model_dir, tmp_path):
    import signal
    import subprocess

    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "nxd_infer.cli.main", "trace", str(model_dir), "--out", str(tmp_path / "a"),
               "--max-len", "64", "--prompt-buckets", "8", "--dtype", "float32"]  # fmt: skip
    env = {**os.environ, "TMPDIR": str(temporary), "NXD_INFER_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def compiles():
        names = [path.name for path in tmp_path.iterdir()]
        return "cache" in names and any(name.startswith(".nxd-trace") for name in names)

    wait_until(lambda: process.poll() is not None or compiles(), 600)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 128 + signal.SIGTERM
    assert [path.name for path in temporary.iterdir() if path.name.startswith("nxd")] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "tmp"]
