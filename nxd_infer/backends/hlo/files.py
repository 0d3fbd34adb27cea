"""What is stored of a graph beside ``graph.json`` and ``ir.json``: its parts, and the table of the HLO's tensors.

``parts.json`` is written by the passes (:mod:`.parts`), ``hlo.json`` and ``body.hlo`` by lowering (:mod:`.lower`).
Names of values are those of :class:`nxd_infer.graph.split.Split`: ``given_N`` is the N-th of states, inputs and weights
of ``graph.json`` together; ``made_N`` is made by one part for another, ``result_N`` by the last one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from nxd_infer.errors import ArtifactCorruptError

PARTS_FILE, HLO_TABLE, HLO_FILE = "parts.json", "hlo.json", "body.hlo"
HEAD_FILE, BODY_FILE, TAIL_FILE = "head.json", "body.json", "tail.json"

_File = TypeVar("_File", bound=BaseModel)


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Value(_Model):
    """A tensor that goes into the HLO or comes out of it."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def device_shape(self) -> list[int]:
        """Its shape there: ``[1]`` for one without dimensions. torch-xla writes the values 0 and 1 of such a tensor
        into the program that takes it, so that a rank's program would depend on its data."""
        return self.shape or [1]


class PartFile(_Model):
    """What one part takes and gives, in order."""

    takes: list[str]
    gives: list[str]


class PartsFile(_Model):
    """``parts.json``: how a graph was cut."""

    given: list[str]
    """The name of every state, input and weight, in the order of ``graph.json``."""
    outputs: list[str]
    new_states: list[str]
    """The value that each state takes, in the order of ``graph.json``; its own name where nothing changes it. States
    that the body takes live on the device, the others on the host."""
    head: PartFile
    body: PartFile
    tail: PartFile
    ranks: list[str]
    """The axes whose ranks the body takes, each as an int64 tensor of shape [1], before what ``body.takes`` names."""
    specs: list[Value]
    """Of everything that the body takes: the ranks (``rank:<axis>``), then ``body.takes``."""
    results: list[Value]
    """Of what the body gives."""

    @property
    def fetched(self) -> list[str]:
        """What the host needs of the body's results: the others are new states, and stay on the device."""
        wanted = {*self.tail.takes, *self.outputs}
        return [name for name in self.body.gives if name in wanted]


class HloFile(_Model):
    """``hlo.json``: the parameters of ``body.hlo``, in the HLO's order; its results are those of ``parts.json``."""

    parameters: list[Value]
    """Names as in ``parts.json``, ``rank:<axis>``, or ``token`` (0.0, float32 of no dimension)."""


def read(directory: Path, name: str, kind: type[_File]) -> _File:
    """Read ``parts.json`` or ``hlo.json``. Raises ArtifactCorruptError when it is not there or not one."""
    try:
        return kind.model_validate_json((directory / name).read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactCorruptError(f"{directory / name} cannot be read: {error}") from error
