"""The store of responses: within its bounds, and each key's own."""

from nxd_server.http.response_store import ResponseStore


def put(store, owner, id, size=10):
    store.put(owner, {"id": id, "output": [{"id": f"out-{id}", "text": "x" * size}]}, [{"id": f"in-{id}"}])


def test_who_holds_most_loses_the_oldest():
    store = ResponseStore(100, 2000)
    put(store, b"b", "b0")
    for number in range(50):
        put(store, b"a", f"a{number}")
    assert store.get(b"a", "a0") is None and store.get(b"a", "a49") and store.get(b"b", "b0")
    assert store.item(b"a", "out-a49")["text"] == "x" * 10 and store.item(b"a", "out-a0") is None
    assert store.item(b"b", "in-a49") is None and store.get(b"b", "a49") is None
    put(store, b"a", "large", 3000)
    assert store.get(b"a", "large") is None and store.get(b"a", "a49"), "it would push out everything"
    assert store.remove(b"a", "a49") and not store.remove(b"a", "a49") and store.item(b"a", "in-a49") is None
