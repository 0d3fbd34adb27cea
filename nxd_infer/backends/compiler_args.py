"""``compiler_args``: separates options of the backend from words written for the Neuron compiler."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from nxd_infer.errors import TraceConfigError
from nxd_infer.util.suggest import did_you_mean

if TYPE_CHECKING:
    from nxd_infer.backends.base import Backend

WORDS = "arguments"
"""The option that holds the words for neuronx-cc, of a backend that takes them."""
_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")
"""Blanks inside quotes belong to the word: ``--tensorizer-options='--one --two'``."""
_NEURON = re.compile(r"--[a-z][a-z0-9]*(-[a-z0-9]+)*(=.+)?|-[A-Za-z][0-9]*|-lnc(=.+)?", re.DOTALL)
"""``--model-type=transformer``, ``--auto-cast``, ``-O1``. Its names never contain a dot or an underscore."""
_VALUED = re.compile(r"--(?!enable-(saturate-infinity|mixed-precision-accumulation|fast-loading))[^=]+|-[A-Za-z]|-lnc")
"""Its words that may be followed by a value as the next word: it has more than are documented."""
_LEVELS, _CORES = ("1", "2", "3"), ("1", "2")
VALUES = {
    "--model-type": ("generic", "transformer", "unet-inference", "cnn-training"),
    "--auto-cast": ("none", "matmult", "all"),
    "--auto-cast-type": ("bf16", "fp16", "tf32", "fp8_e4m3"),
    "--native-int64": ("default", "enabled", "disabled"),
    "--target": ("inf2", "trn1", "trn1n", "trn2", "trn3"),
    **dict.fromkeys(("--optlevel", "-O"), _LEVELS),
    **dict.fromkeys(("--logical-nc-config", "--lnc", "-lnc"), _CORES),
}
"""The values of its options that have a closed set of them. Not ``--verbose``, which also takes numbers, nor
``--distribution-strategy``, whose values differ from release to release.

Source: Neuron Compiler CLI Reference Guide; ``cnn-training``, ``trn3`` and ``--lnc`` are in use and not in it.
"""
DOCUMENTED = (
    *VALUES,
    "--distribution-strategy",
    "--enable-fast-context-switch",
    "--enable-fast-loading-neuron-binaries",
    "--enable-mixed-precision-accumulation",
    "--enable-saturate-infinity",
    "--framework",
    "--logfile",
    "--output",
    "--verbose",
)
"""The options in its reference guide. Others are in use, so an unknown one is told only if it looks like these."""
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def arguments_of(compiler_args: Any, backend: Backend, target: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """What ``backend.options`` is given, and the words that mean nothing to it. Raises TraceConfigError."""
    options, words = split_arguments(compiler_args, backend.has_option)
    require_known_values(words)
    if target is not None:
        if not backend.target_option:
            raise TraceConfigError(
                f"the {backend.name} backend has no choice of machines, got target={target!r}: leave it out"
            )
        if options.setdefault(backend.target_option, target) != target:
            raise TraceConfigError(
                f"target={target!r} and compiler_args, {backend.target_option}={options[backend.target_option]!r}, "
                "say two things: leave one out"
            )
    if not backend.neuron_arguments:
        return options, words
    return {**options, WORDS: [*options.get(WORDS, ()), *words]}, []


def split_arguments(compiler_args: Any, has_option: Callable[[str], bool]) -> tuple[dict[str, Any], list[str]]:
    """Return the backend's options by name, and the words for the Neuron compiler.

    A dictionary holds only options of the backend. In text and in lists, ``key=value`` is an option, and so is
    ``--key=value`` if the backend ``has_option(key)`` (``--nxd-packed=false`` is ``nxd_packed``). Another word in
    the form of a neuronx-cc argument belongs to that compiler, with its value (``-O 1``). Raises TraceConfigError for
    any other word.
    """
    if compiler_args is None or isinstance(compiler_args, Mapping):
        return {str(key): value for key, value in (compiler_args or {}).items()}, []
    options: dict[str, Any] = {}
    neuron: list[str] = []
    takes_value = False
    for word in _words(compiler_args):
        key, equals, value = word.removeprefix("--").partition("=")
        if value and has_option(key.replace("-", "_")):
            options[key.replace("-", "_")] = _value(value)
        elif _NEURON.fullmatch(word):
            neuron.append(word)
            takes_value = _VALUED.fullmatch(word) is not None
            continue
        elif takes_value and not equals and not word.startswith("-"):
            neuron.append(word)
        elif key and value and not key.startswith("-"):
            options[key] = _value(value)  # the backend rejects it
        else:
            raise TraceConfigError(
                f"compiler_args: {word!r} is neither key=value, an option of the backend such as nxd_packed=False, nor "
                "an argument of neuronx-cc such as --model-type=transformer or -O1, nor the value of the one before "
                "it: correct it or leave it out"
            )
        takes_value = False
    return options, neuron


def require_known_values(words: list[str]) -> None:
    """Raise TraceConfigError for a value that neuronx-cc does not have. Options that VALUES lacks may have any.

    Warns of an option that looks like a misspelled one: a backend without that compiler would pass over it in silence.
    """
    for word, following in pairwise([*words, ""]):
        joined = re.fullmatch(r"-O=?(.+)", word)
        name, equals, value = ("-O", "", joined[1]) if joined else word.partition("=")
        value = value or ("" if equals or following.startswith("-") else following)
        if name.startswith("--") and name not in DOCUMENTED and (hint := did_you_mean(name, DOCUMENTED)):
            warnings.warn(f"compiler_args: {name} is not in the reference of neuronx-cc{hint}", stacklevel=2)
        known = VALUES.get(name, ())
        if value and known and value not in known:
            raise TraceConfigError(
                f"compiler_args: {name} of neuronx-cc takes {', '.join(known)}; got {value!r}"
                + did_you_mean(value, known)
            )


def _words(compiler_args: Any) -> list[str]:
    if isinstance(compiler_args, str):
        if rest := _WORD.sub("", compiler_args).strip():
            raise TraceConfigError(f"compiler_args: the quotation mark {rest[0]} is not closed in {compiler_args!r}")
        return _WORD.findall(compiler_args)
    if isinstance(compiler_args, Iterable):
        return [str(word) for word in compiler_args]
    raise TraceConfigError(
        f"compiler_args must be a dictionary, a list of words or a text of them, got {compiler_args!r}"
    )


def _value(text: str) -> Any:
    try:
        return json.loads(_CONSTANTS.get(text, text))
    except ValueError:
        return text
