"""An option is declared once: signatures, docstrings and commands show what is declared, and nothing else."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import typer
import typer.main

from nxd_infer.artifact.sampler_fields import SAMPLER_FIELDS
from nxd_infer.cli.main import app
from nxd_infer.errors import ModelConfigError
from nxd_infer.trace import parallel_model_load, parallel_model_recompile, parallel_model_trace, trace_plan
from nxd_infer.trace.options import RecompileOptions, TraceOptions
from nxd_infer.util.options import command_options, declared, defaults
from nxd_models.serving import tasks
from nxd_models.serving.task_options import TaskOptions
from nxd_server import LLM
from nxd_server.settings import ServerSettings

OF_TRACE = {"--plan-only"}
"""What only the command has."""


def command_flags(name: str) -> set[str]:
    """The options of a command as typer made it."""
    command: Any = typer.main.get_command(app)
    parameters = command.commands[name].params
    return {flag for one in parameters if one.param_type_name == "option" for flag in one.opts} - {"--help", "-h"}


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (parallel_model_trace, TraceOptions),
        (trace_plan, TraceOptions),
        (tasks.plan, TaskOptions),
        (parallel_model_recompile, RecompileOptions),
    ],
)
def test_signature_and_documentation_are_the_declared_options(function, options):
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [one.name for one in fields(options)]
    given = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    assert given == defaults(options)
    if function is not trace_plan:  # whose arguments are parallel_model_trace's
        told = " ".join(function.__doc__.split())
        assert all(f"{name}: {' '.join(one.help.split())}" in told for name, one in declared(options).items())


def test_the_command_offers_the_declared_options_and_three_of_its_own():
    flags = {one.flag for options in (TaskOptions, TraceOptions) for one in command_options(options).values()}
    assert command_flags("trace") == flags | OF_TRACE
    assert {f"--{name.replace('_', '-')}" for name in SAMPLER_FIELDS} < command_flags("generate")


def test_a_model_in_python_has_the_defaults_of_the_server():
    llm = {name: one.default for name, one in inspect.signature(LLM).parameters.items()}
    settings = defaults(ServerSettings)
    for name in ("speculate", "generation_defaults", "allow_kernel", "expect_digest", "threads_per_rank"):
        assert llm[name] == settings[name], name
    assert inspect.signature(parallel_model_load).parameters["expect_digest"].default is settings["expect_digest"]


def test_a_wrong_call_names_the_function_and_the_argument():
    with pytest.raises(TypeError, match=r"^parallel_model_trace\(\) got an unexpected keyword argument 'tp_degre'"):
        parallel_model_trace(print, None, tp_degre=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"^plan\(\) missing a required argument: 'model_dir'"):
        tasks.plan()  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": []}, r"batch_sizes must be a list of one or more whole numbers from 1 to 1048576, got \[\]"),
        ({"max_len": True}, "max_len must be a whole number of at least 2, or None, got True"),
        ({"task": "translate"}, 'task must be "generate", "embed", .* or None, got .translate.'),
        ({"dtype": "float99"}, 'dtype must be "float32", "bfloat16" or None, got .float99.'),
    ],
)
def test_a_value_that_an_option_cannot_have_is_refused(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        TaskOptions("model", **changes)
