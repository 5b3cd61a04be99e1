"""`memory.claim`: a process is known by its pid and start time, and one that has ended is not believed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from epee.errors import ResourceError
from epee.memory import claim as claims
from epee.memory.claim import (
    CLAIM_BYTES,
    make_claim,
    parse_claim,
    process_start_time,
    require_alive,
    require_own,
)
from tests import shortage

MAGIC = b"testtest"


def test_a_claim_survives_the_wire() -> None:
    claim = make_claim(MAGIC, 7, 8192)
    assert parse_claim(claim.pack(), MAGIC, CLAIM_BYTES, 64, "test") == claim
    assert (claim.pid, claim.start_time) == (os.getpid(), process_start_time(os.getpid()))
    require_alive(claim)


def test_cookies_differ() -> None:
    assert make_claim(MAGIC, 7, 8192).cookie != make_claim(MAGIC, 7, 8192).cookie


def test_a_process_that_was_not_waited_for_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-E", "-c", "input()"], stdin=subprocess.PIPE)
    claim = make_claim(MAGIC, 7, 8192)._replace(pid=child.pid, start_time=process_start_time(child.pid))
    require_alive(claim)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    assert process_start_time(child.pid) == -1
    with pytest.raises(ResourceError, match=f"process {child.pid} has ended"):
        require_alive(claim)
    child.communicate()


def test_out_of_descriptors_is_no_proof_of_death() -> None:
    claim = make_claim(MAGIC, 7, 8192)
    with shortage.descriptors(0):
        for ask in (process_start_time, claims.started_at):
            with pytest.raises(ResourceError, match=r"Too many open files.*limit on descriptors"):
                ask(claim.pid)
        with pytest.raises(ResourceError, match="Too many open files") as caught:
            require_alive(claim)
        assert not isinstance(caught.value, claims.OwnerEndedError)
        assert not claims.has_ended(claim.pid, claim.start_time), "nobody says so"
    assert claims.has_ended(claim.pid, claim.start_time + 1)


def test_a_process_that_may_not_be_looked_at_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(ResourceError, match=r"whether process 1 lives.*one user"):
        process_start_time(1)


def test_names_with_brackets_do_not_confuse() -> None:
    code = "import sys; open('/proc/self/comm', 'w').write('a) Z ('); print('x', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert 0 < process_start_time(child.pid) <= time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    child.communicate("\n")


def test_this_user_is_taken_from_the_credentials_and_not_from_the_owner_of_proc() -> None:
    require_own(os.getpid())
    with pytest.raises(ResourceError, match="has ended"):
        require_own(_free_pid())


def _free_pid() -> int:
    child = subprocess.Popen([sys.executable, "-S", "-E", "-c", ""])
    child.wait()
    return child.pid
