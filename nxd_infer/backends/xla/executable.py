"""One bucket's graph on all ranks: the host's parts here, the body on every replica, from its HLO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nxd_infer.backends.base import RankGraph, RankRuntime
from nxd_infer.backends.hlo import xla_api as xla
from nxd_infer.backends.hlo.executable import HloExecutable
from nxd_infer.backends.hlo.files import HLO_FILE, Value
from nxd_infer.backends.hlo.parts import TOKEN
from nxd_infer.backends.hlo.placement import as_parameter
from nxd_infer.backends.xla.replicas import Replicas
from nxd_infer.errors import ArtifactCorruptError
from nxd_infer.util.dtypes import dtype_of


class XlaExecutable(HloExecutable):
    """Loading runs the body once, on zeros and for nothing: XLA compiles it then."""

    def __init__(self, ranks: Sequence[RankGraph], runtime: RankRuntime, replicas: Replicas):
        super().__init__(ranks, runtime)
        self._replicas = replicas
        file = ranks[0].directory / HLO_FILE
        try:
            self._program: Any = xla.computation(self.graph.digest, file.read_bytes())
        except (OSError, RuntimeError) as error:
            raise ArtifactCorruptError(f"{file} cannot be read as HLO: {error}") from error
        self._new_states = [
            (given, new)
            for given, new in zip(self.parts.given, self.parts.new_states, strict=False)
            if new in self.parts.body.gives
        ]
        self._on_devices(self._zeros(), keep=False)

    def run_body(self, known: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._on_devices(known, keep=True)

    def _on_devices(self, known: Mapping[str, Tensor], keep: bool) -> Mapping[str, Tensor]:
        return self._replicas.run(lambda rank: self._on_replica(rank, known, keep))[0]

    def _on_replica(self, rank: int, known: Mapping[str, Tensor], keep: bool) -> Mapping[str, Tensor]:
        """Run the body on this thread's device. ``keep``: its states take their new values. Returns, of the first
        rank, what the host fetches."""
        own = self.ranks[rank]
        for cell in own.values():
            cell.move_to(self._replicas.devices[rank])
        arguments = [
            own[spec.name].value if spec.name in own else _argument(spec, known, self._replicas.devices[rank])
            for spec in self.table.parameters
        ]
        results = dict(zip(self.parts.body.gives, xla.record(self._program, arguments), strict=True))
        self._replicas.step()
        if keep:
            for given, new in self._new_states:
                own[given].value = results[new]
        return self.fetched(results) if rank == 0 else {}

    def _zeros(self) -> dict[str, Tensor]:
        """What the body takes besides what is kept."""
        given = [spec for spec in self.parts.specs if spec.name not in self.ranks[0]]
        return {spec.name: torch.zeros(spec.shape, dtype=dtype_of(spec.dtype)) for spec in given}

    def close(self) -> None:
        super().close()
        self._program = None


def _argument(spec: Value, known: Mapping[str, Tensor], device: str) -> Tensor:
    """A parameter that is not kept on the device."""
    return torch.zeros((), device=device) if spec.name == TOKEN else as_parameter(known[spec.name]).to(device)
