"""``nxd-infer``: one function per command. User errors print without a traceback and exit 1; bad usage exits 2."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core

from nxd_infer import __version__, cli
from nxd_infer.artifact.sampler_fields import SAMPLER_FIELDS
from nxd_infer.backends import registry
from nxd_infer.cli import stop
from nxd_infer.cli.ckpt_app import ckpt
from nxd_infer.cli.load.options import LoadOptions
from nxd_infer.cli.parameters import with_options, words
from nxd_infer.cli.pipeline_app import pipeline
from nxd_infer.errors import NxdError
from nxd_infer.trace.options import RecompileOptions, TraceOptions
from nxd_infer.util.options import Option, command_options, declared, flag_of, from_command, problem_of
from nxd_models.serving.task_options import TaskOptions
from nxd_server.settings import PREFIX, SOURCE, ServerSettings


class Commands(typer.core.TyperGroup):
    """Reports Ctrl-C, and the rejected value of an option; typer does neither."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(_interrupted())
        except typer.BadParameter as error:
            error.message = _with_its_value(error)
            raise


def _with_its_value(error: typer.BadParameter) -> str:
    """Return the message with the rejected value: pydantic's messages, which typer passes on, lack it."""
    message = error.message.removeprefix("Value error, ")
    errors = getattr(error.__cause__, "errors", list)()
    if errors and (problem := problem_of(errors[0])):
        message = f"it {problem}"
    value = repr(errors[0]["input"]) if errors else ""
    return message if value in message else f"{message}, got {value}"


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return 128 + signal.SIGINT


app = typer.Typer(
    name="nxd-infer",
    cls=Commands,
    help="Shard a PyTorch model, trace each rank ahead of time, save, load and serve it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="Example:  nxd-infer demo --dir ./demo",
    context_settings={"help_option_names": ["-h", "--help"]},
)

TRACE = declared(TraceOptions)

SERVER_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "tokenizers", "jinja2")


def _sampler_options() -> dict[str, Option]:
    """An option for each number that the sampler takes."""
    made = {}
    for name, field in SAMPLER_FIELDS.items():
        default = f"the model's own, else {field.off:g}" if field.model_may_set else f"{field.off:g}"
        made[name] = replace(field, flag=flag_of(name, field), help=f"{field.help} Default: {default}.")
    return made


ArtifactDir = Annotated[Path, typer.Argument(help="An artifact that `nxd-infer trace` wrote.", show_default=False)]
ModelDir = Annotated[Path, typer.Argument(help=declared(TaskOptions)["model_dir"].help, show_default=False)]


@app.callback(invoke_without_command=True)
def main_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit()


def compiler_words(typed: str | None) -> list[str] | None:
    """Return ``"a=1,b=2"`` as options of the backend."""
    return None if typed is None else typed.replace(",", " ").split()


def _require_checkpoint(given: dict[str, Any]) -> None:
    if given["checkpoint_tag"] is not None and given["checkpoint"] is None:
        raise typer.BadParameter("it names a checkpoint of --checkpoint, which is not given", param_hint="--tag")


@app.command(epilog="Example:  nxd-infer trace ./llama --tp 2 --out ./artifact --max-len 1024 --quantize int8")
@with_options(command_options(TaskOptions) | command_options(TraceOptions))
def trace(
    model_dir: ModelDir,
    artifact_dir: Annotated[Path, typer.Option("--out", help=TRACE["artifact_dir"].help, show_default=False)],
    plan_only: Annotated[
        bool,
        typer.Option(
            "--plan-only",
            help="Print the plan and stop. Its memory is what the machine must have, without page cache.",
        ),
    ] = False,
    **given: Any,
) -> None:
    """Shard a model, compile one graph per bucket, and write an artifact that needs neither model code nor compiler."""
    _require_checkpoint(given)
    for name, option in (("lora_rank", "--lora-rank"), ("lora_targets", "--lora-targets")):
        if given[name] is not None and not given["lora_slots"]:
            raise typer.BadParameter("it describes the slots of --lora-slots, which is not given", param_hint=option)
    given["compiler_args"] = compiler_words(given["compiler_args"])
    cli.trace.run(model_dir, artifact_dir, plan_only=plan_only, **given)


def _print_keys(wanted: bool) -> None:
    if wanted:
        cli.train.print_keys()
        raise typer.Exit()


@app.command(epilog="Example:  nxd-infer train recipe.yaml trainer.max_steps=100")
def train(
    config: Annotated[Path, typer.Argument(help="A recipe: YAML with the keys of NxD Training.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys to set, dotted.", show_default=False)
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the recipe and print its plan: parameters, memory, time.")
    ] = False,
    chip: Annotated[
        Literal["here", "trn1", "trn2"] | None,
        typer.Option("--chip", help="The device of the plan's times. Default: by the number of ranks."),
    ] = None,
    trace_out: Annotated[
        Path | None, typer.Option("--trace", metavar="OUT", help="Then trace the trained model into this folder.")
    ] = None,
    convert: Annotated[
        bool, typer.Option("--convert", help="Print CONFIG, of NeMo or NeuronX-NeMo-Megatron, as a recipe.")
    ] = False,
    keys: Annotated[
        bool, typer.Option("--keys", is_eager=True, callback=_print_keys, help="List the keys of a recipe, and stop.")
    ] = False,
) -> None:
    """Train a recipe. It starts its ranks on this machine; under torchrun or Slurm it is one of them."""
    if chip is not None and not check:
        raise typer.BadParameter("it is the device of --check's plan, which is not given", param_hint="--chip")
    if convert:
        if overrides or check or trace_out is not None:
            raise typer.BadParameter("it prints CONFIG as it is: leave other arguments out", param_hint="--convert")
        cli.train.print_converted(config)
        return
    cli.train.run(config, overrides or [], check, chip, trace_out)


@app.command(epilog="Example:  nxd-infer recompile ./artifact --out ./artifact-inf2 --backend neuron --target inf2")
@with_options(command_options(RecompileOptions))
def recompile(
    artifact: ArtifactDir,
    out: Annotated[Path, typer.Option("--out", help="Where to write the new artifact.", show_default=False)],
    **given: Any,
) -> None:
    """Recompile an artifact's graphs for another machine or backend, without the model's code or checkpoint."""
    given["compiler_args"] = compiler_words(given["compiler_args"])
    cli.trace.recompile(artifact, out, given)


@app.command(epilog="Example:  NXD_INFER_API_KEYS=secret nxd-infer serve ./artifact --port 8000")
@with_options(command_options(ServerSettings))
def serve(
    artifacts: Annotated[
        list[str] | None,
        typer.Argument(
            help="An artifact that `nxd-infer trace` wrote, or a Hugging Face model directory, which is traced "
            "first; a directory, or its URL in a store (s3://bucket/prefix). Several are answered by name, and "
            f"NAME=ARTIFACT gives one. By default what {PREFIX}{SOURCE} says, with commas between.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="JSON or YAML file with any of the settings below.")] = None,
    **given: Any,
) -> None:
    """Serve an artifact over HTTP: the OpenAI routes, embeddings, /v1/predict, SageMaker's two, health and metrics.

    Every option is also a variable (--max-choices: NXD_INFER_MAX_CHOICES) and a line of --config (max_choices); an
    option comes before a variable, and that before the file.
    """
    from nxd_server.app import run  # slow: what answers HTTP

    artifacts = artifacts or [*filter(None, words(os.environ.get(PREFIX + SOURCE, "")))]
    if not artifacts:
        raise typer.BadParameter(f"give an artifact to serve, or set {PREFIX}{SOURCE}")
    raise typer.Exit(run.serve(artifacts, ServerSettings.resolve(config, **given)))


@app.command(epilog='Example:  nxd-infer generate ./artifact "The with statement" --max-tokens 64')
@with_options(
    command_options(ServerSettings, "speculate", "draft", "generation_defaults", "allow_kernel") | _sampler_options()
)
def generate(
    artifact: ArtifactDir,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to continue.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens to generate. Default: 64, or what fits after the prompt.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; repeat for several.")] = None,
    json_schema: Annotated[
        str | None, typer.Option(metavar="FILE|JSON", help="The answer is JSON of this schema.", show_default=False)
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The answer matches this regular expression.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The answer is one of the --choice texts; repeat for each.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
    **given: Any,
) -> None:
    """Continue prompts in this process, without a server."""
    if not prompts:
        raise typer.BadParameter("there is none; give the text to continue", param_hint="PROMPT")
    if not all(prompts):
        raise typer.BadParameter("a prompt is empty: there is nothing to continue", param_hint="PROMPT")
    cli.generate.run(
        artifact,
        prompts,
        as_json=as_json,
        max_tokens=max_tokens,
        seed=seed,
        stop=stop or [],
        structured_outputs=_structured_outputs(json_schema, regex, choice),
        **given,
    )


def _structured_outputs(json_schema: str | None, regex: str | None, choice: list[str] | None) -> dict[str, Any] | None:
    """Return the options about the answer's form in the form of ``SamplingParams.structured_outputs``."""
    if json_schema is not None and not json_schema.lstrip().startswith("{"):
        try:
            json_schema = Path(json_schema).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(
                f"it is neither a JSON object nor a readable file: {error}", param_hint="--json-schema"
            ) from None
    given = {"json": json_schema, "regex": regex, "choice": choice or None}
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        raise typer.BadParameter("--json-schema, --regex and --choice are alternatives; give one")
    return named or None


@app.command(epilog="Example:  nxd-infer verify ./artifact ./llama")
@with_options(
    command_options(TraceOptions, "checkpoint", "checkpoint_tag") | command_options(ServerSettings, "allow_kernel")
)
def verify(
    artifact: ArtifactDir,
    model_dir: ModelDir,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Largest max|a-b| / max|b| to accept. Default: 1e-4 for float32; 3e-2 for bfloat16, more for over "
            "eight layers.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Seed of the inputs.")] = 0,
    **given: Any,
) -> None:
    """Compare an artifact with the unsharded eager model, one row per bucket; exits 1 above the tolerance."""
    _require_checkpoint(given)
    raise typer.Exit(cli.verify.run(artifact, model_dir, tolerance, seed, **given))


app.add_typer(ckpt, name="ckpt")
app.add_typer(pipeline, name="pipeline")


@app.command(epilog="Example:  nxd-infer port train.py modules/")
def port(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE|DIR", help="Python files, notebooks, or folders.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what becomes of the names of neuronx_distributed, torch_neuronx and torch_xla that a program uses.

    Programs are read, not run. The exit status is 1 if a name is absent or a call refused, unless the program expects
    that (a try around its import); else 0.
    """
    raise typer.Exit(cli.port.run(paths, as_json))


@app.command(epilog="Example:  nxd-infer bench http://localhost:8000 --rate 4 --goodput ttft:500 --plot load.svg")
@with_options(command_options(LoadOptions))
def bench(
    target: Annotated[
        str,
        typer.Argument(
            metavar="URL|ARTIFACT", help="A server of OpenAI's routes, or what to serve.", show_default=False
        ),
    ],
    **given: Any,
) -> None:
    """Send many completions to a server and show rates and latencies; exits 1 if a request failed."""
    raise typer.Exit(cli.load.run.run(target, LoadOptions(**from_command(LoadOptions, given))))


@app.command(epilog="Example:  nxd-infer top http://localhost:8000")
def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server of this package.")] = "http://localhost:8000",
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="The server's key.", show_envvar=True)
    ] = None,
    every: Annotated[float, typer.Option("--every", min=0.1, max=60, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and stop.")] = False,
) -> None:
    """Show in the terminal what a server is doing: tokens, queue, slots, buckets, ranks."""
    cli.top.run(url, api_key, every, once)


@app.command(epilog="Example:  nxd-infer doctor")
def doctor() -> None:
    """Show what this machine has and lacks: torch, compiler, backends, CPU features, memory, optional packages."""
    raise typer.Exit(cli.doctor.run())


@app.command(epilog="Example:  nxd-infer demo --dir ./demo")
@with_options(command_options(TraceOptions, "backend"))
def demo(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Keep everything here; replaces an earlier demo. Default: a temporary directory.",
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="How long to train, at most. Default: 30 steps; of --small, a minute.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help=TRACE["tp_degree"].help)] = 2,
    small: Annotated[
        bool, typer.Option("--small", help="Train a small model from nothing, not a real one that answers questions.")
    ] = False,
    **given: Any,
) -> None:
    """Run everything end to end on this machine's CPU: train, trace, save, load, serve, query."""
    from nxd_infer.cli.demo import run  # slow: torch

    run.run(directory, seconds, tp, given["backend"] or registry.default(), small)


def main() -> None:
    """Entry point of the ``nxd-infer`` script."""
    stop.install()  # `serve` has handlers of its own
    try:
        app()
    except (NxdError, OSError) as error:  # OSError: not a directory, no permission, disk full
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if error.name not in SERVER_PACKAGES:
            raise
        print(f"error: this needs {error.name}: pip install 'nxd-infer[server]'", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # before or after the command
        sys.exit(_interrupted())


if __name__ == "__main__":
    main()
