"""Text work in processes that can be killed: templates, long texts, large bodies."""

from __future__ import annotations

import dataclasses
import functools
import marshal
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from nxd_infer.errors import ModelConfigError
from nxd_server.errors import BodyError, RequestError
from nxd_server.text.chat_template import TemplateSources
from nxd_server.text.concurrency_limit import ConcurrencyLimit
from nxd_server.text.field_bounds import Bounds
from nxd_server.text.text_process import JobFailed, Setup, TextProcess, not_started
from nxd_server.text.text_process_main import TEMPLATE_MEMORY, TEXT_MEMORY
from nxd_server.text.tokenizer import Tokenizer

MIB = 2**20
T = TypeVar("T")


class _Bounded:
    """Work in a process that can be killed: one job at a time, and some that wait."""

    def __init__(self, setup: Callable[[], Setup], what: str, seconds: float, queue: int):
        """``setup`` is called for each process; ``what``: the jobs, as messages call them."""
        self._process = TextProcess(setup)
        self._seconds = seconds
        self._limit = ConcurrencyLimit(what, 1, queue)

    @property
    def inside(self) -> int:
        """The number of running and waiting jobs."""
        return self._limit.inside

    def stop(self) -> None:
        self._process.stop()

    def _ask(self, header: dict[str, Any], blob: bytes, job: object | None) -> bytes:
        return self._process.run(header, blob, seconds=self._seconds, job=job)[1]

    async def _run(self, work: Callable[[object], T]) -> T:
        """Return ``work(job)``, which asks the process for ``job``. Raises JobFailed."""
        job = object()
        try:
            return await self._limit.run(functools.partial(work, job), functools.partial(self._process.cancel, job))
        except JobFailed as error:
            if error.starting:  # no request is to blame for that, nor a template that was checked at the start
                raise not_started(str(error)) from None
            raise

    def _too_much(self, what: str, error: JobFailed) -> str:
        why = f"{self._seconds:g} s" if error.late else f"{TEXT_MEMORY // MIB} MiB of memory"
        return f"{what} takes more than {why}; send less at once"


class BoundedTemplate(_Bounded):
    """A model's chat template, rendered in a process that can be killed."""

    def __init__(self, sources: TemplateSources, seconds: float, queue: int):
        """``seconds`` for each rendering; ``queue`` conversations may wait."""
        header = {"kind": "template", "source": sources.default, "named": dict(sources.named)}
        setup = Setup({**header, "special_tokens": dict(sources.special_tokens)})
        super().__init__(lambda: setup, "conversations", seconds, queue)

    def check(self) -> None:
        """Raise ModelConfigError if the template cannot be used with any conversation; blocks."""
        try:
            self._render([{"role": "user", "content": ""}], {}, MIB, None)
        except JobFailed as error:
            raise ModelConfigError(f"the model's chat template cannot be used: {self._why(error)}") from None
        except RequestError as error:
            if not error.field:  # it does not compile; if it only rejects this conversation, it may accept others
                raise ModelConfigError(error.message) from None

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], most: int) -> str:
        """Return the prompt, of at most ``most`` characters. Raises RequestError if the template gives none."""
        try:
            return await self._run(functools.partial(self._render, messages, variables, most))
        except JobFailed as error:
            raise RequestError("messages", f"the model's chat template was ended: {self._why(error)}") from None

    def _render(self, messages: Any, variables: Mapping[str, Any], most: int, job: object | None) -> str:
        # marshal takes a tenth of JSON's time, during which this thread holds the GIL.
        data = marshal.dumps([messages, dict(variables)])
        return self._ask({"most": most}, data, job).decode()

    def _why(self, error: JobFailed) -> str:
        if error.late:
            return f"it did not come to an end within {self._seconds:g} s (render_timeout)"
        return f"it takes more than {TEMPLATE_MEMORY // MIB} MiB of memory, or ended its process otherwise"


class BoundedTokenizer(_Bounded):
    """Tokenizes long texts, and makes the complete response bodies of ``/tokenize`` and ``/detokenize``, in a process
    that can be killed."""

    def __init__(self, tokenizer: Tokenizer, seconds: float, queue: int):
        """``seconds`` for each text; ``queue`` texts may wait."""
        super().__init__(lambda: self._setup, "texts", seconds, queue)
        self._tokenizer = tokenizer

    @functools.cached_property
    def _setup(self) -> Setup:
        """Create the setup, once: a large vocabulary takes long, and each disconnected client costs a new process."""
        return Setup({"kind": "tokenizer", "config": self._tokenizer.config}, self._tokenizer.raw.to_str().encode())

    async def encode(self, text: str, *, special: bool, most: int, field: str) -> list[int]:
        """Return the token ids of ``text``. Raises RequestError naming ``field``, with the code of a too long prompt if
        there are more than ``most``."""
        header = {"do": "encode", "special": special, "most": most, "field": field}
        return array("q", await self._result(header, text.encode(), field)).tolist()

    async def encode_with_types(
        self, parts: Sequence[str], *, most: int | None, limit: int, field: str
    ) -> tuple[list[int], list[int]]:
        """Like :meth:`~nxd_server.text.tokenizer.Tokenizer.encode_with_types`, for a text or a pair."""
        header = {"do": "types", "most": most, "limit": limit, "field": field}
        both = array("q", await self._result(header, marshal.dumps(list(parts)), field)).tolist()
        return both[: len(both) // 2], both[len(both) // 2 :]

    async def tokenize(self, text: str, *, special: bool, strings: bool, max_model_len: int, field: str) -> bytes:
        """Return the response body of ``/tokenize``. Raises RequestError naming ``field``."""
        header = {"do": "tokenize", "special": special, "strings": strings, "max_model_len": max_model_len}
        return await self._result({**header, "field": field}, text.encode(), field)

    async def detokenize(self, ids: Sequence[int]) -> bytes:
        """Return the response body of ``/detokenize``; ``ids`` must be in the vocabulary."""
        return await self._result({"do": "detokenize"}, array("q", ids).tobytes(), "tokens")

    async def _result(self, header: dict[str, Any], blob: bytes, field: str) -> bytes:
        try:
            return await self._run(functools.partial(self._ask, header, blob))
        except JobFailed as error:
            raise RequestError(field, self._too_much("it", error)) from None


class BoundedJson(_Bounded):
    """Parses large bodies in a process that can be killed: in the server the parser would block everything else."""

    def __init__(self, seconds: float, queue: int):
        """``seconds`` for each body; ``queue`` bodies may wait."""
        super().__init__(lambda: Setup({"kind": "json"}), "large bodies", seconds, queue)

    async def parse(self, data: bytes, bounds: Bounds) -> dict[str, Any]:
        """Like :func:`~nxd_server.text.strict_json.parse_json`."""
        try:
            return await self._run(functools.partial(self._parse, data, bounds))
        except JobFailed as error:
            raise BodyError(self._too_much("the request body", error), "body_too_complex") from None

    def _parse(self, data: bytes, bounds: Bounds, job: object) -> dict[str, Any]:
        header = {"bounds": dataclasses.asdict(bounds)}
        # Trusted: written by our own process, from parsed values.
        return marshal.loads(self._ask(header, data, job))  # nosec B302
