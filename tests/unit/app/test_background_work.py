"""What a server does while its ranks start: done, failed, or too late."""

from __future__ import annotations

import sys
import threading

import pytest

from nxd_infer.errors import ArtifactError
from nxd_server.app.background_work import BackgroundWork


def test_it_is_waited_for_no_longer_than_its_limit():
    begin, done = threading.Event(), []

    def work() -> None:
        assert begin.wait(60)
        done.append(threading.current_thread().daemon)

    reading = BackgroundWork("reading the files", work)
    with pytest.raises(ArtifactError, match="reading the files has taken more than 0 s: raise start_timeout"):
        reading.wait(0.01)
    begin.set()
    reading.wait(60)
    assert done == [True]  # or a process would wait for it


@pytest.mark.parametrize("error", [ValueError("damaged"), TimeoutError("the disk")])
def test_what_it_raises_is_raised(error):
    def work() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        BackgroundWork("reading the files", work).wait(60)


def test_what_would_end_a_thread_in_silence_is_an_error():
    with pytest.raises(RuntimeError, match="reading the files was ended by SystemExit: 3"):
        BackgroundWork("reading the files", lambda: sys.exit(3)).wait(60)
