"""Weights that are given to a combine and come in part: a token's rows are summed all or none."""

from __future__ import annotations

import torch

from tests.csrc.emulated import all_gather_bytes
from tests.csrc.latency_cases import Plan, Round, bring, expected, expert_output, make_core, send
from tests.csrc.latency_failures import mask_of, options
from tests.harness import run_ranks

ROUND = Round((9, 9), weights="combine", seed=4)  # rows with flags
PLAN = Plan((ROUND,), max_tokens=12, num_topk=4, num_local_experts=4)
NUM_SENT = 2  # weights of each token that come, of four
TAG = 1


def _rank(rank: int, num_ranks: int) -> list[tuple[bool, bool]]:
    """Rank 1 stops while it pushes its weights; returns, for each of its tokens, whether all came and whether it was
    sent back."""
    core = make_core(PLAN, rank, "emulated")
    layout = core.config.region_layout
    inputs, packed = expected(PLAN, ROUND)
    d = send(core, ROUND, inputs[rank], options(ROUND, 30.0))
    all_gather_bytes(b"dispatched")
    if rank == 1:  # what its announcer has stored when it stops
        field = layout["combine_weights"]
        words = core.memory._peers[0].lease(layout.offset("combine_weights"), field.nbytes, None)
        weights = inputs[1].topk_weights
        assert weights is not None
        bits = weights.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        slots = words.view(torch.int64).view(*field.shape[:2], PLAN.max_tokens, PLAN.num_topk)
        place = slots[TAG % field.shape[0], 1]
        place[: len(bits), :NUM_SENT] = TAG << 32 | bits[:, :NUM_SENT]
    all_gather_bytes(b"weights")
    if rank == 0:
        y = expert_output(PLAN, packed[0], 0)
        c = bring(core, ROUND, y, inputs[0], d, options(ROUND, 1.0), active_ranks=mask_of(core, 1, 1))
        assert c.got.tolist() == [True, False]
    all_gather_bytes(b"combined")
    seen = []
    if rank == 1:
        field = layout["combine_flags"]
        words = (
            core.memory._own.lease(layout.offset("combine_flags"), field.nbytes, None)
            .view(torch.int64)
            .view(field.shape)
        )
        for token, ids in enumerate(inputs[1].topk_idx):
            is_here = (ids >= 0) & (ids < PLAN.num_local_experts)
            if is_here.any():
                came = not bool(is_here[NUM_SENT:].any())
                seen.append((came, bool((words[TAG % field.shape[0], 0, token] == TAG).all())))
    all_gather_bytes(b"done")
    core.close()
    return seen


def test_a_token_whose_weights_come_in_part_is_not_sent_back() -> None:
    seen = run_ranks(_rank, 2, timeout_s=60)[1]
    assert {came for came, _ in seen} == {True, False}
    assert all(was_sent == came for came, was_sent in seen), seen
