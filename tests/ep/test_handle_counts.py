"""What a handle of CPU tensors says about counts, against counting one by one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epee.ep.config import BufferConfig
from epee.ep.handle import CpuHandle
from epee.ep.throughput.placement import Counts, SendPlan, place, plan_by_expert, plan_by_mask, plan_by_rank

NUM_RANKS, LOCAL, NUM_TOPK = 3, 2, 3
RANK = 1
CONFIG = BufferConfig(NUM_RANKS, NUM_RANKS * LOCAL, 8, NUM_TOPK, 16, torch.float32)


def _routing(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 7, (NUM_RANKS,), generator=generator).tolist()
    return [torch.randint(-1, NUM_RANKS * LOCAL, (size, NUM_TOPK), generator=generator) for size in sizes]


def _handle(
    plans: list[SendPlan], layout: str, alignment: int, sources: list[int], local: torch.Tensor | None
) -> CpuHandle:
    words = torch.stack([torch.from_numpy(plan.counts) for plan in plans])
    counts = Counts(words[:, :NUM_RANKS].numpy(), words[:, NUM_RANKS:].numpy())
    placement = place(counts, RANK, layout, alignment, CONFIG)
    return CpuHandle(
        *(1, 1, 1, layout, alignment, 8, NUM_TOPK, local is not None, plans[RANK], placement),
        recv_topk_idx=local if layout == "rank" else None,
        recv_src_token=torch.tensor(sources, dtype=torch.int64),
    )


def _local(ids: torch.Tensor) -> torch.Tensor:
    return torch.where(ids // LOCAL == RANK, ids - RANK * LOCAL, -1)


def _round_up(count: int, alignment: int) -> int:
    return (count + alignment - 1) // alignment * alignment


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([1, 4]))
def test_the_rank_layout(seed: int, alignment: int) -> None:
    routing = _routing(seed)
    plans = [plan_by_rank(ids, CONFIG) for ids in routing]
    came = [[t for t, row in enumerate(_local(ids)) if bool((row >= 0).any())] for ids in routing]
    local = torch.cat([_local(ids)[tokens] for ids, tokens in zip(routing, came, strict=True)])
    handle = _handle(plans, "rank", alignment, [token for tokens in came for token in tokens], local)
    slots = [int((local == expert).sum()) for expert in range(LOCAL)]
    padded = [_round_up(count, alignment) for count in slots]
    assert handle.recv_slots.tolist() == slots
    assert handle.slot_ends.tolist() == [sum(padded[: i + 1]) for i in range(LOCAL)]
    assert handle.token_ends.tolist() == [sum(map(len, came[: rank + 1])) for rank in range(NUM_RANKS)]
    for ends in (handle.recv_slots, handle.slot_ends, handle.token_ends):
        assert ends.dtype == torch.int32


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([1, 4]))
def test_the_expert_layout(seed: int, alignment: int) -> None:
    routing = _routing(seed)
    plans = [plan_by_expert(ids, CONFIG) for ids in routing]
    sources, came, slots = [], [], [0] * LOCAL
    for ids in routing:
        local = _local(ids).tolist()
        rows = [
            (expert, token) for expert in range(LOCAL) for token, row in enumerate(local) for e in row if e == expert
        ]
        sources += [token for _, token in rows]
        came.append(len({token for _, token in rows}))
        slots = [count + sum(expert == e for e, _ in rows) for expert, count in enumerate(slots)]
    handle = _handle(plans, "expert", alignment, sources, torch.empty(0))
    starts = [sum(_round_up(count, alignment) for count in slots[:expert]) for expert in range(LOCAL)]
    assert handle.recv_slots.tolist() == slots
    assert handle.slot_ends.tolist() == [start + count for start, count in zip(starts, slots, strict=True)]
    assert handle.token_ends.tolist() == [sum(came[: rank + 1]) for rank in range(NUM_RANKS)]


def test_a_mask_routes_tokens_and_no_slots() -> None:
    masks = [torch.ones(tokens, NUM_RANKS, dtype=torch.bool) for tokens in (2, 0, 3)]
    handle = _handle([plan_by_mask(mask, CONFIG) for mask in masks], "rank", 1, [0, 1, 0, 1, 2], None)
    assert handle.token_ends.tolist() == [2, 2, 5]
    assert handle.recv_slots.tolist() == handle.slot_ends.tolist() == [0] * LOCAL
    assert handle.is_exact
    assert handle.received_up_to is None
