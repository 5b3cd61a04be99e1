"""The tables of docs/fault-tolerance.md and docs/buffer.md, row by row: who raises what on which ranks.

A test here is a program of some ranks that uses public names alone, so it says nothing of the code behind them and
stays as it is when that changes. It compares errors, `got`, `lost_weight`, epochs and masks of all ranks. Where the
tables leave the moment open (a loss is raised in the call that meets it, or in the next one), so does the test.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.errors import (
    CommTimeoutError,
    EpeeError,
    EvictedError,
    InvalidArgument,
    NoQuorumError,
    PeerError,
    RankFailedError,
    StaleHandleError,
)
from tests.harness import DEAD, run_mortal

from . import stages
from .buffer_rounds import HIDDEN, check_combine, check_dispatch, die, make_buffer, routing, rows, start

BACKENDS = ("epee", "gloo")
MODES = ("raise", "mask")
NUM_RANKS = 3
ALL = tuple(range(NUM_RANKS))


class Program:
    """One rank of a test, with a buffer that has worked once.

    Attributes:
        epoch: of the buffer then.
    """

    def __init__(self, rank: int, folder: str, mode: str, backend: str = "epee", **options: Any) -> None:
        self.rank, self.folder = rank, folder
        self.group = start(rank, NUM_RANKS, folder, mode, backend=backend, on_stall=options.pop("on_stall", "error"))
        self.buffer = make_buffer(self.group, **options)
        assert self.step(0) == [1, 1, 1]
        self.epoch = self.buffer.epoch
        (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
        self.meet("made", ALL)

    def meet(self, name: str, ranks: tuple[int, ...]) -> None:
        """Let some ranks meet, without the buffer."""
        stages.meet(self.folder, name, self.rank, ranks)

    def pid(self, rank: int) -> int:
        """Return the process of a rank."""
        return int((Path(self.folder) / f"pid{rank}").read_text())

    def dispatch(self, number: int, **options: Any) -> epee.Dispatched:
        """Dispatch and compare what came with what the ranks in `got` have sent."""
        idx, weights = routing(self.rank, NUM_RANKS, number)
        found = self.buffer.dispatch(rows(self.rank, number), idx, weights, **options)
        check_dispatch(found, self.rank, NUM_RANKS, number, 1)
        return found

    def combine(self, sent: epee.Dispatched, number: int, **options: Any) -> epee.Combined:
        """Combine and compare sums and lost weights with those of the ranks in `got`."""
        assert isinstance(sent.x, torch.Tensor)
        found = self.buffer.combine(sent.x, sent.handle, **options)
        check_combine(found, "rank", self.rank, NUM_RANKS, number)
        return found

    def step(self, number: int) -> list[int]:
        """Make a step; return who took part in it."""
        sent = self.dispatch(number)
        found = self.combine(sent, number)
        assert found.got.tolist() == sent.got.tolist()
        assert found.epoch == self.buffer.epoch
        return sent.got.tolist()

    def step_with_losses(self, number: int) -> tuple[list[int], list[tuple[str, tuple[int, ...]]]]:
        """Make a step as often as losses end it; return who took part, and the losses."""
        losses: list[tuple[str, tuple[int, ...]]] = []
        while True:
            try:
                return self.step(number), losses
            except StaleHandleError:
                continue  # mode "mask": a combine that not all survivors had begun
            except (RankFailedError, PeerError) as error:
                losses.append((type(error).__name__, tuple(error.ranks)))
                assert len(losses) < 5, losses


def raised(call: Callable[[], Any]) -> str:
    """Return the class of the error of a call."""
    try:
        call()
    except EpeeError as error:
        return type(error).__name__
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "nothing"


def ones() -> torch.Tensor:
    return torch.ones(NUM_RANKS, dtype=torch.int32)


def without(*ranks: int) -> torch.Tensor:
    mask = ones()
    mask[list(ranks)] = 0
    return mask


# ---- a call that loses a rank


def loses(rank: int, num_ranks: int, folder: str, mode: str, backend: str, op: str, moment: str) -> Any:
    """Rank 1 dies before the call `op`, or while rank 2 keeps that call waiting."""
    program = Program(rank, folder, mode, backend)
    buffer, sent = program.buffer, None
    if op == "combine":
        sent = program.dispatch(1)
    kept = program.dispatch(2)
    want = kept.x.clone()  # type: ignore[union-attr]
    program.meet("ready", ALL)
    if rank == 1 and moment == "before":
        die()
    if rank == 1:
        threading.Timer(0.2, die).start()
    if rank == 2 and moment == "inside":
        while _lives(program.pid(1)):
            time.sleep(0.005)
    seen: Any = "ended well"
    try:
        if op == "dispatch":
            found = program.dispatch(1)
            assert found.got.tolist() == [1, 0, 1]
            assert found.epoch == found.handle.epoch
        elif op == "combine":
            assert sent is not None
            assert program.combine(sent, 1).got.tolist() in ([1, 0, 1], [1, 1, 1])
        else:
            assert buffer.all_gather_bytes(bytes([rank])) in ([b"\0", b"", b"\2"], [b"\0", b"\1", b"\2"])
    except RankFailedError as error:
        seen = "RankFailedError", error.ranks, error.op, error.seq > 0
    except StaleHandleError:
        seen = "StaleHandleError"
    got, losses = program.step_with_losses(3)
    assert torch.equal(kept.x, want), "a result of an earlier epoch has changed"  # type: ignore[arg-type]
    assert got == [1, 0, 1]
    if mode == "raise":
        assert seen in ("ended well", ("RankFailedError", (1,), op, True))
        assert losses == ([("RankFailedError", (1,))] if seen == "ended well" else []), "a loss is raised once"
    else:
        assert losses == []
        assert seen in ("ended well", "StaleHandleError" if op == "combine" else "")
    assert buffer.epoch > program.epoch
    assert raised(lambda: buffer.combine(kept.x, kept.handle)) == "StaleHandleError"  # type: ignore[arg-type]
    assert program.step(4) == [1, 0, 1]
    assert buffer.sync().tolist() == [1, 0, 1]
    return seen, losses, buffer.epoch


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or read
        return False


@pytest.mark.parametrize("moment", ["before", "inside"])
@pytest.mark.parametrize("op", ["dispatch", "combine", "all_gather_bytes"])
@pytest.mark.parametrize(
    ("mode", "backend"), [("raise", "epee"), ("mask", "epee"), ("raise", "gloo"), ("mask", "gloo")]
)
def test_a_call_that_loses_a_rank(mode: str, backend: str, op: str, moment: str) -> None:
    first, dead, last = run_mortal(loses, NUM_RANKS, mode, backend, op, moment, dead={1})
    assert dead == DEAD
    assert first == last, "survivors differ"


def loses_two(rank: int, num_ranks: int, folder: str, mode: str) -> Any:
    program = Program(rank, folder, mode)
    if rank != 0:
        die()
    got, losses = program.step_with_losses(1)
    while got != [1, 0, 0]:
        got, more = program.step_with_losses(2)
        losses += more
    return losses


@pytest.mark.parametrize("mode", MODES)
def test_each_loss_is_raised_once(mode: str) -> None:
    losses = run_mortal(loses_two, NUM_RANKS, mode, dead={1, 2})[0]
    lost = sorted(rank for _, ranks in losses for rank in ranks)
    assert lost == ([1, 2] if mode == "raise" else [])
    assert {kind for kind, _ in losses} <= {"RankFailedError"}


def refused_beside_a_loss(rank: int, num_ranks: int, folder: str) -> Any:
    """Rank 0's own call is refused while rank 2's loss ends it on the others."""
    program = Program(rank, folder, "raise")
    if rank == 2:
        die()
    while _lives(program.pid(2)):
        time.sleep(0.005)
    seen = []
    if rank == 0:
        seen.append(raised(lambda: program.buffer.dispatch(torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.int64))))
    else:
        seen.append(raised(lambda: program.dispatch(1)))
    got, losses = program.step_with_losses(2)
    assert got == [1, 1, 0]
    return seen[0], len(losses)


def test_a_refused_call_beside_a_loss() -> None:
    """The refusal alone is raised where the loss ends that very call; else the loss comes with the next one, or, known
    before the call, in its place."""
    first, second, _ = run_mortal(refused_beside_a_loss, NUM_RANKS, dead={2})
    assert (first[0], first[1]) in (("InvalidArgument", 0), ("InvalidArgument", 1), ("RankFailedError", 0))
    assert (second[0], second[1]) in (("RankFailedError", 0), ("MismatchError", 1))


def leaves(rank: int, num_ranks: int, folder: str, mode: str, backend: str) -> Any:
    """Rank 1 closes its only buffer, and on the backend "epee" its group."""
    program = Program(rank, folder, mode, backend)
    if rank == 1:
        program.buffer.close()
        assert raised(lambda: program.step(1)) == "InvalidState"
        if backend == "epee":
            dist.destroy_process_group()
        stages.wait_for(folder, "over")
        return "left"
    got, losses = program.step_with_losses(1)
    assert program.step(2) == got == [1, 0, 1]
    program.meet("through", (0, 2))
    stages.reach(folder, "over")
    return losses


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_has_left(mode: str, backend: str) -> None:
    first, _, last = run_mortal(leaves, NUM_RANKS, mode, backend, dead=set())
    assert first == last == ([("PeerError", (1,))] if mode == "raise" else [])


# ---- a rank that lives and is silent


def silent(rank: int, num_ranks: int, folder: str, op: str, backend: str) -> Any:
    program = Program(rank, folder, "raise", backend)
    sent = program.dispatch(1)

    def call(timeout: float) -> Any:
        return program.dispatch(2, timeout=timeout) if op == "dispatch" else program.combine(sent, 1, timeout=timeout)

    program.meet("ready", ALL)
    seen = ""
    if rank != 1:
        with pytest.raises(CommTimeoutError) as caught:
            call(0.5)
        seen = str(caught.value.ranks)
    program.meet("given up", ALL)
    if rank == 1:
        seen = raised(lambda: call(10.0))
    program.meet("late", ALL)
    assert program.step(3) == program.step(4) == [1, 1, 1]
    return seen


@pytest.mark.parametrize(("op", "backend"), [("dispatch", "epee"), ("combine", "epee"), ("dispatch", "gloo")])
def test_on_stall_error_names_the_silent_rank_and_all_may_repeat(op: str, backend: str) -> None:
    assert run_mortal(silent, NUM_RANKS, op, backend, dead=set()) == ["(1,)", "CommTimeoutError", "(1,)"]


def voted_out(rank: int, num_ranks: int, folder: str, mode: str, backend: str) -> Any:
    program = Program(rank, folder, mode, backend, on_stall="evict", timeout=2.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        seen = [raised(lambda: program.step(1)) for _ in range(3)]
        stages.reach(folder, "told")
        return seen
    got, losses = program.step_with_losses(1)
    while got[1]:
        got, more = program.step_with_losses(2)
        losses += more
    program.meet("went on", (0, 2))
    if rank == 0:
        stages.await_stop(program.pid(1))
        os.kill(program.pid(1), signal.SIGCONT)
    stages.wait_for(folder, "told")
    assert program.step(3) == [1, 0, 1]
    return losses


@pytest.mark.parametrize(("mode", "backend"), [("raise", "epee"), ("mask", "epee"), ("mask", "gloo")])
def test_on_stall_evict_votes_the_silent_rank_out_for_good(mode: str, backend: str) -> None:
    first, out, last = run_mortal(voted_out, NUM_RANKS, mode, backend, dead=set())
    assert out == ["EvictedError"] * 3
    assert first == last
    assert [ranks for _, ranks in first] == ([(1,)] if mode == "raise" else [])


def awaited(rank: int, num_ranks: int, folder: str) -> Any:
    program = Program(rank, folder, "raise", on_stall="wait", timeout=0.3)
    if rank == 1:
        time.sleep(1.0)
    return program.step(1)


def test_on_stall_wait_waits() -> None:
    assert run_mortal(awaited, NUM_RANKS, dead=set()) == [[1, 1, 1]] * 3


# ---- sync


def put_out(rank: int, num_ranks: int, folder: str, mode: str, backend: str) -> Any:
    """Rank 2 does not come to a sync, is out of the buffer alone, and comes back with the next one."""
    program = Program(rank, folder, mode, backend)
    buffer, old = program.buffer, program.dispatch(1)
    program.meet("dispatched", ALL)
    mask = ones()
    if rank == 2:
        stages.wait_for(folder, "out")
        with pytest.raises(EvictedError) as caught:
            program.step(2)
        assert caught.value.ranks == (2,)
        out = caught.value.epoch
        stages.reach(folder, "tried")
    else:
        assert buffer.sync(mask, timeout=1.0).tolist() == mask.tolist() == [1, 1, 0]
        assert raised(lambda: buffer.combine(old.x, old.handle)) == "StaleHandleError"  # type: ignore[arg-type]
        assert program.step(2) == [1, 1, 0]
        out = buffer.epoch
        program.meet("both", (0, 1))
        stages.reach(folder, "out")
    stages.wait_for(folder, "tried")
    value = torch.ones(1)
    dist.all_reduce(value, group=program.group)
    assert value.item() == NUM_RANKS
    mask = ones()
    assert buffer.sync(mask).tolist() == mask.tolist() == [1, 1, 1]
    assert program.step(3) == program.step(4) == [1, 1, 1]
    assert program.epoch < out < buffer.epoch
    return out, buffer.epoch


@pytest.mark.parametrize(("mode", "backend"), [("raise", "epee"), ("mask", "gloo")])
def test_a_rank_that_does_not_come_to_sync_is_out_and_may_come_back(mode: str, backend: str) -> None:
    results = run_mortal(put_out, NUM_RANKS, mode, backend, dead=set())
    assert len(set(results)) == 1


def not_counted(rank: int, num_ranks: int, folder: str, backend: str) -> None:
    """Nobody's mask counts on rank 1, so nobody waits for it; a rank that comes is in, whatever the masks say."""
    program = Program(rank, folder, "raise", backend, timeout=1000.0)
    if rank != 1:
        assert program.buffer.sync(without(1)).tolist() == [1, 0, 1]
        assert program.step(1) == [1, 0, 1]
        program.meet("both", (0, 2))
        stages.reach(folder, "out")
    stages.wait_for(folder, "out")
    assert program.buffer.sync(without(1) if rank == 0 else ones()).tolist() == [1, 1, 1]
    assert program.step(2) == [1, 1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sync_does_not_wait_for_a_rank_on_which_nobody_counts(backend: str) -> None:
    run_mortal(not_counted, NUM_RANKS, backend, dead=set())


def shown(rank: int, num_ranks: int, folder: str, mode: str, backend: str) -> None:
    """A loss that sync shows is not raised again; each sync begins an epoch."""
    program = Program(rank, folder, mode, backend)
    if rank == 2:
        die()
    while _lives(program.pid(2)):
        time.sleep(0.005)
    assert program.buffer.sync(ones()).tolist() == [1, 1, 0]
    assert program.step(1) == [1, 1, 0]
    before = program.buffer.epoch
    assert program.buffer.sync(ones()).tolist() == [1, 1, 0]
    assert program.step(2) == [1, 1, 0]
    assert program.buffer.epoch > before


@pytest.mark.parametrize(("mode", "backend"), [("raise", "epee"), ("mask", "gloo")])
def test_losses_that_sync_shows_are_not_raised_again(mode: str, backend: str) -> None:
    run_mortal(shown, NUM_RANKS, mode, backend, dead={2})


def too_few(rank: int, num_ranks: int, folder: str) -> None:
    program = Program(rank, folder, "mask")
    if rank == 0:
        with pytest.raises(NoQuorumError):
            program.buffer.sync(ones(), timeout=0.3)
        stages.reach(folder, "alone")
    stages.wait_for(folder, "alone")
    assert program.step(1) == [1, 1, 1]


def test_too_few_in_sync_decide_nothing() -> None:
    run_mortal(too_few, NUM_RANKS, dead=set())


# ---- a process that takes a lost rank's place


def replaced(slot: int, num_processes: int, folder: str, mode: str) -> Any:
    """Rank 1 dies, process 3 takes its place: the next call after `recover_ranks` has it."""
    if slot == 3:
        stages.wait_for(folder, "lost")
        group = start(1, NUM_RANKS, folder, mode, joins=True, on_stall="error")
        program = object.__new__(Program)
        program.rank, program.folder, program.group = 1, folder, group
        program.buffer = make_buffer(group)
    else:
        program = Program(slot, folder, mode)
        if slot == 1:
            die()
        got, _ = program.step_with_losses(1)
        while got[1]:
            got, _ = program.step_with_losses(1)
        program.meet("alone", (0, 2))
        stages.reach(folder, "lost")
        while raised(lambda: dist.barrier(group=program.group)) != "nothing":
            pass  # in mode "raise" the group tells the loss, too
        while not program.group.get_peer_state([1])[0]:
            time.sleep(0.01)
        program.group.recover_ranks([1])
    seen = [program.step(number) for number in (5, 6)]
    assert program.buffer.sync(ones()).tolist() == [1, 1, 1]
    seen.append(program.step(7))
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_a_replacement_takes_part_from_the_next_call_on(mode: str) -> None:
    results = run_mortal(replaced, 4, mode, dead={1})
    assert [results[slot] for slot in (0, 2, 3)] == [[[1, 1, 1]] * 3] * 3


# ---- errors, call by call


def wrong_calls(rank: int, num_ranks: int, folder: str, backend: str) -> list[tuple[str, str]]:
    """Return class and text of the errors of calls that cannot be made; after each of them a step works."""
    program = Program(rank, folder, "raise", backend)
    buffer = program.buffer
    idx, weights = routing(rank, NUM_RANKS, 9)
    other = make_buffer(program.group)
    foreign = other.dispatch(rows(rank, 9), idx, weights)
    assert isinstance(foreign.x, torch.Tensor)
    all_to_one = torch.zeros(16, 3, dtype=torch.int64)
    narrow = epee.Buffer(
        program.group,
        num_experts=6,
        hidden=HIDDEN,
        num_topk=3,
        max_tokens_per_rank=16,
        dtype=torch.float32,
        max_recv_rows=20,
        timeout=20.0,
    )
    calls: list[Callable[[], Any]] = [
        lambda: buffer.dispatch(rows(rank, 9)[:, :8] if rank == 1 else rows(rank, 9), idx, weights),  # a bad argument
        lambda: buffer.all_gather_bytes(b"1") if rank == 2 else buffer.dispatch(rows(rank, 9), idx, weights),
        lambda: buffer.dispatch(rows(rank, 9), idx, weights, layout="rank" if rank else "expert"),  # another layout
        lambda: buffer.combine(foreign.x, foreign.handle) if rank == 0 else program.step(9),  # another buffer's handle
        lambda: narrow.dispatch(torch.ones(16, HIDDEN), all_to_one),  # too many rows for rank 0
        lambda: buffer.refuse(InvalidArgument("own reason")) if rank == 0 else program.dispatch(9),
    ]
    seen = []
    for number, call in enumerate(calls):
        try:
            call()
            seen.append(("nothing", ""))
        except EpeeError as error:
            seen.append((type(error).__name__, str(error)))
        assert program.step(10 + number) == [1, 1, 1]
    narrow.dispatch(torch.ones(2, HIDDEN), all_to_one[:2])
    narrow.close()
    other.close()
    buffer.close()
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_that_cannot_be_made(backend: str) -> None:
    results = run_mortal(wrong_calls, NUM_RANKS, backend, dead=set())
    kinds = [[kind for kind, _ in seen] for seen in results]
    texts = [[text for _, text in seen] for seen in results]
    bad, unlike, layout, foreign, overflow, refused = zip(*kinds, strict=True)
    assert bad == ("MismatchError", "InvalidArgument", "MismatchError")
    assert "rank 1" in texts[0][0]
    assert texts[0][0].split("refused", 1)[1] == texts[2][0].split("refused", 1)[1]
    assert unlike == layout == ("MismatchError",) * 3
    for number in (1, 2):
        assert len({texts[rank][number].split(": ", 1)[1] for rank in ALL}) == 1, texts
    assert foreign == ("StaleHandleError", "MismatchError", "MismatchError")
    assert overflow == ("InvalidArgument",) * 3
    assert len({texts[rank][4].split(": ", 1)[1] for rank in ALL}) == 1, texts
    assert refused == ("nothing", "MismatchError", "MismatchError")
    assert "own reason" in texts[1][5]


def interrupted(rank: int, num_ranks: int, folder: str, op: str) -> Any:
    """Rank 0 is interrupted (Ctrl-C) while rank 2 keeps the call waiting."""
    program = Program(rank, folder, "raise")
    sent = program.dispatch(1)
    program.meet("ready", ALL)
    if rank == 2:
        stages.wait_for(folder, "interrupted")
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    seen = raised(lambda: program.dispatch(2) if op == "dispatch" else program.combine(sent, 1))
    if rank == 0:
        stages.reach(folder, "interrupted")
    program.meet("over", ALL)
    assert program.step(3) == program.step(4) == [1, 1, 1]
    return seen


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_an_interrupt_in_a_wait_gives_the_call_up_on_all_ranks(op: str) -> None:
    seen = run_mortal(interrupted, NUM_RANKS, op, dead=set())
    assert seen == ["KeyboardInterrupt", "CommTimeoutError", "CommTimeoutError"]


def closed(rank: int, num_ranks: int, folder: str) -> Any:
    """Rank 0's buffer is closed by another thread in mid-call."""
    program = Program(rank, folder, "mask")
    if rank == 0:
        threading.Timer(0.2, program.buffer.close).start()
        seen = raised(lambda: program.dispatch(1))
        assert raised(lambda: program.dispatch(1)) == "InvalidState"
        assert program.buffer.nbytes == 0
    else:
        if rank == 2:
            stages.wait_for(folder, "closed")
        seen = raised(lambda: program.dispatch(1))
    if rank == 0:
        stages.reach(folder, "closed")
    program.meet("over", ALL)
    return seen


def test_a_buffer_closed_in_mid_call_ends_the_call() -> None:
    seen = run_mortal(closed, NUM_RANKS, dead=set())
    assert seen[0] == "AbortedError"
    assert seen[1] == seen[2]
    assert seen[1] in ("CommTimeoutError", "MismatchError", "nothing")  # given up, or it goes on without rank 0


def stale(rank: int, num_ranks: int, folder: str) -> Any:
    """Handles of an earlier epoch, on all ranks and on one."""
    program = Program(rank, folder, "mask")
    buffer, old = program.buffer, program.dispatch(1)
    assert isinstance(old.x, torch.Tensor)
    assert buffer.sync(ones()).tolist() == [1, 1, 1]
    assert program.step(2) == [1, 1, 1]
    seen = [raised(lambda: buffer.combine(old.x, old.handle))]
    new = program.dispatch(3)
    mine = old if rank == 0 else new
    seen.append(raised(lambda: buffer.combine(mine.x, mine.handle)))  # type: ignore[arg-type]
    assert program.step(4) == [1, 1, 1]
    return seen


def test_handles_of_an_earlier_epoch_are_refused() -> None:
    seen = run_mortal(stale, NUM_RANKS, dead=set())
    assert [first for first, _ in seen] == ["StaleHandleError"] * 3
    assert seen[0][1] == "StaleHandleError"
    assert [last for _, last in seen[1:]] == ["MismatchError"] * 2
