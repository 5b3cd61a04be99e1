"""GPU buffers as lanes of a view, on the emulated GPU: what ranks that die, leave, stay away or fail are told."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import epee
from epee.ep.members.gpu_members import GpuMembers
from epee.ep.members.rows import RowsPlan
from epee.errors import (
    CommTimeoutError,
    EvictedError,
    InvalidState,
    NoQuorumError,
    PeerError,
    ProtocolError,
    RankFailedError,
    ResourceError,
    StaleHandleError,
)
from tests.csrc.emulated import has_compiler
from tests.csrc.emulated_buffer import emulated
from tests.csrc.test_latency_buffer_emulated import emulated as emulated_latency
from tests.ep import moments
from tests.ep import test_latency_lane as latency_tests
from tests.harness import DEAD, run_mortal, run_ranks
from tests.survive import stages
from tests.survive.buffer_rounds import start
from tests.survive.test_buffer_elsewhere import held

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(240),  # the first one builds the kernels
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
HIDDEN, NUM_EXPERTS = 16, 6


def make(group: Any = None, timeout: float = 60.0) -> epee.Buffer:
    return epee.Buffer(
        group, num_experts=NUM_EXPERTS, hidden=HIDDEN, num_topk=2, max_tokens_per_rank=8, timeout=timeout
    )


def begin(rank: int, folder: str, backend: str = "gloo", timeout: float = 60.0) -> tuple[Any, epee.Buffer]:
    """Make a group of three and a buffer that has worked once."""
    group = start(rank, 3, folder, "mask", backend=backend, on_stall="error")
    buffer = make(group, timeout)
    step(buffer, [1, 1, 1])
    stages.meet(folder, "made", rank, range(3))
    return group, buffer


def step(buffer: epee.Buffer, members: list[int]) -> None:
    """Each rank sends a row to every rank; who is there answers with its number."""
    rank = buffer.rank
    x = torch.full((3, HIDDEN), 1.0 + rank, dtype=torch.bfloat16)
    idx = torch.tensor([[0, -1], [2, -1], [4, -1]])
    got = buffer.dispatch(x, idx)
    want = [1.0 + src for src, is_in in enumerate(members) if is_in]
    assert got.x[:, 0].tolist() == want
    back = buffer.combine(torch.full_like(got.x, 10.0 + rank), got.handle)
    assert back.x[:, 0].tolist() == [10.0 + dst if is_in else 0.0 for dst, is_in in enumerate(members)]


def forever(call: Callable[[], None]) -> None:
    """Repeat a call until it raises; that it does not is for the test's time-out."""
    while True:
        call()


def dies(rank: int, num_ranks: int, folder: str) -> Any:
    _, buffer = begin(rank, folder)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RankFailedError) as caught:
            forever(lambda: step(buffer, [1, 1, 1]))  # one that the dead rank had begun may end well
        assert caught.value.ranks == (1,)
    mask = torch.ones(3, dtype=torch.int32)
    assert buffer.sync(mask).tolist() == mask.tolist() == [1, 0, 1]
    step(buffer, [1, 0, 1])
    assert buffer.all_gather_bytes(bytes([rank])) == [b"\0", b"", b"\2"]
    stages.meet(folder, "end", rank, (0, 2))
    return buffer.epoch > 1


def away(rank: int, num_ranks: int, folder: str) -> Any:
    _, buffer = begin(rank, folder)
    mask = torch.ones(3, dtype=torch.int32)
    if rank == 2:
        stages.wait_for(folder, "synced-0")
        stages.wait_for(folder, "synced-1")
        with pytest.raises(EvictedError, match="did not come to sync"):
            forever(buffer.check)  # the agent of this process hears of it a moment later
    else:
        mask[2] = 0
        assert buffer.sync(mask).tolist() == [1, 1, 0]
        step(buffer, [1, 1, 0])
        stages.meet(folder, "synced", rank, (0, 1))
        mask.fill_(1)
    for _ in range(50):
        try:
            if buffer.sync(mask, timeout=10).all():
                break
        except NoQuorumError:
            assert rank == 2  # its time was over before the others came
    step(buffer, [1, 1, 1])
    stages.meet(folder, "end", rank, range(3))


def closes(rank: int, num_ranks: int, folder: str) -> Any:
    _, buffer = begin(rank, folder)
    if rank == 1:
        buffer.close()
        stages.reach(folder, "closed")
        stages.wait_for(folder, "end-0")
        stages.wait_for(folder, "end-2")
        return
    stages.wait_for(folder, "closed")
    buffer.check()  # what is over has gone well
    with pytest.raises(PeerError, match=r"has closed the buffer|has left the group"):
        step(buffer, [1, 1, 1])
    assert buffer.sync().tolist() == [1, 0, 1]
    step(buffer, [1, 0, 1])
    stages.meet(folder, "end", rank, (0, 2))


def taken_out(rank: int, num_ranks: int, folder: str) -> Any:
    """An error takes rank 1 out of its sync behind the decision: it enters with its next call."""
    _, buffer = begin(rank, folder)
    enter = GpuMembers._enter

    def fails(*args: Any) -> None:
        GpuMembers._enter = enter  # type: ignore[method-assign]
        raise KeyboardInterrupt("in the midst of sync")

    old = buffer.dispatch(torch.ones(1, HIDDEN, dtype=torch.bfloat16), torch.tensor([[0, -1]]))
    if rank == 1:
        GpuMembers._enter = fails  # type: ignore[method-assign, assign]
        with pytest.raises(KeyboardInterrupt):
            buffer.sync()
    else:
        assert buffer.sync().tolist() == [1, 1, 1]
    step(buffer, [1, 1, 1])
    with pytest.raises(StaleHandleError):
        buffer.combine_input(old.handle)
    assert buffer.sync().tolist() == [1, 1, 1]
    step(buffer, [1, 1, 1])
    stages.meet(folder, "end", rank, range(3))
    return buffer.epoch


def never_enters(rank: int, num_ranks: int, folder: str) -> Any:
    """Rank 1 is taken out of its sync and makes no call: the others' sync is an error, their next one leaves it out."""
    _, buffer = begin(rank, folder, timeout=2.0)

    def fails(*args: Any) -> None:
        raise KeyboardInterrupt("in the midst of sync")

    if rank == 1:
        GpuMembers._enter = fails  # type: ignore[method-assign, assign]
        with pytest.raises(KeyboardInterrupt):
            buffer.sync()
        stages.wait_for(folder, "end-0")
        stages.wait_for(folder, "end-2")
        return
    with pytest.raises(CommTimeoutError, match="rank 1 does not come into epoch"):
        buffer.sync()
    stages.meet(folder, "told", rank, (0, 2))
    assert buffer.sync(timeout=4.0).tolist() == [1, 0, 1]
    step(buffer, [1, 0, 1])
    stages.meet(folder, "end", rank, (0, 2))


def on_gpu(rank: int, num_ranks: int, folder: str, name: str) -> Any:
    return emulated(rank, num_ranks, globals()[name], folder)


def test_after_a_death_sync_brings_the_rest_together() -> None:
    assert run_mortal(on_gpu, 3, "dies", dead={1}, timeout_s=200) == [True, DEAD, True]


def test_who_does_not_come_to_sync_is_told_and_comes_back() -> None:
    run_mortal(on_gpu, 3, "away", dead=set(), timeout_s=200)


def test_who_has_closed_the_buffer_is_named_at_once() -> None:
    run_mortal(on_gpu, 3, "closes", dead=set(), timeout_s=200)


def test_who_is_taken_out_of_a_sync_that_was_decided_enters_with_its_next_call() -> None:
    first, *others = run_mortal(on_gpu, 3, "taken_out", dead=set(), timeout_s=200)
    assert others == [first] * 2


def test_who_never_enters_what_was_agreed_is_left_out_by_the_next_sync() -> None:
    run_mortal(on_gpu, 3, "never_enters", dead=set(), timeout_s=200)


def forges(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 1 gives numbers that cannot be: an error on all, and the next sync is right."""
    _, buffer = begin(rank, folder)
    data = GpuMembers._data
    for numbers in ((1 << 62, 0, 0), (0, 1 << 62, 0), (0, 0, 1 << 62)):
        if rank == 1:
            GpuMembers._data = lambda _, numbers=numbers: struct.pack("<QQQ", *numbers)  # type: ignore[method-assign]
        with pytest.raises(ProtocolError, match="rank 1 says that its last agreement, epoch and call are numbers"):
            buffer.sync()
    GpuMembers._data = data  # type: ignore[method-assign]
    assert buffer.sync().tolist() == [1, 1, 1]
    step(buffer, [1, 1, 1])
    stages.meet(folder, "end", rank, range(3))


def test_numbers_of_a_peer_are_no_epoch_before_they_are_checked() -> None:
    run_mortal(on_gpu, 3, "forges", dead=set(), timeout_s=200)


def latency(rank: int, num_ranks: int, name: str, *args: Any) -> Any:
    return emulated_latency(rank, num_ranks, getattr(latency_tests, name), *args)


def test_a_sync_makes_handles_stale_in_latency_mode_as_well() -> None:
    first, second = run_ranks(latency, 2, "_stale", timeout_s=200)
    assert first == second


def test_a_hook_of_an_epoch_that_is_over_is_stale_on_gpus_as_well() -> None:
    run_ranks(latency, 2, "_old_hook", timeout_s=200)


def test_who_lives_and_is_left_out_is_an_error_of_calls_without_a_mask_on_gpus_as_well(tmp_path: Path) -> None:
    run_ranks(latency, 3, "_left_out", str(tmp_path), timeout_s=200)


def test_in_latency_mode_who_is_taken_out_of_a_sync_enters_with_its_next_call() -> None:
    first, *others = run_ranks(latency, 3, "_taken_out", KeyboardInterrupt, timeout_s=200)
    assert others == [first] * 2


def test_in_latency_mode_nobody_waits_for_ever_for_who_was_taken_out_of_its_sync(tmp_path: Path) -> None:
    run_ranks(latency, 3, "_never_comes", str(tmp_path), timeout_s=200)


def comes_late(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 1 enters an epoch when the others have gone on without it: no call of all has a result anywhere."""
    with latency_tests.make(latency_tests.SHAPE, timeout=2) as buffer:
        mask = torch.ones(3, dtype=torch.int32)
        latency_tests.masked_round(buffer, mask, 0, [True] * 3)
        enter = GpuMembers._enter

        def fails(*args: Any) -> None:
            GpuMembers._enter = enter  # type: ignore[method-assign]
            raise ResourceError("in the midst of sync")

        if rank == 1:
            GpuMembers._enter = fails  # type: ignore[method-assign, assign]
            with pytest.raises(ResourceError):
                buffer.sync(mask)
            for other in (0, 2):
                stages.wait_for(folder, f"went on-{other}")
        else:
            assert buffer.sync(mask).tolist() == [1, 1, 1]
            stages.reach(folder, f"went on-{rank}")
        with pytest.raises(PeerError, match="it is not in this epoch"):
            buffer.all_gather_bytes(bytes([rank]), timeout=60.0)
        mask.fill_(1)
        assert buffer.sync(mask, timeout=60.0).tolist() == [1, 1, 1]
        latency_tests.masked_round(buffer, mask, 1, [True] * 3)
        stages.meet(folder, "end", rank, range(3))


def late_in_latency_mode(rank: int, num_ranks: int, folder: str) -> None:
    emulated_latency(rank, num_ranks, comes_late, folder)


def test_in_latency_mode_who_enters_late_is_lost_until_the_next_sync(tmp_path: Path) -> None:
    run_ranks(late_in_latency_mode, 3, str(tmp_path), timeout_s=200)


def interrupted_when_ready(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 1 is interrupted when it has published that it is ready: its next call repeats that, as the others do."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    _, buffer = begin(rank, folder)
    if rank == 1:
        second_call = GpuMembers._second_call

        def interrupted(*args: Any) -> Any:
            GpuMembers._second_call = second_call  # type: ignore[method-assign]
            moments.after_publishing(buffer._exchange, RowsPlan, interrupt)
            return second_call(*args)

        GpuMembers._second_call = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            buffer.sync()
    else:
        assert buffer.sync().tolist() == [1, 1, 1]
    step(buffer, [1, 1, 1])
    assert buffer.sync().tolist() == [1, 1, 1]
    step(buffer, [1, 1, 1])
    stages.meet(folder, "end", rank, range(3))


def test_who_is_interrupted_when_it_is_ready_enters_with_its_next_call() -> None:
    run_mortal(on_gpu, 3, "interrupted_when_ready", dead=set(), timeout_s=200)


def outruns(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 1 has used more numbers than it has said: it cannot enter, and the others hear of that at once."""
    _, buffer = begin(rank, folder)
    numbers: Any = buffer._path._epochs._numbers  # type: ignore[union-attr]
    used = numbers._used
    if rank == 1:
        numbers._used = lambda: 1 << 30
        with pytest.raises(InvalidState, match="this rank has made calls"):
            buffer.sync()
        numbers._used = used
    else:
        assert buffer.sync().tolist() == [1, 1, 1]
    for call in (lambda: step(buffer, [1, 1, 1]), lambda: buffer.all_gather_bytes(b"1")):
        with pytest.raises(PeerError, match="it is not in this epoch"):
            call()
    assert buffer.sync().tolist() == [1, 1, 1]
    step(buffer, [1, 1, 1])
    stages.meet(folder, "end", rank, range(3))


def test_who_cannot_enter_is_lost_until_the_next_sync() -> None:
    run_mortal(on_gpu, 3, "outruns", dead=set(), timeout_s=200)


def lives(rank: int, num_ranks: int, times: int) -> Any:
    before = None
    for number in range(times):
        with make() as buffer:
            for _ in range(2):
                x = torch.full((2, HIDDEN), 1.0 + rank, dtype=torch.bfloat16)
                buffer.dispatch(x, torch.tensor([[0, -1], [3, -1]]))
                buffer.sync()
        if number == 2:
            before = held()
    return before, held()


def many(rank: int, num_ranks: int, times: int) -> Any:
    return emulated(rank, num_ranks, lives, times)


def test_many_lives_leave_nothing() -> None:
    latency_tests.check_lives(run_ranks(many, 2, 12, timeout_s=200))
    latency_tests.check_lives(run_ranks(latency, 2, "_lives", 12, timeout_s=200))


def is_not_ready(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 1 does not prepare its memory, and rank 2 closes the buffer: the others use the memory of neither."""
    with latency_tests.make(latency_tests.SHAPE, timeout=2) as buffer:
        members: Any = buffer._exchange.membership

        def fails(*args: Any) -> None:
            if rank == 2:
                buffer._exchange.engine.close()
            raise ResourceError("in the midst of sync")

        if rank in (1, 2):
            members._enter = fails
            with pytest.raises(ResourceError):
                buffer.sync()
        else:
            buffer.sync()
            assert members._ready == {0, 3}
        stages.meet(folder, "end", rank, range(4))


def not_ready_in_latency_mode(rank: int, num_ranks: int, folder: str) -> None:
    emulated_latency(rank, num_ranks, is_not_ready, folder)


def test_in_latency_mode_the_memory_of_who_has_not_prepared_it_is_not_used(tmp_path: Path) -> None:
    run_ranks(not_ready_in_latency_mode, 4, str(tmp_path), timeout_s=100)
