"""The models of one server: each a :class:`Service`, found by the names that requests give as ``model``."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.artifact.reader import artifact_digest, read_artifact
from nxd_infer.runtime.memory_plan import fit_slots, plan_memory
from nxd_infer.util.memory import available_memory
from nxd_server.app.prepare import prepare
from nxd_server.app.service import Service
from nxd_server.errors import EngineUnavailableError, RequestError, SettingsError, UnknownModelError
from nxd_server.settings import ServerSettings
from nxd_server.threads import at_once

OF_ONE = ("served_model_name", "expect_digest")
"""Settings of one model, which several cannot share."""
OF_GENERATORS = ("lora", "speculate", "draft", "chat_template")
"""Settings that only models that generate have; of several models, the others go without."""


class Models:
    """One or more services that are started, asked and ended together."""

    def __init__(self, services: Sequence[Service]):
        self.services = list(services)

    def start(self) -> None:
        for service in self.services:
            service.start()

    def begin_drain(self) -> None:
        """Reject new requests from now on."""
        for service in self.services:
            service.begin_drain()

    def drain(self, timeout: float) -> bool:
        """Reject new requests and wait for the others; False if ``timeout`` seconds were not enough."""
        self.begin_drain()
        return all(at_once([functools.partial(service.drain, timeout) for service in self.services]))

    def close(self) -> None:
        """End everything; running requests fail. The ranks have exited when this returns."""
        at_once([service.close for service in self.services])

    def readiness(self) -> tuple[bool, str, str]:
        """Return whether requests for every model would be served now, the state, and the reason if not."""
        states = [service.readiness() for service in self.services]
        ready, state, reason = min(states, key=lambda state: state[0])
        if not ready and len(states) > 1 and state != "draining":
            reason = f"{self.services[states.index((ready, state, reason))].model_name}: {reason}"
        return ready, state, reason

    def require_ready(self) -> None:
        """Raise EngineUnavailableError if no model takes requests now."""
        errors: list[EngineUnavailableError] = []
        for service in self.services:
            try:
                service.require_ready()
                return
            except EngineUnavailableError as error:
                errors.append(error)
        raise errors[0]

    def find(self, name: str) -> Service | None:
        """Return the service of the model, or of the adapter, ``name``."""
        services = self.services
        own = (service for service in services if name in service.model_names)
        return next(own, None) or next(
            (service for service in services if any(adapter.name == name for adapter in service.adapters())), None
        )

    def named(self, name: str | None) -> Service:
        """Return the service that answers a request for the model, or the adapter, ``name``; a single one answers those
        without a name, and while it does not know its names.

        Raises RequestError for no name, UnknownModelError for an unknown one.
        """
        if len(self.services) == 1 and (name is None or not self.services[0].loaded):
            return self.services[0]
        if name is not None and (service := self.find(name)) is not None:
            return service
        adapters = [adapter.name for service in self.services for adapter in service.adapters()]
        names = [*(name for service in self.services for name in service.model_names), *adapters]
        known = ", ".join(map(repr, names))
        if name is None:
            raise RequestError("model", f"this server has several models: name one of {known}")
        raise UnknownModelError(f"the model {name[:100]!r} does not exist; this server has {known}")


def plan(given: Sequence[str], settings: ServerSettings) -> list[functools.partial[Service]]:
    """Return for each model in ``given`` what makes its service (its first argument: the artifact), which was fetched
    or traced where needed.

    A model is given as ARTIFACT or NAME=ARTIFACT; the same artifact with several names is one model.

    Raises SettingsError for settings that do not go with several models, MemoryBudgetError for what does not fit into
    ``memory_fraction``, and as :func:`prepare` and the reader do.
    """
    if settings.draft is not None:
        settings = dataclasses.replace(settings, draft=str(prepare(settings.draft, settings)))
    artifacts: dict[Path, list[str]] = {}
    for word in given:
        name, source = _parts(word)
        artifact = prepare(source, settings)
        artifact_digest(artifact)
        if artifact in artifacts and (name is None or name in artifacts[artifact]):
            raise SettingsError(
                f"{artifact} is given twice: with another NAME= that would be another name of it; for copies of it "
                "set replicas (--replicas)"
            )
        artifacts.setdefault(artifact, []).extend([name] if name else [])
    if len(artifacts) == 1:
        (artifact,) = artifacts
        names = [*artifacts[artifact], *settings.served_model_name]
        own = dataclasses.replace(settings, served_model_name=names)
        slots = _slots([artifact], [artifact], settings)
        return [functools.partial(Service, artifact, own, slots=slots[artifact])]
    for setting in OF_ONE:
        if getattr(settings, setting):
            raise SettingsError(f"{setting} is of one model, and {len(artifacts)} are given: NAME=ARTIFACT names each")
    manifests = {artifact: _manifest(artifact) for artifact in artifacts}
    ranks = settings.replicas * sum(manifest.world_size for manifest in manifests.values())
    generating = [artifact for artifact in artifacts if manifests[artifact].metadata.get("task") == "generate"]
    if len(generating) != 1:
        for setting in OF_GENERATORS:
            if getattr(settings, setting):
                raise SettingsError(
                    f"{setting} is of one model that generates, and {len(generating)} of these do: serve that one alone"
                )
    slots = _slots(list(artifacts), generating, settings)
    taken: dict[str, Path] = {}
    services = []
    for artifact, names in artifacts.items():
        names = names or [manifests[artifact].metadata.get("model_name") or artifact.resolve().name]
        for name in names:
            if name in taken:
                raise SettingsError(f"{taken[name]} and {artifact} are both named {name!r}: give NAME={artifact}")
            taken[name] = artifact
        none = {} if artifact in generating else {"lora": [], "speculate": 0, "draft": None, "chat_template": None}
        own = dataclasses.replace(settings, served_model_name=names, **none)
        services.append(functools.partial(Service, artifact, own, ranks=ranks, slots=slots[artifact]))
    return services


def _manifest(artifact: Path) -> Manifest:
    return read_artifact(artifact, verify=False).manifest


def _slots(artifacts: Sequence[Path], generating: Sequence[Path], settings: ServerSettings) -> dict[Path, int | None]:
    """Return how many slots of its cache each artifact may use; None: all. Reads no manifest without a limit."""
    fraction = settings.memory_fraction
    if fraction is None:
        return dict.fromkeys(artifacts)
    swaps = settings.admin() is not None
    draft = None if settings.draft is None else _manifest(Path(settings.draft))
    drafts = dict.fromkeys(generating, draft)
    plans = [plan_memory(_manifest(one), swaps=swaps, draft=drafts.get(one)) for one in artifacts]
    fitting = fit_slots([plan for plan in plans for _ in range(settings.replicas)], available_memory(), fraction)
    return {artifact: slots or None for artifact, slots in zip(artifacts, fitting[:: settings.replicas], strict=True)}


def _parts(word: str) -> tuple[str | None, str]:
    """Return the name, if there is one, and the artifact of NAME=ARTIFACT. A path may hold ``=`` as well."""
    name, sign, source = word.partition("=")
    if not (sign and name and source) or os.sep in name or os.path.lexists(word):
        return None, word
    return name, source
