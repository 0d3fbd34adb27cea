"""Environment variables that look like settings of the server but are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nxd_infer.util.suggest import did_you_mean
from nxd_server.errors import SettingsError

PREFIX = "NXD_INFER_"
OLD_PREFIX = "NXD_"
SINGLE_KEY = "API_KEY"
"""The name that someone with one key would try; ignoring it would leave the server open."""
SOURCE = "ARTIFACT"
"""What to serve, if the command line does not say."""
OTHERS = (
    *("CACHE", "CACHE_LIMIT", "PIN", "FORK", "MAX_RANKS", "CPU_LEVEL", "CPU_ASKS"),
    *("NEURON_ROOT", "NEURON_PROBE", "REAL_NEURON", "BENCH", SOURCE),
)
"""Variables with the same prefix that are read elsewhere: by the library, the benchmarks, the command line."""


def refuse_old_names(environment: Mapping[str, str], settings: Iterable[str]) -> None:
    """Raise SettingsError for variables that use the old prefix: if one holds a key, ignoring it would leave the
    server open. Values are never shown."""
    known = {OLD_PREFIX + name.upper() for name in (*settings, SINGLE_KEY, SOURCE)}
    found = sorted(name for name in environment if name.upper() in known)
    if found:
        new = ", ".join(f"{name} is {PREFIX}{name[len(OLD_PREFIX) :].upper()}" for name in found)
        raise SettingsError(f"variables of the server begin with {PREFIX} now: {new}; rename what sets them")


def unknown_variables(environment: Mapping[str, str], settings: Iterable[str]) -> list[str]:
    """Return a line for each variable with our prefix, or the old one, that is not a setting: a typo in
    NXD_INFER_API_KEYS would leave the server open. Values are never shown."""
    known = {name.upper() for name in (*settings, SINGLE_KEY)}
    lines = []
    for variable in sorted(environment):
        name = variable.upper()  # their case does not count
        ours = name.startswith(PREFIX)
        if not name.startswith(OLD_PREFIX) or (ours and name.removeprefix(PREFIX) in {*known, *OTHERS}):
            continue
        # Without the prefix, which would make any two names look alike.
        near = did_you_mean(name.removeprefix(PREFIX if ours else OLD_PREFIX), {*known, *OTHERS})
        hint = near.replace("did you mean ", f"did you mean {PREFIX}")
        lines.append(f"{variable} is not a setting of the server{hint}")
    return lines
