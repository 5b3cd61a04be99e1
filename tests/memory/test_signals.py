"""`memory.signals`: tags are equal or not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epee.memory.signals import tag, untag


@given(st.integers(0, 2**24 - 1), st.integers(0, 2**40 - 1))
def test_a_tag_names_one_call(epoch: int, seq: int) -> None:
    assert untag(tag(epoch, seq)) == (epoch, seq)
    assert tag(epoch, seq) < 2**64


def test_no_tag_is_what_fresh_memory_holds() -> None:
    assert tag(0, 1) != 0
