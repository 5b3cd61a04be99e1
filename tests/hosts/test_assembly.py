"""What ranks of a buffer over hosts do when they meet in `sync`, and what is told of a buffer. No processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epee.engine.bootstrap.group_note import Home
from epee.engine.bootstrap.joining import Place
from epee.ep.config import BufferConfig
from epee.ep.members import birth, notices
from epee.ep.members.assembly import Assembly
from epee.ep.members.notices import MAX_NOTICES, BufferNotice, tell
from epee.errors import InvalidState, RankFailedError, ResourceError

CONFIG = BufferConfig(3, 6, 8, 2, 4, torch.bfloat16)
LANE = 77


class Meeting:
    """Rank 0 of three with rank 1; rank 2 is known to be there, and never comes to a round."""

    def __init__(self, errors: int = 0) -> None:
        self.rounds, self.errors, self.taken = 0, errors, 0
        view = SimpleNamespace(members=())
        job_handle: Any = SimpleNamespace(
            is_open=True, runtime=SimpleNamespace(view=lambda: view), slots=(), group_id=LANE
        )
        admission = SimpleNamespace(expected=lambda: ({0, 1, 2}, set()), take_in=self._take_in)
        engine = SimpleNamespace(membership=SimpleNamespace(admission=admission))
        exchange: Any = SimpleNamespace(members=(0, 1), config=CONFIG, all_gather_bytes=self._gather, engine=engine)
        self.assembly = Assembly(exchange, job_handle)
        self.assembly._job_handle.runtime.view = lambda: SimpleNamespace(members=(), parts=())  # type: ignore[method-assign]

    def _gather(self, data: bytes, deadline: float, op: int) -> list[bytes]:
        self.rounds += 1
        if self.rounds <= self.errors:
            raise RankFailedError("rank 2 is lost", [2])
        return [data, data, b""]

    def _take_in(self, ranks: set[int], until: float) -> None:
        assert ranks == {2}
        self.taken += 1
        time.sleep(0.005)


def test_a_meeting_ends_without_who_is_in_the_view_and_never_comes() -> None:
    """Past its time and as much again nobody is waited for; the test's own time-out is for a meeting without an end."""
    meeting = Meeting()
    assert meeting.assembly.meet(b"data", time.monotonic() + 0.05, lambda _: False) == [b"data", b"data", b""]
    assert meeting.taken == meeting.rounds - 1 > 0


def test_a_round_that_a_loss_has_ended_is_made_again_and_another_error_ends_the_meeting() -> None:
    meeting = Meeting(errors=2)
    meeting.assembly.meet(b"", time.monotonic() + 0.05, lambda error: isinstance(error, RankFailedError))
    assert meeting.rounds > 3
    meeting = Meeting(errors=1)
    with pytest.raises(RankFailedError):
        meeting.assembly.meet(b"", time.monotonic() + 0.05, lambda _: False)
    assert meeting.rounds == 1


def test_who_has_come_into_a_buffer_tells_of_it_as_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its number and epoch, which are its own, would be those of another buffer for the next newcomer."""
    home = Home(LANE, 3, 1 << 20, "mask/evict", True)
    told: list[BufferNotice] = []
    monkeypatch.setattr(birth, "job_handle_of", lambda group, num_ranks: SimpleNamespace(spans=True, is_open=True))
    monkeypatch.setattr(birth, "place_of", lambda engine, mode: Place(home, [0, 1, 2], 1, False))
    monkeypatch.setattr(birth, "tell", lambda job_handle, notice: told.append(notice))
    engine: Any = SimpleNamespace(members=SimpleNamespace(epoch=9))
    running = BufferNotice(4, 2, 5, home, CONFIG.words())
    monkeypatch.setattr(birth, "_newest", 8)
    birth.tell_of(None, engine, CONFIG, running)  # type: ignore[arg-type]
    birth.tell_of(None, engine, CONFIG)  # type: ignore[arg-type]
    assert [(notice.number, notice.epoch) for notice in told] == [(4, 5), (8, 9)]


class Runtime:
    """Takes groups in; a row of the first `broken` cannot be written."""

    def __init__(self, broken: int = 0) -> None:
        self.groups: dict[int, bytes] = {}
        self.broken = broken
        self.on_register: Callable[[], None] = lambda: None

    def register_board(self, group_id: int) -> Any:
        assert group_id not in self.groups
        self.groups[group_id] = b""
        self.on_register()
        self.broken -= 1

        def write(data: bytes) -> None:
            if self.broken >= 0:
                raise InvalidState("the board is gone")
            self.groups[group_id] = data

        return SimpleNamespace(tell=write)

    def unregister(self, group_id: int) -> None:
        del self.groups[group_id]


NOTICE = BufferNotice(1, 2, 1, Home(LANE + 1, 3, 1 << 20, "mask/evict", True), CONFIG.words())


def seat_in(runtime: Runtime) -> Any:
    return SimpleNamespace(runtime=runtime, group_id=LANE)


def test_a_notice_that_cannot_be_written_leaves_no_lane_and_no_place() -> None:
    runtime = Runtime(broken=1)
    with pytest.raises(InvalidState):
        tell(seat_in(runtime), NOTICE)
    assert runtime.groups == {}
    for _ in range(MAX_NOTICES):
        tell(seat_in(runtime), NOTICE)
    with pytest.raises(ResourceError, match="close some"):
        tell(seat_in(runtime), NOTICE)
    assert list(runtime.groups.values()) == [NOTICE.pack()] * MAX_NOTICES


def test_a_collection_in_the_midst_of_telling_may_take_another_notice_back() -> None:
    """It runs on the same thread, below the lock."""
    runtime = Runtime()
    take_back = tell(seat_in(runtime), NOTICE)
    done = threading.Event()

    def collect() -> None:
        with notices._lock:
            take_back()
            take_back()
        done.set()

    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(20.0)
    assert runtime.groups == {}
