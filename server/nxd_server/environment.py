"""The environment's variables that begin like settings: which were meant for the server, and are not read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nxd_infer.util.suggest import did_you_mean
from nxd_server.errors import SettingsError

PREFIX = "NXD_INFER_"
OLD_PREFIX = "NXD_"
SINGLE_KEY = "API_KEY"
"""The name a person with one key would try; ignoring it would leave the server open."""
OTHERS = ("CACHE", "CACHE_LIMIT", "PIN", "MAX_RANKS", "CPU_LEVEL", "CPU_ASKS", "BENCH", "ARTIFACT")
"""Variables of the same prefix that others read: the library, the benchmarks, the container."""


def refuse_old_names(environment: Mapping[str, str], settings: Iterable[str]) -> None:
    """SettingsError for variables that were settings until the prefix changed: a key among them, passed over, would
    leave a server open. Values are never shown."""
    known = {OLD_PREFIX + name.upper() for name in (*settings, SINGLE_KEY)}
    found = sorted(name for name in environment if name.upper() in known)
    if found:
        new = ", ".join(f"{name} is {PREFIX}{name[len(OLD_PREFIX) :].upper()}" for name in found)
        raise SettingsError(f"variables of the server begin with {PREFIX} now: {new}; rename what sets them")


def unknown_variables(environment: Mapping[str, str], settings: Iterable[str]) -> list[str]:
    """A line for each variable with our prefix, or the old one, that is no setting: one letter less in
    NXD_INFER_API_KEYS leaves a server open. Values are never shown."""
    known = {name.upper() for name in (*settings, SINGLE_KEY)}
    lines = []
    for variable in sorted(environment):
        name = variable.upper()  # pydantic-settings takes any case of letters
        ours = name.startswith(PREFIX)
        if not name.startswith(OLD_PREFIX) or (ours and name.removeprefix(PREFIX) in {*known, *OTHERS}):
            continue
        # Without the prefix: it would make any two names look alike.
        near = did_you_mean(name.removeprefix(PREFIX if ours else OLD_PREFIX), {*known, *OTHERS})
        hint = near.replace("did you mean ", f"did you mean {PREFIX}")
        lines.append(f"{variable} is not a setting of the server{hint}")
    return lines
