"""The real server over the deterministic toy model: ``python -m tests.support.http.http_toy [--toy '{"slots": 4}']``.

Only the artifact is missing: settings, sockets, routes, engine, signals and exit status are the ones users get. A
decoder's server imports no torch, as a real one does not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from nxd_infer.errors import RankDiedError
from nxd_server.app.models import Models
from nxd_server.app.run import serve_service
from nxd_server.app.service import Service
from nxd_server.http.ops import logs
from nxd_server.settings import ServerSettings
from nxd_server.text.chat_template import TemplateSources
from nxd_server.text.tokenizer import Tokenizer
from tests.support.engine.toy_model import EOS, VOCAB, ToyModel

TEMPLATE = (
    "{% for d in documents or [] %}{{ d['text'] }};{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
    "{% if shout %}LOUD;{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
    # What a template may do that nobody should have to wait for.
    "{% if spin %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if times %}{{ 'x' * times }}{% endif %}{% if flood %}{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}"
    "{% endif %}{% if index %}{{ '{}'.format() }}{% endif %}"
)


def toy_tokenizer() -> Tokenizer:
    """Bytes as tokens: ASCII letters, some punctuation, and the bytes of a few longer characters."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Raw

    specials = {0: "<begin>", 1: "<pad>", EOS[0]: "<end>", EOS[1]: "<end2>"}
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:;.,!?'" + "Ġ" + "Ċ"
    high = [pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(char)[0][0] for char in "éü中😀"]
    pieces = list(dict.fromkeys(letters + "".join(high)))
    vocab: dict[str, int] = {text: token for token, text in specials.items()}
    free = iter(token for token in range(VOCAB) if token not in specials)
    for piece in pieces:
        vocab[piece] = next(free)
    for token in free:
        vocab[f"~{token}~"] = token
    raw = Raw(models.BPE(vocab, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials.values()])
    return Tokenizer(raw, {"bos_token": "<begin>", "eos_token": "<end>"})


def said(file: Path) -> str:
    """What a file says, empty if there is none."""
    with contextlib.suppress(FileNotFoundError):
        while not (text := file.read_text().strip()):  # it is just being written
            time.sleep(0.001)
        return text
    return ""


class ToyService(Service):
    """A service whose ranks are a :class:`ToyModel`, or a :class:`ToyOneShot`, in this process."""

    def __init__(
        self,
        settings: ServerSettings,
        on_failure,
        kind: type,
        toy: dict,
        start_file: str | None,
        fail_file: str | None,
    ):
        self._kind, self._options = kind, toy
        self._toy = kind(**toy)
        super().__init__("toy", settings, on_failure)
        self._start_file, self._fail_file = start_file, fail_file
        self._failing = False

    def _maybe_fail(self, file: Path, inputs: dict) -> None:
        """Do what the file says: fail this step ("once", "value"), and all after it ("always"), hang in it ("hang") or
        only wait ("hold"). A step of padding, which finds out whether the ranks still answer, is not the first."""
        asked = "block_table" not in inputs or bool((inputs["block_table"] != self._toy.slots).any())
        held, what = False, said(file)
        while asked and what == "hold":
            held = True
            time.sleep(0.02)
            what = said(file)
        if held or not what or not (asked or what == "hang" or self._failing):
            return
        self._failing = what == "always"
        if what == "once":
            try:
                file.unlink()
            except FileNotFoundError:  # another copy was first
                return
        if what == "once, then hang":
            file.write_text("hang")
        if what == "value":
            raise ValueError("this step alone")
        while what == "hang" and file.exists():
            time.sleep(0.02)
        raise RankDiedError("rank 0 ended with signal 9", 0)

    def _open(self):
        self.stage = "loading the toy"
        while self._start_file and not Path(self._start_file).exists():
            time.sleep(0.02)
        self._manifest = self._toy.manifest
        self._artifact = self._toy

    def _read_text(self, artifact):
        self._tokenizer = toy_tokenizer()
        self._use_template(TemplateSources(TEMPLATE))

    def make_model(self):
        toy = self._kind(**self._options)
        toy.bounds = SimpleNamespace(load=30.0, start=30.0, load_seconds=60.0)
        toy.start = lambda: toy
        if self._fail_file:
            toy.fail = lambda name, inputs: self._maybe_fail(Path(self._fail_file), inputs)
        return toy


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--toy", default="{}")
    parser.add_argument("--one-shot", action="store_true", help="an encoder for embeddings in place of the decoder")
    parser.add_argument("--start-file", help="it is loaded once this file exists")
    parser.add_argument("--fail-file")
    parser.add_argument("--descriptors", type=int, help="this process's limit of open files")
    options = parser.parse_args()
    if options.descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options.descriptors, options.descriptors))
    settings = ServerSettings.resolve(None, **json.loads(options.settings))
    logs.configure(settings.log_format, settings.log_level)
    kind, toy = ToyModel, {"ahead": True, **json.loads(options.toy)}  # arrays, as real decoders take them
    if options.one_shot:
        from tests.support.engine.toy_oneshot import ToyOneShot

        kind, toy = ToyOneShot, json.loads(options.toy)
    return serve_service(
        settings,
        lambda on_failure: Models([ToyService(settings, on_failure, kind, toy, options.start_file, options.fail_file)]),
    )


if __name__ == "__main__":
    sys.exit(main())
