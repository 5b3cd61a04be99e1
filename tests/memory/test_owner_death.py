"""A process that ends while a peer opens its memory: whatever fails because of that is raised as its death."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from epee.errors import ProtocolError, ResourceError
from epee.memory import claim as claims
from epee.memory.claim import CLAIM_BYTES, OwnerEndedError, naming_death, parse_claim
from epee.memory.cuda_share import Way, obtain_descriptor, why_pidfd_may_fail
from epee.memory.passing import DescriptorServer
from epee.memory.shared import BLOB_BYTES, HEADER_BYTES, SharedRegion
from tests.harness import run_ranks

OWN_FILES = tuple(f"epee/memory/{name}.py" for name in ("claim", "shared", "passing", "cuda_share"))
Open = Callable[[bytes, int], None]


def start_owner() -> tuple[int, bytes, int]:
    """Fork a process that lends a region; return its number, the region's blob and the descriptor of its socket."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        region = SharedRegion.create(4096, "lent")
        server = DescriptorServer(region._fd, parse_claim(region.blob, region.blob[:8], BLOB_BYTES, 0, "test").cookie)
        os.write(theirs, region.blob + server.socket_fd.to_bytes(4, "little"))
        threading.Event().wait()
    os.close(theirs)
    data = os.read(ours, BLOB_BYTES + 4)
    os.close(ours)
    return pid, data[:BLOB_BYTES], int.from_bytes(data[BLOB_BYTES:], "little")


def by_proc(blob: bytes, socket_fd: int) -> None:
    SharedRegion.attach(blob).close()


def by_pidfd(blob: bytes, socket_fd: int) -> None:
    claim = parse_claim(blob, blob[:8], CLAIM_BYTES, HEADER_BYTES, "test")
    os.close(obtain_descriptor(claim, Way.PIDFD, socket_fd)[0])


def by_socket(blob: bytes, socket_fd: int) -> None:
    claim = parse_claim(blob, blob[:8], CLAIM_BYTES, HEADER_BYTES, "test")
    os.close(obtain_descriptor(claim, Way.SCM, socket_fd)[0])


def end_at(line: int, pid: int, count: list[int], is_awaited: bool) -> Any:
    """Return a tracer that kills `pid` at the given line of `epee.memory`, and waits until it has ended if asked to."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(OWN_FILES):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == line:
                sys.settrace(None)
                started = claims.started_at(pid)
                os.kill(pid, signal.SIGKILL)
                while is_awaited and not claims.has_ended(pid, started):
                    time.sleep(1e-4)
                sys.settrace(trace)
        return trace

    return trace


def outcomes(rank: int, num_ranks: int, open_memory: Open, end: str) -> dict[str, int]:
    """Kill owners, one at each line of what opens their memory; return how often what came of it.

    Args:
        end: what the next line finds: nothing of the owner ("reaped"), a process that nobody has waited for
            ("zombie"), or one that is on its way out ("dying").
    """
    if end == "reaped":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no trace of theirs in /proc
    seen: dict[str, int] = {}
    line, last = 0, 1
    while line < last:
        pid, *lent = start_owner()
        line, count = line + 1, [0]
        sys.settrace(end_at(line, pid, count, end != "dying"))
        try:
            open_memory(*lent)
            what = "opened"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
            what = type(error).__name__
        finally:
            sys.settrace(None)
        last = max(last, count[0])
        seen[what] = seen.get(what, 0) + 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if end != "reaped":
            os.waitpid(pid, 0)
    return seen


@pytest.mark.parametrize("end", ["reaped", "zombie", "dying"])
@pytest.mark.parametrize("open_memory", [by_proc, by_socket, by_pidfd])
def test_an_owner_that_dies_at_any_line_is_dead(open_memory: Open, end: str) -> None:
    if open_memory is by_pidfd and (why := why_pidfd_may_fail()):
        pytest.skip(why)
    (seen,) = run_ranks(outcomes, 1, open_memory, end, backend=None)
    assert set(seen) <= {"OwnerEndedError", "opened"}, seen
    assert seen["OwnerEndedError"] > 10
    assert seen["opened"]


def test_an_owner_that_is_dying_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes the descriptors of a process before it shows that the process has ended."""
    region = SharedRegion.create(4096, "lent")
    claim = parse_claim(region.blob, region.blob[:8], CLAIM_BYTES, HEADER_BYTES, "test")._replace(pid=os.getppid())
    checks = iter([False, False, True])
    monkeypatch.setattr(claims, "has_ended", lambda pid, start_time: next(checks))
    monkeypatch.setattr(claims, "is_torn_down", lambda pid, start_time: False)
    monkeypatch.setattr(claims, "is_leaving", lambda pid, start_time: True)
    with pytest.raises(OwnerEndedError, match=f"process {os.getppid()} has ended") as caught, naming_death(claim):
        raise FileNotFoundError(2, "No such file or directory", "/proc/1/fd/5")
    assert isinstance(caught.value, ResourceError)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    region.close()


def test_a_living_owner_is_not_dead_because_a_step_failed() -> None:
    region = SharedRegion.create(4096, "lent")
    claim = parse_claim(region.blob, region.blob[:8], CLAIM_BYTES, HEADER_BYTES, "test")._replace(
        pid=os.getppid(), start_time=claims.started_at(os.getppid())
    )
    with pytest.raises(ProtocolError, match="no descriptor"), naming_death(claim):
        raise ProtocolError("the owner has no descriptor 5")
    region.close()
