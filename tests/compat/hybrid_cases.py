"""What the tests of `HybridEPBuffer` share: seeded maps, and what must come of them, one row at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import epee.compat.deep_ep as deep_ep
from epee.errors import InvalidArgument

HIDDEN, NUM_LOCAL, MAX_TOKENS = 64, 3, 8


class Given(NamedTuple):
    """What one rank sends."""

    hidden: torch.Tensor
    routing_map: torch.Tensor
    probs: torch.Tensor


def given(rank: int, num_ranks: int, seed: int, num_tokens: int | None = None) -> Given:
    """Return a rank's tokens: 0 ... 4 experts each, probs everywhere (those beyond the map must not matter)."""
    gen = torch.Generator().manual_seed(100 * seed + rank)
    count = (5 + 3 * rank + seed) % (MAX_TOKENS + 1) if num_tokens is None else num_tokens
    num_experts = NUM_LOCAL * num_ranks
    most = torch.randint(0, min(4, num_experts) + 1, (count, 1), generator=gen)
    order = torch.rand(count, num_experts, generator=gen).argsort(1).argsort(1)
    hidden = torch.randn(count, HIDDEN, generator=gen).to(torch.bfloat16)
    return Given(hidden, order < most, torch.rand(count, num_experts, generator=gen))


def wanted_rows(inputs: list[Given], rank: int, pad: int) -> tuple[list[tuple[int, int, int] | None], list[int]]:
    """Return (expert, source rank, token) of each row of a rank, None for padding; and the rows of each expert."""
    rows: list[tuple[int, int, int] | None] = []
    counts = []
    for expert in range(rank * NUM_LOCAL, (rank + 1) * NUM_LOCAL):
        before = len(rows)
        for src, each in enumerate(inputs):
            rows += [(expert, src, token) for token in range(len(each.hidden)) if each.routing_map[token, expert]]
        rows += [None] * (-len(rows) % pad)
        counts.append(len(rows) - before)
    return rows, counts


def check_call(
    buffer: deep_ep.HybridEPBuffer, rank: int, num_ranks: int, seed: int, pad: int | None, **options: Any
) -> None:
    """Dispatch, dispatch again by the handle, combine with probs: against one row at a time."""
    inputs = [given(each, num_ranks, seed) for each in range(num_ranks)]
    mine = inputs[rank]
    rows, counts = wanted_rows(inputs, rank, pad or 1)
    hidden, probs, scales, per_expert, handle = buffer.dispatch_with_permute(
        hidden=mine.hidden, routing_map=mine.routing_map, probs=mine.probs, pad_multiple=pad,
        num_of_experts_per_rank=NUM_LOCAL, **options,
    )  # fmt: skip
    num_rows = options.get("num_permuted_tokens") or len(rows)
    kept = rows[:num_rows]
    assert scales is None
    assert hidden.shape == (num_rows, HIDDEN)
    assert per_expert.dtype == torch.int64
    ends = [min(sum(counts[: at + 1]), num_rows) for at in range(NUM_LOCAL)]
    assert per_expert.cumsum(0).tolist() == ends
    assert int(handle[-1]) == int(len(rows) > num_rows)
    for at, row in enumerate(kept):
        if row is not None:
            expert, src, token = row
            assert torch.equal(hidden[at], inputs[src].hidden[token]), (at, row)
            assert probs[at] == inputs[src].probs[token, expert]
        else:
            assert not hidden[at].any()
    # what the experts make of it depends on the row's place, so a row that came back from elsewhere would show
    factor = torch.arange(num_rows, dtype=torch.float32)[:, None].remainder(5) + rank + 1
    y = (hidden.float() * factor).to(torch.bfloat16)
    back, back_probs = buffer.combine_with_unpermute(hidden=y, probs=probs, handle=handle, pad_multiple=pad)
    grad = mine.hidden.flip(1).contiguous()
    again = buffer.dispatch_with_permute(hidden=grad, handle=handle, pad_multiple=pad, num_permuted_tokens=num_rows)
    for at, row in enumerate(kept):
        if row is not None:
            assert torch.equal(again[0][at], inputs[row[1]].hidden[row[2]].flip(0))
    total, total_probs = torch.zeros(len(mine.hidden), HIDDEN), torch.zeros_like(mine.probs)
    for other in range(num_ranks):
        theirs = wanted_rows(inputs, other, pad or 1)[0][:num_rows] if "num_permuted_tokens" in options else (
            wanted_rows(inputs, other, pad or 1)[0]
        )  # fmt: skip
        for at, row in enumerate(theirs):
            if row is not None and row[1] == rank:
                part = (mine.hidden[row[2]].float() * (at % 5 + other + 1)).to(torch.bfloat16)
                total[row[2]] += part.float()
                total_probs[row[2], row[0]] = mine.probs[row[2], row[0]]
    # at most four bfloat16 parts below 2^6 summed in float32 and rounded once
    torch.testing.assert_close(back.float(), total, rtol=2**-8, atol=1e-5)
    assert torch.equal(back_probs, total_probs)


def run_calls(rank: int, num_ranks: int) -> None:
    """Calls of all kinds on one buffer."""
    buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, HIDDEN, MAX_TOKENS, NUM_LOCAL, False)
    assert buffer.group is dist.group.WORLD
    assert buffer.configurer.buffer_config.max_num_of_tokens_per_rank == MAX_TOKENS
    for seed, pad in enumerate((None, 4, 1, 16)):
        check_call(buffer, rank, num_ranks, seed, pad)
    for seed, (pad, rows) in enumerate(((None, 48), (4, 64), (None, 6), (4, 8))):  # room to spare, and too little
        check_call(buffer, rank, num_ranks, seed, pad, num_permuted_tokens=rows, non_blocking=True)
    check_call(buffer, rank, num_ranks, 9, 4, num_permuted_tokens=12)
    refuse(buffer, rank, num_ranks)
    check_call(buffer, rank, num_ranks, 10, 4)
    buffer.destroy()


def refuse(buffer: deep_ep.HybridEPBuffer, rank: int, num_ranks: int) -> None:
    """Wrong arguments that need no peer are refused, by name."""
    mine = given(rank, num_ranks, 1)
    options: dict[str, Any] = {"hidden": mine.hidden, "routing_map": mine.routing_map, "probs": mine.probs}
    handle = buffer.dispatch_with_permute(**options)[-1]
    cases: list[tuple[str, Any]] = [
        ("routing_map must be", lambda: buffer.dispatch_with_permute(**{**options, "routing_map": mine.probs})),
        ("num_permuted_tokens", lambda: buffer.dispatch_with_permute(**options, non_blocking=True)),
        ("handle must be", lambda: buffer.combine_with_unpermute(hidden=mine.hidden, handle=None)),
        ("hidden must have", lambda: buffer.combine_with_unpermute(hidden=torch.ones(99, HIDDEN), handle=handle)),
    ]
    for text, call in cases:
        with pytest.raises(InvalidArgument, match=text):
            call()


def run_topk_and_scales(rank: int, num_ranks: int) -> None:
    """Top-k ids instead of a map; FP8 rows with their scaling factors."""
    buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, 128, MAX_TOKENS, NUM_LOCAL)
    num_experts = NUM_LOCAL * num_ranks
    gen = torch.Generator().manual_seed(rank)
    idx = torch.rand(4, num_experts, generator=gen).topk(2, dim=1)[1]
    idx[0, 1] = -1
    weights = torch.rand(4, 2, generator=gen)
    routing_map, probs = deep_ep.hybrid.indices_to_map(idx, weights, 4, num_experts)
    assert routing_map.sum() == 7
    assert probs is not None
    values, scales = deep_ep.utils.per_token_cast_to_fp8(torch.randn(4, 128, generator=gen).to(torch.bfloat16))
    by_map = buffer.dispatch_with_permute(
        hidden=values.view(torch.uint8), scaling_factor=scales, routing_map=routing_map, probs=probs
    )
    by_idx = buffer.dispatch_with_permute(hidden=values, scaling_factor=scales, topk_idx=idx, topk_weights=weights)
    for mine, other in zip(by_map[:4], by_idx[:4], strict=True):
        assert mine is not None
        assert other is not None
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    assert by_map[2].shape == (len(by_map[0]), 1)  # type: ignore[union-attr]
    assert buffer.dispatch_with_permute(hidden=values, scaling_factor=scales, topk_idx=idx)[1] is None


def run_growth(rank: int, num_ranks: int) -> int:
    """Check calls that need more than those before, on all ranks or on one; return how often the ranks exchanged."""
    buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, HIDDEN, MAX_TOKENS, NUM_LOCAL)
    pool = buffer._pool()
    asked: list[tuple[int, ...]] = []
    most = pool.most
    given_to_all, wishes = given, [(2, 4), (2, 4), (1, 4), (2, 4)]

    def given_at_most(each: int, num_ranks: int, seed: int) -> Given:
        most_experts, count = wishes[each]
        made = given_to_all(each, num_ranks, seed, count)
        return made._replace(routing_map=made.routing_map & (made.routing_map.cumsum(1) <= most_experts))

    def count_most(*numbers: int) -> list[int]:
        asked.append(numbers)
        return most(*numbers)

    with pytest.MonkeyPatch.context() as settings:
        settings.setattr(pool, "most", count_most)
        settings.setitem(globals(), "given", given_at_most)
        check_call(buffer, rank, num_ranks, 1, None)
        check_call(buffer, rank, num_ranks, 2, None)
        for seed, grown in enumerate(((1, 3, 4), (0, 4, 4), (1, 4, MAX_TOKENS + 5), (0, 2, 3 * MAX_TOKENS)), 3):
            wishes[grown[0]] = grown[1:]
            check_call(buffer, rank, num_ranks, seed, 4)
            check_call(buffer, rank, num_ranks, seed + 10, None, num_permuted_tokens=5)
        wishes = [(4, MAX_TOKENS)] * 4
        check_call(buffer, rank, num_ranks, 7, None)
        wishes = [(5, 4 * MAX_TOKENS)] * 4  # on all ranks at once
        check_call(buffer, rank, num_ranks, 8, None)
    buffer.destroy()
    return len(asked)
