"""Ranks end, whatever happens: normally, by an error, by a signal, by the end of their parent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epee.demo.launch import Message, Ranks, Send
from epee.errors import RankFailedError
from tests import forked
from tests.survive import stages

REPOSITORY = Path(__file__).resolve().parents[2]


def run_ranks(
    function: Callable[..., None], num_ranks: int, argument: Any, on_message: Callable[[Message], object]
) -> None:
    """Run the ranks to their end and hand on what they send."""
    with Ranks(function) as ranks:
        for rank in range(num_ranks):
            ranks.start(rank, argument)
        for message in ranks.messages():
            on_message(message)


def _hello(rank: int, send: Send, argument: Any) -> None:
    send({"kind": "hello", "rank": rank, "argument": argument, "pid": os.getpid()})


def _one_raises(rank: int, send: Send, argument: Any) -> None:
    send({"kind": "pid", "pid": os.getpid()})
    if rank == argument:
        raise ValueError("the reason")
    time.sleep(600)


def _one_dies(rank: int, send: Send, argument: Any) -> None:
    """The victim kills itself; another rank reports the loss before the parent has seen it."""
    victim, folder = argument
    if rank == victim:
        stages.reach(folder, "started")
        stages.wait_for(folder, "reports")
        time.sleep(0.1)  # the report should be first, but either way the victim is to blame
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        stages.wait_for(folder, "started")
        stages.reach(folder, "reports")
        raise RuntimeError("my peer is gone")
    time.sleep(600)


def _sleep(rank: int, send: Send, argument: Any) -> None:
    send({"kind": "pid", "pid": os.getpid()})
    time.sleep(600)


def is_alive(pid: int) -> bool:
    """True when the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int], limit_s: float = 10.0) -> None:
    """Fail when one of the processes is still there after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.02)


def test_messages_of_all_ranks_arrive() -> None:
    seen: dict[int, Message] = {}
    run_ranks(_hello, 3, {"x": 1}, lambda message: seen.setdefault(message["rank"], message))
    assert {rank: (message["rank"], message["argument"]) for rank, message in seen.items()} == {
        rank: (rank, {"x": 1}) for rank in range(3)
    }
    wait_until_gone([message["pid"] for message in seen.values()])


def test_a_failing_rank_is_named_with_its_traceback_and_the_others_end() -> None:
    pids: list[int] = []
    with pytest.raises(RankFailedError, match="rank 1 failed: ValueError: the reason") as caught:
        run_ranks(_one_raises, 3, 1, lambda message: pids.append(message["pid"]))
    assert caught.value.ranks == (1,)
    assert caught.value.cause.count("Traceback") == 1
    assert "_one_raises" in caught.value.cause
    assert pids
    wait_until_gone(pids)


def test_a_rank_that_dies_silently_is_blamed_before_the_peer_that_noticed(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"rank 2 failed: it died without a word \(ended by SIGKILL\)"):
        run_ranks(_one_dies, 3, [2, str(tmp_path)], lambda message: None)


def test_an_exception_in_the_parent_ends_the_ranks() -> None:
    pids: list[int] = []

    def collect(message: Message) -> None:
        pids.append(message["pid"])
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ranks(_sleep, 2, None, collect)
    wait_until_gone(pids)


def _tell_pids_of_sleepers() -> None:
    forked.fork_server()
    run_ranks(_sleep, 2, None, lambda message: print(message["pid"], flush=True))


def test_ranks_do_not_outlive_a_killed_parent() -> None:
    with forked.Forked(_tell_pids_of_sleepers, folder=REPOSITORY, environment=os.environ, told=(1,)) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(is_alive(pid) for pid in pids)
        parent.kill()
        wait_until_gone(pids)
