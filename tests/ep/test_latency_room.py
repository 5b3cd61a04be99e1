"""One memory for `LatencyBuffer` calls of several sizes: rows as of buffers of their own, refusals, an early death."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.errors import InvalidArgument, MismatchError, StaleHandleError
from epee.reference import latency as oracle
from tests.ep.latency_cases import (
    Shape,
    bits,
    check_dispatched,
    combine,
    dispatch,
    expert_outputs,
    inputs,
    quantisation,
)
from tests.harness import DEAD, run_ranks

SHAPES = (
    Shape(8, 512, 2, 6),
    Shape(4, 1024, 4, 12),
    Shape(16, 512, 1, 40),
    Shape(8, 128, 8, 1),
    Shape(8, 512, 2, 7),
)


def bytes_for(num_ranks: int) -> int:
    """Return bytes in which calls of each of the shapes fit."""
    sizes = [epee.LatencyBuffer.bytes_for(num_ranks, s.num_experts, s.hidden, s.num_topk, s.max_tokens) for s in SHAPES]
    return max(sizes)


def make_room(nbytes: int) -> epee.LatencyBuffer:
    """Make a buffer from bytes, its memory poisoned."""
    os.environ["EPEE_POISON"] = "1"
    return epee.LatencyBuffer.of_bytes(dist.group.WORLD, nbytes, timeout=20)


def of_shape(room: epee.LatencyBuffer, shape: Shape) -> epee.LatencyBuffer:
    """Return the buffer of a shape in a room."""
    return room.of_sizes(
        num_experts=shape.num_experts,
        hidden=shape.hidden,
        num_topk=shape.num_topk,
        max_tokens_per_rank=shape.max_tokens,
    )


def _sizes(rank: int, num_ranks: int) -> None:
    """Calls of all shapes in turn, with results and handles of the others alive, halves open across shapes."""
    room = make_room(bytes_for(num_ranks))
    nbytes = room.nbytes
    buffers = {shape: of_shape(room, shape) for shape in SHAPES}
    for seed in range(3):
        open_calls: list[Any] = []
        for at, shape in enumerate(SHAPES):
            payload = ("bfloat16", "fp8")[(seed + at) % 2]
            counts = [min(shape.max_tokens, shape.max_tokens + src - 1 - seed) for src in range(num_ranks)]
            given = inputs(shape, [max(0, count) for count in counts], 10 * seed + at)
            how = quantisation(payload)
            packed = oracle.dispatch(given, shape.num_experts, shape.max_tokens, **how)
            got = dispatch(buffers[shape], given[rank], **how, return_hook=at % 2 == 1)
            if got.hook is not None:
                got.hook()
            check_dispatched(got, packed[rank])
            open_calls.append((shape, given, packed, got))
        for shape, given, packed, got in reversed(open_calls):  # handles serve behind calls of other shapes
            outputs = expert_outputs(packed, seed)
            wanted = oracle.combine(given, packed, outputs)[rank]
            back = combine(buffers[shape], outputs[rank], got)
            assert torch.equal(bits(back.x), bits(wanted))
            check_dispatched(got, packed[rank])
    assert room.nbytes == nbytes
    with pytest.raises(StaleHandleError, match="another buffer"):
        combine(buffers[SHAPES[0]], outputs[rank], got if got is not open_calls[0][3] else open_calls[1][3])
    for shape in SHAPES:
        assert combine_input_shape(buffers[shape], shape, num_ranks)
    buffers[SHAPES[1]].close()
    with pytest.raises(epee.InvalidState, match="closed"):
        dispatch(buffers[SHAPES[0]], inputs(SHAPES[0], (1,), 1)[0])


def combine_input_shape(buffer: epee.LatencyBuffer, shape: Shape, num_ranks: int) -> bool:
    """Whether the memory for outputs has the shape's sizes."""
    given = inputs(shape, [1] * num_ranks, 5)[dist.get_rank()]
    got = dispatch(buffer, given)
    size = (shape.num_experts // num_ranks, num_ranks * shape.max_tokens, shape.hidden)
    return buffer.combine_input(got.handle).shape == size


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_calls_of_all_sizes_share_one_memory(num_ranks: int) -> None:
    run_ranks(_sizes, num_ranks, timeout_s=60)


def _refused(rank: int, num_ranks: int) -> None:
    room = make_room(bytes_for(num_ranks))
    with pytest.raises(InvalidArgument, match=r"need \d+ bytes of memory.*, the buffer has \d+"):
        of_shape(room, Shape(8, 8192, 8, 300))
    first, second = of_shape(room, SHAPES[0]), of_shape(room, SHAPES[4])
    with pytest.raises(MismatchError, match="disagree"):
        dispatch((first, second)[rank], inputs(SHAPES[0], (6, 6), 1)[rank], timeout=2)
    given = inputs(SHAPES[4], (7, 3), 2)
    got = dispatch(second, given[rank])
    check_dispatched(got, oracle.dispatch(given, SHAPES[4].num_experts, SHAPES[4].max_tokens)[rank])
    with pytest.raises(InvalidArgument, match="num_topk"):
        of_shape(room, Shape(8, 512, 0, 1))
    room.close()


def test_what_does_not_fit_or_differs_is_refused() -> None:
    run_ranks(_refused, 2, timeout_s=60)


def _dead_before_all(rank: int, num_ranks: int) -> Any:
    """Rank 1 dies when the memory is made and before any call: the others go on without it, in a shape that is new."""
    room = make_room(bytes_for(num_ranks))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    shape = SHAPES[0]
    buffer = of_shape(room, shape)
    active = torch.ones(num_ranks, dtype=torch.int32)
    given = inputs(shape, [4] * num_ranks, 3)
    got = dispatch(buffer, given[rank], active_ranks=active)
    told = got.got.tolist(), active.tolist()
    y = buffer.combine_input(got.handle).fill_(1.0)
    back = combine(buffer, y, got, active_ranks=active)
    assert back.got.tolist() == [True, False, True, True][:num_ranks]
    return told


def test_who_dies_before_the_first_call_is_masked() -> None:
    alive = ([True, False, True, True], [1, 0, 1, 1])
    assert run_ranks(_dead_before_all, 4, dead={1}, timeout_s=60) == [alive, DEAD, alive, alive]
