"""Cases for the Buffer tests: described in a few numbers, turned into inputs on each rank, compared in the parent.

A `Setup` says how a buffer is made, its `Call`s what is done with it. Every rank makes its own inputs from the seeds,
runs the calls on real shared memory, and sends everything it got back to the parent, which compares with
`epee.reference` bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import epee
from epee import reference
from epee.reference import Received, Routed
from tests.harness import run_ranks

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
ROUTINGS = ("random", "one expert", "one rank", "repeats", "nowhere", "mask")


@dataclass(frozen=True)
class Call:
    """One dispatch, one cached dispatch and their combines.

    Attributes:
        seed: of rows, routing and weights.
        num_tokens: per rank.
        routing: one of `ROUTINGS`.
        layout: "rank" or "expert".
        expert_alignment: rows.
        payload: a key of `DTYPES`, "fp8" (float32 scales), "fp8 strided" (scales with strides), "fp8 packed" (int32),
            "fp8 mx" (int32, a byte for 32 channels) or "fp8 most" (as many scales as may be).
        with_weights: whether topk_weights are given.
        with_again: whether the cached dispatch brings new weights.
        num_bias: tensors added by combine, 0 to 2.
        in_place: whether combine reads from `combine_input`.
        with_out: whether combine writes into `out`.
        with_weights_back: whether combine returns weights.
        capacity: rows that a rank keeps (rank layout), None for all.
    """

    seed: int
    num_tokens: tuple[int, ...]
    routing: str = "random"
    layout: str = "rank"
    expert_alignment: int = 1
    payload: str = "bfloat16"
    with_weights: bool = True
    with_again: bool = False
    num_bias: int = 0
    in_place: bool = False
    with_out: bool = False
    with_weights_back: bool = False
    capacity: int | None = None


@dataclass(frozen=True)
class Setup:
    """A buffer and what is done with it.

    Attributes:
        host_of: of each rank; nothing where all ranks share a host.
    """

    num_ranks: int
    num_local_experts: int
    hidden: int
    num_topk: int
    dtype: str
    num_slots: int
    calls: tuple[Call, ...]
    host_of: tuple[int, ...] = ()
    wide_partials: bool = False

    @property
    def num_experts(self) -> int:
        """Over all ranks."""
        return self.num_ranks * self.num_local_experts


def make_buffer(setup: Setup, **changes: Any) -> epee.Buffer:
    """Make the buffer of a setup on this rank, its memory poisoned; `changes` replaces arguments."""
    os.environ["EPEE_POISON"] = "1"
    arguments: dict[str, Any] = {
        "num_experts": setup.num_experts,
        "hidden": setup.hidden,
        "num_topk": setup.num_topk,
        "max_tokens_per_rank": max([1, *(max(call.num_tokens) for call in setup.calls)]),
        "dtype": DTYPES[setup.dtype],
        "num_slots": setup.num_slots,
        # the default of the expert layout is less than the worst case, which these routings like to reach
        "max_recv_rows": max([1, *(sum(call.num_tokens) * setup.num_topk for call in setup.calls)]),
        "wide_partials": setup.wide_partials,
        **changes,
    }
    return epee.Buffer(dist.group.WORLD, **arguments)


def make_input(setup: Setup, call: Call, rank: int, again: bool = False) -> Routed:
    """Make what `rank` passes to dispatch (or to the cached dispatch that follows: same routing, other rows).

    Rows are random bits: any change of a value would show.
    """
    generator = torch.Generator().manual_seed(1000 * (call.seed + again) + rank)
    num_tokens = call.num_tokens[rank]
    x = _payload(call.payload, num_tokens, setup.hidden, generator)
    routing = torch.Generator().manual_seed(1000 * call.seed + rank)
    if call.routing == "mask":
        member = torch.rand(num_tokens, setup.num_ranks, generator=routing) < 0.5
        return Routed(x, is_token_in_rank=member)
    has_weights = call.with_again if again else call.with_weights
    weights = _weights(setup, call, num_tokens, generator) if has_weights else None
    return Routed(x, _topk_idx(setup, call, num_tokens, routing), weights)


def _payload(payload: str, num_tokens: int, hidden: int, generator: torch.Generator) -> Any:
    if not payload.startswith("fp8"):
        return _random_bits(DTYPES[payload], num_tokens, hidden, generator)
    values = _random_bits(torch.float8_e4m3fn, num_tokens, hidden, generator)
    if payload == "fp8 mx":
        return values, _random_bits(torch.int32, num_tokens, -(-hidden // 128), generator)
    if payload == "fp8 most":
        return values, _random_bits(torch.float32, num_tokens, hidden // 16, generator)
    if payload == "fp8 packed":
        return values, _random_bits(torch.int32, num_tokens, hidden // 512, generator)
    num_scales = hidden // 128
    if payload == "fp8 strided":  # column-major, as a kernel that makes scales likes to write them
        return values, _random_bits(torch.float32, num_scales, num_tokens, generator).t()
    return values, _random_bits(torch.float32, num_tokens, num_scales, generator)


def _random_bits(dtype: torch.dtype, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    raw = torch.randint(0, 256, (rows, columns * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype) if raw.numel() else torch.empty(rows, columns, dtype=dtype)


def _weights(setup: Setup, call: Call, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    dtype = torch.float64 if call.payload == "float64" and call.seed % 2 else torch.float32
    return torch.randn(num_tokens, setup.num_topk, dtype=dtype, generator=generator)


def _topk_idx(setup: Setup, call: Call, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    shape = (num_tokens, setup.num_topk)
    if call.routing == "nowhere":
        return torch.full(shape, -1)
    if call.routing == "one expert":
        return torch.full(shape, call.seed % setup.num_experts)
    if call.routing == "one rank":
        first = call.seed % setup.num_ranks * setup.num_local_experts
        return torch.randint(first, first + setup.num_local_experts, shape, generator=generator)
    if call.routing == "repeats":  # with replacement: duplicates in a row are likely
        return torch.randint(-1, setup.num_experts, shape, generator=generator)
    ranked = torch.rand(num_tokens, setup.num_experts + setup.num_topk, generator=generator).argsort(1)
    chosen = ranked[:, : setup.num_topk]  # without replacement; the places past the experts stand for "none"
    return torch.where(chosen < setup.num_experts, chosen, -1)


def make_output(setup: Setup, call: Call, rank: int, num_rows: int) -> torch.Tensor:
    """Make what the experts of `rank` return, `[num_rows, hidden]`; finite, with zeros of both signs."""
    dtype = combine_dtype(setup, call)
    generator = torch.Generator().manual_seed(2000 * call.seed + rank)
    y = torch.randn(num_rows, setup.hidden, dtype=torch.float64, generator=generator)
    y = torch.where(torch.rand(y.shape, generator=generator) < 0.1, -0.0, y)
    return y.to(dtype)


def combine_dtype(setup: Setup, call: Call) -> torch.dtype:
    """The dtype of the rows that go back: that of the payload, the buffer's for FP8."""
    return DTYPES[setup.dtype if call.payload.startswith("fp8") else call.payload]


def make_bias(setup: Setup, call: Call, rank: int) -> list[torch.Tensor]:
    """Make the bias tensors of `rank`."""
    generator = torch.Generator().manual_seed(3000 * call.seed + rank)
    shape = (call.num_tokens[rank], setup.hidden)
    dtype = combine_dtype(setup, call)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for _ in range(call.num_bias)]


def make_weights_back(call: Call, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Make the weights that `rank` returns in combine."""
    generator = torch.Generator().manual_seed(4000 * call.seed + rank)
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator).to(dtype)


def until_all_succeed(buffer: epee.Buffer, call: Callable[[], Any], most: int = 10) -> None:
    """Repeat a collective call until it succeeds on all ranks of the default group at once.

    After a time-out the ranks may be a call apart: whoever is behind first makes the calls that it lacks. They fail at
    once, because the others have given them up.
    """
    for _ in range(most):
        seqs = torch.zeros(buffer.num_ranks, dtype=torch.int64)
        seqs[buffer.rank] = buffer._exchange.seq
        dist.all_reduce(seqs)
        for _ in range(int(seqs.max() - seqs[buffer.rank])):
            _succeeds(call)
        flag = torch.tensor([_succeeds(call)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        if flag.item():
            return
    raise AssertionError(f"{most} calls failed in a row")


def _succeeds(call: Callable[[], Any]) -> int:
    try:
        call()
    except (epee.MismatchError, epee.CommTimeoutError):
        return 0
    return 1


def copy_of(value: Any) -> Any:
    """Clone tensors in a result, so that no arena memory is held."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(copy_of(part) for part in value)
    return value


def fields(dispatched: epee.Dispatched) -> dict[str, Any]:
    """Copy what a rank received into a dict that can travel to the parent."""
    return {
        "x": copy_of(dispatched.x),
        "topk_idx": copy_of(dispatched.topk_idx),
        "topk_weights": copy_of(dispatched.topk_weights),
        "num_tokens_per_expert": dispatched.num_tokens_per_expert,
        "src_rank": dispatched.handle.src_rank.clone(),
        "src_token": dispatched.handle.src_token.clone(),
        "got": dispatched.got.clone(),
        "num_dropped": copy_of(dispatched.num_dropped),
    }


def placed(value: Any, buffer: epee.Buffer) -> Any:
    """Return a tensor, a pair or a rank's input on the buffer's device (strides are kept)."""
    if isinstance(value, Routed):
        return Routed(*(placed(getattr(value, name), buffer) for name in value.__dataclass_fields__))
    if isinstance(value, tuple):
        return tuple(placed(part, buffer) for part in value)
    return value.to(buffer.config.device) if isinstance(value, torch.Tensor) else value


def run_call(buffer: epee.Buffer, setup: Setup, call: Call, rank: int) -> dict[str, Any]:
    """Run one call on this rank and return all that came out."""
    given = placed(make_input(setup, call, rank), buffer)
    first = buffer.dispatch(
        given.x,
        given.topk_idx,
        given.topk_weights,
        is_token_in_rank=given.is_token_in_rank,
        layout=call.layout,
        expert_alignment=call.expert_alignment,
        capacity=call.capacity,
    )
    result = {"dispatch": fields(first)}
    handle = first.handle
    del first
    again = placed(make_input(setup, call, rank, again=True), buffer)
    second = buffer.dispatch(again.x, handle=handle, topk_weights=again.topk_weights)
    result["again"] = fields(second)
    result["combine again"] = _run_combine(buffer, setup, call, rank, second.handle)
    del second
    result["combine"] = _run_combine(buffer, setup, call, rank, handle)
    return result


def _run_combine(buffer: epee.Buffer, setup: Setup, call: Call, rank: int, handle: epee.Handle) -> dict[str, Any]:
    y = placed(make_output(setup, call, rank, handle.num_recv), buffer)
    if call.in_place:
        place = buffer.combine_input(handle, dtype=y.dtype)
        place.copy_(y)
        y = place
    options: dict[str, Any] = {}
    bias = placed(tuple(make_bias(setup, call, rank)), buffer)
    if bias:
        options["bias"] = bias[0] if len(bias) == 1 else bias
    if call.with_out:
        options["out"] = torch.full((call.num_tokens[rank], setup.hidden), torch.nan, dtype=y.dtype, device=y.device)
    if call.with_weights_back and call.routing != "mask":
        shape = (handle.num_recv, setup.num_topk) if call.layout == "rank" else (handle.num_recv,)
        options["topk_weights"] = placed(make_weights_back(call, rank, shape, torch.float32), buffer)
    combined = buffer.combine(y, handle, **options)
    if call.with_out:
        assert combined.x.data_ptr() == options["out"].data_ptr(), "out= must be what comes back"
    lost = combined.lost_weight
    return {"x": copy_of(combined.x), "topk_weights": copy_of(combined.topk_weights), "lost_weight": copy_of(lost)}


def run_setups(rank: int, num_ranks: int, setups: list[Setup]) -> list[list[dict[str, Any]]]:
    """Run all calls of all setups on this rank (one buffer per setup)."""
    results = []
    for setup in setups:
        with make_buffer(setup) as buffer:
            results.append([run_call(buffer, setup, call, rank) for call in setup.calls])
    return results


def check_setups(
    num_ranks: int,
    setups: list[Setup],
    timeout_s: float = 40.0,
    around: Callable[..., Any] | None = None,
    run: Callable[..., list[Any]] = run_ranks,
) -> None:
    """Run the setups on `num_ranks` processes and compare everything with the reference.

    `around(rank, num_ranks, function, *args)` runs a rank's part on another device than the CPU. `run` is `run_ranks`,
    or that of a pool.
    """
    if around is None:
        by_rank = run(run_setups, num_ranks, setups, timeout_s=timeout_s)
    else:
        by_rank = run(around, num_ranks, run_setups, setups, timeout_s=timeout_s)
    for setup_idx, setup in enumerate(setups):
        for call_idx, call in enumerate(setup.calls):
            check_call(setup, call, [results[setup_idx][call_idx] for results in by_rank])


def check_call(setup: Setup, call: Call, by_rank: list[dict[str, Any]]) -> None:
    """Compare what all ranks got from one call with the reference, bit for bit."""
    ranks = range(setup.num_ranks)
    inputs = [make_input(setup, call, rank) for rank in ranks]
    again = [make_input(setup, call, rank, again=True) for rank in ranks]
    if call.layout == "expert" and not call.with_again:  # then the handle's weights serve again
        again = [Routed(new.x, new.topk_idx, old.topk_weights) for new, old in zip(again, inputs, strict=True)]
    for stage, given in (("dispatch", inputs), ("again", again)):
        wanted = reference.dispatch(
            given,
            setup.num_experts,
            layout=call.layout,
            expert_alignment=call.expert_alignment,
            capacity=call.capacity,
        )
        for rank in ranks:
            where = f"{stage}, rank {rank}: {setup}, {call}"
            check_dispatched(by_rank[rank][stage], wanted[rank], where)
            dropped = None if call.capacity is None else torch.tensor([wanted[rank].num_dropped], dtype=torch.int32)
            same_bits(by_rank[rank][stage]["num_dropped"], dropped, f"num_dropped of {where}")
        back = "combine" if stage == "dispatch" else "combine again"
        weighted = given if call.with_again or call.routing == "mask" else inputs  # whose weights the handle has
        _check_lost(setup, call, weighted, wanted, [results[back] for results in by_rank])
        _check_combined(setup, call, given, wanted, [results[back] for results in by_rank], back)


def _check_lost(
    setup: Setup, call: Call, inputs: list[Routed], received: list[Received], by_rank: list[dict[str, Any]]
) -> None:
    wanted = [torch.zeros(count) for count in call.num_tokens]
    if call.layout == "rank":
        wanted = reference.lost_weight(inputs, received, setup.num_experts)
    for rank, want in enumerate(wanted):
        got = by_rank[rank]["lost_weight"].cpu()
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, msg=f"lost_weight, rank {rank}: {setup}, {call}")


def check_dispatched(got: dict[str, Any], want: Received, where: str) -> None:
    """Compare one rank's `fields` with the reference."""
    for part, wanted in zip(_parts(got["x"]), _parts(want.x), strict=True):
        same_bits(part, wanted, f"x of {where}")
    same_bits(got["topk_idx"], want.topk_idx, f"topk_idx of {where}")
    same_bits(got["topk_weights"], want.topk_weights, f"topk_weights of {where}")
    same_bits(got["src_rank"], want.src_rank, f"src_rank of {where}")
    same_bits(got["src_token"], want.src_token, f"src_token of {where}")
    assert list(got["num_tokens_per_expert"]) == want.num_tokens_per_expert, f"num_tokens_per_expert of {where}"
    assert got["got"].dtype == torch.int32
    assert bool(got["got"].all()), f"got of {where}: nobody failed"


def _check_combined(
    setup: Setup,
    call: Call,
    inputs: list[Routed],
    received: list[Received],
    by_rank: list[dict[str, Any]],
    stage: str,
) -> None:
    ranks = range(setup.num_ranks)
    y = [make_output(setup, call, rank, len(received[rank].src_rank)) for rank in ranks]
    bias = [make_bias(setup, call, rank) for rank in ranks]
    if setup.host_of:
        wanted = reference.combine_by_host(
            inputs, received, y, setup.host_of, wide_partials=setup.wide_partials, bias=bias
        )
    else:
        wanted = reference.combine(inputs, received, y, bias=bias)
    for rank in ranks:
        same_bits(by_rank[rank]["x"], wanted[rank], f"{stage}, rank {rank}: {setup}, {call}")
    if not (call.with_weights_back and call.routing != "mask"):
        assert all(results["topk_weights"] is None for results in by_rank)
        return
    shapes = [(len(there.src_rank), setup.num_topk)[: 2 if call.layout == "rank" else 1] for there in received]
    weights = [make_weights_back(call, rank, shapes[rank], torch.float32) for rank in ranks]
    by_host = setup.host_of
    if by_host:
        backs = reference.combine_weights_by_host(inputs, received, weights, by_host)
    else:
        backs = reference.combine_weights(inputs, received, weights)
    for rank, want in enumerate(backs):
        same_bits(by_rank[rank]["topk_weights"], want, f"weights of {stage}, rank {rank}: {setup}, {call}")


def same_bits(got: torch.Tensor | None, want: torch.Tensor | None, where: str) -> None:
    """Assert that two tensors have the same dtype, shape and bits (so NaN equals NaN, and -0.0 is not 0.0)."""
    if want is None or got is None:
        assert got is want, f"{where}: got {got}, want {want}"
        return
    assert got.dtype == want.dtype, f"{where}: got {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{where}: got {tuple(got.shape)}, want {tuple(want.shape)}"
    if want.numel() == 0:
        return
    left, right = (value.contiguous().reshape(-1).view(torch.uint8) for value in (got, want))
    if not torch.equal(left, right):
        rows = (left != right).view(want.shape[0], -1).any(1).nonzero().view(-1).tolist()
        raise AssertionError(f"{where}: rows {rows[:8]} differ\ngot  {got[rows[0]]}\nwant {want[rows[0]]}")


def _parts(payload: Any) -> tuple[torch.Tensor, ...]:
    return payload if isinstance(payload, tuple) else (payload,)
