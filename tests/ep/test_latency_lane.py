"""Latency buffers for CPU tensors as groups of a view, on gloo: what ranks that leave, stay away or fail do."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.ep.latency.one_host.members import EpochMembers
from epee.ep.latency.one_host.path import LatencyCpuPath
from epee.ep.members.gpu_members import GpuMembers
from epee.errors import EvictedError, InvalidState, NoQuorumError, PeerError, ResourceError, StaleHandleError
from epee.view.report import look_at_job
from tests.ep.latency_cases import Shape, check_round, dispatch, inputs, make
from tests.ep.test_latency_rejoin import masked_round, without
from tests.harness import run_ranks
from tests.survive import stages
from tests.survive.test_buffer_elsewhere import held

SHAPE = Shape(num_experts=12, hidden=512, num_topk=2, max_tokens=6)
NUM_TOKENS = (6, 3, 4, 5)


def _ones(num_ranks: int) -> torch.Tensor:
    return torch.ones(num_ranks, dtype=torch.int32)


def _stale(rank: int, num_ranks: int) -> list[int]:
    with make(SHAPE) as buffer:
        given = inputs(SHAPE, NUM_TOKENS[:num_ranks], 1)[rank]
        old = dispatch(buffer, given)
        epochs = [buffer.epoch]
        buffer.sync()
        epochs.append(buffer.epoch)
        with pytest.raises(StaleHandleError):
            buffer.combine_input(old.handle)
        for seed in range(6):
            check_round(buffer, SHAPE, NUM_TOKENS[:num_ranks], seed)
        return epochs


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_sync_begins_an_epoch_and_older_handles_are_stale(num_ranks: int) -> None:
    first, *others = run_ranks(_stale, num_ranks)
    assert all(other == first for other in others)
    assert first[1] > first[0] > 0


def _closed(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 1 closes its buffer after two rounds; what it has finished ends well, and it is lost at once."""
    buffer = make(SHAPE, timeout=60)
    mask = _ones(num_ranks)
    for seed in range(2):
        masked_round(buffer, mask, seed, without(num_ranks))
    if rank == 1:
        buffer.close()
        stages.reach(folder, "closed")
    else:
        stages.wait_for(folder, "closed")
        with pytest.raises(PeerError, match=r"has closed the buffer|has left the group"):
            dispatch(buffer, inputs(SHAPE, NUM_TOKENS[:num_ranks], 2)[rank])
        masked_round(buffer, mask, 3, without(num_ranks, 1))
        with pytest.raises(PeerError, match=r"has closed the buffer|has left the group"):
            buffer.all_gather_bytes(b"1")
        assert buffer.sync(mask).tolist() == [1, 0, 1]
        assert buffer.all_gather_bytes(bytes([rank])) == [b"\0", b"", b"\2"]
        masked_round(buffer, mask, 4, without(num_ranks, 1))
    stages.meet(folder, "end", rank, range(num_ranks))


def test_who_closes_its_buffer_is_lost_at_once(tmp_path: Path) -> None:
    run_ranks(_closed, 3, str(tmp_path))


def _left_out(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 2 lives and is not in the epoch: calls with a mask go on without it, others say so."""
    with make(SHAPE, timeout=60) as buffer:
        mask = _ones(num_ranks)
        masked_round(buffer, mask, 0, without(num_ranks))
        if rank != 2:
            mask[2] = 0
            assert buffer.sync(mask).tolist() == [1, 1, 0]
            with pytest.raises(PeerError, match="rank 2: it is not in this epoch"):
                dispatch(buffer, inputs(SHAPE, NUM_TOKENS[:num_ranks], 1)[rank])
            masked_round(buffer, mask, 1, without(num_ranks, 2))
        stages.meet(folder, "end", rank, range(num_ranks))


def test_who_lives_and_is_left_out_is_an_error_of_calls_without_a_mask(tmp_path: Path) -> None:
    run_ranks(_left_out, 3, str(tmp_path))


def _away(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 2 does not come to a sync: it is told so, and comes back."""
    with make(SHAPE, timeout=60) as buffer:
        mask = _ones(num_ranks)
        masked_round(buffer, mask, 0, without(num_ranks))
        if rank == 2:
            stages.wait_for(folder, "synced-0")
            stages.wait_for(folder, "synced-1")
            given = inputs(SHAPE, NUM_TOKENS[:num_ranks], 1)[rank]
            until = time.monotonic() + 30
            while mask[:2].any():  # the agent of this process hears of it a moment later
                assert time.monotonic() < until
                dispatch(buffer, given, active_ranks=mask, timeout_us=20_000_000)
            with pytest.raises(EvictedError, match="did not come to sync"):
                dispatch(buffer, given)
            with pytest.raises(EvictedError, match="did not come to sync"):
                buffer.all_gather_bytes(b"2")
        else:
            mask[2] = 0
            assert buffer.sync(mask).tolist() == [1, 1, 0]
            masked_round(buffer, mask, 1, without(num_ranks, 2))
            stages.meet(folder, "synced", rank, (0, 1))
            mask.fill_(1)
        for _ in range(50):
            try:
                if buffer.sync(mask, timeout=10).all():
                    break
            except NoQuorumError:
                assert rank == 2  # its time was over before the others came
        masked_round(buffer, mask, 2, without(num_ranks))


def test_who_does_not_come_to_sync_is_told_and_comes_back(tmp_path: Path) -> None:
    run_ranks(_away, 3, str(tmp_path))


# before its memory is mapped (on GPUs, too), as it is handed to the path, and mapped; once all has begun
STEPS: dict[str, list[tuple[Any, str]]] = {
    "enter": [(EpochMembers, "_enter"), (GpuMembers, "_enter")],
    "move": [(LatencyCpuPath, "move")],
    "begin": [(EpochMembers, "_attach")],
    "use": [(EpochMembers, "_close")],
}


def _taken_out(rank: int, num_ranks: int, error: type[BaseException], step: str = "enter") -> list[int]:
    """An error takes rank 1 out of its sync behind the decision: it enters with its next call."""
    works = [(*where, getattr(*where)) for where in STEPS[step]]
    with make(SHAPE, timeout=60) as buffer:
        mask = _ones(num_ranks)
        masked_round(buffer, mask, 0, without(num_ranks))

        def fails(*args: object) -> None:
            for owner, name, function in works:
                setattr(owner, name, function)
            raise error("in the midst of sync")

        if rank == 1:
            for owner, name, _ in works:
                setattr(owner, name, fails)
            with pytest.raises(error, match="in the midst of sync"):
                buffer.sync(mask)
        else:
            assert buffer.sync(mask).tolist() == [1] * num_ranks
        for seed in range(1, 4):
            masked_round(buffer, mask, seed, without(num_ranks))
        assert buffer.sync(mask).tolist() == [1] * num_ranks  # this one is another sync on all
        masked_round(buffer, mask, 5, without(num_ranks))
        return [buffer.epoch]


@pytest.mark.parametrize("step", ["enter", "move", "begin", "use"])
@pytest.mark.parametrize("error", [ResourceError, KeyboardInterrupt])
def test_who_is_taken_out_of_a_sync_that_was_decided_enters_with_its_next_call(
    error: type[BaseException], step: str
) -> None:
    first, *others = run_ranks(_taken_out, 3, error, step)
    assert all(other == first for other in others)


def _never_comes(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 1 is taken out of its sync and makes no call: the others go on without it when their time is over."""
    with make(SHAPE, timeout=2) as buffer:
        mask = _ones(num_ranks)
        masked_round(buffer, mask, 0, without(num_ranks))

        def fails(*args: object) -> None:
            raise ResourceError("in the midst of sync")

        if rank == 1:
            EpochMembers._enter = GpuMembers._enter = fails  # type: ignore[method-assign]
            with pytest.raises(ResourceError):
                buffer.sync(mask)
            stages.wait_for(folder, "went on-0")
            stages.wait_for(folder, "went on-2")
        else:
            assert buffer.sync(mask).tolist() == [1] * num_ranks
            masked_round(buffer, mask, 1, without(num_ranks, 1))
            stages.meet(folder, "went on", rank, (0, 2))
        dist.barrier()


def test_nobody_waits_for_ever_for_who_was_taken_out_of_its_sync(tmp_path: Path) -> None:
    run_ranks(_never_comes, 3, str(tmp_path))


def _lives(rank: int, num_ranks: int, times: int) -> tuple[Any, Any]:
    """Make a buffer, let it enter epochs, and close it, again and again; return what this process holds."""
    before = None
    for number in range(times):
        with make(SHAPE) as buffer:
            for seed in range(2):
                check_round(buffer, SHAPE, NUM_TOKENS[:num_ranks], seed)
                buffer.sync()
        if number == 2:
            before = held()
    return before, held()


def check_lives(ends: list[tuple[Any, Any]]) -> None:
    """Threads are as many as before, and nothing of epee's is held that was not held after some lives."""
    for before, after in ends:
        more = Counter(after[2]) - Counter(before[2])
        assert not [link for link in more if "epee" in link or "pidfd" in link or "anon_inode" in link], more
        assert after[0] <= before[0]


@pytest.mark.parametrize("times", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_many_lives_leave_nothing(times: int) -> None:
    check_lives(run_ranks(_lives, 2, times))


def _late(rank: int, num_ranks: int) -> list[list[str]]:
    """Rank 1 comes when it sees that rank 0 waits for it, in each half; then both look at themselves."""
    with make(SHAPE) as buffer:
        given = inputs(SHAPE, NUM_TOKENS[:num_ranks], 1)[rank]
        until = time.monotonic() + 60
        for is_hooked in (False, True):
            seen: set[tuple[str, tuple[int, ...]]] = set()
            while rank == 1 and ("dispatch", (1,)) not in seen:
                assert time.monotonic() < until, seen
                report = look_at_job(os.getpid(), look_s=0.0)
                seen = {(row.op, row.waits_for) for other in report.ranks for row in other.rows}
            got = dispatch(buffer, given, return_hook=is_hooked)
            if got.hook is not None:
                got.hook()
        report = look_at_job(os.getpid(), look_s=0.0)
        dist.barrier()
        return [[row.op for row in other.rows] for other in report.ranks if other.slot == rank]


def test_hang_reports_show_for_whom_a_half_waits_and_nothing_afterwards() -> None:
    for rows in run_ranks(_late, 2):
        assert rows == [[""]]


def forget_pending(buffer: epee.LatencyBuffer) -> None:
    """Let the buffer of this rank have no call that waits for its hook."""
    path: Any = buffer._path
    for calls in path.core._open.values() if buffer.config.is_cuda else [path.wire._open]:
        calls.clear()


def _old_hook(rank: int, num_ranks: int) -> None:
    """A hook of an epoch that is over receives nothing of the present one, and frees no slot of it."""
    with make(SHAPE) as buffer:
        given = inputs(SHAPE, NUM_TOKENS[:num_ranks], 1)[rank]
        old = dispatch(buffer, given, return_hook=True)
        forget_pending(buffer)  # as if an error had taken it out of a sync before
        buffer.sync()
        new = dispatch(buffer, given, return_hook=True)
        assert old.hook is not None
        assert new.hook is not None
        for _ in range(2):
            with pytest.raises(StaleHandleError, match="this hook is of a call of epoch"):
                old.hook()
        new.hook()
        with pytest.raises(InvalidState, match="has been called already"):
            new.hook()
        for seed in range(6):
            check_round(buffer, SHAPE, NUM_TOKENS[:num_ranks], seed)


def test_a_hook_of_an_epoch_that_is_over_is_stale() -> None:
    run_ranks(_old_hook, 2)


def _fails_to_come_in(rank: int, num_ranks: int) -> tuple[Any, Any]:
    owner, name = EpochMembers, "_enter"
    comes = getattr(owner, name)

    def fails(group_id: Any, *args: float) -> None:
        comes(group_id, *args)
        raise ResourceError("no more")

    before = None
    for number in range(6):
        if rank == 1:
            setattr(owner, name, fails)
        with pytest.raises(ResourceError, match="rank 1 could not make its part"):
            make(SHAPE)
        setattr(owner, name, comes)
        if number == 2:
            before = held()
    with make(SHAPE) as buffer:
        check_round(buffer, SHAPE, NUM_TOKENS[:num_ranks], 1)
        dist.barrier()
    make(SHAPE).close()  # what the last one has left is given back now
    return before, held()


def test_a_buffer_that_cannot_be_made_leaves_nothing() -> None:
    check_lives(run_ranks(_fails_to_come_in, 2))
