"""The search for another process's list of buffers, around that process's end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from epee.ep.membership import registry
from epee.errors import ResourceError
from epee.memory.host import process_start_time
from epee.view.process.detector import is_leaving, is_torn_down


def _forbidden(path: str) -> list[str]:
    raise PermissionError(13, "Permission denied", path)


def test_a_dying_process_has_no_list_but_a_living_one_that_is_closed_to_us_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`/proc/PID/fd` of a process without memory is root's: others may not look, and need not."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    start = process_start_time(sleeper.pid)
    try:
        assert registry.find(1, sleeper.pid, start) is None
        assert not is_leaving(sleeper.pid, start)
        assert is_leaving(sleeper.pid, start + 1), "another process of that number"
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", _forbidden)
            with pytest.raises(ResourceError, match="must run as one user"):
                registry.find(1, sleeper.pid, start)
        sleeper.kill()
        deadline = time.monotonic() + 30
        while not is_torn_down(sleeper.pid, start):  # a zombie: nobody has waited for it
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert is_leaving(sleeper.pid, start)
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", _forbidden)
            assert registry.find(1, sleeper.pid, start) is None
    finally:
        sleeper.kill()
        sleeper.wait()
    assert is_leaving(sleeper.pid, start)
    assert registry.find(1, sleeper.pid, start) is None
