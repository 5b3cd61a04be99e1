"""`sync` of CPU buffers with a mask: who does not come is put out of the buffer, stays in the job, can come back."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.engine import EngineMeeting
from epee.ep.members.member_sync import MemberSync
from epee.errors import (
    CommTimeoutError,
    EvictedError,
    InvalidArgument,
    MismatchError,
    NoQuorumError,
    RankFailedError,
)
from epee.view.protocol.agent import Agent
from epee.view.protocol.messages import Ballot
from tests.ep.moments import Known
from tests.harness import DEAD, run_mortal

from . import stages
from .buffer_rounds import check_dispatch, make_buffer, routing, rows, start

BOTH = [("epee", "raise"), ("epee", "mask"), ("gloo", "raise"), ("gloo", "mask")]
ALL = (0, 1, 2)


def ones(num_ranks: int = 3) -> torch.Tensor:
    return torch.ones(num_ranks, dtype=torch.int32)


def without(*ranks: int) -> torch.Tensor:
    mask = ones()
    mask[list(ranks)] = 0
    return mask


def step(buffer: epee.Buffer, number: int) -> list[int]:
    """Dispatch and combine once; return who took part."""
    rank, num_ranks = buffer.rank, buffer.num_ranks
    idx, weights = routing(rank, num_ranks, number)
    d = buffer.dispatch(rows(rank, number), idx, weights)
    assert d.got is not None
    check_dispatch(d, rank, num_ranks, number, 1)
    c = buffer.combine(d.x, d.handle)
    assert c.got is not None
    assert c.got.tolist() == d.got.tolist()
    return d.got.tolist()


def begin(rank: int, folder: str, mode: str, backend: str, **options: Any) -> tuple[Any, epee.Buffer]:
    """Make a group and a buffer that has worked once."""
    group = start(rank, 3, folder, mode, backend=backend, on_stall="error")
    buffer = make_buffer(group, **options)
    assert step(buffer, 1) == [1, 1, 1]
    stages.meet(folder, "made", rank, ALL)
    return group, buffer


def when_it_shows_that_it_comes(buffer: epee.Buffer, act: Callable[[], None]) -> None:
    """Act once when this rank has shown the others that it has come to a sync."""
    members: Any = buffer._exchange.membership
    works = members._sync._write

    def shows(*args: Any) -> None:
        members._sync._write = works
        works(*args)
        act()

    members._sync._write = shows


def answers_in_vain(folder: str) -> None:
    """Let this rank's agent promise nothing before the job has given up waiting for it, once."""
    ask = Agent._ask_for_promise

    def ask_late(agent: Agent, ballot: Ballot) -> None:
        Agent._ask_for_promise = ask  # type: ignore[method-assign]
        stages.wait_for(folder, "in vain")
        ask(agent, ballot)

    Agent._ask_for_promise = ask_late  # type: ignore[method-assign]


def comes_late(
    rank: int, num_ranks: int, folder: str, mode: str, backend: str, is_in_vain: bool
) -> tuple[list[str], int, int]:
    """Return what the steps had, and the epochs in which rank 2 was out and came back."""
    group, buffer = begin(rank, folder, mode, backend)
    seen, out = [], 0
    if is_in_vain and rank == 1:
        answers_in_vain(folder)
    if rank == 2:
        if is_in_vain:
            known = Known(buffer)
            while known.epoch < 2:
                time.sleep(0.005)
            assert (buffer.epoch, known.ranks) == (1, [0, 1, 2])  # that decision was about nobody
            stages.reach(folder, "in vain")
        stages.wait_for(folder, "out")
        for call in (lambda: step(buffer, 2), buffer.sync, lambda: step(buffer, 2)):
            with pytest.raises(EvictedError, match=r"put out of this buffer in epoch \d+: .*active_ranks") as caught:
                call()
            assert caught.value.ranks == (2,)
            assert out in (0, caught.value.epoch)
            out = caught.value.epoch
    else:
        mask = ones()
        stages.meet(folder, "ready", rank, ALL[:2])  # they wait for one in vain, not for each other
        assert buffer.sync(mask, timeout=1.0).tolist() == mask.tolist() == [1, 1, 0]
        seen.append(str(step(buffer, 2)))
        out = buffer.epoch
        stages.reach(folder, "out")
    value = torch.ones(1)
    dist.all_reduce(value, group=group)  # the group has lost nobody
    assert value.item() == 3
    if rank == 2:
        stages.reach(folder, "tried")
    stages.wait_for(folder, "tried")
    mask = ones()
    assert buffer.sync(mask).tolist() == mask.tolist() == [1, 1, 1]
    seen += [str(step(buffer, number)) for number in (3, 4, 5)]
    back = buffer.epoch
    buffer.close()
    return seen, out, back


@pytest.mark.parametrize("is_in_vain", [False, True])
@pytest.mark.parametrize(("backend", "mode"), BOTH)
def test_who_comes_late_is_put_out_and_comes_back(backend: str, mode: str, is_in_vain: bool) -> None:
    """All name the same two epochs; which numbers these have is not promised.

    An agent that does not answer within `answer_s` (a busy machine, or `is_in_vain`) must not hold up the calls of all
    groups: the job decides without meeting the want, which takes a number that changes nothing in any group, and the
    want is met by a later decision (PROTOCOL.md, "Members per group", 4).
    """
    results = run_mortal(comes_late, 3, mode, backend, is_in_vain, dead=set())
    assert [seen for seen, _, _ in results] == [["[1, 1, 0]", *["[1, 1, 1]"] * 3]] * 2 + [["[1, 1, 1]"] * 3]
    epochs = {(out, back) for _, out, back in results}
    assert len(epochs) == 1
    out, back = epochs.pop()
    assert 2 + is_in_vain <= out < back


def counted_out(rank: int, num_ranks: int, folder: str, mode: str, backend: str) -> None:
    """The time-out is far beyond the test's: nobody waits for one that nobody counts on."""
    _, buffer = begin(rank, folder, mode, backend, timeout=1000.0)
    if rank == 1:
        stages.wait_for(folder, "out")
        with pytest.raises(EvictedError):
            step(buffer, 2)
    else:
        assert buffer.sync(without(1)).tolist() == [1, 0, 1]
        assert step(buffer, 2) == [1, 0, 1]
        stages.meet(folder, "done", rank, (0, 2))
        stages.reach(folder, "out")
    stages.meet(folder, "told", rank, ALL)
    mask = without(1) if rank == 0 else ones()  # who comes is in, whoever had counted it out
    assert buffer.sync(mask).tolist() == [1, 1, 1]
    assert step(buffer, 3) == [1, 1, 1]
    buffer.close()


@pytest.mark.parametrize(("backend", "mode"), BOTH)
def test_one_that_nobody_counts_on_is_not_waited_for(backend: str, mode: str) -> None:
    run_mortal(counted_out, 3, mode, backend, dead=set())


def too_few(rank: int, num_ranks: int, folder: str, backend: str) -> None:
    _, buffer = begin(rank, folder, "mask", backend)
    if rank == 0:
        with pytest.raises(NoQuorumError, match="too few to decide") as caught:
            buffer.sync(ones(), timeout=0.2)
        assert caught.value.ranks == (1, 2)
        stages.reach(folder, "alone")
    stages.wait_for(folder, "alone")
    assert step(buffer, 2) == [1, 1, 1]
    assert buffer.sync(ones()).tolist() == [1, 1, 1]
    if rank == 0:
        stages.wait_for(folder, "two")
        with pytest.raises(NoQuorumError, match="the others did not sync"):
            buffer.sync(ones(), timeout=0.2)
        stages.reach(folder, "left out")
    else:
        stages.meet(folder, "two of three", rank, (1, 2))
        assert buffer.sync(ones(), timeout=1.0).tolist() == [0, 1, 1]
        stages.meet(folder, "both", rank, (1, 2))
        stages.reach(folder, "two")
    stages.wait_for(folder, "left out")
    assert buffer.sync(ones()).tolist() == [1, 1, 1]
    assert step(buffer, 3) == [1, 1, 1]
    buffer.close()


@pytest.mark.parametrize("backend", ["epee", "gloo"])
def test_too_few_decide_nothing_and_are_told_so(backend: str) -> None:
    run_mortal(too_few, 3, backend, dead=set())


def dies(rank: int, num_ranks: int, folder: str, mode: str, backend: str) -> None:
    _, buffer = begin(rank, folder, mode, backend)
    if rank == 2:
        stages.meet(folder, "about to", rank, ALL)
        os.kill(os.getpid(), signal.SIGKILL)
    stages.meet(folder, "about to", rank, ALL)
    for number in range(2, 5):
        assert buffer.sync(ones()).tolist() == [1, 1, 0]
        assert step(buffer, number) == [1, 1, 0]  # sync has told the loss
    buffer.close()


@pytest.mark.parametrize(("backend", "mode"), BOTH)
def test_sync_goes_on_without_who_dies(backend: str, mode: str) -> None:
    assert run_mortal(dies, 3, mode, backend, dead={2})[2] is DEAD


def sync_with_one_that_stops(
    rank: int, folder: str, on_stall: str, timeout_s: float, late_s: float = 0.0
) -> epee.Buffer:
    """Return a buffer of which rank 2 has shown that it comes to a sync and was stopped there; it runs on.

    Rank 1 comes `late_s` after the stop. All members that are left have synced without rank 2, which knows that.
    """
    buffer = make_buffer(start(rank, 3, folder, "mask", on_stall=on_stall))
    assert step(buffer, 1) == [1, 1, 1]
    (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
    stages.meet(folder, "made", rank, ALL)
    if rank == 2:
        when_it_shows_that_it_comes(buffer, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        with pytest.raises(NoQuorumError):
            buffer.sync(ones(), timeout=timeout_s)
    else:
        pid = int((Path(folder) / "pid2").read_text())
        stages.await_stop(pid)
        time.sleep(late_s if rank == 1 else 0.0)
        assert buffer.sync(ones(), timeout=timeout_s).tolist() == [1, 1, 0]
        assert step(buffer, 2) == [1, 1, 0]
        stages.meet(folder, "went on", rank, (0, 1))
        os.kill(pid, signal.SIGCONT)
    stages.meet(folder, "all", rank, ALL)
    return buffer


def stops_in_it(rank: int, num_ranks: int, folder: str, on_stall: str) -> list[list[int]]:
    """Rank 2 shows that it comes to a sync, and is stopped there; later it goes on."""
    buffer = sync_with_one_that_stops(rank, folder, on_stall, 1.0)
    seen = [buffer.sync(ones()).tolist(), step(buffer, 3)]
    buffer.close()
    return seen


def stops_before_a_late_one(rank: int, num_ranks: int, folder: str) -> list[list[int]]:
    """Rank 2 stops in a sync, to which rank 1 comes when the time of rank 0 and that of the agents are nearly over."""
    buffer = sync_with_one_that_stops(rank, folder, "error", 6.0, late_s=5.5)
    seen = [buffer.sync(ones()).tolist(), step(buffer, 3)]
    buffer.close()
    return seen


def test_who_stops_in_a_sync_is_put_out_though_another_came_late() -> None:
    assert run_mortal(stops_before_a_late_one, 3, dead=set(), timeout_s=90) == [[[1, 1, 1]] * 2] * 3


@pytest.mark.parametrize("on_stall", ["wait", "evict", "error"])
def test_who_stops_in_a_sync_is_put_out_whatever_the_policy_is(on_stall: str) -> None:
    assert run_mortal(stops_in_it, 3, on_stall, dead=set()) == [[[1, 1, 1]] * 2] * 3


def in_a_call(rank: int, num_ranks: int, folder: str, mode: str, backend: str) -> str:
    """One waits in a dispatch while the others put it out."""
    _, buffer = begin(rank, folder, mode, backend)
    if rank == 2:
        stages.reach(folder, "calling")
        with pytest.raises(EvictedError, match="put out"):
            step(buffer, 2)
    else:
        stages.wait_for(folder, "calling")
        assert buffer.sync(without(2)).tolist() == [1, 1, 0]
        assert step(buffer, 2) == [1, 1, 0]
    stages.meet(folder, "put out", rank, ALL)
    assert buffer.sync(ones()).tolist() == [1, 1, 1]
    assert step(buffer, 3) == [1, 1, 1]
    buffer.close()
    return "right"


@pytest.mark.parametrize(("backend", "mode"), BOTH)
def test_who_is_put_out_in_a_call_hears_of_it_there(backend: str, mode: str) -> None:
    assert run_mortal(in_a_call, 3, mode, backend, dead=set()) == ["right"] * 3


def given_up(rank: int, num_ranks: int, folder: str, backend: str) -> None:
    """Ranks that stand before different calls, because of time-outs, are together again after sync."""
    _, buffer = begin(rank, folder, "mask", backend)
    if rank != 2:
        with pytest.raises(CommTimeoutError):
            buffer.all_gather_bytes(b"1", timeout=0.3)
    stages.meet(folder, "given up", rank, ALL)
    assert buffer.sync(ones()).tolist() == [1, 1, 1]
    assert step(buffer, 2) == [1, 1, 1]
    buffer.close()


@pytest.mark.parametrize("backend", ["epee", "gloo"])
def test_after_a_time_out_sync_brings_all_to_the_same_call(backend: str) -> None:
    run_mortal(given_up, 3, backend, dead=set())


def loses_one_that_was_out(rank: int, num_ranks: int, folder: str, mode: str, backend: str) -> None:
    _, buffer = begin(rank, folder, mode, backend)
    if rank == 2:
        stages.wait_for(folder, "out")
        os.kill(os.getpid(), signal.SIGKILL)
    assert buffer.sync(without(2)).tolist() == [1, 1, 0]
    stages.meet(folder, "both", rank, (0, 1))
    stages.reach(folder, "out")
    epochs = set()
    for number in range(2, 12):
        assert step(buffer, number) == [1, 1, 0]
        epochs.add(buffer.epoch)
    assert len(epochs) == 1
    buffer.close()


@pytest.mark.parametrize(("backend", "mode"), BOTH)
def test_the_death_of_one_that_was_out_is_no_loss(backend: str, mode: str) -> None:
    run_mortal(loses_one_that_was_out, 3, mode, backend, dead={2})


def stops(rank: int, num_ranks: int, folder: str, backend: str, victim: int) -> list[list[int]]:
    """One stops when it has shown that it has come: the others go on without it, be it the one that asks for all."""
    _, buffer = begin(rank, folder, "mask", backend)
    others = [other for other in ALL if other != victim]
    if rank == victim:
        Path(f"{folder}/pid").write_text(str(os.getpid()))

        def stop() -> None:
            stages.reach(folder, "came")
            os.kill(os.getpid(), signal.SIGSTOP)

        when_it_shows_that_it_comes(buffer, stop)
        seen = [buffer.sync(ones(), timeout=60.0).tolist()]
    else:
        stages.wait_for(folder, "came")
        stages.meet(folder, "two", rank, others)
        seen = [buffer.sync(ones(), timeout=10.0).tolist()]
        assert step(buffer, 2) == seen[0]
        stages.meet(folder, "went on", rank, others)
        if rank == others[0]:
            os.kill(int(Path(f"{folder}/pid").read_text()), signal.SIGCONT)
        seen.append(buffer.sync(ones(), timeout=60.0).tolist())
    assert step(buffer, 3) == [1, 1, 1]
    buffer.close()
    return seen


@pytest.mark.parametrize(("backend", "victim"), [("epee", 0), ("epee", 2), ("gloo", 1)])
def test_one_that_stops_when_it_has_come_does_not_keep_the_others(backend: str, victim: int) -> None:
    results = run_mortal(stops, 3, backend, victim, dead=set(), timeout_s=90.0)
    without_it = [int(rank != victim) for rank in ALL]
    assert results == [[[1, 1, 1]] if rank == victim else [without_it, [1, 1, 1]] for rank in ALL]


def again_and_again(rank: int, num_ranks: int, folder: str, backend: str) -> None:
    """Syncs in a row, with and without calls between, of ranks that come in any order, with any mask."""
    _, buffer = begin(rank, folder, "raise", backend)
    dice = random.Random(rank)
    for number in range(15):
        time.sleep(dice.random() * 0.02)
        assert buffer.sync(ones()).tolist() == [1, 1, 1]
        if number % 3 == 0:
            assert step(buffer, number + 2) == [1, 1, 1]
    buffer.close()


@pytest.mark.parametrize("backend", ["epee", "gloo"])
def test_ranks_that_come_are_never_put_out(backend: str) -> None:
    run_mortal(again_and_again, 3, backend, dead=set())


def closes(rank: int, num_ranks: int, folder: str, backend: str) -> None:
    """Two of three close the buffer, one of them before the others sync, and stay in the job by another buffer."""
    group, buffer = begin(rank, folder, "mask", backend, timeout=1000.0)
    with make_buffer(group):
        for number, closer in ((2, 2), (3, 0)):
            if rank == closer:
                buffer.close()
                stages.reach(folder, f"closed{closer}")
                break
            stages.wait_for(folder, f"closed{closer}")
            left = [int(other == 1 or other not in (2, closer)) for other in ALL]
            assert buffer.sync(ones()).tolist() == left
            assert step(buffer, number) == left
            stages.meet(folder, f"after{closer}", rank, [other for other in ALL if left[other]])
        stages.meet(folder, "done", rank, ALL)
    buffer.close()


@pytest.mark.parametrize("backend", ["epee", "gloo"])
def test_who_has_closed_the_buffer_is_not_waited_for(backend: str) -> None:
    run_mortal(closes, 3, backend, dead=set())


def with_a_replacement(slot: int, folder: str, delay: Callable[[], None]) -> epee.Buffer:
    """Rank 2 dies, slot 3 takes its place and makes its buffer after a delay; returns when all see it in the view."""
    if slot == 3:
        stages.wait_for(folder, "lost")
        group = start(2, 3, folder, "mask", joins=True, on_stall="error")
        stages.reach(folder, "joined")
        delay()
        return make_buffer(group)
    group, buffer = begin(slot, folder, "mask", "epee")
    if slot == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    while step(buffer, 2) != [1, 1, 0]:
        pass
    stages.meet(folder, "alone", slot, (0, 1))
    stages.reach(folder, "lost")
    if slot == 0:
        while group.waiting_ranks() != (2,):
            time.sleep(0.005)
        group.recover_ranks([2])
    stages.wait_for(folder, "joined")
    known = Known(buffer)
    while len(known.ranks) != 3:
        time.sleep(0.005)
    return buffer


def takes_in(slot: int, num_ranks: int, folder: str) -> list[list[int]]:
    """A process that took a lost rank's place is waited for, though the masks do not have it and it is slow."""
    buffer = with_a_replacement(slot, folder, lambda: time.sleep(0.5))  # nobody can see its buffer yet
    seen = [buffer.sync(ones() if slot == 3 else without(2), timeout=60.0).tolist()]
    seen += [step(buffer, number) for number in (3, 4)]
    buffer.close()
    return seen


def test_a_replacement_is_waited_for_and_taken_in() -> None:
    results = run_mortal(takes_in, 4, dead={2})
    assert [results[slot] for slot in (0, 1, 3)] == [[[1, 1, 1]] * 3] * 3


def taken_in_late(slot: int, num_ranks: int, folder: str) -> list[list[int]]:
    """A replacement makes its buffer when the others have synced without it: decisions left no trace of all of that."""
    buffer = with_a_replacement(slot, folder, lambda: stages.wait_for(folder, "synced"))
    if slot != 3:
        for turn in range(3):
            stages.meet(folder, f"turn{turn}", slot, (0, 1))
            assert buffer.sync(without(2), timeout=0.3).tolist() == [1, 1, 0]
        stages.meet(folder, "both", slot, (0, 1))
        stages.reach(folder, "synced")
    seen = [buffer.sync(ones(), timeout=60.0).tolist()]
    seen += [step(buffer, number) for number in (3, 4)]
    buffer.close()
    return seen


def test_a_replacement_that_makes_its_buffer_late_comes_to_the_next_sync() -> None:
    results = run_mortal(taken_in_late, 4, dead={2})
    assert [results[slot] for slot in (0, 1, 3)] == [[[1, 1, 1]] * 3] * 3


def interrupted(rank: int, num_ranks: int, folder: str, mode: str, backend: str) -> None:
    """A rank is interrupted in sync, be it that the decision is under way, and calls it again."""
    _, buffer = begin(rank, folder, mode, backend)
    survivor: Any = buffer._exchange.membership
    dice, quiet = random.Random(rank), survivor._interrupt
    for number in range(12):
        stages.meet(folder, f"round{number}", rank, ALL)
        if number % 3 == rank:
            looks = iter(range(dice.randrange(12)))

            def interrupt(looks: Any = looks) -> None:
                if next(looks, None) is None:
                    survivor._interrupt = quiet
                    time.sleep(dice.choice((0.0, 0.1)))  # the others may agree in the meantime
                    raise KeyboardInterrupt
                quiet()

            survivor._interrupt = interrupt
        try:
            mask = buffer.sync(ones())
        except KeyboardInterrupt:
            mask = buffer.sync(ones())
        survivor._interrupt = quiet
        assert mask.tolist() == [1, 1, 1]
        assert step(buffer, number + 2) == [1, 1, 1]
    buffer.close()


@pytest.mark.parametrize(("backend", "mode"), [("epee", "raise"), ("gloo", "mask")])
def test_who_is_interrupted_and_syncs_again_is_with_the_others(backend: str, mode: str) -> None:
    run_mortal(interrupted, 3, mode, backend, dead=set())


def gives_up_too_late(rank: int, num_ranks: int, folder: str, backend: str) -> list[list[int]]:
    """Rank 2 has seen nobody come and is about to say so when rank 0 comes, which agrees with it."""
    _, buffer = begin(rank, folder, "mask", backend)
    if rank == 2:
        kind: Any = MemberSync
        no_quorum = kind._no_quorum

        def hesitate(self: Any, *args: Any) -> NoQuorumError:
            stages.reach(folder, "giving up")
            stages.wait_for(folder, "came")  # a call of the engine is made by all
            found: NoQuorumError = no_quorum(self, *args)
            return found

        kind._no_quorum = hesitate
        with pytest.raises(NoQuorumError):
            buffer.sync(ones(), timeout=0.1)
        kind._no_quorum = no_quorum
    if rank == 1:
        stages.wait_for(folder, "both")
    else:
        stages.wait_for(folder, "giving up")
        if rank == 0:
            when_it_shows_that_it_comes(buffer, lambda: stages.reach(folder, "came"))
        assert buffer.sync(ones()).tolist() == [1, 0, 1]  # the time of one that has come is over
        stages.reach(folder, "agreed")
        assert step(buffer, 2) == [1, 0, 1]
        stages.meet(folder, "two", rank, (0, 2))
        stages.reach(folder, "both")
    seen = [buffer.sync(ones()).tolist(), step(buffer, 3)]
    buffer.close()
    return seen


@pytest.mark.parametrize("backend", ["epee", "gloo"])
def test_who_gives_up_while_the_others_agree_finds_that_when_it_syncs_again(backend: str) -> None:
    assert run_mortal(gives_up_too_late, 3, backend, dead=set()) == [[[1, 1, 1]] * 2] * 3


def never_entered(rank: int, num_ranks: int, folder: str) -> list[list[int]]:
    """Rank 2 dies while the buffer is made, so the others enter no epoch there; sync is their first call."""
    group = start(rank, 3, folder, "mask", on_stall="error")
    if rank == 2:
        EngineMeeting.begin = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assign, method-assign]
    else:
        meet = EngineMeeting.meet

        def meet_late(self: EngineMeeting, *args: Any) -> Any:
            while self._membership.runtime.view().epoch < 2:
                time.sleep(0.005)
            return meet(self, *args)

        EngineMeeting.meet = meet_late  # type: ignore[method-assign]
    buffer = make_buffer(group)
    seen = [buffer.sync(ones()).tolist(), step(buffer, 2)]
    buffer.close()
    return seen


def test_a_buffer_that_has_entered_no_epoch_yet_can_sync() -> None:
    assert run_mortal(never_entered, 3, dead={2})[:2] == [[[1, 1, 0]] * 2] * 2


def told_once(rank: int, num_ranks: int, folder: str) -> list[str]:
    """A plain call in mode "raise" tells a loss as before."""
    _, buffer = begin(rank, folder, "raise", "epee")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = []
    for _ in range(2):
        try:
            seen.append(str(buffer.sync().tolist()))
        except RankFailedError as error:
            seen.append(str(error.ranks))
    buffer.close()
    return seen


def test_without_a_mask_sync_is_a_call_like_others() -> None:
    assert run_mortal(told_once, 3, dead={2})[:2] == [["(2,)", "[1, 1, 0]"]] * 2


def alone(rank: int, num_ranks: int, folder: str) -> None:
    buffer = make_buffer(start(rank, 1, folder, "raise", backend="gloo"))
    mask = torch.zeros(2, dtype=torch.int32)
    assert buffer.sync(mask).tolist() == [1]
    assert mask.tolist() == [1, 0]
    for wrong in (torch.ones(1), torch.ones(0, dtype=torch.int32), [1]):
        with pytest.raises(InvalidArgument, match="active_ranks"):
            buffer.sync(wrong)  # type: ignore[arg-type]
    buffer.close()


def test_one_rank_agrees_with_itself() -> None:
    run_mortal(alone, 1, dead=set())


def stops_in_sync(rank: int, num_ranks: int, folder: str, backend: str) -> Any:
    """Rank 1 of two stops when it has shown that it comes."""
    group = start(rank, num_ranks, folder, "mask", backend=backend, on_stall="error")
    buffer = make_buffer(group)
    assert step(buffer, 1) == [1, 1]
    if rank == 0:
        stages.wait_for(folder, "came")
        sleeper = int((Path(folder) / "pid").read_text())
        stages.await_stop(sleeper)
        mask = buffer.sync(ones(2), timeout=2.0).tolist()
        os.kill(sleeper, signal.SIGCONT)
        stages.wait_for(folder, "woke up")
        return mask
    (Path(folder) / "pid").write_text(str(os.getpid()))

    def stop() -> None:
        stages.reach(folder, "came")
        os.kill(os.getpid(), signal.SIGSTOP)

    when_it_shows_that_it_comes(buffer, stop)
    with pytest.raises(NoQuorumError):  # it was put out while it stood still
        buffer.sync(ones(2), timeout=1.0)
    stages.reach(folder, "woke up")
    return "woke up"


@pytest.mark.parametrize("backend", ["epee", "gloo"])
def test_half_with_the_lowest_goes_on_without_one_that_stops_in_sync(backend: str) -> None:
    assert run_mortal(stops_in_sync, 2, backend, dead=set()) == [[1, 0], "woke up"]


def one_without_a_mask(rank: int, num_ranks: int, folder: str, backend: str, num_calls: int) -> str:
    group = start(rank, num_ranks, folder, "raise", backend=backend, on_stall="error")
    buffer = make_buffer(group, timeout=60.0)
    for number in range(num_calls):
        step(buffer, number)
    with pytest.raises(MismatchError, match="all ranks must call sync with a mask") as caught:
        buffer.sync(ones(2) if rank == 0 else None)
    assert step(buffer, num_calls) == [1, 1]
    return type(caught.value).__name__


@pytest.mark.parametrize("num_calls", [0, 1])
@pytest.mark.parametrize("backend", ["epee", "gloo"])
def test_a_sync_with_a_mask_on_some_ranks_only_is_told_also_before_the_first_call(backend: str, num_calls: int) -> None:
    told = run_mortal(one_without_a_mask, 2, backend, num_calls, dead=set(), timeout_s=30)
    assert told == ["MismatchError"] * 2
