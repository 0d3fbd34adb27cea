"""Every setting of the server in one model: command-line arguments, then ``NXD_*`` variables, then a file.

A later source never overrides an earlier one: what was typed wins over the environment, the environment over the
file, the file over the defaults below. Secrets are :class:`~pydantic.SecretStr`, so neither ``repr`` nor a log line
nor a validation error ever shows one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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

from nxd_infer.errors import NxdError
from nxd_infer.util.suggest import did_you_mean

ENV_PREFIX = "NXD_"
SINGLE_KEY = ENV_PREFIX + "API_KEY"
"""The name a person with one key would try; ignoring it would leave the server open."""


class SettingsError(NxdError, ValueError):
    """A setting that cannot be used; names the setting, never the value of a secret."""


class ServerSettings(BaseSettings):
    """The settings of ``nxd-infer serve``; build one with :meth:`resolve`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", hide_input_in_errors=True, frozen=True, allow_inf_nan=False
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one and logs it.")
    served_model_name: str | None = Field(
        None, min_length=1, description="Name under /v1/models; by default the one in the artifact."
    )

    api_keys: Annotated[list[SecretStr], NoDecode] = Field(
        default_factory=list, description="Keys that open the server; a list, or text with commas between them."
    )
    api_keys_file: Path | None = Field(None, description="File with one key a line, for secrets mounted by a host.")

    admin_key: SecretStr | None = Field(
        None, description="Key of the routes that change what is served; without it they are closed."
    )

    lora: Annotated[list[str], NoDecode] = Field(
        default_factory=list, description="LoRA adapters to begin with, as NAME=PATH; a list, or text with commas."
    )

    generation_defaults: bool = Field(
        True,
        description="Sample as the model's `generation_config.json` says where a request does not; the tokens that end "
        "a text are the file's either way.",
    )
    speculate: int = Field(
        0, ge=0, description="Tokens to guess ahead and verify in one step; as many as the artifact was traced for."
    )
    stall_ratio: float = Field(
        4.0,
        ge=1,
        description="Times as long as the fastest decode step that a stream may wait for its next token while prompts "
        "are read; more answers prompts sooner.",
    )

    weights_root: Path | None = Field(
        None, description="Directory of what requests may load; without it they may load nothing."
    )
    weights_drain_timeout: float = Field(
        60.0,
        gt=0,
        le=86400,
        description="Seconds running requests may take to finish before a swap of weights is given up.",
    )

    max_queued_requests: int = Field(
        128, ge=0, description="Requests that may wait for a free slot; one more is answered 429."
    )
    max_choices: int = Field(64, ge=1, description="Prompts times n of one request.")
    max_body_bytes: int | None = Field(
        None,
        ge=1024,
        description="Largest request body; a larger one is answered 413. By default what `max_choices` prompts of the "
        "model's length can be, from 2 to 16 MiB.",
    )
    request_timeout: float = Field(600.0, gt=0, description="Seconds a request may take in all; then 504.")
    render_timeout: float = Field(
        5.0, gt=0, le=3600, description="Seconds the model's chat template may take for one conversation."
    )
    keep_alive_interval: float = Field(
        10.0, gt=0, description="Seconds of silence on a stream before a comment line keeps it open."
    )
    connection_timeout: int = Field(
        75,
        ge=1,
        description="Seconds a connection is kept for the next request, or for a client that reads nothing or sends "
        "nothing more of a body.",
    )
    header_timeout: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Seconds until the head of a request must be here, from its first byte or, on a "
        "new connection, from the start.",
    )
    max_connections: int | None = Field(
        None, ge=16, description="Connections at once; by default as many as the limit of open files leaves room for."
    )
    max_connections_per_address: int | None = Field(
        None, ge=1, description="Connections at once from one address; by default as many as there are."
    )

    drain_timeout: float = Field(
        30.0, ge=0, description="Seconds running requests may take to finish after SIGTERM before they are cut."
    )
    call_timeout: float = Field(
        10.0,
        gt=0,
        description="Seconds one step may take before its rank counts as stuck; ten times what its graph's "
        "last steps have taken, where that is more, up to what a first start may take.",
    )
    start_timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds the ranks may take to load the artifact; by default 300, and one more for every 100 MB. "
        "Also to load again, or to take new weights; by default six times what the start took, and one more for every "
        "100 MB; at least 30.",
    )
    recovery_timeout: float | None = Field(
        None,
        ge=0,
        description="Seconds lost ranks may take to be ready again; then the server exits. By default twice what "
        "loading again may take: so ranks that hang meanwhile are started once more.",
    )
    max_restarts: int = Field(3, ge=0, description="Restarts within ten minutes before the server gives up.")
    threads_per_rank: int | None = Field(
        None, ge=1, description="CPU threads a rank; by default the cores divided, or a container's share of them."
    )

    allow_kernel: bool = Field(
        True, description="Serve an artifact that chooses its buckets with code of its own (a bucket kernel)."
    )
    expect_digest: str | None = Field(None, description="SHA-256 the artifact's manifest must have.")
    log_format: Literal["text", "json"] = Field("text", description="One line or one JSON object a log record.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged: `debug`, `info`, `warning` or `error`."
    )
    access_log: bool = Field(True, description="Log every request but those to the health routes.")

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
            SettingsError: an unreadable file, an unknown name, or a value out of range; says which and why.
        """
        given = {name: value for name, value in arguments.items() if value is not None and value != []}
        environment = {name.upper(): value for name, value in os.environ.items()}  # as pydantic-settings reads it
        if "api_keys" not in given and not environment.get(ENV_PREFIX + "API_KEYS") and environment.get(SINGLE_KEY):
            given["api_keys"] = [environment[SINGLE_KEY]]
        data = _read_file(Path(config_file)) if config_file is not None else {}

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
        """The keys as UTF-8 bytes, from the setting and the file; empty when the server is open.

        Raises:
            SettingsError: ``api_keys_file`` cannot be read, or holds no key; the admin key is among them.
        """
        keys = [key.get_secret_value().strip().encode() for key in self.api_keys]
        if self.api_keys_file is not None:
            lines = _read_text(self.api_keys_file, "api_keys_file").splitlines()
            found = [line.strip().encode() for line in lines if line.strip()]
            if not found:
                raise SettingsError(f"api_keys_file {str(self.api_keys_file)!r} holds no key: one a line is expected")
            keys += found
        if self.admin() in keys:
            raise SettingsError("admin_key is one of api_keys too: whoever may ask could change what is served")
        return tuple(dict.fromkeys(keys))

    def admin(self) -> bytes | None:
        """The admin key as UTF-8 bytes; None when the admin's routes are closed."""
        return None if self.admin_key is None else self.admin_key.get_secret_value().strip().encode()


load_settings = ServerSettings.resolve


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A line for each ``NXD_*`` variable that is no setting: one letter less in NXD_API_KEYS leaves a server open.

    Values are never shown.
    """
    known = {ENV_PREFIX + name.upper() for name in ServerSettings.model_fields} | {SINGLE_KEY}
    theirs = ("INFER_", "CPU_LEVEL", "CPU_ASKS", "ARTIFACT")  # the package's, the container's
    others = tuple(ENV_PREFIX + name for name in theirs)
    lines = []
    for name in sorted(environment):
        read_as = name.upper()  # pydantic-settings takes any case of letters
        if read_as.startswith(ENV_PREFIX) and not read_as.startswith(others) and read_as not in known:
            lines.append(f"{name} is not a setting of the server{did_you_mean(read_as, known)}")
    return lines


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingsError(f"{what} {str(path)!r} cannot be read: {why}") from None


def _read_file(path: Path) -> dict[str, Any]:
    text = _read_text(path, "the configuration file")
    try:
        if path.suffix == ".json":
            data = json.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            data = _load_yaml(text)
        else:
            raise SettingsError(f"the configuration file {str(path)!r} must end in .json, .yaml or .yml")
    except ValueError as error:
        if isinstance(error, SettingsError):
            raise
        # The parser's message may quote the line with a key in it; only the place is safe to show.
        place = getattr(error, "lineno", None)
        where = f" (line {place})" if place else ""
        raise SettingsError(f"the configuration file {str(path)!r} is not valid{where}") from None
    if not isinstance(data, dict):
        raise SettingsError(f"the configuration file {str(path)!r} must hold a mapping of setting names to values")
    return {str(name).replace("-", "_"): value for name, value in data.items()}


def _load_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise SettingsError("a YAML configuration file needs PyYAML (pip install pyyaml), or write JSON") from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError("not YAML") from error


def _explain(error: ValidationError) -> str:
    """One line a setting: its name and what is wrong, without the value."""
    lines = []
    for item in error.errors(include_url=False, include_input=False, include_context=False):
        name = ".".join(str(part) for part in item["loc"]) or "settings"
        if item["type"] == "extra_forbidden":
            lines.append(f"{name}: there is no such setting{did_you_mean(name, ServerSettings.model_fields)}")
        else:
            lines.append(f"{name}: {item['msg'].removeprefix('Value error, ')}")
    return "invalid server settings: " + "; ".join(lines)
