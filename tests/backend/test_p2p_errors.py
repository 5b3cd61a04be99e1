"""What errors out of sends and receives leave: a send that raised was not delivered, a receive has consumed nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.engine.entry import NEWS, TROUBLED
from epee.engine.outbox import TAKEN_BACK
from epee.engine.p2p import ends
from epee.errors import CommTimeoutError, InvalidState, NoQuorumError, RankFailedError
from tests.harness import run_ranks
from tests.survive import stages

from . import cases

PATIENCE = timedelta(seconds=30)


class Stop(Exception):
    """What the signal handlers here raise."""


def interrupt_when_asleep() -> None:
    """Have a signal handler raise `Stop` as soon as this thread sleeps in a call of the default group."""

    def handler(*_: Any) -> None:
        raise Stop

    signal.signal(signal.SIGALRM, handler)
    me = threading.get_ident()
    group: Any = dist.group.WORLD
    cases.when_asleep(group._engine, lambda: signal.pthread_kill(me, signal.SIGALRM))


def set_timeout(seconds: float) -> None:
    """Set the default group's time-out."""
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=seconds))


def send_until_it_returns(value: float, dst: int) -> list[str]:
    """Send a number as users do who repeat on errors; returns the errors' texts."""
    told = []
    while True:
        try:
            dist.send(torch.tensor([value]), dst)
            return told
        except RuntimeError as exc:
            told.append(str(exc))


def late_receiver(rank: int, num_ranks: int, folder: str) -> Any:
    cases.init(rank, num_ranks, folder, op_timeout=0.2 if rank == 0 else 30.0)
    if rank == 0:
        told = []
        for _ in range(2):
            with pytest.raises(CommTimeoutError) as caught:
                dist.send(torch.zeros(1), 1)
            told.append(str(caught.value))
        stages.reach(folder, "twice")
        for value in range(4):
            told += send_until_it_returns(float(value), 1)
        return told
    stages.wait_for(folder, "twice")
    got = []
    for _ in range(4):
        x = torch.zeros(1)
        dist.recv(x, 0)
        got.append(x.item())
    return got


def test_a_send_that_timed_out_is_not_delivered_and_may_be_repeated(tmp_path: Path) -> None:
    told, got = run_ranks(late_receiver, 2, str(tmp_path), backend=None)
    assert got == [0.0, 1.0, 2.0, 3.0]
    assert all("the message is cancelled and will not be delivered" in text for text in told)


def interrupted_sender(rank: int, num_ranks: int, folder: str) -> list[float]:
    got = []
    if rank == 0:
        interrupt_when_asleep()
        with pytest.raises(Stop):
            dist.send(torch.zeros(1), 1)
        stages.reach(folder, "raised")
        for value in range(2):
            dist.send(torch.tensor([float(value)]), 1)
    else:
        stages.wait_for(folder, "raised")
        for _ in range(2):
            x = torch.zeros(1)
            dist.recv(x, 0)
            got.append(x.item())
    dist.barrier()
    if rank == 1:
        with pytest.raises(CommTimeoutError):
            dist.irecv(torch.zeros(1), 0).wait(timedelta(seconds=0.2))
    dist.barrier()
    return got


def test_a_send_that_was_interrupted_is_not_delivered_and_may_be_repeated(tmp_path: Path) -> None:
    assert run_ranks(interrupted_sender, 2, str(tmp_path), backend="epee")[1] == [0.0, 1.0]


def no_quorum(rank: int, num_ranks: int, folder: str) -> None:
    """An error of the group out of a wait for a blocking send: nobody holds the request any more."""
    group: Any = dist.group.WORLD
    if rank == 0:
        kept = group._engine.membership.hooks.raise_trouble

        def raise_trouble() -> None:
            group._engine.lower_flag(TROUBLED)
            raise NoQuorumError("too few answer")

        group._engine.membership.hooks.raise_trouble = raise_trouble
        cases.when_asleep(group._engine, lambda: group._engine.raise_flag(TROUBLED))
        with pytest.raises(NoQuorumError):
            dist.send(torch.zeros(1), 1)
        group._engine.membership.hooks.raise_trouble = kept
        stages.reach(folder, "raised")
        dist.send(torch.ones(1), 1)
    else:
        stages.wait_for(folder, "raised")
        x = torch.zeros(1)
        dist.recv(x, 0)
        assert x.item() == 1.0


def test_a_send_that_raised_for_lack_of_a_quorum_is_not_delivered(tmp_path: Path) -> None:
    run_ranks(no_quorum, 2, str(tmp_path), backend="epee")


def receiver_stands_still(rank: int, num_ranks: int, folder: str, where: str, same: bool) -> Any:
    """The receiver is stopped in the midst of its claim until its sender has given up twice."""
    cases.init(rank, num_ranks, folder, op_timeout=1.0 if rank == 0 else 30.0)
    if rank == 0:
        stages.wait_for(folder, "receives")  # else the first send may end before it is taken
        told = []
        for _ in range(2):
            with pytest.raises(CommTimeoutError) as caught:
                dist.send(torch.zeros(1), 1)
            told.append(str(caught.value))
        stages.reach(folder, "twice")
        stages.wait_for(folder, "on")
        set_timeout(30)
        if not same and where == "answer":
            with pytest.raises(InvalidState, match="has been delivered after all"):
                dist.send(torch.ones(1), 1)
        for value in (0.0, 1.0)[1 - same :]:
            dist.send(torch.tensor([value]), 1)
        return told
    real_fence, real_answer = ends.fence, ends.Receiver._answer

    def stand(*args: Any) -> None:
        ends.fence, ends.Receiver._answer = real_fence, real_answer  # type: ignore[method-assign]
        if not args:
            real_fence()
        stages.wait_for(folder, "twice")
        if args:
            real_answer(*args)
        stages.reach(folder, "on")

    if where == "claim":
        ends.fence = stand
    else:
        ends.Receiver._answer = stand  # type: ignore[method-assign]
    got = []
    stages.reach(folder, "receives")
    for _ in range(1 if not same and where == "claim" else 2):
        x = torch.zeros(1)
        dist.recv(x, 0)
        got.append(x.item())
    return got


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("where", ["claim", "answer"])
def test_a_message_that_is_being_taken_stays_open_and_is_continued(tmp_path: Path, where: str, same: bool) -> None:
    told, got = run_ranks(receiver_stands_still, 2, str(tmp_path), where, same, backend=None)
    assert all("stays open" in text and "rank(s) 1 silent" in text for text in told)
    assert got == ([1.0] if not same and where == "claim" else [0.0, 1.0])


def interrupted_delivery(rank: int, num_ranks: int) -> Any:
    """A handler raises when the message has been taken: the note says so, and the repetition completes at once."""
    group: Any = dist.group.WORLD
    x = torch.full((3,), 5.0)
    if rank == 0:
        drive = group._engine.drive

        def interrupted(*args: Any) -> None:
            drive(*args)
            raise Stop

        group._engine.drive = interrupted
        with pytest.raises(Stop) as caught:
            dist.send(x, 1)
        del group._engine.drive
        began = time.monotonic()
        while not group._engine.mail._sender._channels[1].open:
            assert time.monotonic() - began < 10
        dist.send(x, 1)
        dist.barrier()
        dist.send(x, 1)  # the same bytes once more are another message
        return getattr(caught.value, "__notes__", [])
    dist.recv(x.zero_(), 0)
    dist.barrier()
    dist.recv(x.zero_(), 0)
    assert x.tolist() == [5.0] * 3
    return None


def test_a_delivered_send_whose_caller_was_interrupted_is_repeated_at_no_cost() -> None:
    notes = run_ranks(interrupted_delivery, 2, backend="epee")[0]
    assert not hasattr(BaseException, "add_note") or "has been delivered" in notes[0]


def nobody_sends(rank: int, num_ranks: int, folder: str) -> str:
    cases.init(rank, num_ranks, folder, op_timeout=0.2)
    told = ""
    if rank == 0:
        x = torch.full((2,), 3.0)
        with pytest.raises(CommTimeoutError) as caught:
            dist.recv(x)
        assert x.tolist() == [3.0, 3.0]
        assert caught.value.ranks == ()
        told = str(caught.value)
        stages.reach(folder, "told")
    else:
        stages.wait_for(folder, "told")
    return told


def test_a_receive_from_any_source_that_times_out_says_that_nothing_was_sent(tmp_path: Path) -> None:
    told = run_ranks(nobody_sends, 3, str(tmp_path), backend=None)[0]
    assert "nothing with this tag was sent" in told
    assert "no room" not in told


def leaves_a_send(rank: int, num_ranks: int, folder: str) -> Any:
    """A send that ends because its group is destroyed is not delivered to a receive that comes later."""
    group: Any = dist.new_group([0, 1], backend="epee")
    if rank == 0:
        dist.isend(torch.ones(1), 1, group=group)
        group.shutdown()
        stages.reach(folder, "left")
    else:
        stages.wait_for(folder, "left")
        mark = group._engine.peer_regions.channel_base[1] + TAKEN_BACK
        assert group._engine.peer_regions.words[0][mark] == 1
        x = torch.full((1,), 7.0)
        with pytest.raises(RuntimeError, match="left the group"):
            dist.recv(x, 0, group=group)
        assert x.item() == 7.0
    dist.barrier()


def test_a_send_that_its_group_ended_is_not_delivered(tmp_path: Path) -> None:
    run_ranks(leaves_a_send, 2, str(tmp_path), backend="epee")


def loses_one(rank: int, num_ranks: int, folder: str, mode: str) -> None:
    """Rank 2 dies while rank 0 waits for it by name and for anybody."""
    cases.init(rank, num_ranks, folder, fault_mode=mode)
    dist.all_reduce(torch.ones(1))
    if rank == 2:
        stages.wait_for(folder, "posted")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        x, y = torch.zeros(1), torch.zeros(1)
        named, anyone = dist.irecv(x, 2), dist.irecv(y, tag=1)
        stages.reach(folder, "posted")
        with pytest.raises(RankFailedError):
            named.wait()
        if mode == "raise":
            with pytest.raises(RankFailedError, match="the receive is cancelled") as caught:
                anyone.wait()
            assert caught.value.ranks == (2,)
            anyone = dist.irecv(y, tag=1)
        stages.reach(folder, "lost")
        anyone.wait()
        assert anyone._source_rank() == 1
        assert y.item() == 1.0
        until = time.monotonic() + 60
        while True:  # the death is known here at once; the view without the rank needs rank 1, too
            with pytest.raises(RankFailedError, match="its process has ended") as caught:
                dist.recv(x, 2)
            assert caught.value.ranks == (2,)
            if "not in the view since epoch 2" in str(caught.value):
                break
            assert time.monotonic() < until
        for call in (dist.recv, dist.send, dist.irecv, dist.isend):
            with pytest.raises(RankFailedError, match="not in the view since epoch 2") as caught:
                call(x, 2)
            assert (caught.value.ranks, caught.value.epoch) == ((2,), 2)
    else:
        stages.wait_for(folder, "lost")
        dist.send(torch.ones(1), 0, tag=1)
    stages.meet(folder, "over", rank, range(2))


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_receives_that_wait_when_a_rank_is_lost(tmp_path: Path, mode: str) -> None:
    run_ranks(loses_one, 3, str(tmp_path), mode, backend=None, dead={2})


def sends_to_one_that_leaves(rank: int, num_ranks: int, folder: str) -> float:
    """Nobody looks at the send between its delivery and the news that the receiver has left."""
    cases.init(rank, num_ranks, folder, op_timeout=30.0)
    x = torch.full((1,), float(7 - rank))
    if rank == 0:
        engine: Any = dist.group.WORLD._engine  # type: ignore[union-attr]
        engine.helper.kick = lambda *_, **__: None
        work = dist.isend(x, 1)
        until = time.monotonic() + 20.0
        while not engine.flags & NEWS:
            assert time.monotonic() < until, "the receiver does not leave"
            time.sleep(0.005)
        work.wait()
    else:
        dist.recv(x, 0)
        dist.destroy_process_group()
    return x.item()


def test_a_send_to_a_rank_that_took_it_and_left_does_not_raise(tmp_path: Path) -> None:
    assert run_ranks(sends_to_one_that_leaves, 2, str(tmp_path), backend=None) == [7.0, 7.0]
