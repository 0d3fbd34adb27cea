"""Every setting of the server, declared once: command-line arguments, then ``NXD_INFER_*`` variables, then a file.

A later source never overrides an earlier one: the command line wins over the environment, the environment over the
file, the file over the defaults below. A new setting is declared only here: ``serve`` derives its options from these,
and a test compares the table in ``docs/settings.md`` with them. No ``repr``, log line or error ever shows a secret.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxd_infer.util.options import Kind, check_each, declared, from_text, option
from nxd_infer.util.suggest import did_you_mean
from nxd_server.errors import SettingsError

PREFIX = "NXD_INFER_"
SINGLE_KEY = "API_KEY"
"""The name that someone with one key would try; ignoring it would leave the server open."""
SOURCE = "ARTIFACT"
"""What to serve, if the command line does not say."""
OTHERS = (
    *("CACHE", "CACHE_LIMIT", "BACKEND", "PIN", "FORK", "MAX_RANKS", "CPU_LEVEL", "CPU_ASKS"),
    *("NEURON_ROOT", "NEURON_PROBE", "REAL_NEURON", "BENCH", SOURCE),
)
"""Variables with the same prefix that are read elsewhere: by the library, the benchmarks, the command line."""
KEY_LIST = Kind("a list of keys, or comma-separated text", lambda value: isinstance(value, str | list | tuple))

# --- what values must be, where their type does not say it: each check returns the value ----------------------


def key_list(name: str, value: Any) -> list[str]:
    keys = value
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            keys = json.loads(value)
        except ValueError:
            raise SettingsError(f"{name} looks like a JSON list but is not one") from None
    elif isinstance(value, str):
        keys = [key.strip() for key in value.split(",") if key.strip()]
        if value.strip() and not keys:
            raise SettingsError(f"{name} holds no key; unset it to leave the server open to everyone")
    if not all(isinstance(key, str) for key in keys):
        raise SettingsError(f"{name} holds something that is not a text")
    if not all(key.strip() for key in keys):
        raise SettingsError(f"{name}: an empty key would open the server to everyone; leave it out where that is meant")
    return list(keys)


def not_empty(name: str, text: str) -> str:
    if not text.strip():
        raise SettingsError(f"{name} is empty; leave it out for the default")
    return text


def matching(pattern: str, what: str) -> Callable[[str, str], str]:
    """Return the check of a text that is ``what`` if it matches ``pattern``."""

    def check(name: str, text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise SettingsError(f"{name}: {text!r} is not {what}")
        return text

    return check


adapter_path = matching(r"(?s)[^=]+=.+", "NAME=PATH")
origin = matching(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s*]+", "an origin, such as https://chat.example.org, nor *")
prefix = matching(r"(?!/v[12]$)(/[\w.~-]+)+", "the beginning of a path of its own, such as /llm")


def network(name: str, text: str) -> str:
    try:
        if text != "*":
            ipaddress.ip_network(text)
    except ValueError as error:
        raise SettingsError(f"{name}: {error}; list addresses, networks, or *") from None
    return text


def each(check: Callable[[str, str], str]) -> Callable[[str, list[str]], list[str]]:
    """Return the check of a list whose elements ``check`` checks."""
    return lambda name, given: [check(name, one) for one in given]


def receiver(name: str, url: str) -> str:
    if not (parts := re.fullmatch(r"(https?://[^/?#@\s]+)(/[^?#\s]*)?", url)):
        fix = "http://collector:4318/v1/traces; keys for it go into the variable OTEL_EXPORTER_OTLP_HEADERS"
        raise SettingsError(f"{name} is not the URL of an OTLP/HTTP receiver, such as {fix}")
    return url if (parts[2] or "/") != "/" else f"{parts[1]}/v1/traces"


def directory(name: str, root: Path) -> Path:
    if not root.is_dir():
        raise SettingsError(f"{name} {str(root)!r} is not a directory")
    return root


def words(name: str, text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise SettingsError(f"{name}: cannot be split into options: {error}") from None
    return text


# --- the settings ---------------------------------------------------------------------------------------------


class Group(str):
    """The settings of a heading: called, it declares one, of its annotation's kind; its option has the field's name
    unless ``more`` has a ``flag``."""

    def __call__(self, default: Any, help: str, *, kind: Any = None, **more: Any) -> Any:
        return option(default, help, kind, group=str(self), **{"flag": "", **more})

    def seconds(self, default: float | None, help: str, *, above: float | None = 0, **more: Any) -> Any:
        """Declare one that is a time, at most a day."""
        return self(default, help, **{"above": above, "maximum": 86400, "unit": "seconds", **more})


ADDRESS = Group("Address and name")
DOORS = Group("TLS, proxies, pages of other origins")
KEYS = Group("Keys")
GENERATION = Group("Generation")
WEIGHTS = Group("Weights and adapters")
REQUESTS = Group("Limits of requests")
CONNECTIONS = Group("Connections")
LIFE = Group("Ranks, start and end")
ARTIFACT = Group("What is served")
LOG = Group("Log")


@dataclass(frozen=True)
class ServerSettings:
    """The settings of ``nxd-infer serve``; :meth:`resolve` gathers them. Texts are read as what they stand for.

    Raises SettingsError with the name of each faulty setting and what is wrong with it.
    """

    host: str = ADDRESS("127.0.0.1", "Address to listen on.", check=not_empty)
    port: int = ADDRESS(8000, "Port to listen on; 0 takes a free one and logs it.", minimum=0, maximum=65535)
    served_model_name: list[str] = ADDRESS(
        [],
        "Names of the model, of which answers have the first; by default the one in the artifact. Of several "
        "artifacts each is given as NAME=ARTIFACT.",
        check=each(not_empty),
        repeats=True,
    )
    page: bool = ADDRESS(True, "Serve the pages at / (chat, completion, embeddings, live plots) and /docs.")
    ssl_certfile: Path | None = DOORS(
        None, "PEM file of the certificate and its chain, for TLS; read again once it has changed."
    )
    ssl_keyfile: Path | None = DOORS(None, "PEM file with the certificate's key.")
    ssl_keyfile_password: str | None = DOORS(None, "Password of the key.", secret=True)
    root_path: str | None = DOORS(None, "Beginning of all paths at a proxy, which may strip it: `/llm`.", check=prefix)
    forwarded_allow_ips: list[str] = DOORS(
        [],
        "Proxies whose `X-Forwarded-For` is believed: addresses, networks, or `*`; by default FORWARDED_ALLOW_IPS.",
        check=each(network),
    )
    allowed_origins: list[str] = DOORS(
        [],
        "Origins whose pages may use the server in a browser (CORS): `https://chat.example.org`, or `*` for all.",
        flag="--allowed-origin",
        check=each(origin),
        repeats=True,
    )
    api_keys: list[str] = KEYS(
        [],
        "Keys that open the server; a list, or comma-separated text.",
        kind=KEY_LIST,
        secret=True,
        flag="--api-key",
        check=key_list,
        repeats=True,
    )
    api_keys_file: Path | None = KEYS(
        None, "File of keys, or of JSON objects with their SHA-256 and limits, one a line."
    )
    admin_key: str | None = KEYS(
        None, "Key of the routes that change what is served; without it they are closed.", secret=True, check=not_empty
    )
    lora: list[str] = WEIGHTS(
        [],
        "LoRA adapters to load at the start, as NAME=PATH; a list, or comma-separated text.",
        check=each(adapter_path),
        repeats=True,
    )
    generation_defaults: bool = GENERATION(
        True,
        "Sample as the model's `generation_config.json` says if a request does not; the tokens that end a text "
        "always come from the file and the tokenizer.",
    )
    speculate: int = GENERATION(
        0, "Draft tokens to verify in one step; at most as many as the artifact was traced for.", minimum=0
    )
    draft: str | None = GENERATION(
        None,
        "Artifact of a smaller model, or an EAGLE head, that makes the draft tokens, by default as many as the model "
        "was traced for.",
        check=not_empty,
    )
    stall_ratio: float = GENERATION(
        4.0,
        "How long a stream may wait for its next token during prefill, as a multiple of the fastest decode step; "
        "more starts new answers sooner.",
        minimum=1,
    )
    prefix_caching: bool = GENERATION(
        True,
        "Keep what was computed for a prompt and its answer until the slot is needed: a prompt that begins like "
        "it continues there.",
    )
    chat_template: str | None = GENERATION(
        None, "A file with the chat template to use, or the name of one of the model's further ones.", check=not_empty
    )
    tool_call_parser: str = GENERATION(
        "auto", "How the model writes tool calls.", choices=("auto", "hermes", "llama3_json", "mistral", "none")
    )
    reasoning_parser: str = GENERATION(
        "auto", "How the model writes its reasoning.", choices=("auto", "think", "mistral", "none")
    )
    weights_root: Path | None = WEIGHTS(
        None, "Directory from which requests may load weights and adapters; unset: none.", check=directory
    )
    weights_drain_timeout: float = WEIGHTS.seconds(
        60.0, "Seconds running requests may take to finish before a weight swap is abandoned."
    )
    max_queued_tokens: int = REQUESTS(
        2**24, "Prompt tokens (of one-shot models: numbers of inputs) that may wait; then 429.", minimum=1
    )
    max_queue_wait: float | None = REQUESTS.seconds(
        None, "Seconds a request may wait, as foretold; then 429. By default `request_timeout`."
    )
    max_queued_requests: int | None = REQUESTS(
        None, "Choices (prompts times n) that may wait; then 429. By default any number.", minimum=0
    )
    max_choices: int = REQUESTS(64, "Largest number of prompts times n per request.", minimum=1)
    max_body_bytes: int | None = REQUESTS(
        None,
        "Largest request body; a larger one is answered 413. By default what `max_choices` prompts of the model's "
        "length need, from 2 to 16 MiB.",
        minimum=1024,
    )
    max_stored_responses: int = REQUESTS(
        1000, "Responses of /v1/responses that are kept in memory for later requests; 0: none.", minimum=0
    )
    max_stored_bytes: int = REQUESTS(
        64 * 2**20,
        "Bytes of all stored responses; those of the key that holds most go first, the oldest of them.",
        minimum=0,
    )
    request_timeout: float = REQUESTS.seconds(600.0, "Seconds a request may take in total; then 504.")
    render_timeout: float = REQUESTS.seconds(
        5.0, "Seconds the model's chat template may take for one conversation.", maximum=3600
    )
    keep_alive_interval: float = CONNECTIONS.seconds(
        10.0, "Seconds of silence on a stream before a comment line keeps it open."
    )
    connection_timeout: int = CONNECTIONS(
        75,
        "Seconds a connection is kept for the next request, or for a client that reads nothing or sends nothing "
        "more of a body.",
        minimum=1,
        maximum=86400,
        unit="seconds",
    )
    header_timeout: float = CONNECTIONS.seconds(
        10.0,
        "Seconds until a request's head must be complete, from its first byte or, on a new connection, from the start.",
        maximum=3600,
    )
    max_connections: int | None = CONNECTIONS(
        None, "Concurrent connections; by default as many as the limit of open files allows, up to 4096.", minimum=16
    )
    max_connections_per_address: int | None = CONNECTIONS(
        None,
        "Concurrent connections from one address, not from a client in `X-Forwarded-For`; by default the limit on "
        "all of them.",
        minimum=1,
    )
    drain_timeout: float = LIFE.seconds(
        30.0, "Seconds running requests may take to finish after SIGTERM before they are cut.", minimum=0, above=None
    )
    call_timeout: float = LIFE.seconds(
        10.0,
        "Seconds one step may take before its rank counts as stuck; if larger, ten times the graph's last steps, "
        "up to the limit of a first start.",
    )
    start_timeout: float | None = LIFE.seconds(
        None,
        "Seconds the ranks may take to load the artifact, and the server then to read its tokenizer; by default "
        "300, plus one per 100 MB. Also to reload it or to take new weights; by default six times the time of the "
        "start, plus one per 100 MB, at least 30.",
    )
    recovery_timeout: float | None = LIFE.seconds(
        None,
        "Seconds lost ranks may take to be ready again; then the server exits. By default twice the limit of a "
        "reload, so that ranks that hang meanwhile are started once more, and twelve times what the ranks took "
        "from there to ready.",
        minimum=0,
        above=None,
    )
    max_restarts: int = LIFE(3, "Restarts within ten minutes before the server gives up.", minimum=0)
    threads_per_rank: int | None = LIFE(
        None, "CPU threads per rank; by default the cores (or a container's share of them) divided.", minimum=1
    )
    memory_fraction: float | None = ARTIFACT(
        None, "Part of the available memory that models may take; caches get what weights leave.", above=0, maximum=1
    )
    replicas: int = ARTIFACT(1, "Copies of each model, with ranks and cores of their own.", minimum=1, maximum=256)
    allow_kernel: bool = ARTIFACT(
        True,
        "Take an artifact that chooses its buckets with its own code (a bucket kernel).",
        flag="--allow-kernel/--no-kernel",
    )
    expect_digest: str | None = ARTIFACT(None, "SHA-256 the artifact's manifest must have.")
    keep: Path | None = ARTIFACT(
        None,
        "Directory for artifacts that are fetched from a store, or traced of a model directory; the next start "
        "finds them there. By default in the cache.",
    )
    trace_options: str = ARTIFACT(
        "", "Options of `nxd-infer trace` for a model directory, as one text: `--tp 2 --max-len 1024`.", check=words
    )
    prepare_only: bool = ARTIFACT(False, "Fetch or trace the artifact, and stop: a job that runs before servers do.")
    prepare_timeout: float = ARTIFACT.seconds(
        7200.0,
        "Seconds a model may take to be traced, by this server or by another with the same `keep`.",
        maximum=604800,
    )
    log_format: str = LOG("text", "One line or one JSON object per log record.", choices=("text", "json"))
    log_level: str = LOG(
        "info",
        "Lowest level to log: `debug`, `info`, `warning` or `error`.",
        choices=("debug", "info", "warning", "error"),
    )
    access_log: bool = LOG(True, "Log every request except those to the health routes.")
    otlp_traces_endpoint: str | None = LOG(
        None,
        "OTLP/HTTP receiver, `http://collector:4318/v1/traces`, of an OpenTelemetry span for each POST.",
        check=receiver,
    )

    def __post_init__(self) -> None:
        for name, one in declared(type(self)).items():
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, from_text(one.kind, value))
        try:
            check_each(self, SettingsError)
        except SettingsError as error:
            raise SettingsError(f"invalid server settings: {error}") from None

    @classmethod
    def resolve(cls, config_file: str | Path | None = None, **arguments: Any) -> ServerSettings:
        """Settings from ``arguments`` (``None`` = not given), the environment, then ``config_file`` (JSON or YAML).

        Raises:
            SettingsError: an unreadable file, an unknown name, or a value out of range; names it and the reason.
        """
        known = declared(cls)
        variables = {name.upper(): value for name, value in os.environ.items()}  # in any case
        environment: dict[str, Any] = {
            name: variables[PREFIX + name.upper()] for name in known if PREFIX + name.upper() in variables
        }
        if not environment.get("api_keys") and (single := variables.get(PREFIX + SINGLE_KEY)):
            environment["api_keys"] = [single]
        given = {name: value for name, value in arguments.items() if value is not None and value != []}
        found = {**(read_settings(Path(config_file)) if config_file is not None else {}), **environment, **given}
        for name in found:
            if name not in known:
                raise SettingsError(f"no server setting is named {name!r}{did_you_mean(name, known)}")
        return cls(**found)

    def admin(self) -> bytes | None:
        """Return the admin key as UTF-8 bytes; None if the admin routes are closed."""
        return None if self.admin_key is None else self.admin_key.strip().encode()


# --- where they come from -------------------------------------------------------------------------------------


def read_text(path: Path, what: str) -> str:
    """Return the text of a file. Raises SettingsError with the reason; ``what`` names the kind of file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingsError(f"{what} {str(path)!r} cannot be read: {why}") from None


def read_settings(path: Path) -> dict[str, Any]:
    """Return settings by name. Raises SettingsError if the file cannot be read or is not a mapping."""
    text = read_text(path, "the configuration file")
    parse: Callable[[str], Any] = json.loads
    invalid: tuple[type[Exception], ...] = (ValueError,)
    if path.suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError:
            raise SettingsError("a YAML configuration file needs PyYAML (pip install pyyaml), or write JSON") from None
        parse, invalid = lambda text: yaml.safe_load(text) or {}, (ValueError, yaml.YAMLError)
    elif path.suffix != ".json":
        raise SettingsError(f"the configuration file {str(path)!r} must end in .json, .yaml or .yml")
    try:
        data = parse(text)
    except invalid as error:
        # The parser's message may quote a line that holds a key; only the line number is safe to show.
        where = f" (line {line})" if (line := getattr(error, "lineno", None)) else ""
        raise SettingsError(f"the configuration file {str(path)!r} is not valid{where}") from None
    if not isinstance(data, dict):
        raise SettingsError(f"the configuration file {str(path)!r} must hold a mapping of setting names to values")
    return {str(name).replace("-", "_"): value for name, value in data.items()}


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a line for each variable with our prefix that is not a setting: a typo in NXD_INFER_API_KEYS would leave
    the server open. Values are never shown."""
    known = {*(name.upper() for name in declared(ServerSettings)), SINGLE_KEY, *OTHERS}
    lines = []
    for variable in sorted(environment):
        name = variable.upper()  # their case does not count
        if name.startswith(PREFIX) and (name := name.removeprefix(PREFIX)) not in known:
            # Without the prefix, which would make any two names look alike.
            near = did_you_mean(name, known).replace("did you mean ", f"did you mean {PREFIX}")
            lines.append(f"{variable} is not a setting of the server{near}")
    return lines
