"""Corner cases of a Buffer that must be met for certain, not only when hypothesis happens to draw them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import epee
from epee import reference
from tests.ep.buffer_cases import (
    Call,
    Setup,
    check_dispatched,
    check_setups,
    fields,
    make_buffer,
    make_input,
    make_output,
    same_bits,
)
from tests.harness import run_ranks
from tests.test_arrays import Wrapped

LAYOUTS = ("rank", "expert")


def setup_of(*calls: Call, num_ranks: int = 3, **changes: Any) -> Setup:
    """A small buffer for the calls."""
    options: dict[str, Any] = {
        "num_ranks": num_ranks,
        "num_local_experts": 2,
        "hidden": 16,
        "num_topk": 2,
        "dtype": "bfloat16",
        "num_slots": 2,
        **changes,
    }
    return Setup(calls=calls, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_small_step_shows_nothing_of_a_larger_one(layout: str) -> None:
    """E-8: 128 tokens, then 1, 0 and 128 again, in poisoned memory."""
    steps = [(128, 128), (1, 1), (0, 0), (128, 128), (0, 128), (1, 0)]
    calls = [
        Call(seed=step, num_tokens=counts, layout=layout, expert_alignment=1 if step % 2 else 4)
        for step, counts in enumerate(steps)
    ]
    check_setups(2, [setup_of(*calls, num_ranks=2, num_slots=1), setup_of(*calls, num_ranks=2)])


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_degenerate_routing(num_ranks: int, layout: str) -> None:
    """E-9: no tokens at all, one rank without tokens, all to one rank or expert, all -1, top-k of 1."""
    nobody, uneven = (0,) * num_ranks, (5, 0, 7)[:num_ranks]
    calls = [
        Call(seed, counts, routing, layout, alignment, num_bias=1, with_weights_back=True)
        for seed, (counts, routing, alignment) in enumerate(
            [
                (nobody, "random", 4),
                (uneven, "nowhere", 4),
                (uneven, "one rank", 1),
                (uneven, "one expert", 8),
                (uneven, "random", 1),
                (nobody, "nowhere", 1),
                (uneven, "repeats", 3),
            ]
        )
    ]
    check_setups(num_ranks, [setup_of(*calls, num_ranks=num_ranks, num_topk=topk) for topk in (1, 2, 32)])


@pytest.mark.parametrize("hidden", [8, 24, 1000, 7168])
def test_any_multiple_of_eight_is_a_row(hidden: int) -> None:
    calls = [
        Call(1, (3, 4), payload=payload, layout=layout) for payload in ("bfloat16", "float32") for layout in LAYOUTS
    ]
    check_setups(2, [setup_of(*calls, num_ranks=2, hidden=hidden, dtype="float32")])


@pytest.mark.parametrize("payload", ["fp8", "fp8 strided", "fp8 packed", "fp8 mx", "fp8 most"])
def test_pairs_come_back_as_pairs(payload: str) -> None:
    calls = [Call(2, (5, 0, 3), payload=payload, layout=layout, expert_alignment=4) for layout in LAYOUTS]
    check_setups(3, [setup_of(*calls, hidden=512)])


@pytest.mark.parametrize("hidden", [16, 48, 2880])
def test_scales_of_any_block_size_travel_beside_any_row_of_whole_pieces(hidden: int) -> None:
    calls = [Call(1, (3, 4), payload=payload, layout=layout) for payload in MX for layout in LAYOUTS]
    check_setups(2, [setup_of(*calls, num_ranks=2, hidden=hidden)])


def _payload_round(rank: int, num_ranks: int) -> list[dict[str, Any]]:
    setup = setup_of(Call(1, (6, 3), with_weights=False), num_ranks=2, hidden=128, dtype="float64")
    results = []
    with make_buffer(setup) as buffer:
        given = make_input(setup, setup.calls[0], rank)
        handle = buffer.dispatch(given.x, given.topk_idx).handle
        for seed, payload in enumerate(PAYLOADS):
            call = Call(seed, (6, 3), payload=payload)
            results.append(fields(buffer.dispatch(make_input(setup, call, rank).x, handle=handle)))
            y = make_output(setup, call, rank, handle.num_recv)
            results[-1]["combined"] = buffer.combine(y, handle).x.clone()
    return results


MX = ("fp8 mx", "fp8 most")
PAYLOADS = ("bfloat16", "fp8", "float64", "float16", "fp8 strided", "float32", "bfloat16")


def test_one_handle_serves_every_payload_type() -> None:
    """FP8 forward and BF16 backward over the same routing, many times."""
    setup = setup_of(Call(1, (6, 3), with_weights=False), num_ranks=2, hidden=128, dtype="float64")
    by_rank = run_ranks(_payload_round, 2)
    routing = [make_input(setup, setup.calls[0], rank).topk_idx for rank in range(2)]
    for seed, payload in enumerate(PAYLOADS):
        call = Call(seed, (6, 3), payload=payload)
        inputs = [reference.Routed(make_input(setup, call, rank).x, routing[rank]) for rank in range(2)]
        received = reference.dispatch(inputs, setup.num_experts)
        y = [make_output(setup, call, rank, len(received[rank].src_rank)) for rank in range(2)]
        sums = reference.combine(inputs, received, y)
        for rank in range(2):
            check_dispatched(by_rank[rank][seed], received[rank], f"{payload} on rank {rank}")
            same_bits(by_rank[rank][seed]["combined"], sums[rank], f"combine of {payload} on rank {rank}")


def _two_micro_batches(rank: int, num_ranks: int, layout: str) -> list[dict[str, Any]]:
    calls = [Call(seed, (seed, 9 - seed), layout=layout) for seed in range(6)]
    setup = setup_of(*calls, num_ranks=2)
    with make_buffer(setup) as buffer:
        alive = []
        for call in calls:
            given = make_input(setup, call, rank)
            alive.append(buffer.dispatch(given.x, given.topk_idx, given.topk_weights, layout=layout))
        results = []
        for call, held in zip(reversed(calls), reversed(alive), strict=True):  # in the other order
            y = make_output(setup, call, rank, held.handle.num_recv)
            results.insert(0, {**fields(held), "combined": buffer.combine(y, held.handle).x})
        return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_stay_right_when_slots_run_out(layout: str) -> None:
    """Six results alive with two slots: the later ones are copies, none is overwritten, handles work in any order."""
    calls = [Call(seed, (seed, 9 - seed), layout=layout) for seed in range(6)]
    setup = setup_of(*calls, num_ranks=2)
    by_rank = run_ranks(_two_micro_batches, 2, layout)
    for seed, call in enumerate(calls):
        inputs = [make_input(setup, call, rank) for rank in range(2)]
        received = reference.dispatch(inputs, setup.num_experts, layout=layout)
        y = [make_output(setup, call, rank, len(received[rank].src_rank)) for rank in range(2)]
        for rank, want in enumerate(reference.combine(inputs, received, y)):
            check_dispatched(by_rank[rank][seed], received[rank], f"call {seed} on rank {rank}")
            same_bits(by_rank[rank][seed]["combined"], want, f"combine {seed} on rank {rank}")


def _views_and_slots(rank: int, num_ranks: int) -> dict[str, Any]:
    setup = setup_of(Call(1, (4, 4)), num_ranks=2)
    given = make_input(setup, setup.calls[0], rank)
    with make_buffer(setup) as buffer:
        first = buffer.dispatch(given.x, given.topk_idx, given.topk_weights)
        address = first.x.data_ptr()
        kept = first.x[1:]  # a view of the view holds the slot too
        del first
        second = buffer.dispatch(given.x, given.topk_idx, given.topk_weights)
        reused_while_held = second.x.data_ptr() == address
        want = kept.clone()
        del second
        for _ in range(10):
            buffer.dispatch(given.x, handle=buffer.dispatch(given.x, given.topk_idx).handle)
        unchanged = torch.equal(kept.view(torch.int16), want.view(torch.int16))
        del kept
        places = set()
        for _ in range(20):
            places.add(buffer.dispatch(given.x, given.topk_idx, given.topk_weights).x.data_ptr())
    return {"reused_while_held": reused_while_held, "unchanged": unchanged, "num_places": len(places)}


def test_a_slot_returns_when_its_last_view_dies() -> None:
    for result in run_ranks(_views_and_slots, 2):
        assert not result["reused_while_held"]
        assert result["unchanged"]
        assert result["num_places"] <= 4, "results that die at once must share the arena's slots"


def _outlives(rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    setup = setup_of(Call(1, (4, 4)), num_ranks=2)
    given = make_input(setup, setup.calls[0], rank)
    buffer = make_buffer(setup)
    result = buffer.dispatch(given.x, given.topk_idx, given.topk_weights)
    before = result.x.clone()
    buffer.close()
    del buffer
    return before, result.x.clone()


def test_results_outlive_the_buffer() -> None:
    for before, after in run_ranks(_outlives, 2):
        same_bits(after, before, "x after close")


def _in_place(rank: int, num_ranks: int) -> dict[str, Any]:
    calls = [Call(1, (4, 6), layout="expert"), Call(2, (4, 6), layout="expert", expert_alignment=64)]
    setup = setup_of(*calls, num_ranks=2)
    with make_buffer(setup) as buffer:
        given = make_input(setup, calls[0], rank)
        handle = buffer.dispatch(given.x, given.topk_idx, given.topk_weights, layout="expert").handle
        y = make_output(setup, calls[0], rank, handle.num_recv)
        ordinary = buffer.combine(y, handle).x
        place = buffer.combine_input(handle)
        shape, dtype = tuple(place.shape), place.dtype
        place.copy_(y)
        # Meanwhile the arena grows for a larger alignment: what was leased must not be lost.
        other = make_input(setup, calls[1], rank)
        buffer.dispatch(other.x, other.topk_idx, other.topk_weights, layout="expert", expert_alignment=64)
        leased = buffer.combine(place, handle).x
        many = [buffer.combine_input(handle) for _ in range(6)]  # more than there are slots
        for number, memory in enumerate(many):
            memory.copy_(y * number)
        scaled = [buffer.combine(memory, handle).x for memory in many]
    want = [reference_sum(setup, calls[0], rank, number) for number in range(6)]
    same_bits(leased, ordinary, "combine from combine_input")
    for number in range(6):
        same_bits(scaled[number], want[number], f"combine from input {number}")
    return {"shape": shape == (handle.num_recv, setup.hidden), "dtype": dtype}


def reference_sum(setup: Setup, call: Call, rank: int, factor: int) -> torch.Tensor:
    """What combine returns on `rank` for outputs that are `factor` times those of `make_output`."""
    ranks = range(setup.num_ranks)
    inputs = [make_input(setup, call, each) for each in ranks]
    received = reference.dispatch(inputs, setup.num_experts, layout=call.layout, expert_alignment=call.expert_alignment)
    y = [make_output(setup, call, each, len(received[each].src_rank)) * factor for each in ranks]
    return reference.combine(inputs, received, y)[rank]


def test_combine_input_is_leased_memory_of_the_right_shape() -> None:
    for result in run_ranks(_in_place, 2):
        assert result["shape"]
        assert result["dtype"] == torch.bfloat16


def _strided(rank: int, num_ranks: int) -> None:
    call = Call(5, (6, 6))
    setup = setup_of(call, num_ranks=2)
    given = make_input(setup, call, rank)
    assert isinstance(given.x, torch.Tensor)
    assert given.topk_idx is not None
    assert given.topk_weights is not None
    wide = torch.full((6, 2 * setup.hidden), torch.nan, dtype=torch.bfloat16)
    wide[:, ::2] = given.x
    with make_buffer(setup) as buffer:
        want = buffer.dispatch(given.x, given.topk_idx, given.topk_weights)
        got = buffer.dispatch(
            wide[:, ::2], given.topk_idx.t().contiguous().t(), given.topk_weights.t().contiguous().t()
        )
        same_bits(got.x, want.x, "x from strided rows")
        same_bits(got.topk_idx, want.topk_idx, "topk_idx from strided rows")
        same_bits(got.topk_weights, want.topk_weights, "topk_weights from strided rows")
        y = make_output(setup, call, rank, want.handle.num_recv)
        sums = buffer.combine(y, want.handle).x
        bias = torch.ones(6, setup.hidden, dtype=torch.bfloat16)
        with_bias = buffer.combine(y, want.handle, bias=bias).x
        same_bits(buffer.combine(y.t().contiguous().t(), want.handle).x, sums, "combine of strided rows")
        same_bits(buffer.combine(y, want.handle, bias=bias[:1].expand(6, -1)).x, with_bias, "expanded bias")
        before = given.x.clone()
        same_bits(given.x, before, "the caller's rows")


def test_strided_inputs_are_right() -> None:
    run_ranks(_strided, 2)


def _nan_rows(rank: int, num_ranks: int, poisoned: bool) -> torch.Tensor:
    call = Call(5, (6, 6))
    setup = setup_of(call, num_ranks=2)
    given = make_input(setup, call, rank)
    with make_buffer(setup) as buffer:
        handle = buffer.dispatch(given.x, given.topk_idx, given.topk_weights).handle
        y = make_output(setup, call, rank, handle.num_recv)
        if poisoned:
            y[(handle.src_rank == 0) & (handle.src_token == 2)] = torch.nan
        return buffer.combine(y, handle).x


def test_nan_stays_with_its_own_token() -> None:
    clean = run_ranks(_nan_rows, 2, False)
    bad = run_ranks(_nan_rows, 2, True)
    same_bits(bad[1], clean[1], "tokens of rank 1")
    neighbours = [0, 1, 3, 4, 5]
    same_bits(bad[0][neighbours], clean[0][neighbours], "neighbours on rank 0")
    assert bool(bad[0][2].isnan().all()) or torch.equal(bad[0][2], clean[0][2]), "NaN, unless the token went nowhere"


def _nbytes(rank: int, num_ranks: int) -> tuple[int, int, int]:
    setup = setup_of(Call(1, (4, 4)), num_ranks=2, hidden=1024)
    given = make_input(setup, setup.calls[0], rank)
    with make_buffer(setup, max_tokens_per_rank=256, max_recv_rows=512) as buffer:
        empty = buffer.nbytes
        buffer.dispatch(given.x, given.topk_idx)
        one = buffer.nbytes
        buffer.dispatch(given.x, given.topk_idx, layout="expert")
        return empty, one, buffer.nbytes


def test_receive_memory_is_made_at_first_use_of_a_layout() -> None:
    payload = 512 * 1024 * 2
    for empty, one, both in run_ranks(_nbytes, 2):
        assert empty < payload, "no layout was used yet"
        assert one >= empty + 2 * payload, "two slots of the rank layout"
        assert both >= one + 2 * payload


class Rewrapped(Wrapped):
    """Shows another tensor, as do the results of operations on it; it has no memory that numpy can access."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        return tree_map(lambda one: Rewrapped(one) if isinstance(one, torch.Tensor) else one, found)


def sends_wrappers(rank: int, num_ranks: int) -> None:
    """Rows and scales of tensors without memory of their own, and rows off an 8-byte border."""
    with epee.Buffer(dist.group.WORLD, num_experts=2, hidden=128, num_topk=1, max_tokens_per_rank=4) as buffer:
        x = torch.randn(4, 128).to(torch.bfloat16)
        idx, weights = torch.tensor([[0], [1], [1], [0]]), torch.ones(4, 1)
        plain = buffer.dispatch(x, idx, weights).x
        same_bits(buffer.dispatch(Rewrapped(x), idx, weights).x, plain, "wrapper")
        off_border = torch.empty(4 * 128 + 1, dtype=torch.bfloat16)[1:].view(4, 128).copy_(x)
        same_bits(buffer.dispatch(off_border, idx, weights).x, plain, "off an 8-byte border")
        odd_storage = torch.frombuffer(bytearray(2 * (4 + 4 * 128)), dtype=torch.bfloat16, offset=2)
        for first in range(4):  # elements: the offset is on the border for one, the address for another
            shifted = odd_storage[first : first + 4 * 128].view(4, 128).copy_(x)
            same_bits(buffer.dispatch(shifted, idx, weights).x, plain, f"element {first}")
        values, scales = x.to(torch.float8_e4m3fn), torch.rand(4, 1)
        plain_pair = buffer.dispatch((values, scales), idx, weights).x
        pair = buffer.dispatch((Rewrapped(values), Rewrapped(scales)), idx, weights).x
        for one, other, name in zip(pair, plain_pair, ("values", "scales"), strict=True):
            same_bits(one, other, name)


def test_rows_of_wrappers_are_sent() -> None:
    run_ranks(sends_wrappers, 2)
