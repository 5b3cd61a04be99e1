"""Buffers over invented hosts whose ranks die at random moments: a few rounds. `survival_rounds.py` plays more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Pool
from tests.survive.buffer_kills import KINDS

from .survival_rounds import draw, play


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as workers:
        yield workers


@pytest.mark.timeout(170)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_survivors_agree_and_have_what_they_should(pool: Pool, kind: tuple[str, str]) -> None:
    first = KINDS.index(kind)
    rounds = [draw(first, True), draw(first + 3, False)]
    assert all((spec.kind, spec.mode) == kind for spec, _ in rounds)
    assert sum(play(pool, spec, placement) for spec, placement in rounds) >= 2
