"""Cases for `LatencyBuffer`'s tests: inputs from a few numbers, equal on every rank, compared with the oracle there.

Every rank can make the inputs and expert outputs of all ranks, so it works out what it must get by itself. Memory is
poisoned: a row that nobody wrote, or that is left of an earlier call, shows as NaN.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

import epee
from epee.ep.latency.types import LatencyCombined, LatencyDispatched
from epee.reference import latency as oracle
from epee.reference import latency_hosts
from epee.reference.latency import Packed, Sent

BF16 = torch.bfloat16
PLAIN = ("bfloat16", "fp8", "fp8 rounded", "fp8 packed")


@dataclass(frozen=True)
class Shape:
    """A buffer: experts over all ranks, hidden size, top-k, tokens per rank."""

    num_experts: int = 8
    hidden: int = 512
    num_topk: int = 2
    max_tokens: int = 6


def make(shape: Shape, **changes: Any) -> epee.LatencyBuffer:
    """Make the buffer of a shape on this rank, its memory poisoned."""
    os.environ["EPEE_POISON"] = "1"
    arguments: dict[str, Any] = {
        "num_experts": shape.num_experts,
        "hidden": shape.hidden,
        "num_topk": shape.num_topk,
        "max_tokens_per_rank": shape.max_tokens,
        **changes,
    }
    return epee.LatencyBuffer(dist.group.WORLD, **arguments)


def inputs(shape: Shape, num_tokens: Sequence[int], seed: int, routing: str = "random") -> list[Sent]:
    """Make what all ranks pass to dispatch: random rows and weights, random experts with holes (-1) and repeats."""
    made = []
    for rank, count in enumerate(num_tokens):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        x = torch.randn(count, shape.hidden, generator=generator).to(BF16)
        idx = torch.randint(-1, shape.num_experts, (count, shape.num_topk), generator=generator)
        if routing == "one expert":
            idx.fill_(shape.num_experts - 1)
        elif routing == "nowhere":
            idx.fill_(-1)
        elif routing == "everywhere":  # each token to every rank that top-k allows
            step = torch.arange(shape.num_topk) * (shape.num_experts // len(num_tokens))
            idx = (torch.arange(count)[:, None] + step) % shape.num_experts
        made.append(Sent(x, idx, torch.rand(count, shape.num_topk, generator=generator)))
    return made


def quantisation(payload: str) -> dict[str, bool]:
    """Return the arguments of dispatch, and of the oracle, for one of `PLAIN`."""
    return {
        "use_fp8": payload != "bfloat16",
        "round_scale": payload in ("fp8 rounded", "fp8 packed"),
        "use_ue8m0": payload == "fp8 packed",
    }


def expert_outputs(packed: Sequence[Packed], seed: int) -> list[torch.Tensor]:
    """Make the outputs of all experts, NaN behind the rows that are there."""
    outputs = []
    for rank, there in enumerate(packed):
        x = there.x[0] if isinstance(there.x, tuple) else there.x
        generator = torch.Generator().manual_seed(7000 * seed + rank)
        y = torch.randn(x.shape, generator=generator).to(BF16)
        for expert, count in enumerate(there.num_tokens_per_expert.tolist()):
            y[expert, count:] = float("nan")
        outputs.append(y)
    return outputs


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, for comparisons that tell -0.0 from 0.0."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(torch.uint8)


def dispatch(buffer: epee.LatencyBuffer, given: Sent, **options: Any) -> LatencyDispatched:
    """Dispatch through a `LatencyBuffer`."""
    return cast(LatencyDispatched, buffer.dispatch(given.x, given.topk_idx, given.topk_weights, **options))


def combine(buffer: epee.LatencyBuffer, y: torch.Tensor, got: LatencyDispatched, **options: Any) -> LatencyCombined:
    """Combine through a `LatencyBuffer`."""
    return cast(LatencyCombined, buffer.combine(y, got.handle, **options))


def check_dispatched(got: LatencyDispatched, want: Packed) -> None:
    """Compare rows, scales, counts, ranges, tokens and mask with the oracle's, bit for bit."""
    assert torch.equal(got.num_tokens_per_expert, want.num_tokens_per_expert)
    assert got.num_tokens_per_expert.dtype == torch.int32
    assert torch.equal(got.handle.layout_range, want.layout_range)
    assert torch.equal(got.got, want.got)
    assert torch.equal(got.handle.got, want.got)
    mine, theirs = (part if isinstance(part, tuple) else (part,) for part in (got.x, want.x))
    assert len(mine) == len(theirs)
    for have, expected in zip(mine, theirs, strict=True):
        assert have.shape == expected.shape
        assert have.dtype == expected.dtype
        assert have.stride() == expected.stride()
        for expert, count in enumerate(want.num_tokens_per_expert.tolist()):
            assert torch.equal(bits(have[expert, :count]), bits(expected[expert, :count])), f"expert {expert}"
    for expert, count in enumerate(want.num_tokens_per_expert.tolist()):
        assert torch.equal(got.handle.src_token[expert, :count], want.src_token[expert, :count])


def check_round(
    buffer: epee.LatencyBuffer,
    shape: Shape,
    num_tokens: Sequence[int],
    seed: int,
    *,
    payload: str = "bfloat16",
    routing: str = "random",
    use_hook: bool = False,
    zero_copy: bool = False,
    late_weights: bool = False,
    partial_dtype: torch.dtype = BF16,
    hosts: Sequence[int] = (),
    **options: Any,
) -> None:
    """Do one dispatch and combine on this rank and compare both with the oracle; `hosts` are of ranks on several."""
    given = inputs(shape, num_tokens, seed, routing)
    mine, how = given[buffer.rank], quantisation(payload)
    packed = oracle.dispatch(given, shape.num_experts, shape.max_tokens, **how)
    got = dispatch(buffer, mine, **how, return_hook=use_hook, **options)
    if use_hook:
        assert not got.got.any()
        assert got.hook is not None
        got.hook()
    else:
        assert got.hook is None
    check_dispatched(got, packed[buffer.rank])
    outputs = expert_outputs(packed, seed)
    y = outputs[buffer.rank].clone()
    if zero_copy:
        y = buffer.combine_input(got.handle).copy_(y)
    changed = [torch.flip(each.topk_weights, (0, 1)) + 1 for each in given if each.topk_weights is not None]
    back = combine(
        buffer,
        y,
        got,
        topk_weights=changed[buffer.rank] if late_weights else None,
        partial_dtype=partial_dtype,
        return_hook=use_hook,
        **options,
    )
    y.fill_(float("nan"))  # its rows have been read when the send half is over
    if back.hook is not None:
        back.hook()
    late = changed if late_weights else None
    if hosts:
        sums = latency_hosts.combine(given, packed, outputs, hosts, topk_weights=late, partial_dtype=partial_dtype)
    else:
        sums = oracle.combine(given, packed, outputs, topk_weights=late, partial_dtype=partial_dtype)
    want = sums[buffer.rank]
    assert back.got.all(), back.got
    assert torch.equal(bits(back.x), bits(want)), (seed, back.x, want)
    assert torch.equal(back.lost_weight, torch.zeros(len(mine.x)))
