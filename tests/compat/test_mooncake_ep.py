"""Mooncake's `ep.Buffer`: tuples, values, mask and time-out, on gloo groups and on Mooncake's own."""

from __future__ import annotations

import inspect
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.compat.mooncake import ep, pg
from epee.errors import InvalidArgument, InvalidState, UnsupportedError
from epee.reference import latency as oracle
from tests.compat.test_deep_ep_low_latency import check_rows
from tests.ep.latency_cases import BF16, Shape, bits, expert_outputs, inputs
from tests.harness import DEAD, run_mortal, run_ranks
from tests.survive import stages

SHAPE = Shape(num_experts=8, hidden=512, num_topk=3, max_tokens=4)
NUM_TOKENS = (4, 1, 0, 3)
LONG_US = 300_000_000  # a wait of that length fails the test by its own time-out

ENDS = "async_finish=False, return_recv_hook=False"
SIGNATURES = {
    "__init__": "self, group, num_ep_buffer_bytes=0, disable_p2p=False",
    "get_ep_buffer_size_hint": "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts",
    "dispatch": "self, x, topk_idx, active_ranks, num_max_dispatch_tokens_per_rank, num_experts, timeout_us, "
    f"use_fp8=None, {ENDS}",
    "combine": f"self, x, topk_idx, topk_weights, active_ranks, timeout_us, handle, zero_copy=False, {ENDS}, out=None",
    "get_next_combine_buffer": "self, handle",
    "update_ep_member": "self",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_is_mooncakes(name: str) -> None:
    parameters = inspect.signature(getattr(ep.Buffer, name)).parameters.values()
    shown = [each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in parameters]
    assert ", ".join(shown) == SIGNATURES[name]


def a_round(
    buffer: Any,
    active: torch.Tensor | None,
    seed: int,
    got: list[bool],
    *,
    timeout_us: int = -1,
    use_fp8: bool | None = False,
    use_hook: bool = False,
    zero_copy: bool = False,
    is_async: bool = False,
    shape: Shape = SHAPE,
) -> None:
    """One dispatch and combine, compared with the oracle; `got` is what must be reported of each rank."""
    rank, num_ranks = buffer.rank, buffer.group_size
    given = inputs(shape, [min(count, shape.max_tokens) for count in NUM_TOKENS[:num_ranks]], seed)
    mine, mask = given[rank], [got] * num_ranks
    packed = oracle.dispatch(given, shape.num_experts, shape.max_tokens, use_fp8=use_fp8 is not False, got=mask)
    ends = {"async_finish": is_async, "return_recv_hook": use_hook}
    recv_x, counts, handle, event, hook = buffer.dispatch(
        mine.x, mine.topk_idx, active, shape.max_tokens, shape.num_experts, timeout_us, use_fp8, **ends
    )
    assert (hook is not None) == use_hook
    if hook is not None:
        hook()
    if is_async:
        event.current_stream_wait()
    assert isinstance(recv_x, tuple) == (use_fp8 is not False)
    check_rows(recv_x, counts, packed[rank])
    assert torch.equal(handle[1], packed[rank].layout_range)
    assert handle[2:] == (shape.max_tokens, shape.hidden, shape.num_experts)
    outputs = expert_outputs(packed, seed)
    y = outputs[rank]
    if zero_copy:
        buffer.get_next_combine_buffer(handle).copy_(y)
        y = torch.full_like(y, float("nan"))
    out = torch.empty(len(mine.x), shape.hidden, dtype=BF16) if seed % 2 else None
    combined, event, hook = buffer.combine(
        y, mine.topk_idx, mine.topk_weights, active, timeout_us, handle, zero_copy, **ends, out=out
    )
    if hook is not None:
        hook()
    with event:
        assert out is None or combined is out
    assert torch.equal(bits(combined), bits(oracle.combine(given, packed, outputs, got=mask)[rank]))


def _calls(rank: int, num_ranks: int) -> None:
    os.environ["EPEE_POISON"] = "1"
    buffer = ep.Buffer(dist.group.WORLD, ep.Buffer.get_ep_buffer_size_hint(4, 512, num_ranks, 8))
    everybody = [True] * num_ranks
    active = torch.ones(num_ranks + 3, dtype=torch.int32)  # may be longer
    seed = 0
    for use_fp8 in (False, True, None):
        for use_hook, zero_copy, is_async in ((False, False, False), (True, True, False), (False, True, True)):
            ways = {"use_hook": use_hook, "zero_copy": zero_copy, "is_async": is_async}
            a_round(buffer, active if seed % 2 else None, seed, everybody, use_fp8=use_fp8, **ways)
            seed += 1
    assert active.all()
    buffer.connect()
    buffer.update_ep_member()
    a_round(buffer, active, seed, everybody)
    assert buffer.ibgda_disabled()
    assert buffer.p2p_enabled()
    assert buffer.use_fast_path()
    assert not buffer.is_roce()


@pytest.mark.parametrize(("num_ranks", "backend"), [(1, "gloo"), (4, "gloo"), (2, "mooncake-cpu")])
def test_tuples_and_values(num_ranks: int, backend: str) -> None:
    assert pg.get_active_ranks  # importing it registers the backend
    run_ranks(_calls, num_ranks, backend=backend)


def _lost(rank: int, num_ranks: int, folder: str, kind: str) -> list[int]:
    buffer = ep.Buffer(dist.group.WORLD)
    active = torch.ones(num_ranks, dtype=torch.int32)
    a_round(buffer, active, 0, [True] * num_ranks, timeout_us=LONG_US)
    dist.barrier()
    stages.meet(folder, "through", rank, range(num_ranks))  # nobody is in gloo's barrier any more
    if rank == 2:
        (Path(folder) / "victim").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    got = [True, True, False, True]
    for seed in range(1, 6):
        is_awaited = kind == "stop" and seed == 1  # in vain; nobody else may be lost where the machine is busy
        a_round(buffer, active, seed, got, timeout_us=3_000_000 if is_awaited else LONG_US, use_hook=seed == 2)
        assert active.tolist() == [1, 1, 0, 1]
    stages.meet(folder, "over", rank, (0, 1, 3))
    if rank == 0 and kind == "stop":
        os.kill(int((Path(folder) / "victim").read_text()), signal.SIGKILL)
    return active.tolist()


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_rank_that_does_not_come_is_marked_and_left_out(tmp_path: Path, kind: str) -> None:
    active = [1, 1, 0, 1]
    assert run_ranks(_lost, 4, str(tmp_path), kind, dead={2}) == [active, active, DEAD, active]


def start_pair(slot: int, folder: str) -> Any:
    """Begin a group of processes 0 and 1; process 2 comes in when rank 1 is lost, in its place."""
    if slot == 2:
        stages.wait_for(folder, "lost")
    store = dist.FileStore(f"{folder}/store", 2)
    options = pg.MooncakeBackendOptions(torch.ones(2, dtype=torch.int32), slot == 2)
    dist.init_process_group("mooncake-cpu", store=store, rank=min(slot, 1), world_size=2, pg_options=options)
    pg.join_group(dist.group.WORLD)
    return dist.group.WORLD


def take_back(group: Any, buffer: Any, folder: str) -> None:
    """Let rank 1's loss be known, and the newcomer in."""
    while pg.get_active_ranks(group).sum() == 2:
        dist.all_reduce(torch.ones(1))
    stages.reach(folder, "lost")
    while not pg.get_peer_state(group, [1])[0]:
        time.sleep(0.01)
    pg.recover_ranks(group, [1])
    buffer.update_ep_member()


def _replaced(slot: int, num_processes: int, folder: str) -> list[int]:
    """Processes 0 and 1 are the ranks; process 2 takes rank 1's place when that is dead."""
    joins = slot == 2
    group = start_pair(slot, folder)
    buffer = ep.Buffer(group)
    active = torch.ones(2, dtype=torch.int32)
    if not joins:
        a_round(buffer, active, 0, [True, True], timeout_us=LONG_US)
        if slot == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for seed in range(1, 4):
            a_round(buffer, active, seed, [True, False], timeout_us=LONG_US)
        take_back(group, buffer, folder)
        active.fill_(1)
    for seed in range(4, 8):
        a_round(buffer, active, seed, [True, True], timeout_us=LONG_US)
    return active.tolist()


def test_a_replacement_is_connected_after_update_ep_member() -> None:
    results = run_mortal(_replaced, 3, dead={1}, timeout_s=60)
    assert results == [[1, 1], DEAD, [1, 1]]


def _away(rank: int, num_ranks: int, folder: str) -> list[int]:
    """Rank 3 does not come when all are to meet again: it is in nobody's mask, and nobody waits for it."""
    buffer = ep.Buffer(dist.group.WORLD)
    active = torch.ones(num_ranks, dtype=torch.int32)
    a_round(buffer, active, 0, [True] * num_ranks, timeout_us=LONG_US)
    buffer.update_ep_member()
    if rank == 3:
        for other in range(3):
            stages.wait_for(folder, f"over-{other}", 150.0)
        return []
    (core,) = buffer._pool._latency.wholes
    core._timeout = 3.0  # of the meeting
    for seed in range(1, 4):
        a_round(buffer, active, seed, [True, True, True, False], timeout_us=LONG_US)
    stages.meet(folder, "over", rank, range(3))
    return active.tolist()


def test_who_does_not_meet_the_others_again_is_left_out(tmp_path: Path) -> None:
    assert run_ranks(_away, 4, str(tmp_path), backend="mooncake-cpu") == [[1, 1, 1, 0]] * 3 + [[]]


def _mistakes(rank: int, num_ranks: int) -> None:
    buffer = ep.Buffer(None)
    mine = inputs(SHAPE, NUM_TOKENS[:num_ranks], 1)[rank]
    for timeout_us in (0, -2, 1.5, True):
        with pytest.raises(InvalidArgument, match="timeout_us must be above 0, or -1"):
            buffer.dispatch(mine.x, mine.topk_idx, None, SHAPE.max_tokens, SHAPE.num_experts, timeout_us)
    for short in (torch.ones(0, dtype=torch.int32), torch.ones(1)):
        with pytest.raises(InvalidArgument, match="active_ranks must"):
            buffer.dispatch(mine.x, mine.topk_idx, short, SHAPE.max_tokens, SHAPE.num_experts, -1)
    with pytest.raises(InvalidArgument, match="handle must be"):
        buffer.get_next_combine_buffer(None)
    for name in (
        "sync_ib",
        "sync_roce",
        "sync_ibgda_peers",
        "sync_nvlink_ipc_handles",
        "get_ipc_handle",
        "get_mr_info",
        "get_gid",
        "get_local_qpns",
        "get_local_lids",
        "update_local_qpns",
    ):
        with pytest.raises(UnsupportedError, match=f"^{name} is not supported"):
            getattr(buffer, name)()


def test_mistakes_are_named() -> None:
    run_ranks(_mistakes, 1)
    with pytest.raises(UnsupportedError, match="give a process group"):
        ep.Buffer(0, 8)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="give a process group"):
        ep.Buffer(0, 8, 1 << 30, "mlx5_0")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="give a process group"):
        ep.Buffer(rank=0, num_ranks=8, buffer_size=1 << 30, device_name="mlx5_0")
    with pytest.raises(UnsupportedError, match="disable_p2p"):
        ep.Buffer(None, disable_p2p=True)


def _silent_without_a_mask(rank: int, num_ranks: int, folder: str) -> None:
    """Rank 2 stands still; calls without a mask wait for it once, and again when the ranks have met again."""
    buffer = ep.Buffer(dist.group.WORLD)
    a_round(buffer, None, 0, [True] * num_ranks, timeout_us=LONG_US)
    stages.meet(folder, "through", rank, range(num_ranks))
    if rank == 2:
        for other in (0, 1, 3):
            stages.wait_for(folder, f"missed-{other}")
        buffer.update_ep_member()
    else:
        got = [True, True, False, True]
        a_round(buffer, None, 1, got, timeout_us=2_000_000)
        for seed in (2, 3):
            a_round(buffer, None, seed, got, timeout_us=LONG_US)
        stages.reach(folder, f"missed-{rank}")
        buffer.update_ep_member()
    a_round(buffer, None, 4, [True] * num_ranks, timeout_us=LONG_US)


def test_calls_without_a_mask_keep_what_they_learn_until_the_ranks_meet_again(tmp_path: Path) -> None:
    run_ranks(_silent_without_a_mask, 4, str(tmp_path), backend="gloo", timeout_s=80)


def _buffer(num_ranks: int, has_bytes: bool) -> Any:
    sizes = SHAPE.max_tokens, SHAPE.hidden, num_ranks, SHAPE.num_experts
    return ep.Buffer(dist.group.WORLD, ep.Buffer.get_ep_buffer_size_hint(*sizes) if has_bytes else 0)


def _second(rank: int, num_ranks: int, has_bytes: bool, has_call: bool, meets: bool) -> None:
    """In each round other ranks make another buffer."""
    everybody, seed = [True] * num_ranks, 0
    buffer = _buffer(num_ranks, has_bytes)
    if has_call:
        a_round(buffer, None, seed, everybody)
    makers: tuple[set[int], ...] = ({0}, {num_ranks - 1}, set(), set(range(1, num_ranks)), set(range(num_ranks)), {0})
    for makers_now in makers:
        if rank in makers_now:
            buffer = _buffer(num_ranks, has_bytes)
        else:
            buffer.update_ep_member()
        if meets:
            dist.barrier()
        active = torch.ones(num_ranks, dtype=torch.int32)
        for _ in range(3):
            seed += 1
            a_round(buffer, active, seed, everybody, use_hook=seed % 2 == 0)
        assert active.tolist() == [1] * num_ranks


def _second_of_all(rank: int, num_ranks: int) -> None:
    """Buffers that all ranks make have memory of their own: results of one outlive calls of the other."""
    first = _buffer(num_ranks, True)
    second = _buffer(num_ranks, True)
    x = torch.full((2, SHAPE.hidden), rank + 1.0, dtype=torch.bfloat16)
    idx = torch.arange(2)[:, None] % SHAPE.num_experts
    rows = first.dispatch(x, idx, None, SHAPE.max_tokens, SHAPE.num_experts, -1, use_fp8=False)[0]
    kept = rows.clone()
    for _ in range(5):
        second.dispatch(x + 7, idx, None, SHAPE.max_tokens, SHAPE.num_experts, -1, use_fp8=False)
    assert torch.equal(rows.view(torch.uint8), kept.view(torch.uint8))


def _second_behind_dropped_ones(rank: int, num_ranks: int) -> None:
    """Some ranks keep the buffers that they had, others drop them: all make further ones."""
    kept = [_buffer(num_ranks, True)]
    for seed in range(4):
        if (seed + rank) % 2:
            kept.clear()
        kept.append(_buffer(num_ranks, seed < 2))
        a_round(kept[-1], None, seed, [True] * num_ranks)


def test_buffers_may_be_dropped_on_some_ranks_before_all_make_others() -> None:
    run_ranks(_second_behind_dropped_ones, 2, backend="mooncake-cpu")


def _dropped(rank: int, num_ranks: int) -> str:
    buffer: Any = _buffer(num_ranks, True)
    if rank == 0:
        del buffer
        with pytest.raises(InvalidState) as caught:
            _buffer(num_ranks, True)
        return str(caught.value)
    buffer.update_ep_member()
    return ""


def test_a_rank_that_has_dropped_its_buffer_cannot_meet_others_in_it() -> None:
    assert "has dropped the one that belongs to it" in run_ranks(_dropped, 2, backend="mooncake-cpu")[0]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("has_bytes", "has_call", "meets"), [(True, True, False), (False, True, True), (True, False, True)]
)
def test_a_second_buffer_of_one_rank_meets_the_others_that_update(
    num_ranks: int, has_bytes: bool, has_call: bool, meets: bool
) -> None:
    run_ranks(_second, num_ranks, has_bytes, has_call, meets, backend="mooncake-cpu")


def test_second_buffers_of_all_ranks_have_memory_of_their_own() -> None:
    run_ranks(_second_of_all, 2, backend="mooncake-cpu")


def _second_behind_a_replacement(slot: int, num_processes: int, folder: str) -> list[int]:
    """As `_replaced`, after a step; then rank 0 makes a buffer while the replacement updates, and in turn."""
    joins = slot == 2
    group = start_pair(slot, folder)
    buffer = ep.Buffer(group)
    active = torch.ones(2, dtype=torch.int32)
    if not joins:
        a_round(buffer, active, 0, [True, True], timeout_us=LONG_US)
        buffer.update_ep_member()
        a_round(buffer, active, 1, [True, True], timeout_us=LONG_US)
        if slot == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        a_round(buffer, active, 2, [True, False], timeout_us=LONG_US)
        take_back(group, buffer, folder)
        active.fill_(1)
    a_round(buffer, active, 4, [True, True], timeout_us=LONG_US)
    for seed, maker in ((5, 0), (6, 2), (7, 0)):
        if slot == maker:
            kept, buffer = buffer, ep.Buffer(group)  # the one before must live until then
            assert kept is not buffer
        else:
            buffer.update_ep_member()
        a_round(buffer, active, seed, [True, True], timeout_us=LONG_US)
    return active.tolist()


def test_a_replacement_takes_part_in_later_steps() -> None:
    results = run_mortal(_second_behind_a_replacement, 3, dead={1}, timeout_s=120)
    assert results == [[1, 1], DEAD, [1, 1]]
