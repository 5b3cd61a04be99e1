"""Buffers whose ranks die at random moments beside calls and syncs: a few rounds. The campaign plays more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Pool

from .buffer_kills import KINDS, draw, play


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as workers:
        yield workers


@pytest.mark.timeout(170)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_survivors_agree_and_have_what_they_should(pool: Pool, kind: tuple[str, str]) -> None:
    seeds = range(KINDS.index(kind), 60, len(KINDS))
    assert {draw(seed).backend for seed in seeds} == {"gloo", "epee"}
    assert sum(play(pool, draw(seed)) for seed in seeds[:6]) >= 6
