"""Text to token ids and back, using only the ``tokenizers`` library.

Reads the canonical files that :mod:`nxd_infer.hugging_face.tokenizer` makes of a model directory's, and checks those of
an artifact. The tokenizer's own post-processor decides which special tokens are added to a text.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face.tokenizer import CHECK, TOKENIZER
from nxd_server.errors import PromptTooLongError, RequestError, TextTooLongError, TokenizerMismatchError
from nxd_server.text.tokenizer_files import TextFiles

if TYPE_CHECKING:
    from nxd_server.text.tokenizer_files import Source

LONG_TEXT = 4096
"""Texts of at least this many characters are encoded by the library's fast call."""
MOST_IDS = 2**20
"""Largest id that is accepted for a vocabulary of any size."""
SHORT_ENOUGH = 2**20
"""Texts up to this many characters are always encoded: an unknown word of any length may be a single token."""


class LibraryPanic(Exception):
    """``tokenizers`` or ``llguidance`` panicked; the message is its own.

    Their Rust code does on some damaged files, texts and ids. The class of a panic cannot be imported and is not an
    Exception, so it would end the thread that it reaches, with everyone whom that serves.
    """


@contextlib.contextmanager
def no_panics() -> Iterator[None]:
    """Raise LibraryPanic if the library panics."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise LibraryPanic(str(error)) from None


def check_text(text: Any, field: str = "prompt") -> str:
    """Return ``text``. Raises RequestError if it is not a string or not valid Unicode (a lone surrogate)."""
    if not isinstance(text, str):
        raise RequestError(field, f"must be a string, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            field,
            f"character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X}), which no valid Unicode "
            "text contains; send the whole pair or leave it out",
        ) from None
    return text


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """Return the inverse of GPT-2's alphabet: printable bytes map to themselves, others to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in set(printable)):
        table[chr(0x100 + offset)] = byte
    return table


@functools.lru_cache(1 << 16)
def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a byte-level token; a token outside that alphabet (an added token) stands for itself."""
    table = _byte_of_char()
    try:
        return bytes(table[char] for char in piece)
    except KeyError:
        return piece.encode()


def _require_dense(raw: Any) -> None:
    """Raise ValueError for ids far beyond the number of tokens: when asked to write such a vocabulary, the library
    loops over all ids in between, and aborts the process when memory runs out."""
    known = raw.get_vocab()
    highest = max(known.values(), default=0)
    if highest > MOST_IDS and highest > 16 * len(known):
        raise ValueError(f"its {len(known)} tokens have ids up to {highest}, and should be numbered without gaps")


class Tokenizer:
    """One model's tokenizer; safe to use from several threads."""

    def __init__(self, raw: Any, config: dict[str, Any] | None = None):
        """``raw`` is a ``tokenizers.Tokenizer``, ``config`` the content of ``tokenizer_config.json``."""
        _require_dense(raw)
        _require_special_tokens(raw)
        raw.no_truncation()  # the server reports an exceeded limit, it never truncates silently
        raw.no_padding()
        self.raw = raw
        self.config = config or {}
        added = raw.get_added_tokens_decoder()
        self.added = frozenset(spec.content for spec in added.values())
        """The tokens that a text is searched for before anything else."""
        self.special_ids = frozenset(token for token, spec in added.items() if spec.special)
        self.byte_level = raw.decoder is not None and _is_byte_level(json.loads(raw.decoder.__getstate__()))
        self._whole: dict[int, str | None] = {}
        self.bos_token_id = self._config_id("bos_token")
        self.eos_token_id = self._config_id("eos_token")
        raw.encode_special_tokens = self.config.get("split_special_tokens") is True
        self._types = "token_type_ids" in self.config.get("model_input_names", ["token_type_ids"])

    @classmethod
    def from_dir(cls, source: Source) -> Tokenizer:
        """Read the canonical tokenizer in a directory or an artifact. Raises ModelConfigError if there is none, and
        TokenizerMismatchError for an artifact's that gives other ids here than where it was traced."""
        from tokenizers import Tokenizer as RawTokenizer

        files = TextFiles(source)
        path = files.find(TOKENIZER)
        if path is None:
            raise ModelConfigError(f"{files.directory} has no {TOKENIZER}")
        try:
            with no_panics():
                tokenizer = cls(RawTokenizer.from_file(str(path)), read_config(files))
        except Exception as error:  # the library raises a bare Exception for a file it cannot read
            raise ModelConfigError(f"{path} is not a tokenizer that can be read: {error}") from error
        if files.artifact is not None:
            tokenizer.check(files)
        return tokenizer

    def check(self, files: TextFiles) -> None:
        """Raise TokenizerMismatchError if texts have other ids than where the model was traced."""
        import tokenizers

        path = files.find(CHECK)
        if path is None:
            raise TokenizerMismatchError(f"{files.directory} has a {TOKENIZER} without {CHECK}: trace the model again")
        check = _read_json(path)
        try:
            entries = [(entry["text"], entry["ids"]) for entry in check["texts"]]
        except (KeyError, TypeError):
            raise TokenizerMismatchError(f"{path} has no texts with their ids: trace the model again") from None
        for text, ids in entries:
            found = self.encode(text, field=str(path))
            if found != ids:
                raise TokenizerMismatchError(
                    f"{path}: {text!r} had the tokens {ids} where the model was traced, by tokenizers "
                    f"{check.get('tokenizers')}, and has {found} by {tokenizers.__version__}: install that version, or "
                    "trace the model again"
                )

    # --- encode ---------------------------------------------------------------------------------------------

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        field: str = "prompt",
        most: int | None = None,
        last: int | None = None,
    ) -> list[int]:
        """Return the token ids of ``text``; with ``last`` at most so many of its end, special tokens included.

        Raises RequestError naming ``field`` if it is not valid text, PromptTooLongError if there are more than
        ``most``.
        """
        check_text(text, field)
        with _readable(field):
            encoding = self._encode_one(text, add_special_tokens and last is None)
        if last is not None:
            special = self.raw.num_special_tokens_to_add(False) if add_special_tokens else 0
            if last <= special:
                raise _no_room(last, special)
            encoding.truncate(last - special, direction="left")
            if add_special_tokens:
                encoding = self.raw.post_process(encoding)
        if most is not None and len(encoding) > most:  # before a list is built
            raise PromptTooLongError(len(encoding), most, field)
        return encoding.ids

    def encode_with_types(
        self,
        text: str,
        pair: str | None = None,
        *,
        field: str = "input",
        most: int | None = None,
        limit: int | None = None,
    ) -> tuple[list[int], list[int]]:
        """Return token ids and token type ids, for encoders; truncated to ``most``, including special tokens.

        In a pair the longer text is truncated first, as in transformers.

        Raises:
            RequestError: ``most`` leaves no room for text.
            PromptTooLongError: there are more than ``limit`` ids.
        """
        texts = [check_text(text, field)] if pair is None else [check_text(text, field), check_text(pair, field)]
        if most is None and sum(map(len, texts)) <= LONG_TEXT:
            with _readable(field):
                encoding = self.raw.encode(text, pair)
            types = None
        else:
            encoding, types = self._encode_parts(texts, field, most)
        if limit is not None and len(encoding) > limit:  # before a list is built
            raise PromptTooLongError(len(encoding), limit, field, completes=False)
        return encoding.ids, (types or encoding.type_ids) if self._types else [0] * len(encoding)

    def _encode_parts(self, texts: list[str], field: str, most: int | None) -> tuple[Any, list[int] | None]:
        """Encode a text or a pair, each part separately and truncated; return the types if the encoding lacks them."""
        special = self.raw.num_special_tokens_to_add(len(texts) == 2)
        if most is not None and most <= special:
            raise _no_room(most, special)
        with _readable(field):
            parts = [self._encode_one(text, add_special_tokens=False) for text in texts]
        if most is not None:
            for part, length in zip(parts, _shares([len(part) for part in parts], most - special), strict=True):
                part.truncate(length, direction=self.config.get("truncation_side", "right"))
        types = None
        if self.raw.post_processor is None:  # otherwise it sets the types of a pair
            types = [place for place, part in enumerate(parts) for _ in range(len(part))]
        return self.raw.post_process(*parts), types

    def _encode_one(self, text: str, add_special_tokens: bool) -> Any:
        if len(text) <= LONG_TEXT:
            return self.raw.encode(text, add_special_tokens=add_special_tokens)
        # Without offsets: an eighth of the time, and the GIL is released meanwhile.
        return self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def check_length(self, text: str, max_len: int, field: str = "prompt") -> None:
        """Raise TextTooLongError if ``text`` cannot fit in ``max_len`` tokens: far cheaper than encoding it."""
        most = self.most_characters(max_len)
        if len(text) > most:
            raise TextTooLongError(
                field,
                f"the text has {len(text)} characters, which are more than fit: this model's maximum context length is "
                f"{max_len} tokens; at most {most} characters are read",
            )

    def most_characters(self, max_len: int) -> int:
        """Return the length of the longest text that is read for a model with ``max_len`` tokens."""
        return max(SHORT_ENOUGH, max_len * self._longest_token)

    @functools.cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.raw.get_vocab(with_added_tokens=True)), default=1)

    # --- decode --------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; invalid UTF-8 becomes U+FFFD. Unknown ids are skipped."""
        with no_panics():
            return self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a single token (logprobs show them); empty for an unknown id."""
        piece = self.raw.id_to_token(token)
        if piece is None:
            return b""
        if token in self.special_ids:
            return piece.encode()
        if self.byte_level:
            return byte_level_bytes(piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # a sentencepiece byte token
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    def token_text(self, token: int) -> str:
        """Return :meth:`token_bytes` as text, with invalid bytes as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def whole_text(self, token: int) -> str | None:
        """Return the text of a single byte-level token if its bytes are complete characters; else None."""
        if token not in self._whole:
            piece = self.raw.id_to_token(token)
            try:
                self._whole[token] = "" if piece is None else byte_level_bytes(piece).decode()
            except UnicodeDecodeError:
                self._whole[token] = None
        return self._whole[token]

    # --- vocabulary -------------------------------------------------------------------------------------

    @functools.cached_property
    def vocab_size(self) -> int:
        """The largest token id plus one, including added tokens."""
        return max(self.raw.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def showing(self, tags: Collection[str]) -> Tokenizer:
        """Return a tokenizer that decodes ``tags`` to text, which may be special tokens; this one if none is."""
        if not {self.id_to_token(token) for token in self.special_ids}.intersection(tags):
            return self
        changed = json.loads(self.raw.to_str())
        for token in changed["added_tokens"]:
            token["special"] = token["special"] and token["content"] not in tags
        return Tokenizer(type(self.raw).from_str(json.dumps(changed)), self.config)

    def token_to_id(self, token: str) -> int | None:
        return self.raw.token_to_id(token)

    def id_to_token(self, token: int) -> str | None:
        return self.raw.id_to_token(token)

    def _config_id(self, name: str) -> int | None:
        text = self.config.get(name)
        return self.raw.token_to_id(text) if isinstance(text, str) else None


def _require_special_tokens(raw: Any) -> None:
    """Raise ValueError for a post-processor that adds undefined special tokens, on which the library panics."""
    try:
        with no_panics():
            raw.encode("")
            raw.encode("", "")
    except LibraryPanic as error:
        raise ValueError(f"its post_processor cannot be applied: {error}") from None
    except Exception:
        return  # it has no tokens for this text, which requests report


def _no_room(asked: int, special: int) -> RequestError:
    words = f"{asked} has no room beside {special} special tokens; use at least {special + 1}"
    return RequestError("truncate_prompt_tokens", words)


@contextlib.contextmanager
def _readable(field: str) -> Iterator[None]:
    """Raise RequestError if the tokenizer has no tokens for a text and its unknown token is not in the vocabulary,
    where the library raises a bare Exception, or if the library panics."""
    try:
        with no_panics():
            yield
    except Exception as error:
        if type(error) not in (Exception, LibraryPanic):
            raise
        raise RequestError(field, f"the model's tokenizer cannot read it: {error}") from None


def _shares(lengths: list[int], room: int) -> list[int]:
    """Return how many tokens of one or two texts fit in ``room`` if the longer one is truncated first."""
    if sum(lengths) <= room or len(lengths) == 1:
        return [min(length, room) for length in lengths]
    first, second = lengths
    shorter = min(first, second, room // 2)
    return [shorter, room - shorter] if first <= second else [room - shorter, shorter]


def read_config(files: TextFiles) -> dict[str, Any]:
    """Return ``tokenizer_config.json``; {} without it."""
    path = files.find("tokenizer_config.json")
    return {} if path is None else _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelConfigError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return {key: value for key, value in content.items() if value is not None}


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"
