"""What the command line refuses, plans and prints without compiling anything."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

import nxd_infer
from nxd_infer.cli.top import Look, view
from nxd_infer.cli.trace import TraceProgress
from nxd_infer.util.progress_bar import progress_bar
from tests.support import toy_artifacts as toy
from tests.support.e2e.command import here, refused
from tests.support.tiny_models import write_tiny

COMMANDS = ("trace", "recompile", "serve", "generate", "verify", "doctor", "demo", "port", "bench", "top")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("cli") / "model", num_hidden_layers=1)


@pytest.mark.parametrize("command", [*COMMANDS, "ckpt", ""])
def test_help_shows_an_example(command):
    done = here(*command.split(), "--help")
    assert done.status == 0
    assert f"nxd-infer {command}" in done.out.replace("\n", " ").split("Example:")[1]
    shown = {"serve": ("--admin-key", "--weights-root"), "trace": ("--checkpoint", "--tag")}.get(command, ())
    assert all(option in done.out for option in shown)


def test_the_version():
    assert here("--version").out == f"{nxd_infer.__version__}\n"


def test_the_demo_leaves_a_directory_alone_that_is_not_of_a_demo(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_text("precious")
    refused(here("demo", "--dir", tmp_path, "--seconds", 1), "is left alone", "--dir")
    assert (tmp_path / "model" / "model.safetensors").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_code_that_chooses_buckets_can_be_refused(model_dir, tmp_path):
    def kernel(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        return tensors, torch.tensor([0])

    path = toy.build(tmp_path / "kernel", degree=1, kernel=kernel)
    for arguments in (("generate", path, "x"), ("verify", path, model_dir)):
        refused(here(*arguments, "--no-kernel"), "bucket_kernel.pt, which is code, and")


def test_an_artifact_is_not_traced_again(tmp_path):
    path = toy.build(tmp_path / "artifact", degree=1)
    refused(here("trace", path, "--out", tmp_path / "out"), f"{path} is an artifact", "recompile", "model's directory")


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
    screen = Console(file=out, force_terminal=terminal, width=100, highlight=False)
    with progress_bar(screen, drawn=terminal) as display:
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


def picture(before: Look, now: Look) -> list[list[str]]:
    """The lines of ``top``, as words."""
    out = io.StringIO()
    Console(file=out, width=100).print(view(before, now, "host:1"))
    return [re.findall(r"[^\s│┃]+", line) for line in out.getvalue().splitlines()]


def test_top_shows_the_ranks_and_graphs_of_every_model_and_copy():
    def look(steps: int, tokens: int, models: list[str], copies: list[str]) -> Look:
        lines = [f"nxd_generation_tokens_total {tokens}"]
        for index, model in enumerate(models):
            one = f'model_name="{model}"'
            lines.append(f'nxd_bucket_executions_total{{graph="b1",{one}}} {steps * (index + 1)}')
            for number, copy in enumerate(copies):
                labels = one + (f',copy="{copy}"' if copy else "") + ',rank="0"'
                lines.append(f"nxd_rank_alive{{{labels}}} {1 - number}")
                lines.append(f"nxd_rank_steps_total{{{labels}}} {steps * (index + number)}")
        look = Look("\n".join(lines))
        look.time = float(steps > 0)
        return look

    def pictured(*whose) -> list[list[str]]:
        return picture(look(0, 0, *whose), look(3, 5, *whose))

    assert "b[/x]" in [line[0] for line in pictured(["a", "b[/x]"], ["0"]) if line]
    lines = pictured(["a", "b"], ["0", "1"])
    assert ["model", "copy", "rank", "alive", "steps/s", "ms", "a", "step"] in lines
    ranks = [["a", "0", "0", "yes", "0.0"], ["a", "1", "0", "NO", "3.0"], ["b", "0", "0", "yes", "3.0"]]
    assert all(row in [line[:5] for line in lines] for row in [*ranks, ["b", "1", "0", "NO", "6.0"]])
    assert all(row in [line[:3] for line in lines] for row in (["a", "b1", "3.0"], ["b", "b1", "6.0"]))
    assert ["rank", "alive", "steps/s", "ms", "a", "step"] in (alone := pictured(["a"], [""]))
    assert ["0", "yes", "0.0"] in [line[:3] for line in alone]
    assert ["copy", "rank"] in [line[:2] for line in pictured(["a"], ["0", "1"])]
    assert " ".join(alone[0]) == "host:1: speeds and times of the last 1.0 s"
    idle = picture(look(0, 5, ["a"], [""]), look(3, 5, ["a"], [""]))
    assert " ".join(idle[0]) == "host:1: speeds and times of the last 1.0 s, without a request"


def test_a_plan_says_what_a_model_lacks_and_writes_nothing(tmp_path):
    model = write_tiny("llama", tmp_path / "model")
    options = ("--max-len", 64, "--prompt-buckets", 16, "--backend", "eager")
    trace = ("trace", model, "--tp", 4, "--out", tmp_path / "a", *options)
    done = here(*trace, "--plan-only")
    assert done.status == 0 and "graphs to compile" in done.out and "tokenizer.json" not in done.out, done
    assert "verify_b1" in here(*trace, "--speculate", 2, "--plan-only").out
    (model / "tokenizer.json").unlink()
    done = here(*trace, "--plan-only")
    assert done.status == 0 and "has no tokenizer.json" in done.out and "with token ids" in done.out
    (model / "vocab.json").write_text("{}")  # half of GPT-2's
    refused(here(*trace, "--plan-only"), f"{model}: transformers' AutoTokenizer cannot read its tokenizer")
    (model / "vocab.json").unlink()
    (model / "model.safetensors").unlink()
    done = here(*trace)
    refused(done, f"{model} has no safetensors file")
    assert "graphs to compile" not in done.out
    assert here(*trace, "--plan-only").status == 0  # a plan needs no weights
    assert not (tmp_path / "a").exists()


def test_a_directory_of_somebody_else_is_refused_before_anything_is_traced(model_dir, tmp_path):
    (tmp_path / "notes.txt").write_text("keep")
    done = here("trace", model_dir, "--out", tmp_path, "--max-len", 64, "--prompt-buckets", 8, "--backend", "eager")
    refused(done, str(tmp_path), "not an artifact")
    assert "plan" not in done.out
    assert (tmp_path / "notes.txt").read_text() == "keep"


NINES = "9" * 20
TRACE = ["trace", "MODEL", "--out", "a"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trace", "/no/such/model", "--out", "a"], ["/no/such/model", "config.json"]),
        ([*TRACE, "--batch-sizes", "1,x"], ["1,x"]),
        ([*TRACE, "--batch-sizes", "0"], ["--batch-sizes", "from 1 to 1048576, got [0]"]),
        ([*TRACE, "--prompt-buckets", NINES], ["--prompt-buckets", "from 1 to 1048576"]),
        ([*TRACE, "--max-len", "100000"], ["100000", "256"]),
        ([*TRACE, "--speculate", "16"], ["--speculate", "from 0 to 15, got 16"]),
        ([*TRACE, "--tp", "0"], ["--tp", "0", "1"]),
        ([*TRACE, "--tp", "two"], ["--tp", "it must be a whole number, got 'two'"]),
        ([*TRACE, "--dtype", "float16"], ["'float16' is not one of", "bfloat16"]),
        ([*TRACE, "--backend", "eager", "--quantize", "int4-16"], ["int4-16", "'int8'"]),
        ([*TRACE, "--target", "z80"], ["z80"]),
        (["trace", "MODEL", "--out", "/etc/hostname/a"], ["/etc/hostname is not a directory", "choose another"]),
        (["ckpt", "reshard", "a", "b", "--tp", "0"], ["--tp", "it must be at least 1, got '0'"]),
        (["ckpt", "reshard", "a", "b", "--tp", "1", "--pp", "100000"], ["pp must be", "from 1 to 4096, got 100000"]),
        (["generate", "MODEL", "x", "--temperature", "-1"], ["--temperature", "-1", "0"]),
        (["generate", "MODEL", "x", "--seed", "late"], ["--seed", "it must be a whole number, got 'late'"]),
        (["generate", "MODEL", "x"], ["a model to trace", "nxd-infer trace"]),
        (["generate", "MODEL"], ["PROMPT", "give the text to continue"]),
        (["generate", "/no/such/artifact", "x"], ["/no/such/artifact"]),
        (["generate", "/no/such/artifact", "x", ""], ["a prompt is empty"]),
        (["verify", "/no/such/artifact", "MODEL"], ["/no/such/artifact"]),
        (["verify", "/etc", "MODEL", "--tolerance", "nan"], ["--tolerance", "nan", "at least 0"]),
        (["verify", "/etc", "MODEL", "--seed", NINES], ["--seed", NINES]),
        (["pipeline", "plan", "MODEL", "--microbatches", "200000"], ["--microbatches", "200000"]),
        (["demo", "--dir", "/etc/hostname", "--seconds", "1"], ["is not a directory", "/etc/hostname"]),
        (["demo", "--backend", "neuron"], ["'neuron' cannot trace here"]),
        (["recompile", "/no/such/artifact", "--out", "a"], ["/no/such/artifact"]),
        (["recompile", "MODEL", "--out", "a"], ["is not an artifact"]),
        (["recompile", "MODEL", "--out", "/etc/hostname/a"], ["/etc/hostname is not a directory", "choose another"]),
        (["frobnicate"], ["frobnicate"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_user_errors_name_the_value_and_exit_without_a_traceback(arguments, words, model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(here(*(str(model_dir) if word == "MODEL" else word for word in arguments)), *words)
    assert not (tmp_path / "a").exists()
