"""What a server does while its ranks start: done, failed, or too late."""

from __future__ import annotations

import threading

import pytest

from nxd_server.app.start_model import Aside
from nxd_server.errors import EngineUnavailableError

pytestmark = pytest.mark.check


def test_work_aside_is_waited_for_no_longer_than_its_limit():
    begin, done = threading.Event(), []

    def work() -> None:
        assert begin.wait(60)
        done.append(threading.current_thread().daemon)

    aside = Aside("reading the files", work)
    with pytest.raises(EngineUnavailableError, match="reading the files has taken more than 0 s"):
        aside.wait(0.01)
    begin.set()
    aside.wait(60)
    assert done == [True]  # or a process would wait for it


@pytest.mark.parametrize("error", [ValueError("damaged"), TimeoutError("the disk"), SystemExit(3)])
def test_work_aside_that_fails_raises_what_it_raised(error):
    def work() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        Aside("reading the files", work).wait(60)
