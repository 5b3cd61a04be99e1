"""`memory.arena`: a slot is never in two hands, and every slot comes back."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epee.errors import ProtocolError
from epee.memory.arena import Arena, SlotPool, Slots
from epee.memory.layout import Field, Layout

SLOT = Layout(Field("payload", torch.int64, (64,)), Field("meta", torch.int32, (16,)))


class PoolModel(RuleBasedStateMachine):
    """Calls, leases and releases in any order that a buffer can produce, against a model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(2)
        self.seq = 0
        self.leases: list[tuple[int, object]] = []  # (slot, release)
        self.cooling: dict[int, int] = {}

    def _start_call(self) -> int:
        """A call starts: all peers have passed every call but the last."""
        slot = self.pool.take()
        assert slot not in [held for held, _ in self.leases]
        assert slot not in self.cooling
        self.seq += 1
        self.pool.between_calls(self.seq, self.seq)
        self.cooling = {held: seq for held, seq in self.cooling.items() if seq >= self.seq}
        return slot

    @rule()
    def dispatch(self) -> None:
        slot = self._start_call()
        if self.pool.can_lease("result"):
            self.leases.append((slot, self.pool.lease(slot, "result")))
        else:
            self.pool.give_back(slot)

    @rule()
    def failed_dispatch_or_combine(self) -> None:
        slot = self._start_call()
        self.pool.cool(slot, self.seq)
        self.cooling[slot] = self.seq

    @rule()
    def combine_input(self) -> None:
        if self.pool.can_lease("input"):
            slot = self.pool.take()
            assert slot not in self.cooling
            self.leases.append((slot, self.pool.lease(slot, "input")))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def a_tensor_dies(self, data: st.DataObject) -> None:
        _, release = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        release(None)

    @precondition(lambda self: self.pool.leased("input"))
    @rule(data=st.data())
    def combine_of_an_input(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.pool.leased("input")))
        self.seq += 1
        self.pool.between_calls(self.seq, self.seq)
        self.cooling = {held: seq for held, seq in self.cooling.items() if seq >= self.seq}
        self.pool.cool(slot, self.seq)
        self.cooling[slot] = self.seq

    @invariant()
    def leases_are_bounded(self) -> None:
        assert len(self.pool.leased("result")) <= 2
        assert len(self.pool.leased("input")) <= 2

    def teardown(self) -> None:
        for _, release in self.leases:
            release(None)
        self.pool.between_calls(self.seq, self.seq + 1)
        taken = [self.pool.take() for _ in range(self.pool.total)]
        assert sorted(taken) == list(range(self.pool.total))


TestPool = PoolModel.TestCase


def test_a_lease_ends_with_the_last_view() -> None:
    arena = Arena(SLOT, 1, "test")
    slot = arena.pool.take()
    arena.poison(slot)
    (rows,) = arena.lease(slot, [Field("payload", torch.float64, (4, 4))], "result")
    view = rows[1:].t()
    del rows
    gc.collect()
    assert arena.pool.leased("result") == [slot]
    assert view.isnan().all()
    del view
    assert arena.pool.leased("result") == []
    arena.close()


def test_a_result_survives_the_arena() -> None:
    arena = Arena(SLOT, 1, "test")
    (rows,) = arena.lease(arena.pool.take(), [Field("payload", torch.int64, (64,))], "result")
    rows.fill_(3)
    arena.close()
    arena.close()
    assert rows.sum() == 192


def test_a_peer_sees_what_the_owner_wrote() -> None:
    arena = Arena(SLOT, 1, "test")
    peer = Slots.attach(arena.region.blob, SLOT, arena.total)
    for slot in range(arena.total):
        arena.field(slot, "meta").fill_(slot + 1)
    assert [int(peer.field(slot, "meta").sum()) for slot in range(arena.total)] == [
        16 * (slot + 1) for slot in range(arena.total)
    ]
    peer.close()
    arena.close()


def test_an_arena_of_another_size_is_refused() -> None:
    arena = Arena(SLOT, 1, "test")
    with pytest.raises(ProtocolError, match=r"maps \d+ bytes, its layout needs"):
        Slots.attach(arena.region.blob, SLOT, arena.total + 20)
    arena.close()


def test_a_lease_ends_without_a_python_function_that_an_interrupt_could_end() -> None:
    arena = Arena(SLOT, 1, "test")
    tensors = arena.lease(arena.pool.take(), [Field("payload", torch.int64, (8,))], "result")
    called: list[str] = []
    sys.setprofile(lambda frame, event, arg: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        tensors.clear()
    finally:
        sys.setprofile(None)
    assert arena.pool.leased("result") == []
    assert called == []
    arena.close()
