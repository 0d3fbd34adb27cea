"""Texts and what a model brings along to read them: chat templates, tokenizers' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from nxd_infer.errors import ModelConfigError
from nxd_server.engine.request import check_token_ids
from nxd_server.errors import RequestError
from nxd_server.text.chat_template import TemplateSources
from nxd_server.text.detokenize import Detokenizer, TextStream
from nxd_server.text.grammars import Grammars
from nxd_server.text.structured_outputs import StructuredOutputs
from nxd_server.text.template_process import BoundedTemplate, RenderingFailed
from nxd_server.text.tokenizer import Tokenizer
from nxd_server.text.tokenizer_files import TextFiles
from tests.fuzz.target import Target, object_with
from tests.support.text.text_tokenizers import KINDS, byte_level


def template(place: Path) -> Target:
    """A chat template and a conversation, where the server has it: in a process that is ended in time."""

    def read(data: bytes) -> None:
        example: Any = json.loads(data)
        source, messages, variables = (example[name] for name in ("template", "messages", "variables"))
        if not isinstance(source, str) or not isinstance(variables, dict):
            return
        try:
            source.encode()
        except UnicodeEncodeError:
            return  # it has been read from a file
        bounded = BoundedTemplate(TemplateSources(source), seconds=5.0, queue=0)
        try:
            text = bounded.render_here(messages, {"x": variables.get("x")}, 4096)
            assert len(text) <= 4096
        finally:
            bounded.stop()

    refusals = (ModelConfigError, RequestError, RenderingFailed)
    return Target("template", object_with(read, "template", "messages", "variables"), refusals, examples=12)


def grammar(place: Path) -> Target:
    """A form that an answer is bound to, and its first tokens."""
    grammars = Grammars(byte_level(), byte_level().vocab_size, [1])
    words = np.empty(-(-byte_level().vocab_size // 32), np.int32)

    def read(data: bytes) -> None:
        guide = grammars.compiled(StructuredOutputs.of(json.loads(data))).guide()
        for turn in range(12):
            if guide.complete:
                break
            guide.allow(words, [2] * (turn % 2))
            allowed = np.nonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0]
            assert len(allowed), "neither a token nor the end may follow"
            if (token := int(allowed[(7 * turn) % len(allowed)])) == 1:
                break
            guide.take(token)

    return Target("grammar", object_with(read), (RequestError,))


def tokenizer(place: Path) -> Target:
    """Texts and ids for each kind of tokenizer; a byte-level one gives every text back."""
    readers = [make() for make in KINDS.values()]

    def read(data: bytes) -> None:
        example: Any = json.loads(data)
        text, ids = example["text"], example["ids"]
        if not isinstance(text, str) or not isinstance(ids, list):
            return
        for reader in readers:
            reader.check_length(text, 100)
            reader.encode_with_types(text, text[:5], most=9)
            known = check_token_ids(ids, reader.vocab_size, "ids")
            reader.decode(known)
            stream, pieces = TextStream(Detokenizer(reader), ["stop"]), []
            for token in known:
                pieces.append(reader.token_text(token))
                stream.push(token)
        assert (
            byte_level().decode(byte_level().encode(text, add_special_tokens=False), skip_special_tokens=False) == text
        )

    return Target("tokenizer", object_with(read, "text", "ids"), (RequestError,))


FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer_check.json")


def tokenizer_files(place: Path) -> Target:
    """The files that an artifact has for texts, of which only the first must be there."""
    raw = json.loads(byte_level().raw.to_str())
    vocabulary = list(raw["model"]["vocab"])[:40]
    raw["model"] |= {"vocab": {name: number for number, name in enumerate(vocabulary)}, "merges": []}
    raw["added_tokens"] = raw["added_tokens"][:2]
    config = {"bos_token": "<s>", "eos_token": "</s>", "model_input_names": ["input_ids"]}
    check = {"tokenizers": "0", "texts": [{"text": "", "ids": [0]}]}
    made = json.dumps(dict(zip(FILES, (raw, config, check), strict=True)))

    def read(data: bytes) -> None:
        example: Any = json.loads(data)
        for name in FILES:
            (place / name).unlink(missing_ok=True)
            if example.get(name) is not None:
                (place / name).write_text(json.dumps(example[name]))
        found = Tokenizer.from_dir(place)
        assert found.vocab_size >= 0
        if (place / FILES[2]).is_file():
            found.check(TextFiles(place))
        TemplateSources.from_dir(place)
        found.decode(found.encode("a text"))

    return Target("tokenizer_files", object_with(read, FILES[0]), (ModelConfigError, RequestError), [made.encode()])
