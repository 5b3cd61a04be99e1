"""State words of an outbox: a flipped bit frees nothing that somebody still reads, and sends nobody away."""

from __future__ import annotations

from array import array

import pytest

from epee.engine.outbox import (
    CONSUMED,
    CONSUMED_TOO,
    LIFE,
    LIFE_ABORTED,
    LIFE_BORN,
    LIFE_EXITED,
    LIFE_FAILED,
    LIFE_LEFT,
    LIFE_READY,
    STATE_WORDS,
    consumed_of,
    has_left,
)


def state(consumed: int, life: int) -> memoryview:
    words = memoryview(array("Q", [0] * STATE_WORDS))
    words[CONSUMED] = words[CONSUMED_TOO] = consumed
    words[LIFE] = life
    return words


@pytest.mark.parametrize("word", [CONSUMED, CONSUMED_TOO])
def test_no_bit_makes_a_rank_through_with_more(word: int) -> None:
    for bit in range(64):
        words = state(0b1010, LIFE_READY)
        words[word] ^= 1 << bit
        assert consumed_of(words) <= 0b1010
        words[CONSUMED] = words[CONSUMED_TOO] = 11
        assert consumed_of(words) == 11, "the next call mends it"


@pytest.mark.parametrize("life", [LIFE_BORN, LIFE_READY])
def test_no_bit_makes_a_rank_leave(life: int) -> None:
    for bit in range(64):
        words = state(1, life)
        words[LIFE] ^= 1 << bit
        assert not has_left(words)


@pytest.mark.parametrize("life", [LIFE_LEFT, LIFE_ABORTED, LIFE_FAILED, LIFE_EXITED])
def test_who_has_left_is_seen(life: int) -> None:
    assert has_left(state(1, life))
