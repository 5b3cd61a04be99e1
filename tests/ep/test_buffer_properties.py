"""Dispatch and combine over drawn cases: any ranks, counts, routing, payload and layout agree with the reference.

Hypothesis draws whole lists of buffers and calls in the parent; the ranks (real processes over real shared memory,
kept from list to list) run them in one go. Receive memory is poisoned, so a row that nobody wrote shows as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.ep.buffer_cases import DTYPES, ROUTINGS, Call, Setup, check_setups
from tests.harness import Pool


@st.composite
def calls(draw: st.DrawFn, num_ranks: int, hidden: int, dtype: str, max_tokens: int) -> Call:
    """Draw one call that suits a buffer."""
    layout = draw(st.sampled_from(["rank", "expert"]))
    routings = [routing for routing in ROUTINGS if layout == "rank" or routing != "mask"]
    payloads = [name for name in DTYPES if DTYPES[name].itemsize <= DTYPES[dtype].itemsize]
    if hidden % 128 == 0:
        payloads += ["fp8", "fp8 strided"]
    if hidden % 512 == 0:
        payloads += ["fp8 packed"]
    counts = st.one_of(st.just(0), st.integers(0, max_tokens))
    return Call(
        seed=draw(st.integers(0, 10_000)),
        num_tokens=tuple(draw(st.lists(counts, min_size=num_ranks, max_size=num_ranks))),
        routing=draw(st.sampled_from(routings)),
        layout=layout,
        expert_alignment=draw(st.sampled_from([1, 1, 2, 3, 8, 16])),
        payload=draw(st.sampled_from(payloads)),
        with_weights=draw(st.booleans()),
        with_again=draw(st.booleans()),
        num_bias=draw(st.integers(0, 2)),
        in_place=draw(st.booleans()),
        with_out=draw(st.booleans()),
        with_weights_back=draw(st.booleans()),
        capacity=draw(st.one_of(st.none(), st.integers(1, max_tokens * num_ranks))) if layout == "rank" else None,
    )


@st.composite
def setups(draw: st.DrawFn, num_ranks: int) -> Setup:
    """Draw a buffer and its calls. More ranks get fewer tokens: the work of the reference grows with both."""
    hidden = draw(st.sampled_from([8, 16, 24, 40, 56, 128, 512, 1000]))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    num_topk = draw(st.sampled_from([1, 2, 3, 4, 8, 32]))
    max_tokens = max(2, 24 // num_ranks // (1 + num_topk // 8))
    return Setup(
        num_ranks=num_ranks,
        num_local_experts=draw(st.sampled_from([1, 2, 3, 8])),
        hidden=hidden,
        num_topk=num_topk,
        dtype=dtype,
        num_slots=draw(st.integers(1, 3)),
        calls=tuple(draw(st.lists(calls(num_ranks, hidden, dtype, max_tokens), min_size=1, max_size=4))),
    )


def agrees(num_ranks: int, max_examples: int, around: Callable[..., Any] | None = None) -> None:
    """Run drawn cases on some ranks and compare them with the reference; `around`: as of `check_setups`."""

    @settings(
        max_examples=max_examples,
        phases=(Phase.explicit, Phase.generate),  # no shrinking: the message holds the whole case, and runs are dear
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn=st.lists(setups(num_ranks), min_size=1, max_size=3))
    def check(drawn: list[Setup]) -> None:
        check_setups(num_ranks, drawn, around=around, run=pool.run_ranks)

    with Pool() as pool:  # half of the time would go into new processes
        check()


@pytest.mark.parametrize(("num_ranks", "max_examples"), [(1, 20), (2, 30), (3, 20), (5, 8), (8, 5)])
def test_agrees_with_the_reference(num_ranks: int, max_examples: int) -> None:
    """Dispatch, cached dispatch and both combines, for everything that hypothesis can think of."""
    agrees(num_ranks, max_examples)
