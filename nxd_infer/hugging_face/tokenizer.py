"""A directory's tokenizer and chat templates as transformers reads them, in the form that everything else here reads.

What the files of a directory mean is defined by transformers' AutoTokenizer, which reads them when a model is traced
and when a recipe starts. What it made of them is kept as ``tokenizer.json``, with the few settings beside it that
matter, so that a server needs ``tokenizers`` alone; texts with their ids (``tokenizer_check.json``) tell it whether its
version of that library makes the same of the file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nxd_infer.errors import MissingPackageError, ModelConfigError

TOKENIZER, CONFIG, CHECK = "tokenizer.json", "tokenizer_config.json", "tokenizer_check.json"
TEMPLATE, FURTHER_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
VOCABULARIES = (
    *("tokenizer.json", "tekken.json", "vocab*", "merges.txt", "dict.txt"),
    *("*.model", "*.spm", "*.tiktoken", "*.codes", "*.bpe"),
)
"""Files, of which a tokenizer's directory has at least one."""
BESIDE = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.*", f"{FURTHER_TEMPLATES}/*.jinja"),
)
TEXTS = (
    "",
    " ",
    "Hello, World! Don't stop.",
    "hello world",
    "  two  spaces,\ta tab\nand\r\n\n lines  ",
    "naïve café, Ünïcödé, Ωμέγα ΣΊΣΥΦΟΣ, İstanbul",
    "e\u0301 and \u00e9, \ufb01ne, \uff21\uff22, \u2460, \u1e9b\u0323",
    "你好，世界。こんにちは 안녕하세요",
    "Привет, мир! שלום مرحبا नमस्ते ภาษาไทย",
    "😀 👩‍👩‍👧 🇨🇭 \U0001f9d1\U0001f3fd",
    "a\u00a0b\u2003c\u200bd\u200de\ufefff\u3000g\u2028h",
    "\x00\x01\x1f\x7f\u0085 \ufffd",
    "1234567890 3.14159 1,000,000 0x1F 2026-11-30",
    "def f(x):\n    return x ** 2  # squared\n\n\tif x != 1: pass",
    '{"name": "f", "arguments": {"a": [1, 2.5, null]}}',
    "https://example.org/a_b?c=d&e=%20#f <b>bold</b> &amp; $x^2$",
    "<s> </s> <pad> <unk> [CLS] [SEP] [MASK] <|endoftext|>",
    "▁ ## Ġ Ċ <0x0A> @@ _under_score_",
    "Pneumonoultramicroscopicsilicovolcanoconiosis and antidisestablishmentarianism",
    "zzzzqqqqxxxx aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ......!!!!????",
)
"""Texts of a tokenizer's check, beside some with its own added tokens."""


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has a vocabulary of any kind."""
    return any(_files(directory, VOCABULARIES))


def source_files(directory: Path) -> list[Path]:
    """Return the files that a directory's tokenizer and templates may be read from, beside ``config.json``."""
    return sorted({*_files(directory, VOCABULARIES), *_files(directory, BESIDE)})


def _files(directory: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    return (path for pattern in patterns for path in directory.glob(pattern) if path.is_file())


def canonical_files(
    directory: str | os.PathLike[str], *, lowercase: bool = False, chat_template: str | None = None
) -> dict[str, bytes]:
    """Return the canonical files of a directory's tokenizer and templates by name; {} if it has no tokenizer.

    Args:
        lowercase: texts are lowercased first, as sentence-transformers does with ``do_lower_case``.
        chat_template: the path of a template, or the name of one of the directory's, that is used by default.

    Raises:
        ModelConfigError: transformers cannot read it, or it has no form for the library ``tokenizers`` with equal ids.
        MissingPackageError: transformers is not installed.
    """
    directory = Path(directory)
    if not has_tokenizer(directory):
        if chat_template is not None:
            raise ModelConfigError(f"chat_template = {chat_template!r}: {directory} has no tokenizer")
        return {}
    with _one_thread():
        tokenizer = _read(directory)
        raw = _backend(tokenizer, directory)
        _compare(tokenizer, raw, directory)
    if lowercase:
        from tokenizers import normalizers

        own = [] if raw.normalizer is None else [raw.normalizer]
        raw.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    texts = {TOKENIZER: raw.to_str(), CONFIG: json.dumps(_settings(tokenizer), indent=1) + "\n"}
    texts[CHECK] = json.dumps(_check(tokenizer, raw)) + "\n"
    texts |= _templates(tokenizer, directory, chat_template)
    return {name: text.encode() for name, text in texts.items()}


def write_canonical(directory: Path, target: Path, **options: Any) -> None:
    """Write the canonical files into ``target``, without the check, as a directory that transformers reads too.

    ``options``: of :func:`canonical_files`.
    """
    for name, content in canonical_files(directory, **options).items():
        if name != CHECK:
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(content)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Keep ``tokenizers`` from using threads: it warns in every process that is forked afterwards."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _read(directory: Path) -> Any:
    needed = ["transformers"]
    if not (directory / TOKENIZER).is_file() and any(directory.glob("*.model")):
        needed += ["sentencepiece"]  # without it, transformers takes the file for one of tiktoken
    for package in needed:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"{directory}: its tokenizer is read with {' and '.join(needed)}, and {package} is not installed: "
                "pip install 'nxd-infer[hf]'"
            )
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)  # nosec B615
    except BaseException as error:
        raise _refused(error, f"{directory}: transformers' AutoTokenizer cannot read its tokenizer") from error
    # Some classes make up a vocabulary if they do not find theirs.
    names = [*getattr(found, "vocab_files_names", {}).values(), TOKENIZER]
    names += filter(None, [getattr(found, "vocab_file", None)])
    if not any((directory / name).is_file() for name in names) or not len(found):
        raise ModelConfigError(
            f"{directory}: its {type(found).__name__} reads {', '.join(dict.fromkeys(names))}, and finds no vocabulary "
            f"here. {_FIX}"
        )
    return found


def _refused(error: BaseException, what: str) -> BaseException:
    """Return the error to raise for one of the libraries', whose Rust code may panic."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    text = " ".join(str(error).split())[:500].rstrip(".")
    return ModelConfigError(f"{what}: {type(error).__name__}: {text}. {_FIX}")


_FIX = (
    "Save it with transformers in a form that has a tokenizer.json "
    "(AutoTokenizer.from_pretrained(dir).save_pretrained(dir)), or take the directory of a model that has one"
)


def _backend(tokenizer: Any, directory: Path) -> Any:
    """Return a copy of the ``tokenizers.Tokenizer`` of one of transformers', converted if that is written in Python."""
    from tokenizers import Tokenizer

    kind = type(tokenizer).__name__
    try:
        if getattr(tokenizer, "is_fast", False):
            backend = tokenizer.backend_tokenizer
        else:
            from transformers.convert_slow_tokenizer import convert_slow_tokenizer

            backend = convert_slow_tokenizer(tokenizer)
        raw = Tokenizer.from_str(backend.to_str())
    except BaseException as error:
        raise _refused(error, f"{directory}: its {kind} has no form that the library tokenizers has") from error
    raw.no_truncation()
    raw.no_padding()
    raw.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
    return raw


def _texts(tokenizer: Any) -> Iterator[str]:
    """Yield the texts of a tokenizer's check: the fixed ones, and its first and last added tokens amid others."""
    yield from TEXTS
    added = [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items())]
    for token in dict.fromkeys([*added[:4], *added[-4:]]):
        yield f"a{token}b {token} c\n{token}"


def _compare(tokenizer: Any, raw: Any, directory: Path) -> None:
    """Raise ModelConfigError if ``raw`` gives other ids than the tokenizer, or other types for a pair."""
    texts = list(_texts(tokenizer))
    for given in [*((text,) for text in texts), (texts[2], texts[3]), (texts[4], texts[2])]:
        for special in (True, False):
            right, found = (_tried(call, given, special) for call in (tokenizer, raw.encode))
            if isinstance(right, Exception) or isinstance(found, Exception):  # there are none, or it takes no pairs
                same = isinstance(right, Exception) == isinstance(found, Exception) or len(given) > 1
            else:
                same = right["input_ids"] == found.ids
                same = same and right.get("token_type_ids", found.type_ids) == found.type_ids
            if not same:
                right = repr(right) if isinstance(right, Exception) else right["input_ids"]
                found = repr(found) if isinstance(found, Exception) else found.ids
                raise ModelConfigError(
                    f"{directory}: its {type(tokenizer).__name__} does in Python what the library tokenizers does not "
                    f"do: {' + '.join(given)!r} has the tokens {right!s:.200}, and there {found!s:.200}. Where that "
                    f'does not matter, set "tokenizer_class": "PreTrainedTokenizerFast" in its {CONFIG}. {_FIX}'
                )


def _tried(call: Any, texts: tuple[str, ...], special: bool) -> Any:
    try:
        return call(*texts, add_special_tokens=special)
    except Exception as error:
        return error


def _settings(tokenizer: Any) -> dict[str, Any]:
    """Return what a server, and transformers, must know of a tokenizer beside ``tokenizer.json``."""
    names = ("model_input_names", "model_max_length", "clean_up_tokenization_spaces", "split_special_tokens")
    special = tokenizer.special_tokens_map.items()
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: getattr(tokenizer, name, None) for name in (*names, "padding_side", "truncation_side")},
        **{name: str(one) if isinstance(one, str) else list(map(str, one)) for name, one in special},
    }


def _check(tokenizer: Any, raw: Any) -> dict[str, Any]:
    from tokenizers import __version__

    found = []
    for text in _texts(tokenizer):
        with contextlib.suppress(Exception):  # it has no tokens for this one
            found.append({"text": text, "ids": raw.encode(text).ids})
    return {"tokenizers": __version__, "texts": found}


def _templates(tokenizer: Any, directory: Path, asked: str | None) -> dict[str, str]:
    given = getattr(tokenizer, "chat_template", None)
    templates = dict(given) if isinstance(given, dict) else {} if given is None else {"default": given}
    if not templates and (file := directory / "chat_template.json").is_file():  # of transformers' processors
        try:
            templates["default"] = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelConfigError(f"{file} is not a chat template file: {error!r}") from None
    if asked is not None:
        templates["default"] = templates[asked] if asked in templates else read_template(asked, sorted(templates))
    if templates and "default" not in templates:
        raise ModelConfigError(
            f"{directory} names chat templates {sorted(templates)}, but none is the default: choose one with "
            "chat_template (--chat-template)"
        )
    names = {name: TEMPLATE if name == "default" else f"{FURTHER_TEMPLATES}/{name}.jinja" for name in templates}
    return {names[name]: text for name, text in templates.items()}


def read_template(path: str, names: list[str]) -> str:
    """Return the template in a file; ``names`` are those of the model's, which could have been meant."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        others = f"nor the name of one of the model's ({', '.join(names)})" if names else "and the model names none"
        raise ModelConfigError(f"chat_template = {path!r} is no template that can be read, {others}: {error}") from None
