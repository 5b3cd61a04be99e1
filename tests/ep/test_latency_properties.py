"""`LatencyBuffer`'s arithmetic against the oracle, for any shape, routing and mask: no processes, all ranks here."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epee.ep.latency.rows import as_sent, expand, lost_weight, partial_sums, place_rows, sum_over_ranks
from epee.ep.latency.types import Quantisation
from epee.reference import latency as oracle
from epee.reference.latency import Sent
from tests.ep.latency_cases import BF16, bits

PLAIN = Quantisation()


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Sent], int, int, list[list[bool]], list[list[bool]]]:
    """All ranks' inputs, experts over all ranks, most tokens of a rank, `got` of dispatch and of combine."""
    num_ranks, num_local = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num_topk, max_tokens = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    num_experts = num_ranks * num_local
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    sent = []
    for _ in range(num_ranks):
        count = draw(st.integers(0, max_tokens))
        idx = draw(
            st.lists(
                st.lists(st.integers(-1, num_experts - 1), min_size=num_topk, max_size=num_topk),
                min_size=count,
                max_size=count,
            )
        )
        x = torch.randn(count, 128, generator=generator).to(BF16)
        weights = torch.randn(count, num_topk, generator=generator)
        sent.append(Sent(x, torch.tensor(idx, dtype=torch.int64).view(count, num_topk), weights))
    masks = [
        [[me == src or draw(st.booleans()) for src in range(num_ranks)] for me in range(num_ranks)] for _ in range(2)
    ]
    return sent, num_experts, max_tokens, masks[0], masks[1]


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_rows_places_sums_and_losses_are_the_oracles(
    job: tuple[list[Sent], int, int, list[list[bool]], list[list[bool]]],
) -> None:
    sent, num_experts, max_tokens, got, came = job
    num_ranks = len(sent)
    num_local, capacity = num_experts // num_ranks, num_ranks * max_tokens
    packed = oracle.dispatch(sent, num_experts, max_tokens, got=got)
    owners = [np.where(each.topk_idx.numpy() < 0, -1, each.topk_idx.numpy() // num_local) for each in sent]
    outputs, partials = [], []
    for me, want in enumerate(packed):
        told = []
        for src, each in enumerate(sent):
            tokens = (owners[src] == me).any(1).nonzero()[0]
            local = each.topk_idx.numpy()[tokens] - me * num_local
            local[(local < 0) | (local >= num_local)] = -1
            assert each.topk_weights is not None
            told.append((tokens, local, each.topk_weights.numpy()[tokens]) if got[me][src] else None)
        placed = place_rows(told, num_local, capacity)
        assert placed.num_tokens_per_expert.tolist() == want.num_tokens_per_expert.tolist()
        assert placed.layout_range.tolist() == want.layout_range.tolist()
        assert placed.src_token.tolist() == want.src_token.tolist()
        x = torch.zeros(num_local * capacity, 128, dtype=BF16)
        for src, source in enumerate(placed.sources):
            if source is not None:
                rows = as_sent(sent[src].x, PLAIN)
                expand(source, rows._replace(data=rows.data[torch.from_numpy(source.tokens)]), x, None)
        assert isinstance(want.x, torch.Tensor)
        assert torch.equal(bits(x.view(num_local, capacity, 128)), bits(want.x))
        y = torch.randn(x.shape, generator=torch.Generator().manual_seed(me)).to(BF16)
        y[y.abs() < 0.3] = 0.0  # times a negative weight: -0.0, which a sum that starts from +0.0 would lose
        outputs.append(y.view(num_local, capacity, 128))
        partials.append(
            [source and (source.tokens, partial_sums(source, source.weights, y).to(BF16)) for source in placed.sources]
        )
    combined = oracle.combine(sent, packed, outputs, got=came)
    for me, each in enumerate(sent):
        counted = oracle.counted(packed, me, came)
        parts = [part for dst in range(num_ranks) if counted[dst] and (part := partials[dst][me]) is not None]
        assert torch.equal(bits(sum_over_ranks(parts, len(each.x), 128)), bits(combined[me]))
        assert each.topk_weights is not None
        lost = lost_weight(owners[me], each.topk_weights.numpy(), np.array(counted))
        assert torch.equal(bits(lost), bits(oracle.lost_weight(each, num_local, counted)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(0, 5), st.sampled_from([(False, False), (True, False), (True, True)]))
def test_every_bfloat16_is_quantised_as_the_oracle_says(seed: int, num_tokens: int, how: tuple[bool, bool]) -> None:
    round_scale, use_ue8m0 = how
    raw = torch.randint(-(1 << 15), 1 << 15, (num_tokens, 512), generator=torch.Generator().manual_seed(seed))
    x = raw.to(torch.int16).view(BF16)
    tame = torch.where(x.isfinite() | (seed % 2 == 0), x, torch.zeros_like(x))
    data, scales = as_sent(tame, Quantisation(True, round_scale, use_ue8m0))
    want, want_scales = oracle.quantise(tame, round_scale=round_scale)
    assert scales is not None
    assert torch.equal(bits(scales), bits(oracle.pack_ue8m0(want_scales) if use_ue8m0 else want_scales))
    same = (bits(data) == bits(want)) | (data.to(torch.float32).isnan() & want.to(torch.float32).isnan())
    assert same.all()
