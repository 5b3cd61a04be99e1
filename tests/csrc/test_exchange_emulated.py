"""The exchange of rows between the CPU sides of a GPU buffer, on the emulated GPU: how its calls fail, and go on.

What the ranks of a call learn, and that their next calls agree, when one of them is late, interrupted, killed, refused,
or stores a damaged row; and how a buffer is made, or enters an epoch, if one rank lacks something on the way.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import epee
from epee.engine import EngineMeeting
from epee.ep.members.gpu_members import GpuMembers
from epee.ep.members.header import HEADER_NAMES
from epee.ep.members.member_sync import MemberSync
from epee.ep.members.rows import RowsPlan
from epee.ep.throughput.gpu.epochs import Epochs
from epee.errors import (
    CommTimeoutError,
    EpeeError,
    InvalidArgument,
    InvalidState,
    MismatchError,
    RankFailedError,
    ResourceError,
)
from tests.csrc.emulated import has_compiler
from tests.csrc.emulated_buffer import emulated
from tests.csrc.test_latency_buffer_emulated import emulated as emulated_latency
from tests.ep import moments
from tests.ep.test_latency_calls import closed_meanwhile, interrupted
from tests.harness import DEAD, run_ranks
from tests.survive import stages

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
HIDDEN, NUM_EXPERTS = 16, 6


def make() -> epee.Buffer:
    return epee.Buffer(num_experts=NUM_EXPERTS, hidden=HIDDEN, num_topk=2, max_tokens_per_rank=8, timeout=60.0)


def make_latency() -> epee.LatencyBuffer:
    return epee.LatencyBuffer(num_experts=NUM_EXPERTS, hidden=512, num_topk=2, max_tokens_per_rank=8, timeout=60.0)


def gather(
    buffer: epee.Buffer | epee.LatencyBuffer, word: str, members: list[int] | None = None, timeout: float | None = None
) -> None:
    """Let all ranks give each other `word` and their numbers; more than one row long."""
    ranks = range(buffer.num_ranks) if members is None else members
    want = [f"{rank}{word}".encode() * 100 if rank in ranks else b"" for rank in range(buffer.num_ranks)]
    assert buffer.all_gather_bytes(f"{buffer.rank}{word}".encode() * 100, timeout=timeout) == want


def step(buffer: epee.Buffer) -> None:
    """Each rank sends a row to every rank, and gets the sum of what they make of it."""
    n, rank = buffer.num_ranks, buffer.rank
    idx = torch.tensor([[dst * NUM_EXPERTS // n, -1] for dst in range(n)])
    got = buffer.dispatch(torch.full((n, HIDDEN), 1.0 + rank, dtype=torch.bfloat16), idx)
    assert got.x[:, 0].tolist() == [1.0 + src for src in range(n)]  # type: ignore[union-attr, call-overload]
    back = buffer.combine(torch.full_like(got.x, 10.0 + rank), got.handle)  # type: ignore[arg-type]
    assert back.x[:, 0].tolist() == [10.0 + dst for dst in range(n)]


def once(owner: Any, name: str, act: Callable[[], object], first: bool = True) -> None:
    """Let `act` run once at the next call of a function: before it, or behind it; an error of `act` leaves it."""
    works, had = getattr(owner, name), name in vars(owner)

    def acts(*args: Any, **options: Any) -> Any:
        if had:
            setattr(owner, name, works)
        else:
            delattr(owner, name)
        if first:
            act()
        result = works(*args, **options)
        if not first:
            act()
        return result

    setattr(owner, name, acts)


def interrupt() -> None:
    raise KeyboardInterrupt


def forever(call: Callable[[], object]) -> None:
    """Repeat a call until it raises; that it does not is for the test's time-out."""
    while True:
        call()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# ---- a rank that is late


def late(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 0 makes its call when that of the others is over: it is over for it, too."""
    with make() as buffer:
        gather(buffer, "before")
        if rank == 0:
            for other in range(1, num_ranks):
                stages.wait_for(folder, f"told-{other}")
        with pytest.raises(CommTimeoutError) as caught:
            gather(buffer, "late", timeout=1.0 if rank else None)
        assert (0 in caught.value.ranks) is (rank != 0)
        stages.reach(folder, f"told-{rank}")
        for turn in range(3):
            gather(buffer, f"again{turn}")
        step(buffer)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_who_comes_late_is_named_and_the_repeated_call_works_on_all(num_ranks: int, tmp_path: Path) -> None:
    run_ranks(emulated, num_ranks, late, str(tmp_path), timeout_s=200)


# ---- interrupts


def stopped(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 1 is interrupted when it has published its part of a call, and waits for one that is not there."""
    with make() as buffer:
        gather(buffer, "before")
        if rank == 1:
            moments.after_publishing(buffer._exchange, RowsPlan, interrupt)
        if rank == 0:
            stages.wait_for(folder, "told-1")
        with pytest.raises(KeyboardInterrupt if rank == 1 else CommTimeoutError):
            gather(buffer, "stopped")
        stages.meet(folder, "told", rank, range(num_ranks))
        for turn in range(3):
            gather(buffer, f"again{turn}")
        step(buffer)


def test_a_call_that_an_interrupt_ends_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    run_ranks(emulated, 3, stopped, str(tmp_path), timeout_s=200)


def unmade(rank: int, num_ranks: int) -> None:
    """Rank 1 is interrupted before it has announced anything: it has made no call, and repeats it."""
    with make() as buffer:
        gather(buffer, "before")
        if rank == 1:
            moments.before_its_row(buffer, interrupt)
            with pytest.raises(KeyboardInterrupt):
                gather(buffer, "unmade")
        for turn in range(3):
            gather(buffer, f"again{turn}")


def test_an_interrupt_before_the_announcement_leaves_the_call_unmade() -> None:
    run_ranks(emulated, 3, unmade, timeout_s=200)


def overtaken(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 1 is interrupted in its call when the others have the result: nobody goes on as if it had it, too."""

    def too_late() -> None:
        for other in (0, 2):
            stages.wait_for(folder, f"has-{other}")
        interrupt()

    with make() as buffer:
        gather(buffer, "before")
        if rank == 1:
            moments.when_it_has_all_rows(buffer, too_late)
            with pytest.raises(KeyboardInterrupt):
                buffer.all_gather_bytes(b"1")
        else:
            assert buffer.all_gather_bytes(bytes([rank])) == [b"\0", b"1", b"\2"]
            stages.reach(folder, f"has-{rank}")
        stand_apart(buffer, rank == 1)


def stand_apart(buffer: epee.Buffer, is_behind: bool) -> None:
    """A call has a result on some ranks, and not on those that are behind: the next calls say so, until a sync."""
    for _ in range(2):
        with pytest.raises(InvalidState if is_behind else MismatchError, match="others have completed it"):
            gather(buffer, "next")
    assert buffer.sync().tolist() == [1] * buffer.num_ranks
    gather(buffer, "again")
    step(buffer)


def test_who_is_interrupted_when_the_others_have_the_result_says_so_until_the_next_sync(tmp_path: Path) -> None:
    run_ranks(emulated, 3, overtaken, str(tmp_path), timeout_s=200)


def interrupted_in_latency_mode(rank: int, num_ranks: int, folder: str) -> None:
    emulated_latency(rank, num_ranks, interrupted, folder)


def test_in_latency_mode_who_is_interrupted_when_the_others_have_the_result_says_so(tmp_path: Path) -> None:
    run_ranks(interrupted_in_latency_mode, 3, str(tmp_path), timeout_s=200)


def closed_in_latency_mode(rank: int, num_ranks: int, folder: str) -> None:
    emulated_latency(rank, num_ranks, closed_meanwhile, folder)


def test_closing_in_another_thread_ends_a_gather(tmp_path: Path) -> None:
    run_ranks(closed_in_latency_mode, 2, str(tmp_path), timeout_s=200)


# ---- kills


def killed(rank: int, num_ranks: int, moment: str) -> None:
    """Rank 1 is killed in a call, and the others go on without it."""
    buffer = make()
    gather(buffer, "before")
    if rank == 1:
        getattr(moments, moment)(buffer, die)
    with pytest.raises(RankFailedError) as caught:
        forever(lambda: buffer.all_gather_bytes(bytes([rank])))  # what it has told all ranks counts
    assert caught.value.ranks == (1,)
    with pytest.raises(RankFailedError) as again:
        gather(buffer, "lost")
    assert again.value.ranks == (1,)
    assert buffer.sync().tolist() == [1, 0, 1]
    for turn in range(3):
        gather(buffer, f"rest{turn}", [0, 2])
    buffer.close()


@pytest.mark.parametrize("moment", ["before_its_row", "when_it_waits", "when_it_has_all_rows"])
def test_who_is_killed_in_a_call_is_named_and_left_out_by_the_next_sync(moment: str) -> None:
    assert run_ranks(emulated, 3, killed, moment, timeout_s=200, dead={1}) == [None, DEAD, None]


def killed_in_sync(rank: int, num_ranks: int, where: str) -> None:
    """Rank 1 is killed in its sync: the others' one ends without it, or the next one does."""
    buffer = make()
    step(buffer)
    if rank == 1:
        replaced_once(*SYNCING[where], die)
    while (agreed := buffer.sync().tolist()) != [1, 0, 1]:
        assert agreed == [1, 1, 1]
        with pytest.raises((RankFailedError, CommTimeoutError)) as caught:  # the latter, if the other has given up
            gather(buffer, "lost")
        assert 1 in caught.value.ranks
    for turn in range(3):
        gather(buffer, f"rest{turn}", [0, 2])
    buffer.close()


@pytest.mark.parametrize("where", ["meet", "enter", "prepare", "second call", "move", "begin"])
def test_who_is_killed_in_a_sync_is_left_out_by_this_one_or_the_next(where: str) -> None:
    assert run_ranks(emulated, 3, killed_in_sync, where, timeout_s=200, dead={1}) == [None, DEAD, None]


def apart(rank: int, num_ranks: int, folder: str, is_latency: bool) -> None:
    """Rank 1 dies in its sync when all are ready: 0 has mapped its memory, and 2 finds it dead."""

    def dies() -> None:
        (Path(folder) / "victim").write_text(str(os.getpid()))
        stages.wait_for(folder, "mapped")
        stages.reach(folder, "dying")
        die()

    def await_death() -> None:
        """Return when nothing of the victim can be mapped: its descriptors go after its memory."""
        stages.wait_for(folder, "dying")
        with contextlib.suppress(OSError):
            while os.listdir(f"/proc/{(Path(folder) / 'victim').read_text()}/fd"):
                os.sched_yield()

    buffer = make_latency() if is_latency else make()
    gather(buffer, "before")
    owner: Any = buffer._path if is_latency else buffer._path._epochs  # type: ignore[union-attr]
    act = {0: lambda: stages.reach(folder, "mapped"), 1: dies, 2: await_death}
    once(owner, "move", act[rank])
    assert buffer.sync().tolist() == [1, 1, 1]
    for turn in range(3):
        with pytest.raises(RankFailedError) as caught:
            buffer.all_gather_bytes(bytes([rank]))
        assert caught.value.ranks == (1,)
        stages.meet(folder, f"told{turn}", rank, (0, 2))
    assert buffer.sync().tolist() == [1, 0, 1]
    gather(buffer, "rest", [0, 2])
    buffer.close()


def apart_in_latency_mode(rank: int, num_ranks: int, folder: str) -> None:
    emulated_latency(rank, num_ranks, apart, folder, True)


def test_who_was_lost_on_its_way_into_an_epoch_is_lost_for_all(tmp_path: Path) -> None:
    """No rank has results of a call of which another one says that a rank is missing."""
    assert run_ranks(emulated, 3, apart, str(tmp_path), False, timeout_s=200, dead={1}) == [None, DEAD, None]


def test_in_latency_mode_who_was_lost_on_its_way_into_an_epoch_is_lost_for_all(tmp_path: Path) -> None:
    assert run_ranks(apart_in_latency_mode, 3, str(tmp_path), timeout_s=200, dead={1}) == [None, DEAD, None]


# ---- damage


def flipped(row: bytes, word: int, bit: int) -> bytes:
    damaged = bytearray(row)
    damaged[8 * word + bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def damaged(rank: int, num_ranks: int) -> list[list[str]]:
    """A bit of the header that rank 1 makes is another one: in each word the highest, and the lowest."""
    told = []
    with make() as buffer:
        gather(buffer, "before")
        form: Any = buffer._exchange._format
        for word, name in enumerate(HEADER_NAMES):
            for bit in (0, 63):
                if rank == 1:
                    pack = form.pack
                    form.pack = lambda *args, word=word, bit=bit, pack=pack: flipped(pack(*args), word, bit)
                try:
                    assert buffer.all_gather_bytes(bytes([rank])) == [b"\0", b"\1", b"\2"]
                except EpeeError as error:
                    told.append([name, str(bit), type(error).__name__])
                if rank == 1:
                    del form.pack
                gather(buffer, "again")
    return told


def test_a_flipped_bit_in_a_header_is_the_same_error_on_all_ranks() -> None:
    first, *others = run_ranks(emulated, 3, damaged, timeout_s=200)
    assert others == [first] * 2
    assert {name for name, bit, _ in first if bit == "63"} == set(HEADER_NAMES)
    assert {error for _, bit, error in first if bit == "63"} == {"ProtocolError"}
    no_matter = {"arena_alignment", "num_tokens", "slot"}  # of a call that moves no rows
    assert {name for name, bit, _ in first if bit == "0"} == set(HEADER_NAMES) - no_matter


# ---- refusals


def refused(rank: int, num_ranks: int) -> None:
    with make() as buffer:
        for turn in range(3):
            gather(buffer, f"before{turn}")
            if rank == turn:
                with pytest.raises(InvalidArgument, match="data must be bytes, got str"):
                    buffer.all_gather_bytes("text")  # type: ignore[arg-type]
            else:
                with pytest.raises(MismatchError, match=f"rank {turn} refused its call.*data must be bytes, got str"):
                    buffer.all_gather_bytes(b"bytes")
        with pytest.raises(MismatchError, match=r"number of bytes.*rank 0 has 1, rank 2 has 2"):
            buffer.all_gather_bytes(b"1" if rank < 2 else b"22")
        gather(buffer, "again")
        step(buffer)


def test_a_refusal_on_one_rank_is_told_to_the_others_and_the_next_call_works() -> None:
    run_ranks(emulated, 3, refused, timeout_s=200)


def elsewhere(rank: int, num_ranks: int) -> None:
    """Rank 1 makes another call than sync."""
    with make() as buffer:
        for turn in range(2):
            gather(buffer, f"before{turn}")
            with pytest.raises(MismatchError, match="it makes another call" if rank != 1 else "refused its call.*sync"):
                gather(buffer, "another") if rank == 1 else buffer.sync()
        gather(buffer, "again")
        assert buffer.sync().tolist() == [1] * num_ranks
        step(buffer)


def test_another_call_than_sync_is_an_error_on_all_ranks_and_the_next_call_works() -> None:
    run_ranks(emulated, 3, elsewhere, timeout_s=200)


# ---- what is lacking while a buffer is made, or enters an epoch


def lacks() -> None:
    raise ResourceError("no descriptors")


MAKING: dict[str, tuple[Any, str]] = {
    "meet": (EngineMeeting, "meet"),
    "attach": (EngineMeeting, "attach"),
    "begin": (EngineMeeting, "begin"),
}


def replaced_once(owner: Any, name: str, act: Callable[[], object]) -> None:
    """Let `act` run once in place of a method of a class."""
    works = getattr(owner, name)

    def fails(*args: Any, **options: Any) -> None:
        setattr(owner, name, works)
        act()

    setattr(owner, name, fails)


def lacking(rank: int, num_ranks: int) -> list[str]:
    """Rank 1 cannot make its part, at each step in turn; then all can."""
    told = []
    for step_name, (owner, name) in MAKING.items():
        if rank == 1:
            replaced_once(owner, name, lacks)
        with pytest.raises(ResourceError, match="rank 1 could not make its part: ResourceError: no descr") as caught:
            make()
        told.append(f"{step_name}: {caught.value}")
        with make() as buffer:
            gather(buffer, step_name)
            step(buffer)
    return told


def test_a_shortage_while_a_buffer_is_made_is_the_same_error_on_all_ranks() -> None:
    first, *others = run_ranks(emulated, 3, lacking, timeout_s=200)
    assert others == [first] * 2


ENTERING: dict[str, tuple[Any, str]] = {
    "prepare": (Epochs, "prepare"),
    "second call": (GpuMembers, "_second_call"),
    "move": (Epochs, "move"),
    "begin": (GpuMembers, "_begin"),
}


SYNCING: dict[str, tuple[Any, str]] = {
    **ENTERING,
    "meet": (MemberSync, "meet"),
    "enter": (GpuMembers, "_enter"),
}


def taken_out(rank: int, num_ranks: int, where: str, error: type[BaseException]) -> int:
    """An error takes rank 1 out of its sync behind the decision: it enters with its next call."""

    def fails() -> None:
        raise error("in the midst of sync")

    with make() as buffer:
        step(buffer)
        if rank == 1:
            replaced_once(*ENTERING[where], fails)
            with pytest.raises(error, match="in the midst of sync"):
                buffer.sync()
        else:
            assert buffer.sync().tolist() == [1] * num_ranks
        for turn in range(2):
            gather(buffer, f"entered{turn}")
            step(buffer)
        assert buffer.sync().tolist() == [1] * num_ranks  # this one is another sync on all
        gather(buffer, "again")
        step(buffer)
        return buffer.epoch


@pytest.mark.parametrize("error", [ResourceError, KeyboardInterrupt])
@pytest.mark.parametrize("where", list(ENTERING))
def test_who_is_taken_out_of_a_sync_at_any_step_enters_with_its_next_call(
    where: str, error: type[BaseException]
) -> None:
    first, *others = run_ranks(emulated, 3, taken_out, where, error, timeout_s=200)
    assert others == [first] * 2
