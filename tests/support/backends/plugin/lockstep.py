"""A backend of another package: all ranks are threads of one process, on a device whose memory only it can read.

It takes the functional form, compiles (to a file of its own), and registers by an entry point. Nothing in nxd_infer
knows of it.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nxd_infer.artifact.rank_weights import load_initial_states, load_weights
from nxd_infer.backends.base import Availability, Backend
from nxd_infer.comm import register_collectives, unregister_collectives
from nxd_infer.context import make_context, use_context
from nxd_infer.errors import ArtifactVersionError, InputMismatchError, ModelClosedError, TraceConfigError
from nxd_infer.graph.ir import Program
from nxd_infer.graph.stored import Lowered, read_graph, read_ir

CODE = "lockstep.bin"
REVISION = 1
_here = threading.local()


class Held:
    """A tensor in the device's memory: only the device's threads can read it."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor.clone()

    def read(self) -> torch.Tensor:
        if not getattr(_here, "device", False):
            raise RuntimeError("the device's memory was read from outside of it")
        return self._tensor


class Place:
    def __init__(self, manifest, weight_file):
        self.weights = {name: Held(tensor) for name, tensor in load_weights(weight_file, manifest.weights).items()}
        zeros = {spec.name: torch.zeros(spec.shape, dtype=spec.torch_dtype) for spec in manifest.states}
        self._first = {**zeros, **load_initial_states(weight_file, manifest.states)}
        self.states: dict[str, Held] = {}
        self.reset_states()

    def reset_states(self):
        self.states.update((name, Held(tensor)) for name, tensor in self._first.items())

    def replace_weights(self, names, read):
        self.weights.update((name, Held(read(name))) for name in names)
        return {}  # the graphs look here

    def replace_entry(self, name, slot, entry):
        self.weights[name]._tensor[slot] = entry

    def close(self):
        self.weights.clear()
        self.states.clear()


class Lockstep:
    """The collectives of the device: every rank's thread contributes its tensor, and takes what it needs from all."""

    def __init__(self, degree):
        self._barrier = threading.Barrier(degree)
        self._brought = [torch.empty(0)] * degree

    def of(self, rank):
        return _Transport(self, rank)

    def all_of(self, rank, x):
        self._brought[rank] = x
        self._barrier.wait(60)
        found = list(self._brought)
        self._barrier.wait(60)
        return found

    def abort(self):
        self._barrier.abort()


class _Transport:
    def __init__(self, device, rank):
        self.all_of, self.rank = lambda x: device.all_of(rank, x), rank

    def all_reduce(self, x, axis, op="sum"):
        stacked = torch.stack(self.all_of(x))
        return {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}[op](0)

    def all_gather(self, x, axis, dim):
        return torch.cat(self.all_of(x), dim)

    def reduce_scatter(self, x, axis, dim):
        parts = self.all_of(x)
        return torch.stack(parts).sum(0).chunk(len(parts), dim)[self.rank].clone()

    def broadcast(self, x, axis, src=0):
        return self.all_of(x)[src].clone()

    def close(self):
        pass


class Loaded:
    """One bucket on all ranks."""

    def __init__(self, ranks):
        self.graph = read_graph(ranks[0].directory, ranks[0].spec.digest)
        self._ranks = list(ranks)
        self._graphs = [read_graph(rank.directory, rank.spec.digest) for rank in ranks]
        self._programs = [Program(read_ir(rank.directory, CODE)) for rank in ranks]
        self._device = Lockstep(len(ranks))
        self._threads = ThreadPoolExecutor(len(ranks))
        self._keys = [f"lockstep-{id(self)}-{rank}" for rank in range(len(ranks))]
        for rank, key in enumerate(self._keys):
            register_collectives(key, self._device.of(rank))

    def __call__(self, inputs):
        return self.bind(inputs)()

    def bind(self, inputs):
        specs = self.graph.inputs
        if len(inputs) != len(specs):
            raise InputMismatchError(f"{len(inputs)} inputs, the graph takes {len(specs)}")
        for tensor, spec in zip(inputs, specs, strict=True):
            if tensor.dtype != spec.torch_dtype or list(tensor.shape) != spec.shape:
                raise InputMismatchError(f"input {spec.name!r} is not the traced one")

        def run():
            if not self._ranks:
                raise ModelClosedError(f"graph {self.graph.digest} was closed")
            given = [tensor.contiguous() for tensor in inputs]
            steps = [self._threads.submit(self._run, rank, given) for rank in range(len(self._ranks))]
            first, *_ = [step.result() for step in steps]
            return first

        return run

    def _run(self, rank, inputs):
        own, graph = self._ranks[rank], self._graphs[rank]
        degree = len(self._ranks)
        _here.device = True
        try:
            with torch.no_grad(), use_context(make_context(degree, rank, tp=degree, collectives=self._keys[rank])):
                states = [own.states[spec.name].read() for spec in graph.states]
                weights = [own.weights[spec.name].read() for spec in graph.weights]
                kept = [state.clone() for state in states]
                results = self._programs[rank](*states, *inputs, *weights)
                if not all(torch.equal(a, b) for a, b in zip(states, kept, strict=True)):
                    raise RuntimeError("a functional graph changed a state that it was given")
            count = len(graph.outputs)
            for spec, value in zip(graph.states, results[count:], strict=True):
                own.states[spec.name] = Held(value)
            return [value.clone() for value in results[:count]]
        except BaseException:
            self._device.abort()
            raise
        finally:
            _here.device = False

    def update_weights(self, weights, rank=0):
        raise RuntimeError("the place has told that nothing moves")

    def close(self):
        self._ranks = []
        self._threads.shutdown()
        for key in self._keys:
            unregister_collectives(key)
        self._keys = []


class LockstepBackend(Backend):
    name = "lockstep"
    one_process = True
    compiles = True

    def probe(self):
        return Availability(True)

    def has_option(self, name):
        return name == "speed"

    def options(self, given, quantize=None):
        if given.keys() - {"speed"}:
            raise TraceConfigError(f"lockstep has one option, speed, got {dict(given)!r}")
        return dict(given)

    def passes(self, graphs, options):
        return [Lowered(graph.file.model_copy(deep=True)) for graph in graphs]

    def environment(self, workdir: Path):
        return {"LOCKSTEP_WORK": str(workdir)}

    def compiler(self):
        return f"lockstep {REVISION}"

    def compile(self, graph_dir, options):
        import os

        assert os.environ["LOCKSTEP_WORK"]
        (graph_dir / CODE).write_bytes((graph_dir / "ir.json").read_bytes())

    def target(self, options):
        return {"revision": REVISION}

    def check_target(self, target, versions):
        if target != {"revision": REVISION}:
            raise ArtifactVersionError(f"is for another revision of the device than {REVISION}: {target}")

    def place(self, manifest, weight_file, runtime):
        return Place(manifest, weight_file)

    def load(self, ranks, runtime):
        return Loaded(ranks)


BACKEND = LockstepBackend()
