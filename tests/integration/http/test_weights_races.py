"""``POST /v1/weights`` while somebody replaces what it names: nothing from outside of the root is ever served."""

from __future__ import annotations

from tests.support.engine.toy_model import naive_generate
from tests.support.flipping import flipping
from tests.support.http.http_servers import toy_server

ADMIN = {"authorization": "Bearer root"}


def test_a_folder_that_becomes_a_link_while_weights_are_swapped(tmp_path, tokenizer):
    """A hundred swaps, of which some succeed; what is answered afterwards is of the file inside, every time."""
    for folder, number in (("root/now", "1"), ("outside", "3")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model").write_text(number)

    def want(weights):
        return tokenizer.decode(naive_generate(tokenizer.encode("a"), max_tokens=6, ignore_eos=True, weights=weights))

    assert want(1) != want(3)
    settings = {"admin_key": "root", "weights_root": str(tmp_path / "root"), "access_log": False}
    with toy_server(**settings) as server, flipping(tmp_path / "root" / "now", tmp_path / "outside"):
        seen: dict[int, int] = {}
        while sum(seen.values()) < 100 or (seen.get(200, 0) < 5 and sum(seen.values()) < 3000):
            answer = server.post("/v1/weights", {"path": "now/model"}, headers=ADMIN)
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 403), answer.text
            if answer.status_code == 200:
                body = {"prompt": "a", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
                asked = server.post("/v1/completions", body, headers=ADMIN)
                assert asked.json()["choices"][0]["text"] == want(1)
    assert seen[200] >= 5, seen
