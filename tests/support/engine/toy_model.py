"""A small deterministic language model with true slot states, behind the interface that the engine drives.

Its cache holds, for every slot, the tokens that were written at each position, and nothing else: the logits of a row
are a function of exactly the tokens it finds at positions 0 to start + length - 1 of its slot. A wrong slot, a wrong
start, a stale entry, a mixed-up row or a lost piece of a prompt therefore changes every later token. ``naive_generate``
is the same language model without cache, batch or pieces.

With arrays it needs no torch, whose import would be most of the start of a toy server.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from pathlib import Path

import numpy as np

from nxd_infer.artifact.manifest import BucketSpec, InputSpec, Manifest, OutputSpec
from nxd_infer.errors import ModelClosedError, RankDiedError, WeightSchemaError
from nxd_infer.runtime.ranks import RankHealth

VOCAB = 97
EOS = (5, 6)
TOP = 20


def logits_of(prefix: np.ndarray, weights: int = 0) -> np.ndarray:
    """Logits of the token after ``prefix``: float32 [VOCAB], a function of every token of it and of the weights."""
    seed = zlib.crc32(prefix.astype(np.int64).tobytes(), weights)
    return np.random.default_rng(seed).standard_normal(VOCAB).astype("f4") * 2


def choose(logits: np.ndarray, temperature: float, top_k: int, seed: int, position: int) -> int:
    """Greedy, or the Gumbel-max trick with noise from (seed, position) alone."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits / temperature
    if top_k > 0:
        scaled = np.where(scaled >= np.sort(scaled)[-top_k], scaled, -np.inf)
    noise = np.random.default_rng([seed & 0xFFFFFFFFFFFFFFFF, position]).gumbel(size=VOCAB)
    return int((scaled + noise).argmax())


def masked(logits: np.ndarray, allowed: np.ndarray, bias_ids: np.ndarray, bias_values: np.ndarray) -> np.ndarray:
    result = logits.copy()
    np.add.at(result, bias_ids, bias_values)
    bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
    return np.where(bits, result, -np.inf)


def naive_generate(
    prompt, *, max_tokens, temperature=0.0, top_k=0, seed=0, max_len=10**6, ignore_eos=False, min_tokens=0, weights=0
):
    """The tokens the model gives, one at a time from the whole prefix; includes the stopping token."""
    tokens, output, stops = list(prompt), [], [] if ignore_eos else list(EOS)
    while len(output) < min(max_tokens, max(1, max_len - len(prompt))):
        logits = logits_of(np.array(tokens), weights)
        if len(output) < min_tokens:
            logits[stops] = -np.inf
        token = choose(logits, temperature, top_k, seed, len(tokens))
        tokens.append(token)
        output.append(token)
        if token in stops:
            break
    return output


class ToyWeights:
    """Weights of a ToyModel, cut: one number."""

    def __init__(self, seed):
        self.seed, self.closed = seed, False

    def close(self):
        self.closed = True


class ToyStep:
    """A step that a ToyModel was given ahead."""

    def __init__(self, model, name, inputs):
        self.model, self.name, self.inputs, self.seconds = model, name, inputs, 0.0

    def result(self, copy=True):
        assert self.model.begun.pop(0) is self, "results are taken in order"
        started = time.monotonic()
        outputs = self.model._run(self.name, self.inputs)
        self.seconds = time.monotonic() - started
        return outputs


class Toy:
    """In-process stand-in for a TensorParallelModel. ``fail`` (a callable) may raise in place of a step, and
    ``fail_update`` in place of new weights, which are a number or a file that holds one."""

    spare_cores, lead_cores, steps = 1, (), ()

    def __init__(self, delay):
        self.delay, self.dead, self.restarts, self.weights = delay, False, 0, 0
        self.fail = lambda name, inputs: None
        self.fail_update = lambda: None
        self.running = threading.Lock()

    @contextlib.contextmanager
    def taking(self, name, inputs):
        if self.dead:
            raise ModelClosedError("the toy is dead")
        assert self.running.acquire(blocking=False), "two steps at the same time"
        try:
            self.fail(name, inputs)
            time.sleep(self.delay)
            yield
        finally:
            self.running.release()

    def cut_weights(self, weights, tag=None):
        try:
            text = Path(weights).read_text() if isinstance(weights, os.PathLike) else weights
            return ToyWeights(int(text))
        except ValueError as error:
            raise WeightSchemaError(f"different: {error}") from error

    def update_weights(self, new):
        assert self.running.acquire(blocking=False), "new weights in the middle of a step"
        try:
            self.fail_update()
            self.weights = new.seed
        finally:
            self.running.release()

    def restart(self):
        self.restarts += 1
        self.dead = False

    def health(self):
        """Its one rank is no process."""
        state, steps = "ended" if self.dead else "running", len(self.steps)
        return [RankHealth(0, None, not self.dead, state, steps, collectives=0, busy_seconds=0.0, last_step_age=None)]

    @property
    def failure(self):
        return RankDiedError("the toy is dead", 0) if self.dead else None

    def close(self):
        self.dead = True


class ToyModel(Toy):
    """With ``prompt_rows``, a graph has so many rows more than slots, and rows of one token may share a slot. With
    ``ahead``, it takes arrays, and a second step before the first one's result is taken. With ``speculate``, graphs
    verify so many guesses."""

    ahead = False

    def __init__(
        self, slots=4, max_len=64, prompt_buckets=(8, 16), batch_sizes=(1, 2, 4), delay=0.0, omit=(), lora_slots=0,
        prompt_rows=0, ahead=None, sampling_defaults=None, speculate=0,
    ):  # fmt: skip
        super().__init__(delay)
        ahead = self.ahead if ahead is None else ahead
        self.arrays = ahead
        self.begun: list[ToyStep] = []
        self.most_begun = 0
        self.slots, self.max_len = slots, max_len
        shapes = {f"decode_b{b}": (b, 1) for b in batch_sizes} | {f"prefill_s{s}": (1, s) for s in prompt_buckets}
        shapes |= {f"verify_b{b}": (b, speculate + 1) for b in batch_sizes if speculate}
        if prompt_rows:
            shapes[f"mixed_b{slots + prompt_rows}"] = (slots + prompt_rows, 1)
        self.manifest = Manifest(
            backend="toy",
            tp_degree=1,
            graphs={},
            buckets=[_bucket(name, b, s, omit, ahead) for name, (b, s) in shapes.items()],
            metadata={
                "task": "generate", "model_type": "toy", "vocab_size": VOCAB, "max_len": max_len, "slots": slots,
                "prompt_buckets": list(prompt_buckets), "batch_sizes": list(batch_sizes), "dtype": "float32",
                "eos_token_ids": list(EOS), "bos_token_id": 0, "top_logprobs": TOP, "bias_slots": 4,
                "model_name": "toy", "lora": {"slots": lora_slots}, "rows_share_slots": prompt_rows > 0,
                "speculate": speculate,
                "sampling_defaults": sampling_defaults or {},
            },
        )  # fmt: skip
        self.buckets = self.manifest.buckets
        self.costs = {name: 1e-3 + 1e-5 * b * s for name, (b, s) in shapes.items()}
        """What an engine of a test takes the steps to cost: which ones it chooses hangs on no measured time."""
        self.steps: list[tuple[str, list[int]]] = []
        """Bucket and slots of every step that had a row of a request."""
        self._forget()

    def _forget(self):
        self.cache = np.full((self.slots + 1, self.max_len), -1, np.int64)
        self.last = np.full(self.slots + 1, -1, np.int64)
        self.begun.clear()

    def begin_bucket(self, name, inputs, checked=False):
        """The step runs when its result is taken, with the inputs of now."""
        inputs.check()
        step = ToyStep(self, name, {key: array.copy() for key, array in inputs.items()})
        self.begun.append(step)
        self.most_begun = max(self.most_begun, len(self.begun))
        assert len(self.begun) <= 2
        return step

    def run_bucket(self, name, inputs):
        assert not self.begun, "steps run in the order in which they were begun"
        if self.arrays:
            step = self.begin_bucket(name, inputs)
            return step.result()
        return self._run(name, inputs)

    def _run(self, name, inputs):
        with self.taking(name, inputs):
            return self._step(self.manifest.bucket(name), inputs)

    def _step(self, bucket, inputs):
        arrays = {}
        for spec in bucket.inputs:
            given = inputs[spec.name]
            array = given if self.arrays else given.numpy()
            assert isinstance(array, np.ndarray), spec.name
            assert list(array.shape) == spec.shape and array.dtype == np.dtype(spec.dtype), spec.name
            arrays[spec.name] = array
        batch, size = arrays["tokens"].shape
        slots = arrays["block_table"][:, 0].tolist()
        real = [slot for slot in slots if slot != self.slots]
        shared = size == 1 and self.manifest.metadata["rows_share_slots"]
        assert shared or len(set(real)) == len(real), f"two rows share a slot: {slots}"
        if real:
            self.steps.append((bucket.name, real))
        places = size if bucket.name.startswith("verify") else 1  # of a row that have an output
        token, logprob = np.zeros((batch, places), np.int64), np.zeros((batch, places), "f4")
        top_ids, top = np.zeros((batch, places, TOP), np.int64), np.zeros((batch, places, TOP), "f4")
        for row, slot in enumerate(slots):
            start, length = int(arrays["start"][row]), int(arrays["length"][row])
            assert 1 <= length <= size and start >= 0 and start + length <= self.max_len
            assert slot == self.slots or arrays["prompt_length"][row] > 0
            if arrays["tokens"][row, 0] == -1:
                assert self.arrays and size == 1
                arrays["tokens"][row, 0] = self.last[slot]
            assert (arrays["tokens"][row] >= 0).all()
            self.cache[slot, start : start + length] = arrays["tokens"][row, :length]
            self.cache[self.slots, : size - length] = arrays["tokens"][row, length:][: self.max_len]
        for row, slot in enumerate(slots):
            start, length = int(arrays["start"][row]), int(arrays["length"][row])
            for place, end in enumerate(range(start + 1, start + length + 1) if places > 1 else [start + length]):
                raw = self.logits(self.cache[slot, :end])
                chosen = self._sample(raw, arrays, row, end)
                logs = raw - np.log(np.exp(raw).sum())
                order = np.argsort(-logs)[:TOP]
                token[row, place], logprob[row, place] = chosen, logs[chosen]
                self.last[slot] = chosen
                top_ids[row, place], top[row, place] = order, logs[order]
        outputs = {"token": token, "logprob": logprob, "top_ids": top_ids, "top_logprobs": top}
        return outputs if self.arrays else _tensors(outputs)

    def logits(self, prefix):
        return logits_of(prefix, self.weights)

    def _sample(self, raw, arrays, row, position):
        logits = raw
        if "allowed" in arrays:
            logits = masked(logits, arrays["allowed"][row], arrays["bias_ids"][row], arrays["bias_values"][row])
        return choose(
            logits, float(arrays["temperature"][row]), int(arrays["top_k"][row]), int(arrays["seed"][row]), position
        )

    def cut_adapter(self, slot, folder):
        """Never returns, as if ``folder`` lay on a file system that does not answer any more."""
        Path(str(folder), "entered").touch()
        threading.Event().wait()

    def reset_states(self):
        self._forget()

    def restart(self):
        super().restart()
        self._forget()


def _tensors(arrays):
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _spec(kind, name, dtype, *shape, **more):
    strides = [int(np.prod(shape[place + 1 :])) for place in range(len(shape))]
    return kind(name=name, dtype=dtype, shape=list(shape), stride=strides, **more)


def _bucket(name, batch, size, omit, ahead):
    i64, i32, f32 = "int64", "int32", "float32"
    mask = (VOCAB + 31) // 32
    required = {
        "tokens": (i64, batch, size),
        "start": (i64, batch),
        "length": (i64, batch),
        "block_table": (i64, batch, 1),
    }
    optional = {
        "temperature": (0, f32, batch), "top_k": (0, i64, batch), "top_p": (1, f32, batch), "min_p": (0, f32, batch),
        "seed": (0, i64, batch), "allowed": (-1, i32, batch, mask), "bias_ids": (0, i64, batch, 4),
        "bias_values": (0, f32, batch, 4), "presence_penalty": (0, f32, batch), "frequency_penalty": (0, f32, batch),
        "repetition_penalty": (1, f32, batch), "prompt_length": (-1, i64, batch),
    }  # fmt: skip
    inputs = [_spec(InputSpec, key, *tensor) for key, tensor in required.items()]
    inputs[0].minimum = -1 if ahead else None
    inputs += [
        _spec(InputSpec, key, *tensor, default=default)
        for key, (default, *tensor) in optional.items()
        if key not in omit
    ]
    places = size if name.startswith("verify") else 1
    outputs = [
        _spec(OutputSpec, "token", i64, batch, places),
        _spec(OutputSpec, "logprob", f32, batch, places),
        _spec(OutputSpec, "top_ids", i64, batch, places, TOP),
        _spec(OutputSpec, "top_logprobs", f32, batch, places, TOP),
    ]
    return BucketSpec(name=name, inputs=inputs, outputs=outputs, graphs=["toy"])


class Listener:
    """Collects one request's events, and checks the rules that every stream of events keeps."""

    def __init__(self, n=1):
        self.tokens = [[] for _ in range(n)]
        self.text = ["" for _ in range(n)]
        self.events = [[] for _ in range(n)]
        self.ends = [None] * n

    def __call__(self, event):
        from nxd_server.engine.request import TokenEvent

        index = event.index
        assert self.ends[index] is None, "an event after the terminal one"
        self.events[index].append(event)
        if isinstance(event, TokenEvent):
            self.tokens[index].append(event.token)
            self.text[index] += event.text
        else:
            self.text[index] += getattr(event, "text", "")
            self.ends[index] = event

    @property
    def end(self):
        return self.ends[0]
