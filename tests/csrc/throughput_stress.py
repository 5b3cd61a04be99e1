"""Many small rounds at random on any platform, with warps that stand still at random places; every bit is compared.

A round is a fresh dispatch, a combine (in place, from `combine_input` or from ordinary memory) and sometimes a cached
dispatch. All ranks draw the same rounds from the seed, know all inputs, and compare with `epee.reference` on their own.
What a rank may choose alone, such as multiprocessors and the number of kernels, differs between the ranks.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from epee import reference
from epee.ep.throughput.gpu import dispatch as throughput_dispatch
from epee.ep.throughput.gpu.types import CombineOptions, DispatchOptions
from epee.gpu.shapes import FEW_TOKENS
from epee.reference import Received
from tests.csrc.throughput_cases import (
    TIMEOUT_S,
    Case,
    biases_of,
    device_of,
    expect_equal,
    expert_output,
    inputs_of,
    make_buffer,
    seen_by,
)
from tests.csrc.throughput_end import ThroughputEnd

STALL_ONE_IN = 24
MOST_TOKENS = 24
CONFIGS = (
    Case((), hidden=64, num_topk=3, num_local_experts=4),
    Case((), hidden=136, num_topk=9, num_local_experts=3, dtype="float16", payload="float16"),
    Case((), hidden=256, num_topk=4, num_local_experts=2, dtype="float32", payload="float32"),
    Case((), hidden=512, num_topk=8, num_local_experts=8),
    Case((), hidden=1032, num_topk=1, num_local_experts=1),
)


@dataclass(frozen=True)
class Round:
    """One round. `config` is the index of its buffer; `source` says where the rows lie that are combined."""

    config: int
    case: Case
    sync: bool
    source: str
    is_repeated: bool
    returns_weights: bool


def draw_round(seed: int, number: int, num_ranks: int) -> Round:
    """The same on every rank."""
    rng = random.Random(seed * 1_000_003 + number)
    config = rng.randrange(len(CONFIGS))
    base = CONFIGS[config]
    routing = rng.choice(["random", "random", "random", "repeats", "one expert", "nowhere", "mask"])
    layout = rng.choice(["rank", "rank", "expert"]) if routing != "mask" else "rank"
    is_fp8 = base.hidden % 128 == 0 and base.dtype == "bfloat16" and rng.random() < 0.3
    case = replace(
        base,
        num_tokens=tuple(rng.choice([0, 1, 7, MOST_TOKENS, rng.randrange(MOST_TOKENS)]) for _ in range(num_ranks)),
        layout=layout,
        expert_alignment=rng.choice([1, 4, 8]) if layout == "expert" else 1,
        routing=routing,
        payload="fp8" if is_fp8 else base.payload,
        with_weights=routing != "mask" and rng.random() < 0.7,
        num_bias=rng.choice([0, 0, 1, 2]),
        is_bias_wide=rng.random() < 0.3,
        seed=seed * 1_000_003 + number,
    )
    if routing == "random" and case.num_topk > case.num_experts:
        case = replace(case, routing="repeats")
    source = rng.choice(["in place", "given", "ordinary"])
    return Round(config, case, rng.random() < 0.6, source, rng.random() < 0.3, rng.random() < 0.5)


def play(buffer: ThroughputEnd, this: Round, rank: int, members: Collection[int] | None = None) -> None:
    """Run a round on one rank, which is one of `members` (None: of all); raises at the first difference."""
    device = buffer.machine.platform.device
    whole = inputs_of(this.case, rank)  # what the kernels get: they leave out who is no member
    case, inputs = seen_by(this.case, members)
    want = reference.dispatch(inputs, case.num_experts, layout=case.layout, expert_alignment=case.expert_alignment)
    given, mine = whole, want[rank]
    x, scales = given.x if isinstance(given.x, tuple) else (given.x, None)
    route = given.topk_idx if given.topk_idx is not None else given.is_token_in_rank
    assert route is not None
    alone = random.Random(case.seed * 8 + rank)  # what the ranks need not agree about
    throughput_dispatch.FEW_TOKENS = alone.choice([0, FEW_TOKENS])
    limit = buffer.machine.platform.limits.num_sms
    num_sms = alone.choice([None, 1, 2, max(1, limit // 3), limit // 2 + 1])
    options = DispatchOptions(case.layout, case.expert_alignment, this.sync, num_sms, TIMEOUT_S)
    weights = None if given.topk_weights is None else given.topk_weights.to(device)
    route = route.contiguous().to(device)
    d = buffer.dispatch(x.to(device), _to(scales, device), route, weights, None, options)
    _check(d, mine)
    rows = _rows(mine)
    y = expert_output(d.x, rank, case)
    if this.source == "in place" and case.payload != "fp8" and case.layout == "rank":
        d.x.copy_(y)
        y = d.x
    elif this.source == "given" and (place := buffer.combine_input(d.handle, y.dtype)) is not None:
        place.copy_(y)
        y = place
    ys = [expert_output(_values(there), src, case) for src, there in enumerate(want)]
    bias = [tensor.to(device) for tensor in biases_of(case, rank)]
    returned = d.topk_weights if this.returns_weights else None
    out, back = buffer.combine(y, d.handle, returned, bias, None, CombineOptions(num_sms, TIMEOUT_S))
    biases = [biases_of(case, src) for src in range(case.num_ranks)]
    expect_equal(out.cpu(), reference.combine(inputs, want, ys, bias=biases)[rank], "combine")
    if returned is not None and mine.topk_weights is not None:
        sent = [there.topk_weights for there in want]
        assert back is not None
        expect_equal(back.cpu(), reference.combine_weights(inputs, want, sent)[rank], "weights")  # type: ignore[arg-type]
    if this.is_repeated:
        again = buffer.dispatch(x.to(device), _to(scales, device), None, None, d.handle, options)
        expect_equal(again.x[:rows].cpu(), _values(mine), "cached dispatch")


def _to(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def _values(there: Received) -> torch.Tensor:
    return there.x[0] if isinstance(there.x, tuple) else there.x


def _rows(there: Received) -> int:
    return _values(there).shape[0]


def _check(d: Any, mine: Received) -> None:
    rows = _rows(mine)
    expect_equal(d.x[:rows].cpu(), _values(mine), "x")
    if isinstance(mine.x, tuple):
        expect_equal(d.scales[:rows].cpu().view(torch.float32), mine.x[1], "scales")
    for name in ("topk_idx", "topk_weights", "src_token"):
        expected = getattr(mine, name)
        if expected is not None:
            expect_equal(getattr(d, name)[:rows].cpu(), expected, name)
    if mine.topk_idx is not None:
        assert bool((d.topk_idx[rows:] == -1).all()), "a row behind the last one belongs to an expert"


def stress(rank: int, num_ranks: int, platform: str, num_rounds: int, seed: int, stall_one_in: int) -> int:
    """Play `num_rounds` rounds on one rank; returns how many results had to be copied out."""
    if platform == "cuda":
        torch.cuda.set_device(device_of(rank))
    buffers = []
    for base in CONFIGS:
        case = replace(base, num_tokens=(MOST_TOKENS,) * num_ranks, expert_alignment=8)
        buffers.append(make_buffer(case, rank, platform, stall_one_in=stall_one_in))
    for number in range(num_rounds):
        this = draw_round(seed, number, num_ranks)
        try:
            play(buffers[this.config], this, rank)
        except Exception as error:
            raise AssertionError(f"round {number} of seed {seed}, rank {rank}: {this}") from error
    for buffer in buffers:
        buffer.barrier(TIMEOUT_S)
    if platform == "cuda":
        torch.cuda.synchronize()
    for buffer in buffers:
        buffer.check()
    return sum(buffer.machine.pool.num_copies for buffer in buffers)
