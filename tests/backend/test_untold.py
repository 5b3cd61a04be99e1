"""A loss that no call could tell is told by the next one, once this host has been told what says whether it is one.

One process plays the ranks, as in `test_take_news.py`; what a host of a group over several still waits for is invented.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from epee.backend.collectives.arguments import barrier
from epee.engine.entry import CHANGING
from epee.engine.outbox import COMPLETES, GAVE_UP, failed_by_view
from epee.errors import CommTimeoutError, RankFailedError

from .test_take_news import Case, Process


class Waiting:
    """Rank 0, whose host has to be told of rank 1 before calls can be judged: so many looks find that it is not."""

    def __init__(self, processes: list[Process], on_stall: str, looks: int) -> None:
        self.case = Case(processes, f"raise/{on_stall}", is_told=False)
        self.engine, self.membership = self.case.engine, self.case.membership
        self.left, self.judged, self.accused = looks, 0, 0
        self.membership.settle = self._settle  # type: ignore[method-assign]
        self.membership.unsettled = lambda: [1]  # type: ignore[method-assign]
        self.membership.tellers = lambda: [1]  # type: ignore[method-assign]
        self.membership._call_outcome.raise_loss = self._judge  # type: ignore[method-assign]
        self.membership.runtime.accuse = self._accuse  # type: ignore[method-assign]
        self.membership.runtime.settings = SimpleNamespace(no_quorum_s=60.0)  # type: ignore[assignment]
        self.engine.helper.kick = lambda *_, **__: None  # type: ignore[method-assign]
        self.engine.unsettled.calls.append(SimpleNamespace(seq=0, peer_regions=self.engine.peer_regions))  # type: ignore[arg-type]
        self.engine.raise_flag(CHANGING)

    def _settle(self) -> bool:
        assert self.engine.entry._lock._is_owned()
        self.left -= 1
        return self.left < 0

    def _judge(self) -> None:
        assert self.left < 0, "what is not here yet may say something else"
        self.judged += 1
        raise RankFailedError("rank 1 is lost", [1])

    def _accuse(self, *what: Any) -> None:
        self.accused += 1
        self.left = 0  # it goes, and the next look finds that nobody is left to tell


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Process]]:
    made = [Process(0, 1, 2), Process(1, 1, 2), Process(1, 3, 2), Process(2, 4, 3)]
    yield made
    for process in made:
        process.region.close()


def test_a_loss_is_judged_when_all_is_here(processes: list[Process]) -> None:
    waiting = Waiting(processes, "error", 3)
    with pytest.raises(RankFailedError, match="rank 1 is lost"):
        waiting.engine.start(barrier)
    assert waiting.judged == 1
    assert waiting.engine.seq == 0
    waiting.case.close()


def test_a_wait_for_what_is_not_here_ends_with_the_time_out(processes: list[Process]) -> None:
    """The number is not used up, the lock is free, and who could tell is named."""
    waiting = Waiting(processes, "error", 1_000_000)
    waiting.engine.timeout_s = 0.05
    with pytest.raises(CommTimeoutError, match=r"rank\(s\) 1 can resend it; the call was not made") as found:
        waiting.engine.start(barrier)
    assert found.value.ranks == (1,)
    assert waiting.judged == waiting.engine.seq == 0
    assert not waiting.engine.entry._lock._is_owned()
    waiting.case.close()


def test_who_does_not_tell_is_accused_where_the_policy_is_to_evict(processes: list[Process]) -> None:
    waiting = Waiting(processes, "evict", 1_000_000)
    waiting.engine.timeout_s = 0.05
    with pytest.raises(RankFailedError, match="rank 1 is lost"):
        waiting.engine.start(barrier)
    assert waiting.accused == 1
    waiting.case.close()


@pytest.mark.parametrize("is_counted", [False, True])
def test_what_a_rank_has_put_into_a_call_that_others_complete_stays(processes: list[Process], is_counted: bool) -> None:
    """A call that a view ends is taken back, but not where its end is a missing part on this host alone."""
    case = Case(processes, "raise/error", is_told=False)
    case.engine.helper.kick = lambda *_, **__: None  # type: ignore[method-assign]
    op = case.engine.start(barrier)
    assert op.published
    op.fail(RankFailedError("rank 1 was lost with its host", [1]))
    op.by_view, op.is_counted = True, is_counted
    case.engine.entry.enter()
    case.engine.retire_heads()
    case.engine.entry.leave()
    words = case.engine.peer_regions.own
    stays = (op.tag, COMPLETES)
    assert (words[op.cell], words[op.cell + GAVE_UP]) == (stays if is_counted else (0, failed_by_view(op.tag)))
    case.close()
