"""When a view with newcomers may be taken over: what the gate waits for. No processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from epee.engine.bootstrap.group_note import FOUNDER, Offer
from epee.engine.replication.loss_resolution import Gate
from epee.memory.shared import BLOB_BYTES
from epee.view.protocol.messages import DEAD, Decision, Member, Removal

LANE = 7


def member(slot: int, incarnation: int = 1) -> Member:
    return Member(slot, incarnation, bytes([slot, incarnation]) * 8, b"", "h")


def told(turned: dict[int, int]) -> dict[int, Offer]:
    return {slot: Offer(FOUNDER, slot, 4, bytes(BLOB_BYTES), 1, epoch) for slot, epoch in turned.items()}


def made(said: list[int]) -> tuple[Gate, Any]:
    roles = SimpleNamespace(topology=SimpleNamespace(rank=0))
    heard: list[tuple[int, list[int]]] = []
    resolution: Any = SimpleNamespace(roles=roles, unsettled={}, heard=heard, hear=lambda *args: heard.append(args))
    rank_table: Any = SimpleNamespace(
        group_id=LANE, since={0: 1, 1: 1, 2: 1}, rank_of={slot: slot for slot in range(4)}
    )
    return Gate(rank_table, resolution, said.append), resolution


JOIN = Decision(3, (member(0), member(1), member(2), member(3, 3)))
LOSS = Decision(4, (member(0), member(2), member(3, 3)), (Removal(1, 1, DEAD),))


def test_it_opens_when_all_who_stay_have_turned() -> None:
    said: list[int] = []
    gate, resolution = made(said)
    assert gate.begin(3)
    assert gate.begin(3), "what follows from it may be broken off"
    gate.begun(JOIN)
    assert not gate.begin(3)
    resolution.unsettled[3] = 2
    assert not gate.is_open(lambda: told({1: 3, 2: 3}))
    assert said == [], "it needs something of a lost rank"
    resolution.unsettled.clear()
    assert not gate.is_open(lambda: told({1: 2, 2: 3}))
    assert (said, gate.late) == ([3], (1,))
    assert not gate.is_open(lambda: told({2: 3}))
    assert gate.is_open(lambda: told({1: 5, 2: 3}))
    assert (said, gate.late) == ([3], ())
    gate.end()
    assert gate.epoch == gate.newest == 0


def test_who_is_lost_meanwhile_is_not_waited_for_and_changes_who_tells() -> None:
    gate, resolution = made([])
    gate.begin(3)
    gate.begun(JOIN)
    assert not gate.is_open(lambda: told({2: 3}))
    gate.hear(LOSS)
    gate.hear(LOSS)
    assert resolution.heard == [(4, [1])]
    assert gate.newest == 4
    assert gate.is_open(lambda: told({2: 3}))


def test_who_goes_with_the_view_itself_is_not_waited_for() -> None:
    gate, _ = made([])
    gate.begin(3)
    gate.begun(Decision(3, (member(0), member(2), member(1, 3)), (Removal(1, 1, DEAD),)))
    assert gate.is_open(lambda: told({2: 3}))
