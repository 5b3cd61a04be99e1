"""Random shapes, one buffer for all of them: V1 and V2 give what the reference gives, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import epee.compat.deep_ep as deep_ep
from epee import reference
from epee.reference import Routed
from epee.reference.orders import combine_in_order
from tests.compat.deep_ep_cases import num_rows_of, run_v1, world
from tests.ep.buffer_cases import Call, Setup, copy_of, make_bias, make_input, make_output, same_bits
from tests.harness import run_ranks

NUM_ROUNDS = 40


def _setups(num_ranks: int, seed: int) -> list[Setup]:
    chance = random.Random(seed)
    setups = []
    for index in range(NUM_ROUNDS):
        call = Call(
            seed=1000 * seed + index,
            num_tokens=tuple(chance.choice((0, 1, 3, 17)) for _ in range(num_ranks)),
            routing=chance.choice(("random", "one expert", "one rank", "repeats", "nowhere")),
            layout=chance.choice(("rank", "expert")),
            expert_alignment=chance.choice((1, 2, 5)),
            payload=chance.choice(("bfloat16", "float16", "float32")),
            with_weights=True,
            num_bias=chance.randrange(3),
        )
        num_local, num_topk = chance.choice((1, 3)), chance.choice((1, 4))
        setups.append(Setup(num_ranks, num_local, chance.choice((8, 136)), num_topk, "float32", 2, (call,)))
    return setups


def _run(rank: int, num_ranks: int, setups: list[Setup]) -> list[dict[str, Any]]:
    first, second = deep_ep.Buffer(world()), deep_ep.ElasticBuffer(world())
    return [
        run_v1(first, setup, setup.calls[0], rank)
        if setup.calls[0].layout == "rank"
        else _run_v2(second, setup, setup.calls[0], rank)
        for setup in setups
    ]


def _run_v2(buffer: deep_ep.ElasticBuffer, setup: Setup, call: Call, rank: int) -> dict[str, Any]:
    given = make_input(setup, call, rank)
    recv_x, _, weights, handle, _ = buffer.dispatch(
        given.x,
        given.topk_idx,
        given.topk_weights,
        num_experts=setup.num_experts,
        num_max_tokens_per_rank=17 * setup.num_topk,  # repeated experts take more rows than V2 allows for
        expert_alignment=call.expert_alignment,
        do_expand=True,
    )
    y = make_output(setup, call, rank, num_rows_of(recv_x))
    combined, _, _ = buffer.combine(y, handle, bias=make_bias(setup, call, rank) or None)
    return {"x": copy_of(recv_x), "topk_weights": copy_of(weights), "combined": combined}


@pytest.mark.parametrize(("num_ranks", "seed"), [(2, 1), (4, 2)])
def test_random_calls_on_one_buffer_agree_with_the_reference(num_ranks: int, seed: int) -> None:
    setups = _setups(num_ranks, seed)
    by_rank = run_ranks(_run, num_ranks, setups)
    for index, setup in enumerate(setups):
        (call,) = setup.calls
        inputs = [make_input(setup, call, rank) for rank in range(num_ranks)]
        plain = [Routed(given.x, given.topk_idx) for given in inputs]
        options: Any = {"layout": call.layout, "expert_alignment": call.expert_alignment}
        wanted = reference.dispatch(inputs, setup.num_experts, **options)
        y = [make_output(setup, call, rank, len(there.src_rank)) for rank, there in enumerate(wanted)]
        combined = combine_in_order(
            plain,
            reference.dispatch(plain, setup.num_experts, **options),
            y,
            setup.num_experts,
            by="rank" if call.layout == "rank" else "last_k",
            bias_first=True,
            round_partials=call.layout == "expert",
            bias=[make_bias(setup, call, rank) for rank in range(num_ranks)],
        )
        for rank, want in enumerate(wanted):
            got, where = by_rank[rank][index], f"rank {rank}: {setup}"
            assert isinstance(want.x, torch.Tensor)
            same_bits(got["x"], want.x, f"x of {where}")
            same_bits(got["topk_weights"], want.topk_weights, f"weights of {where}")
            same_bits(got["combined"], combined[rank], f"combine of {where}")
