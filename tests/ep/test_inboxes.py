"""Entering an epoch with members that lend nothing, or what cannot be right; with stand-ins for their lines."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epee.ep.config import BufferConfig
from epee.ep.control.words import inbox_layout
from epee.ep.membership import lane as sync
from epee.ep.membership.inboxes import Absent, Inboxes, Wait
from epee.ep.membership.registry import MAX_BUFFERS, NUMBER, USED, Registry
from epee.errors import CommTimeoutError, ProtocolError
from epee.memory.shared import SharedRegion
from epee.view.protocol.messages import FOREVER, Member

CONFIG = BufferConfig(4, 8, 64, 2, 4, torch.bfloat16)
NBYTES = inbox_layout(CONFIG).nbytes + 64
EPOCH = 5


class Peers:
    """The lines of ranks 1 to 3, which lend an inbox of `EPOCH`, one that is too small, or none."""

    def __init__(self, *kinds: str) -> None:
        self.registry = Registry.make(91)
        self.regions = []
        self.lines: dict[int, Any] = {}
        for rank, kind in enumerate(kinds, 1):
            line = self.registry.open(rank, CONFIG.words())
            line.words[NUMBER] = 1  # one and the same buffer
            self.lines[rank] = line
            if kind in ("lends", "too small"):
                region = SharedRegion.create(NBYTES if kind == "lends" else 64, f"peer-{rank}")
                self.regions.append(region)
                line.lend_inbox(EPOCH, region.blob)


def _inboxes(peers: Peers, look: Any) -> Any:
    own = peers.registry.open(MAX_BUFFERS, CONFIG.words())
    roster: Any = SimpleNamespace(view=SimpleNamespace(epoch=EPOCH), job_handle=None)
    made: Any = Inboxes(CONFIG, 0, 1, roster, own, look, NBYTES)
    made.line_of = lambda rank, member: peers.lines.get(rank)
    return made


def test_who_lends_nothing_or_something_wrong_does_not_keep_the_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epee.ep.membership.inboxes.process_of", lambda member: (1, 1))
    monkeypatch.setattr("epee.ep.membership.inboxes.is_leaving", lambda *process: False)
    peers = Peers("too small", "lends nothing", "lends")
    looks: list[int] = []

    def look(rank: int, what: str, started: float, deadline: float) -> None:
        looks.append(rank)
        if rank == 1:
            raise CommTimeoutError(what, [rank])  # then what is wrong with it is told
        raise Absent

    inboxes = _inboxes(peers, look)
    filled: list[int] = []
    inboxes.fill = lambda region: filled.append(region.nbytes)
    members = {rank: Member(rank, 1, bytes(16), b"") for rank in range(4)}
    met = inboxes.meet_those(members, Wait(EPOCH, lambda: False, time.monotonic(), time.monotonic() + 60))
    assert sorted(met.regions) == [0, 3]
    assert set(looks) == {1, 2}
    assert len(filled) == 1
    again = inboxes.meet_those(members, Wait(EPOCH, lambda: False, time.monotonic(), time.monotonic() + 60))
    assert again.regions[0] is met.regions[0], "one and the same in each attempt"
    assert len(filled) == 1
    inboxes.give_back(met)
    inboxes.use(again)
    assert inboxes.own is again.regions[0]
    inboxes.close()


def test_a_call_number_that_cannot_be_right_is_refused() -> None:
    line = Registry.make(92).open(1, [3])
    line.words[USED] = FOREVER - 1
    assert sync._used(line, 2) == FOREVER - 1
    line.words[USED] = FOREVER
    with pytest.raises(ProtocolError, match="rank 2 says that its last call"):
        sync._used(line, 2)
