"""Calls of several shapes out of memory that was lent once: what each rank does in `test_throughput_room.py`.

Every function runs on one rank, with `epee.Buffer` on the emulated GPU.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee import errors
from epee.ep.config import BufferConfig
from tests.csrc import survival_buffer_cases as cases
from tests.csrc.survival_buffer_cases import CASE, case_for, check_round, until_lost
from tests.ep.buffer_cases import DTYPES, Call, Setup, fields, make_input, make_output, run_call
from tests.harness.meeting import meet

ROOM, EXPERT_ROOM = 3 << 20, 2 << 20
LONG_S = 300.0  # who waits so long fails the test by its own time-out


def make_room(expert_bytes: int = EXPERT_ROOM, **options: Any) -> epee.Buffer:
    """A poisoned room."""
    os.environ["EPEE_POISON"] = "1"
    return epee.Buffer.of_bytes(
        dist.group.WORLD, ROOM, expert_bytes, **{"device": "cuda", "timeout": LONG_S, **options}
    )


def shaped(room: epee.Buffer, setup: Setup, **changes: Any) -> epee.Buffer:
    """The room's buffer for a setup."""
    sizes: dict[str, Any] = {
        "num_experts": setup.num_experts,
        "hidden": setup.hidden,
        "num_topk": setup.num_topk,
        "max_tokens_per_rank": max(max(call.num_tokens) for call in setup.calls),
        "dtype": DTYPES[setup.dtype],
        "max_recv_rows": max(sum(call.num_tokens) * setup.num_topk for call in setup.calls),
    }
    return room.of_sizes(**{**sizes, **changes})


def setups_of(num_ranks: int) -> list[Setup]:
    """Three shapes that differ in everything, with as many calls each."""

    def calls(seed: int, counts: Sequence[int], payload: str, alignment: int) -> tuple[Call, ...]:
        tokens = tuple(counts[rank % len(counts)] for rank in range(num_ranks))
        expert = Call(
            seed + 1, tokens, "repeats", "expert", alignment, payload, num_bias=1, in_place=True, with_weights_back=True
        )
        return (
            Call(seed, tokens, payload=payload, num_bias=1, with_weights_back=True, with_again=True),
            expert,
            Call(seed + 2, tokens, "one rank", payload=payload, in_place=True),
            Call(seed + 3, tokens, "mask", payload=payload, with_weights=False),
        )

    return [
        Setup(num_ranks, 2, 16, 2, "bfloat16", 2, calls(10, (9, 4, 7), "bfloat16", 4)),
        Setup(num_ranks, 5, 264, 3, "float32", 2, calls(20, (3, 12), "float32", 1)),
        Setup(num_ranks, 1, 512, 1, "bfloat16", 2, calls(30, (21, 0, 2), "fp8", 8)),
    ]


def by_turns(rank: int, num_ranks: int, expert_bytes: int) -> list[list[dict[str, Any]]]:
    """All shapes' dispatches, then what follows them in another order; results of each live while others' calls run."""
    setups = setups_of(num_ranks)
    room = make_room(expert_bytes)
    buffers = [shaped(room, setup) for setup in setups]
    made, found = room.nbytes, []
    for turn in range(len(setups[0].calls)):
        calls = [setup.calls[turn] for setup in setups]
        given = [make_input(setup, call, rank) for setup, call in zip(setups, calls, strict=True)]
        firsts = [
            buffer.dispatch(
                one.x, one.topk_idx, one.topk_weights, is_token_in_rank=one.is_token_in_rank, layout=call.layout,
                expert_alignment=call.expert_alignment,
            )
            for buffer, call, one in zip(buffers, calls, given, strict=True)
        ]  # fmt: skip
        # once more by the same handles, while all results live; those of one shape in its slot, of others copied
        agains = [make_input(setup, call, rank, again=True) for setup, call in zip(setups, calls, strict=True)]
        seconds = [
            buffer.dispatch(one.x, handle=first.handle, topk_weights=one.topk_weights)
            for buffer, first, one in zip(buffers, firsts, agains, strict=True)
        ]
        results: list[dict[str, Any]] = []
        for at in reversed(range(len(setups))):
            result: dict[str, Any] = {"dispatch": fields(firsts[at]), "again": fields(seconds[at])}
            for name, one in (("combine again", seconds[at]), ("combine", firsts[at])):
                result[name] = back(buffers[at], setups[at], calls[at], rank, one.handle)
            results.insert(0, result)
        found.append(results)
    assert room.nbytes == made or not expert_bytes
    assert {buffer.nbytes for buffer in buffers} == {room.nbytes}
    dist.barrier()
    buffers[0].close()
    assert room.nbytes == buffers[1].nbytes == 0
    with pytest.raises(errors.InvalidState, match="closed"):
        buffers[1].barrier()
    return found


def back(buffer: epee.Buffer, setup: Setup, call: Call, rank: int, handle: epee.Handle) -> dict[str, Any]:
    """The combine of a call, as `run_call` makes it."""
    from tests.ep.buffer_cases import _run_combine

    return _run_combine(buffer, setup, call, rank, handle)


def again_and_again(rank: int, num_ranks: int) -> list[list[dict[str, Any]]]:
    """Whole calls of the shapes in turn, each three times, so that later ones are like earlier ones."""
    setups = setups_of(num_ranks)
    room = make_room()
    buffers = [shaped(room, setup) for setup in setups]
    found = [
        [run_call(buffer, setup, setup.calls[turn], rank) for buffer, setup in zip(buffers, setups, strict=True)]
        for turn in (0, 1, 0, 1, 0, 2, 3)
    ]
    dist.barrier()
    room.close()
    return found


def many_setups(num_ranks: int) -> list[Setup]:
    """Two shapes with more tokens than the one-kernel dispatch takes."""
    counts = (600, 530, 513, 700)[:num_ranks]
    calls = tuple(Call(seed, counts, num_bias=1, with_weights_back=True) for seed in (40, 41))
    return [Setup(num_ranks, 2, 16, 2, "bfloat16", 2, calls), Setup(num_ranks, 3, 40, 1, "float32", 2, calls)]


def many(rank: int, num_ranks: int) -> list[list[dict[str, Any]]]:
    """Calls of both in turn."""
    setups = many_setups(num_ranks)
    room = make_room(0)
    buffers = [shaped(room, setup) for setup in setups]
    found = [
        [run_call(buffer, setup, setup.calls[turn], rank) for buffer, setup in zip(buffers, setups, strict=True)]
        for turn in (0, 1)
    ]
    dist.barrier()
    room.close()
    return found


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """The kind and text of what a call raises."""
    try:
        call()
    except epee.EpeeError as error:
        return type(error).__name__, str(error)
    return "", ""


def disagree(rank: int, num_ranks: int, layout: str) -> dict[str, tuple[str, str]]:
    """Each way in which the ranks' shapes may differ; good calls come behind each of them."""
    base = Setup(num_ranks, 2, 16, 2, "bfloat16", 2, (Call(1, (8,) * num_ranks, layout=layout),))
    call = base.calls[0]
    room = make_room()
    mine = shaped(room, base)
    generator = torch.Generator().manual_seed(rank)
    found = {}
    for name, changes in {
        "hidden": {"hidden": 24},
        "num_experts": {"num_experts": 4 * num_ranks},
        "fewer experts": {"num_experts": num_ranks},
        "num_topk": {"num_topk": 3},
        "max_tokens_per_rank": {"max_tokens_per_rank": 64},
        "dtype": {"dtype": torch.float32},
        "max_recv_rows": {"max_recv_rows": 100},
    }.items():
        buffer = shaped(room, base, **changes) if rank == 0 else mine
        config = buffer.config
        # more tokens, to one expert, than the others' shape could hold
        num_tokens = config.max_tokens_per_rank if name == "max_tokens_per_rank" else 8
        x = torch.randn(num_tokens, config.hidden, generator=generator).bfloat16()
        idx = torch.zeros(num_tokens, config.num_topk, dtype=torch.int64)
        found[name] = error_of(lambda: buffer.dispatch(x, idx, layout=layout))  # noqa: B023 - called at once
        run_call(mine, base, call, rank)
        mine.check()
    here, there = mine, shaped(room, base, hidden=24)
    given = make_input(base, call, rank)
    first = here.dispatch(given.x, given.topk_idx, given.topk_weights, layout=layout)
    wide = torch.zeros(8, 24, dtype=torch.bfloat16)
    second = there.dispatch(wide, given.topk_idx, layout=layout)
    for name, calls in {
        "one with a handle": (
            lambda: here.dispatch(given.x, handle=first.handle),
            lambda: there.dispatch(wide, given.topk_idx, layout=layout),
        ),
        "both with handles": (
            lambda: here.dispatch(given.x, handle=first.handle),
            lambda: there.dispatch(wide, handle=second.handle),
        ),
        "combines": (
            lambda: here.combine(first.x, first.handle),
            lambda: there.combine(second.x, second.handle),
        ),
    }.items():
        found[name] = error_of(lambda: (calls[rank](), mine.check()))  # noqa: B023
        run_call(mine, base, call, rank)
    dist.barrier()
    room.close()
    return found


def refusals(rank: int, num_ranks: int) -> None:
    """What does not fit is refused where it is asked for, with the bytes; a handle serves its own shape alone."""
    setup = setups_of(num_ranks)[0]
    call = setup.calls[0]
    room = make_room()
    mine, other = shaped(room, setup), shaped(room, setup)
    config = BufferConfig(num_ranks, num_ranks, 7168, 2, 4096, torch.bfloat16)
    assert room.fits(mine.config)
    assert not room.fits(config)
    needed, slot_bytes = epee.Buffer.slot_bytes_for(config), ROOM // 3 // 256 * 256
    assert epee.Buffer.slot_bytes_for(mine.config) <= slot_bytes < needed
    assert epee.Buffer.expert_slot_bytes_for(mine.config, 128) <= EXPERT_ROOM // 2
    sizes: dict[str, Any] = {
        "num_experts": num_ranks, "hidden": 7168, "num_topk": 2, "max_tokens_per_rank": 4096, "dtype": torch.bfloat16
    }  # fmt: skip
    with pytest.raises(errors.InvalidArgument, match=f"{needed} bytes.* has {slot_bytes}"):
        room.of_sizes(**sizes)
    for name, value, says in (
        ("hidden", 12, "multiple of 8"), ("dtype", torch.float64, "float64"), ("num_experts", 2048 * num_ranks, "1024"),
        ("max_recv_rows", 0, "max_recv_rows"), ("num_topk", 33, "num_topk"), ("max_tokens_per_rank", "8", "'8'"),
    ):  # fmt: skip
        with pytest.raises(errors.InvalidArgument, match=says):
            room.of_sizes(**{**sizes, "max_tokens_per_rank": 8, name: value})
    handle = run_and_keep(mine, setup, call, rank)
    y = make_output(setup, call, rank, handle.num_recv)
    if rank == 0:
        with pytest.raises(errors.StaleHandleError, match="another buffer"):
            other.combine(y, handle)
    else:
        with pytest.raises(errors.MismatchError, match="rank 0 refused"):
            mine.combine(y, handle)
    mine.combine(y, handle)
    with pytest.raises(errors.StaleHandleError, match="another buffer"):
        other.combine_input(handle)
    del room, other
    gc.collect()
    run_call(mine, setup, call, rank)  # the memory lives as long as any of them
    dist.barrier()
    nbytes = mine.nbytes
    assert nbytes > 0
    mine.of_sizes(**{**sizes, "max_tokens_per_rank": 8}).close()
    assert mine.nbytes == 0
    with pytest.raises(errors.InvalidState, match="closed"):
        mine.of_sizes(**{**sizes, "max_tokens_per_rank": 8})


def run_and_keep(buffer: epee.Buffer, setup: Setup, call: Call, rank: int) -> epee.Handle:
    """Dispatch; return the handle."""
    given = make_input(setup, call, rank)
    return buffer.dispatch(given.x, given.topk_idx, given.topk_weights).handle


def plain(rank: int, num_ranks: int) -> list[list[dict[str, Any]]]:
    """A buffer that was made for one shape serves smaller ones as well."""
    large, small = setups_of(num_ranks)[1], setups_of(num_ranks)[0]
    most = max(large.calls[0].num_tokens)
    with epee.Buffer(
        dist.group.WORLD, num_experts=large.num_experts, hidden=large.hidden, num_topk=large.num_topk,
        max_tokens_per_rank=most, dtype=torch.float32, max_recv_rows=most * large.num_topk * num_ranks, timeout=LONG_S,
    ) as buffer:  # fmt: skip
        other = shaped(buffer, small)
        pairs = (buffer, large), (other, small), (buffer, large)
        found = [[run_call(each, setup, setup.calls[turn], rank) for each, setup in pairs] for turn in (0, 1)]
        dist.barrier()
    return found


def rooms_differ(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    """Rooms of other sizes on some rank, or too small ones, or on CPUs."""
    group = dist.group.WORLD
    make: Any = epee.Buffer.of_bytes
    return [
        error_of(lambda: make(group, ROOM + 768 * rank, device="cuda")),
        error_of(lambda: make(group, ROOM, 512 * rank, device="cuda")),
        error_of(lambda: make(group, 100, device="cuda")),
        error_of(lambda: make(group, 3 * 256, device="cuda")),
        error_of(lambda: make(group, 0, device="cuda")),
        error_of(lambda: make(group, "1", device="cuda")),
    ]


def on_cpus(rank: int, num_ranks: int) -> None:
    """CPU buffers serve one shape."""
    sizes: dict[str, Any] = {"num_experts": 2, "hidden": 16, "num_topk": 1, "max_tokens_per_rank": 4}
    with pytest.raises(errors.UnsupportedError, match="room"):
        epee.Buffer.of_bytes(dist.group.WORLD, ROOM, device="cpu")
    with epee.Buffer(dist.group.WORLD, **sizes) as buffer:
        with pytest.raises(errors.UnsupportedError, match="CPU"):
            buffer.of_sizes(**sizes)
        with pytest.raises(errors.UnsupportedError, match="CPU"):
            buffer.fits(buffer.config)


def dies_first(rank: int, num_ranks: int) -> str:
    """The last rank dies before any call; the others hear of it in the first one, agree, and go on in two shapes."""
    room = make_room()
    last, survivors = num_ranks - 1, range(num_ranks - 1)
    narrow = room_shape(room, num_ranks, hidden=64, max_tokens_per_rank=32)
    wide = room_shape(room, num_ranks)
    meet("made", rank, num_ranks)
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    case = case_for(num_ranks, CASE, "rank", 1)
    error = until_lost(lambda: cases.send(wide, case))
    assert error.ranks == (last,), error
    assert narrow.sync().tolist() == [1] * last + [0]
    made = room.nbytes
    for seed in range(3):
        for layout in ("rank", "expert"):
            check_round(wide, case_for(num_ranks, CASE, layout, seed), survivors)
            check_round(narrow, narrow_case(num_ranks, layout, seed), survivors)
    assert room.nbytes == made
    meet("through", rank, num_ranks - 1)
    room.close()
    return "ok"


def narrow_case(num_ranks: int, layout: str, seed: int) -> cases.Case:
    """A case for another shape than `CASE` is for."""
    case = case_for(num_ranks, CASE, layout, seed)
    return cases.replace(case, hidden=64, expert_alignment=2 * case.expert_alignment if layout == "expert" else 1)


def room_shape(room: epee.Buffer, num_ranks: int, **changes: Any) -> epee.Buffer:
    """The shape of `survival_buffer_cases.make`."""
    sizes: dict[str, Any] = {
        "num_experts": CASE.num_local_experts * num_ranks, "hidden": CASE.hidden, "num_topk": CASE.num_topk,
        "max_tokens_per_rank": 16, "max_recv_rows": 16 * num_ranks * CASE.num_topk,
    }  # fmt: skip
    return room.of_sizes(**{**sizes, **changes})


def make_shaped(num_ranks: int, timeout: float = LONG_S, num_slots: int = 2) -> epee.Buffer:
    """What stands for `survival_buffer_cases.make` where its cases run in a room."""
    return room_shape(make_room(timeout=timeout, num_slots=num_slots), num_ranks)


def weights_beside_rows_of_another(rank: int, num_ranks: int) -> bool:
    """A combine whose y is the live result of another shape sends weights back, and leaves that result as it is."""
    room = make_room()
    sizes = {"num_experts": 4, "hidden": 16, "num_topk": 2}
    large, small = (room.of_sizes(**sizes, max_tokens_per_rank=most) for most in (8, 4))
    x = torch.full((4, 16), 1.0 + rank, dtype=torch.bfloat16)
    idx, weights = torch.tensor([[0, 3], [1, 2], [2, 0], [3, 1]]), torch.rand(4, 2)
    held, other = large.dispatch(x, idx, weights), small.dispatch(x, idx, weights)
    parts = lambda: (held.x, held.topk_idx, held.topk_weights, held.handle.src_token)  # noqa: E731
    before = [part.clone() for part in parts()]
    back = torch.full((held.x.shape[0], 2), 7.0)
    returned = small.combine(held.x, other.handle, topk_weights=back).topk_weights
    room.barrier()
    is_right = torch.equal(returned, torch.full((4, 2), 7.0) * _num_ranks_of(idx, num_ranks))
    return is_right and all(torch.equal(old, new) for old, new in zip(before, parts(), strict=True))


def _num_ranks_of(idx: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """`[num_tokens, 1]`: how many ranks each token goes to, of 4 experts."""
    owners = idx // (4 // num_ranks)
    return torch.tensor([[len(set(row))] for row in owners.tolist()])
