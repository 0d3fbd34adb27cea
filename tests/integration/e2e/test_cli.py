"""The command line as a user meets it: a model directory, artifacts, and processes where they are what matters."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import toy_artifacts as toy
from tests.support.backends.manifests import changed
from tests.support.e2e.command import ROOT, here, nxd_infer, refused
from tests.support.shared import shared
from tests.support.tiny_models import write_tiny

BUCKETS = ("decode_b1", "decode_b2", "mixed_b18", "prefill_s8", "prefill_s16")
EAGER = ("--backend", "eager", "--dtype", "float32", "--max-len", 64)


def traced(folder: Path) -> None:
    model = write_tiny("llama", folder / "model", num_hidden_layers=1)
    options = ("--tp", 2, "--batch-sizes", "1,2", "--prompt-buckets", "8,16", *EAGER)
    done = here("trace", model, "--out", folder / "artifact", *options)
    assert done.status == 0, done.err
    for word in ("trace ranks 0 of ", "5 graphs", *BUCKETS, "weights", "states", "peak memory"):
        assert word in done.out, (word, done.out)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return shared("cli", traced) / "model"


@pytest.fixture(scope="module")
def artifact(model_dir) -> Path:
    return model_dir.parent / "artifact"


def test_generate_answers_each_prompt_the_same_way_twice_and_prints_it_as_it_is(artifact):
    """One prompt is wider than the terminal, has a tab, and has what rich would draw as a picture."""
    prompts = ["def f", "[bold]\tx :warning: def f"]
    asked = ("generate", artifact, prompts[0], prompts[1], "--max-tokens", 24)
    done = here(*asked, "--json")
    assert done.status == 0, done.err
    records = [json.loads(line) for line in done.out.splitlines()]
    assert [record["prompt"] for record in records] == prompts
    assert all(1 <= record["tokens"] <= 24 for record in records)
    plain = here(*asked, "--temperature", 0, columns=20)
    assert plain.out == "".join(f"{record['prompt']}{record['text']}\n" for record in records)
    # What is no answer goes to the error stream.
    told = " ".join(plain.err.split())
    for record in records:
        assert f"[{record['tokens']} tokens, finish reason {record['finish_reason']}]" in told, plain.err
    assert "loading" not in plain.err  # a spinner is for who looks


def test_generate_binds_an_answer_to_a_form(artifact, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}')
    forms = [
        (("--choice", "left", "--choice", "right"), "left|right"),
        (("--regex", "[0-9]{4}"), "[0-9]{4}"),
        (("--json-schema", schema, "--temperature", 1, "--seed", 1), r"\[\s*([12](,\s*[12])?)?\s*\]"),
        (("--json-schema", '{"const": [true]}'), r"\[\s*true\s*\]"),
    ]
    for words, right in forms:
        done = here("generate", artifact, "def", *words, "--max-tokens", 50, "--json")
        assert done.status == 0, done.err
        record = json.loads(done.out)
        assert record["finish_reason"] == "stop" and re.fullmatch(right, record["text"].strip()), record
    for words, why in (
        (("--regex", "a", "--choice", "b"), "alternatives"),
        (("--json-schema", tmp_path / "none.json"), "--json-schema"),
        (("--regex", "(a"), "unclosed group"),
    ):
        refused(here("generate", artifact, "def", *words), why)


def test_generate_refuses_what_does_not_fit_and_cuts_only_its_default(artifact, tmp_path):
    """The artifact's longest prompt and answer are 64 tokens together."""
    done = here("generate", artifact, "def f", "--json", "--max-tokens", 64)
    refused(done, "max_tokens: 64 tokens do not fit", "maximum context length is 64 tokens", "which leaves")
    done = here("generate", artifact, "def f", "--json")
    assert done.status == 0, done.err
    assert 1 <= json.loads(done.out)["tokens"] < 64
    # An artifact without a tokenizer.
    bare = shutil.copytree(artifact, tmp_path / "bare")
    with changed(bare) as manifest:
        del manifest["files"]["tokenizer.json"]
    refused(
        here("generate", bare, "def f"),
        f"{bare} has no tokenizer.json: put the tokenizer's files into the model's directory and trace again",
    )


def test_what_is_compiled_again_verifies_and_another_model_does_not(artifact, model_dir, tmp_path, monkeypatch):
    done = here("recompile", artifact, "--out", tmp_path / "again")
    assert done.status == 0, done.err
    assert "5 graphs (0 compiled now) for cpu" in done.out
    done = here("verify", tmp_path / "again", model_dir)
    assert done.status == 0 and all(bucket in done.out for bucket in BUCKETS), done
    other = write_tiny("llama", tmp_path / "other", seed=7, num_hidden_layers=1)
    done = here("verify", artifact, other)
    assert done.status == 1 and "Traceback" not in done.err and "differs" in done.out
    assert f"compares with the weights of {other}" in done.out and "--checkpoint" in done.out
    # A wrong path is refused before the artifact is loaded.
    monkeypatch.setattr("nxd_infer.trace.parallel_model_load", None)
    missing = tmp_path / "nothere"
    refused(here("verify", artifact, missing), f"{missing}")
    refused(here("verify", artifact, model_dir, "--checkpoint", missing), f"{missing}")


def test_a_checkpoint_is_traced_in_eight_bits_and_verified(model_dir, tmp_path):
    from nxd_infer.trainer import save_checkpoint
    from nxd_models import registry

    trained = registry.load_model(model_dir)
    for tag in ("first", "second"):
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(1.5)
        save_checkpoint(tmp_path / "ckpts", tag, trained)
    out, source = tmp_path / "artifact", ("--checkpoint", tmp_path / "ckpts", "--tag", "first")
    options = (*EAGER, "--tp", 2, "--batch-sizes", 1, "--prompt-buckets", 8, "--quantize", "int8")
    options += ("--compiler-args", "nxd_packed=1")  # small as they are
    done = here("trace", model_dir, *source, "--out", out, *options)
    assert done.status == 0 and "linear layers keep their weights in int8" in done.out, done
    sizes = r"([0-9.]+) KiB instead of ([0-9.]+) KiB, summed over 2 ranks;"
    count = re.search(rf"int8: each rank holds (\d+) of its (\d+) weights so, {sizes}", " ".join(done.out.split()))
    assert count and 0 < int(count[1]) < int(count[2]), done.out
    files = sum(file.stat().st_size / 2**10 for file in (out / "weights").iterdir())
    assert float(count[3]) < float(count[4]) == pytest.approx(files, rel=0.1)
    done = here("verify", out, model_dir, *source)
    assert done.status == 0, done
    lines = done.out.splitlines()
    assert lines[0].startswith("load the artifact and the model") and "compare buckets 1 of 2 (" in done.out
    assert "compare with the weights before rounding 1 of 1" in lines
    title = "".join(done.out.split())  # wherever it is cut into lines
    assert f"{tmp_path / 'ckpts'}(first)" in title and "weightsroundedtoint8" in title, done.out
    for others in ((), source[:2]):  # the directory's, and the newest checkpoint
        assert here("verify", out, model_dir, *others).status == 1
    refused(here("verify", out, model_dir, "--tag", "first"), "--checkpoint")


def test_a_packed_artifact_answers_with_the_same_tokens_and_verifies(model_dir, tmp_path):
    options = ("--tp", 2, "--batch-sizes", 1, "--prompt-buckets", 8, "--compiler-args", "nxd_packed=1", *EAGER)
    answers = []
    for name, more in (("plain", ()), ("packed", ("--packed",))):
        done = here("trace", model_dir, *options, *more, "--out", tmp_path / name)
        assert done.status == 0, done.err
        answers.append(here("generate", tmp_path / name, "def f", "--json", "--max-tokens", 24).out)
    assert json.loads(answers[0])["tokens"] and answers[1] == answers[0]
    done = here("verify", tmp_path / "packed", model_dir)
    assert done.status == 0, done
    files = [(tmp_path / name / "weights" / "rank_00.safetensors").read_bytes() for name in ("plain", "packed")]
    assert len(files[0]) == len(files[1]) and files[0] != files[1]


def test_serve_refuses_as_the_others_do(tmp_path):
    """It sets up logging, and would in the process of the tests: in one of its own."""

    def kernel(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        return tensors, torch.tensor([0])

    refused(nxd_infer("serve", "/no/such/artifact"), "/no/such/artifact", "missing: give an artifact")
    path = toy.build(tmp_path / "kernel", degree=1, kernel=kernel)
    refused(nxd_infer("serve", path, "--port", 0, "--no-kernel"), "bucket_kernel.pt, which is code, and")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def test_a_missing_extra_is_named_with_the_way_to_install_it(artifact):
    done = python(
        f"import sys; sys.argv = ['nxd-infer', 'generate', {str(artifact)!r}, 'x']\n"
        "sys.modules['tokenizers'] = None  # as if it were not installed\n"
        "from nxd_infer.cli.main import main; main()"
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "tokenizers" in done.stderr and "nxd-infer[server]" in done.stderr


@pytest.mark.parametrize(
    ("module", "words", "shown"),
    [
        ("nxd_infer", ["--help"], ("trace", "serve", "doctor")),
        ("nxd_infer", ["serve", "--help"], ("--max-choices",)),
        ("bench", ["--help"], ("start", "--help")),
    ],
)
def test_the_packages_are_programs_that_explain_themselves_at_once(module, words, shown):
    """Without torch and what answers HTTP, which take seconds to import."""
    done = python(
        f"import runpy, sys; sys.argv = {[module, *words]!r}\n"
        f"try: runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n"
        "    print('ENDED', end.code, {'torch', 'fastapi', 'uvicorn', 'numpy'} & set(sys.modules))"
    )
    assert "ENDED 0 set()" in done.stdout, done.stdout + done.stderr
    assert all(word in done.stdout for word in shown), done.stdout


def test_shells_complete_commands_and_options():
    code = "import sys; sys.argv = ['nxd-infer']; from nxd_infer.cli.main import main; main()"
    for typed, found in (("nxd-infer ge", ["generate"]), ("nxd-infer trace --prompt", ["--prompt-buckets"])):
        words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        done = python(code, _NXD_INFER_COMPLETE="complete_bash", **words)
        assert done.stdout.split() == found, done.stderr
