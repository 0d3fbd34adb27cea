"""Every setting of the server in one model: command-line arguments, then ``NXD_INFER_*`` variables, then a file.

A later source never overrides an earlier one: the command line wins over the environment, the environment over the
file, the file over the defaults below. A new setting is declared only here: ``serve`` derives its options from these
(``settings_options``), and a test compares the table in ``docs/deployment.md`` with them. Secrets are
:class:`~pydantic.SecretStr`, so that no ``repr``, log line or validation error ever shows one.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from nxd_infer.util.suggest import did_you_mean
from nxd_server.environment import PREFIX, SINGLE_KEY, refuse_old_names
from nxd_server.errors import SettingsError
from nxd_server.settings_file import read_settings, read_text


def _setting(default: Any = ..., *, group: str, option: str | None = None, **field: Any) -> Any:
    """Declare a setting; ``group``: its section in the help; ``option``: its option's name, if not the field's."""
    return Field(default, json_schema_extra={"group": group, "option": option}, **field)


ADDRESS = "Address and name"
KEYS = "Keys"
GENERATION = "Generation"
WEIGHTS = "Weights and adapters"
REQUESTS = "Limits of requests"
CONNECTIONS = "Connections"
LIFE = "Ranks, start and end"
ARTIFACT = "What is served"
LOG = "Log"


class ServerSettings(BaseSettings):
    """The settings of ``nxd-infer serve``; build one with :meth:`resolve`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", hide_input_in_errors=True, frozen=True, allow_inf_nan=False
    )

    host: str = _setting("127.0.0.1", group=ADDRESS, min_length=1, description="Address to listen on.")
    port: int = _setting(
        8000, group=ADDRESS, ge=0, le=65535, description="Port to listen on; 0 takes a free one and logs it."
    )
    served_model_name: str | None = _setting(
        None, group=ADDRESS, min_length=1, description="Name under /v1/models; by default the one in the artifact."
    )

    api_keys: Annotated[list[SecretStr], NoDecode] = _setting(
        default_factory=list,
        group=KEYS,
        option="--api-key",
        description="Keys that open the server; a list, or comma-separated text.",
    )
    api_keys_file: Path | None = _setting(
        None, group=KEYS, description="File with one key per line, for secrets mounted by a host."
    )

    admin_key: SecretStr | None = _setting(
        None, group=KEYS, description="Key of the routes that change what is served; without it they are closed."
    )

    lora: Annotated[list[str], NoDecode] = _setting(
        default_factory=list,
        group=WEIGHTS,
        description="LoRA adapters to load at the start, as NAME=PATH; a list, or comma-separated text.",
    )

    generation_defaults: bool = _setting(
        True,
        group=GENERATION,
        description="Sample as the model's `generation_config.json` says if a request does not; the tokens that end "
        "a text always come from the file.",
    )
    speculate: int = _setting(
        0,
        group=GENERATION,
        ge=0,
        description="Draft tokens to verify in one step; at most as many as the artifact was traced for.",
    )
    stall_ratio: float = _setting(
        4.0,
        group=GENERATION,
        ge=1,
        description="How long a stream may wait for its next token during prefill, as a multiple of the fastest decode "
        "step; more starts new answers sooner.",
    )

    weights_root: Path | None = _setting(
        None, group=WEIGHTS, description="Directory from which requests may load weights and adapters; unset: none."
    )
    weights_drain_timeout: float = _setting(
        60.0,
        group=WEIGHTS,
        gt=0,
        le=86400,
        description="Seconds running requests may take to finish before a weight swap is abandoned.",
    )

    max_queued_requests: int = _setting(
        128, group=REQUESTS, ge=0, description="Requests that may wait for a free slot; further ones are answered 429."
    )
    max_choices: int = _setting(64, group=REQUESTS, ge=1, description="Largest number of prompts times n per request.")
    max_body_bytes: int | None = _setting(
        None,
        group=REQUESTS,
        ge=1024,
        description="Largest request body; a larger one is answered 413. By default what `max_choices` prompts of the "
        "model's length need, from 2 to 16 MiB.",
    )
    request_timeout: float = _setting(
        600.0, group=REQUESTS, gt=0, description="Seconds a request may take in total; then 504."
    )
    render_timeout: float = _setting(
        5.0,
        group=REQUESTS,
        gt=0,
        le=3600,
        description="Seconds the model's chat template may take for one conversation.",
    )
    keep_alive_interval: float = _setting(
        10.0, group=CONNECTIONS, gt=0, description="Seconds of silence on a stream before a comment line keeps it open."
    )
    connection_timeout: int = _setting(
        75,
        group=CONNECTIONS,
        ge=1,
        description="Seconds a connection is kept for the next request, or for a client that reads nothing or sends "
        "nothing more of a body.",
    )
    header_timeout: float = _setting(
        10.0,
        group=CONNECTIONS,
        gt=0,
        le=3600,
        description="Seconds until a request's head must be complete, from its first byte or, on a "
        "new connection, from the start.",
    )
    max_connections: int | None = _setting(
        None,
        group=CONNECTIONS,
        ge=16,
        description="Concurrent connections; by default as many as the limit of open files allows.",
    )
    max_connections_per_address: int | None = _setting(
        None,
        group=CONNECTIONS,
        ge=1,
        description="Concurrent connections from one address; by default the limit on all of them.",
    )

    drain_timeout: float = _setting(
        30.0,
        group=LIFE,
        ge=0,
        description="Seconds running requests may take to finish after SIGTERM before they are cut.",
    )
    call_timeout: float = _setting(
        10.0,
        group=LIFE,
        gt=0,
        description="Seconds one step may take before its rank counts as stuck; if larger, ten times the graph's "
        "last steps, up to the limit of a first start.",
    )
    start_timeout: float | None = _setting(
        None,
        group=LIFE,
        gt=0,
        description="Seconds the ranks may take to load the artifact; by default 300, plus one per 100 MB. "
        "Also to reload it or to take new weights; by default six times the time of the start, plus one per 100 MB, "
        "at least 30.",
    )
    recovery_timeout: float | None = _setting(
        None,
        group=LIFE,
        ge=0,
        description="Seconds lost ranks may take to be ready again; then the server exits. By default twice the limit "
        "of a reload, so that ranks that hang meanwhile are started once more.",
    )
    max_restarts: int = _setting(
        3, group=LIFE, ge=0, description="Restarts within ten minutes before the server gives up."
    )
    threads_per_rank: int | None = _setting(
        None,
        group=LIFE,
        ge=1,
        description="CPU threads per rank; by default the cores (or a container's share of them) divided.",
    )

    allow_kernel: bool = _setting(
        True,
        group=ARTIFACT,
        option="--allow-kernel/--no-kernel",
        description="Serve an artifact that chooses its buckets with its own code (a bucket kernel).",
    )
    expect_digest: str | None = _setting(None, group=ARTIFACT, description="SHA-256 the artifact's manifest must have.")
    keep: Path | None = _setting(
        None,
        group=ARTIFACT,
        description="Directory for artifacts that are fetched from a store, or traced of a model directory; the next "
        "start finds them there. By default in the cache.",
    )
    trace_options: str = _setting(
        "",
        group=ARTIFACT,
        description="Options of `nxd-infer trace` for a model directory, as one text: `--tp 2 --max-len 1024`.",
    )
    prepare_only: bool = _setting(
        False, group=ARTIFACT, description="Fetch or trace the artifact, and stop: a job that runs before servers do."
    )
    prepare_timeout: float = _setting(
        7200.0,
        group=ARTIFACT,
        gt=0,
        le=604800,
        description="Seconds a model may take to be traced, by this server or by another with the same `keep`.",
    )
    log_format: Literal["text", "json"] = _setting(
        "text", group=LOG, description="One line or one JSON object per log record."
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", group=LOG, description="Lowest level to log: `debug`, `info`, `warning` or `error`."
    )
    access_log: bool = _setting(True, group=LOG, description="Log every request except those to the health routes.")

    @field_validator("api_keys", mode="before")
    @classmethod
    def _split_keys(cls, value: Any) -> Any:
        if isinstance(value, str):
            text = value.strip()
            if text.startswith("["):
                try:
                    return json.loads(text)
                except ValueError:
                    raise ValueError("looks like a JSON list but is not one") from None
            keys = [key.strip() for key in text.split(",") if key.strip()]
            if text and not keys:
                raise ValueError("holds no key; unset it to leave the server open to everyone")
            return keys
        return value

    @field_validator("api_keys")
    @classmethod
    def _no_empty_key(cls, keys: list[SecretStr]) -> list[SecretStr]:
        if any(not key.get_secret_value().strip() for key in keys):
            raise ValueError("an empty key would open the server to everyone; leave it out where that is meant")
        return keys

    @field_validator("lora", mode="before")
    @classmethod
    def _split_adapters(cls, value: Any) -> Any:
        return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value

    @field_validator("lora")
    @classmethod
    def _named_adapters(cls, words: list[str]) -> list[str]:
        for word in words:
            name, _, path = word.partition("=")
            if not name or not path:
                raise ValueError(f"{word!r} is not NAME=PATH")
        return words

    @field_validator("weights_root")
    @classmethod
    def _existing_root(cls, root: Path | None) -> Path | None:
        if root is not None and not root.is_dir():
            raise ValueError(f"{str(root)!r} is not a directory")
        return root

    @field_validator("trace_options")
    @classmethod
    def _words(cls, text: str) -> str:
        try:
            shlex.split(text)
        except ValueError as error:
            raise ValueError(f"cannot be split into options: {error}") from None
        return text

    @field_validator("admin_key")
    @classmethod
    def _no_empty_admin_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not key.get_secret_value().strip():
            raise ValueError("is empty; leave it out to close the routes that it opens")
        return key

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings

    @classmethod
    def resolve(cls, config_file: str | Path | None = None, **arguments: Any) -> ServerSettings:
        """Settings from ``arguments`` (``None`` = not given), the environment, then ``config_file`` (JSON or YAML).

        Raises:
            SettingsError: an unreadable file, an unknown name, a variable with an old name, or a value out of range;
                names it and the reason.
        """
        refuse_old_names(os.environ, cls.model_fields)
        given = {name: value for name, value in arguments.items() if value is not None and value != []}
        environment = {name.upper(): value for name, value in os.environ.items()}  # as pydantic-settings reads it
        single = environment.get(PREFIX + SINGLE_KEY)
        if "api_keys" not in given and not environment.get(PREFIX + "API_KEYS") and single:
            given["api_keys"] = [single]
        data = read_settings(Path(config_file)) if config_file is not None else {}

        class _Settings(cls):
            @classmethod
            def settings_customise_sources(
                cls, settings_cls: type[BaseSettings], **sources: Any
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                return *super().settings_customise_sources(settings_cls, **sources), InitSettingsSource(cls, data)

        _Settings.__name__ = _Settings.__qualname__ = cls.__name__
        try:
            return _Settings(**given)
        except ValidationError as error:
            raise SettingsError(_explain(error)) from None

    def keys(self) -> tuple[bytes, ...]:
        """Return the keys as UTF-8 bytes, from the setting and the file; empty if the server is open to everyone.

        Raises:
            SettingsError: ``api_keys_file`` cannot be read, or holds no key; or the admin key is among them.
        """
        keys = [key.get_secret_value().strip().encode() for key in self.api_keys]
        if self.api_keys_file is not None:
            lines = read_text(self.api_keys_file, "api_keys_file").splitlines()
            found = [line.strip().encode() for line in lines if line.strip()]
            if not found:
                raise SettingsError(f"api_keys_file {str(self.api_keys_file)!r} holds no key; expected one per line")
            keys += found
        if self.admin() in keys:
            raise SettingsError("admin_key is one of api_keys too: whoever may ask could change what is served")
        return tuple(dict.fromkeys(keys))

    def admin(self) -> bytes | None:
        """Return the admin key as UTF-8 bytes; None if the admin routes are closed."""
        return None if self.admin_key is None else self.admin_key.get_secret_value().strip().encode()


load_settings = ServerSettings.resolve


def _explain(error: ValidationError) -> str:
    """Return one line with the name of each faulty setting and what is wrong with it, without the value."""
    lines = []
    for item in error.errors(include_url=False, include_input=False, include_context=False):
        name = ".".join(str(part) for part in item["loc"]) or "settings"
        if item["type"] == "extra_forbidden":
            lines.append(f"{name}: there is no such setting{did_you_mean(name, ServerSettings.model_fields)}")
        else:
            lines.append(f"{name}: {item['msg'].removeprefix('Value error, ')}")
    return "invalid server settings: " + "; ".join(lines)
