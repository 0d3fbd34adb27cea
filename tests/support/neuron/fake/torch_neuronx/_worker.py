"""The cores: a process with a replica of torch_xla for each rank. ``python _worker.py DESCRIPTOR RANKS``.

It ends with its connection. A replica that is stuck ends it as well, as torch_xla does then.
"""

from __future__ import annotations

import io
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xla_builder
import torch_xla.core.xla_model as xm
from torch_xla._internal import pjrt

_X: Any = torch_xla


class Replicas:
    def __init__(self, degree: int):
        if degree > 1:
            pjrt.initialize_multiprocess(0, 1)
        self.devices = list(xm.get_xla_supported_devices())[:degree]
        self._lock = threading.Lock()

    def run(self, program: Any, ranks: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        found: list[Any] = [None] * len(ranks)
        self._all = threading.Barrier(len(ranks))  # one that is refused breaks its own alone
        threads = [
            threading.Thread(target=self._run, args=(rank, program, given, found)) for rank, given in enumerate(ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found

    def _run(self, rank: int, program: Any, given: list[torch.Tensor], found: list[Any]) -> None:
        try:
            _X._XLAC._xla_set_default_device(self.devices[rank])
            with torch.no_grad():
                held = [tensor.to(self.devices[rank]) for tensor in given]
                results = _X._XLAC._xla_user_computation("xla::_op_neff", held, program)
            with self._lock:
                torch_xla.sync(wait=False)
            self._all.wait(60)
            xm.wait_device_ops()
            self._all.wait(60)
            found[rank] = [result.cpu() for result in results]
        except BaseException as error:
            self._all.abort()
            found[rank] = error


def main(descriptor: int, degree: int) -> None:
    connection, replicas, programs = Connection(descriptor), Replicas(degree), []
    while True:
        try:
            question = connection.recv_bytes()
        except EOFError:
            return
        try:
            if question.startswith(b"load"):
                programs.append(xla_builder.computation_from_module_proto("neff", question.removeprefix(b"load")))
                answer = str(len(programs) - 1).encode()
            else:
                job = torch.load(io.BytesIO(question.removeprefix(b"run ")), weights_only=True)
                out = io.BytesIO()
                torch.save(replicas.run(programs[job["program"]], job["ranks"]), out)
                answer = out.getvalue()
        except BaseException as error:
            connection.send_bytes(b"error" + f"{type(error).__name__}: {error}".encode())
        else:
            connection.send_bytes(b"answer" + answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    import os

    os._exit(0)  # torch_xla's threads would keep it
