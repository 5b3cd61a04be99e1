"""Members of a group of one host hear of each process of another host that was refused, and wait on for others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epee.engine.bootstrap import refusal as elsewhere
from epee.engine.bootstrap.group_note import ASKS, Offer
from epee.engine.membership.admission import Admission
from epee.errors import UnsupportedError
from epee.memory.shared import BLOB_BYTES

LANE, RANK, SLOT = 7, 3, 5


class OfJob:
    """One board for all, of processes on two hosts."""

    def __init__(self) -> None:
        self.member = SimpleNamespace(host="a")
        self.shown: dict[int, dict[int, bytes]] = {}

    def view(self) -> Any:
        return SimpleNamespace(members=[SimpleNamespace(slot=SLOT, nonce=b"n" * 16, host="b")])

    def host_of(self, slot: int) -> str:
        return "b"

    def told(self, group_id: int) -> dict[int, bytes]:
        return self.shown.get(group_id, {})

    def register_board(self, group_id: int) -> Any:
        return SimpleNamespace(tell=lambda data: self.shown.setdefault(group_id, {}).update({SLOT: data}))


def test_a_refusal_is_raised_once_and_again_when_the_process_tries_again() -> None:
    runtime: Any = OfJob()
    rest: Any = None
    rank_table: Any = SimpleNamespace(group_id=LANE)
    admission = Admission(runtime, rest, rank_table, rest, rest, rest, rest, dict)
    admission._askers = lambda view: {}  # type: ignore[method-assign,assignment]
    offer = Offer(ASKS, RANK, 4, bytes(BLOB_BYTES))
    for _ in range(2):
        elsewhere._tell(runtime, elsewhere._group_id_of(LANE), offer)
        admission._require_hosts([0, 1])  # others are waited for
        with pytest.raises(UnsupportedError, match=r"rank 3 cannot be admitted: slot 5 .* on host b"):
            admission._require_hosts([RANK])
        admission._require_hosts([RANK])  # another process may come
