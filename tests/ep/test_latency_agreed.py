"""Coming into a running buffer where something is wrong: peers that cannot map, lie or are dead; with stand-ins."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from epee.ep.latency import birth as latency_birth
from epee.ep.membership.agreement import Agreement
from epee.ep.membership.rejoin import Held, Kin
from epee.ep.membership.table import Decision, word_of
from epee.errors import ProtocolError, ResourceError
from epee.memory.host import process_start_time


def _agreement(known: list[list[int]], lost: tuple[int, ...] = (), seqs: tuple[int, ...] = ()) -> Any:
    """Rank r lends memory 10 + r; `known[r]` is what it has mapped."""
    cards = {
        rank: SimpleNamespace(known=lambda words=words: words, serial=10 + rank, seq=(*seqs, 0, 0, 0, 0)[rank])
        for rank, words in enumerate(known)
    }
    kin: Any = SimpleNamespace(
        cards=cards, is_lost=lambda rank, last: rank in lost, table=None, card=None, rank=0, config=_config(len(known))
    )
    return Agreement(kin, lambda: None)


def _config(num_ranks: int) -> Any:
    return SimpleNamespace(num_ranks=num_ranks)


def _last(*members: int) -> Decision:
    return Decision(0, 0, 0, [bool(mark) for mark in members], [0] * len(members), [0] * len(members))


ALL = [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("known", "lost", "agreed"),
    [
        ([ALL, ALL, ALL, ALL], (), [0, 1, 2, 3]),
        ([ALL, ALL, ALL, ALL], (0,), [0, 1, 2, 3]),
        ([ALL, ALL, ALL, [0, 0, 0, 13]], (3,), [0, 1, 2]),  # a newcomer that cannot map
        ([[0, 0, 0, 10], ALL, ALL, ALL], (0,), [1, 2, 3]),
        ([ALL, ALL, [10, 11, 12, 0], ALL], (3,), [0, 1, 2]),  # a member has not mapped it
        ([ALL, ALL, [10, 11, 12, 0], [0, 11, 12, 13]], (2, 3), [0, 1, 2]),  # of two newcomers one
        ([ALL, ALL, [10, 11, 12, 0], ALL], (2, 3), [0, 1, 2]),
        ([ALL, [10, 11, 7, 13], ALL, ALL], (), [0, 1, 3]),  # among members: whose memory one lacks
        ([ALL, [10, 11, 7, 13], ALL, [10, 11, 7, 13]], (3,), [0, 1, 3]),
    ],
)
def test_newcomers_come_in_if_all_who_are_in_know_them_and_they_know_all(
    known: list[list[int]], lost: tuple[int, ...], agreed: list[int]
) -> None:
    assert _agreement(known, lost)._agreed(_last(1, 1, 1, 1), [0, 1, 2, 3]) == agreed


def test_who_was_voted_out_comes_back_like_a_newcomer() -> None:
    known = [ALL, ALL, ALL, [10, 7, 12, 13]]
    assert _agreement(known)._agreed(_last(1, 1, 1, 0), [0, 1, 2, 3]) == [0, 1, 2]
    assert _agreement([ALL] * 4)._agreed(_last(1, 1, 1, 0), [1, 3]) == [1, 3]


def test_a_call_number_that_cannot_be_right_is_refused() -> None:
    assert _agreement([ALL] * 3, seqs=(3, (1 << 62) - 1, 5))._newest([0, 1, 2]) == (1 << 62) - 1
    with pytest.raises(ProtocolError, match="rank 1 says that its last call"):
        _agreement([ALL] * 3, seqs=(3, 1 << 62, 5))._newest([0, 1, 2])


class _Box:
    is_open = True
    blob = b""

    def close(self) -> None:
        self.is_open = False


@pytest.mark.parametrize("fails", ["use", "follow"])
def test_a_commit_that_failed_goes_on_where_it_stopped(fails: str) -> None:
    """Rank 1 has been replaced by process (7, 7), rank 0 has new memory."""
    did: list[Any] = []
    broken = [True]

    def does(name: str) -> Any:
        def run(rank: int, what: Any) -> None:
            if name == fails and rank == 1 and broken.pop():
                broken.append(False)
                raise ResourceError("no memory")
            did.append((name, rank, what))

        return run

    memory: Any = SimpleNamespace(use=does("use"), follow=does("follow"), drop=lambda held: did.append(("drop", held)))
    exchange: Any = SimpleNamespace(epoch=0)
    begun: list[Any] = []
    exchange.begin = lambda epoch, inboxes: begun.append((epoch, inboxes))
    card: Any = SimpleNamespace(
        process=(5, 5), set_known=lambda *args: None, say_closed=lambda: None, close=lambda: None
    )
    table: Any = SimpleNamespace(close=lambda: None)
    kin = Kin(_config(2), 0, card, table, memory, exchange, None)
    old, new = [_Box(), _Box()], [_Box(), _Box()]
    for rank in range(2):
        kin._used[rank] = Held(rank, old[rank], b"", f"old {rank}")  # type: ignore[arg-type]
        kin._next[rank] = Held(10 + rank, new[rank], b"", f"new {rank}")  # type: ignore[arg-type]
    decision = Decision(1, 0, 1, [True, True], [5 << 40 | 5, 7 << 40 | 7], [10, 11])
    with pytest.raises(ResourceError):
        kin.commit(decision)
    assert begun == []
    assert all(box.is_open for box in old)
    assert kin.commit(decision)
    assert did == [("use", 0, "new 0"), ("use", 1, "new 1"), ("follow", 1, (7, 7))]
    assert begun == [(1, {0: new[0], 1: new[1]})]
    assert not any(box.is_open for box in old)
    assert all(box.is_open for box in new)
    kin.close()
    assert not any(box.is_open for box in new)
    assert len(did) == 3, "nothing was left that calls do not use"


def test_one_bad_peer_does_not_keep_the_others_from_being_heard() -> None:
    """The search for rank 1 fails, rank 2 shows what cannot be right; rank 3 is adopted. Then they are well again."""
    bad = [True]

    def lent() -> Any:
        if bad:
            raise ProtocolError("blobs of 7 and 7 bytes")

    def find_card(process: tuple[int, int], num_ranks: int) -> Any:
        if bad:
            raise ResourceError("cannot look")

    own: Any = SimpleNamespace(process=(5, 5), known=lambda: [10, 0, 0, 0], close=lambda: None)
    nothing = lambda *args: None  # noqa: E731
    memory: Any = SimpleNamespace(drop=nothing)
    place: Any = SimpleNamespace(check=nothing, processes=dict, find_card=find_card)
    kin: Any = Kin(_config(4), 0, own, SimpleNamespace(), memory, SimpleNamespace(), place)  # type: ignore[arg-type]
    kin.processes[1] = (os.getpid(), 1)
    for rank, how in ((2, lent), (3, lambda: "lent")):
        kin.cards[rank] = SimpleNamespace(serial=10 + rank, is_closed=False, lent=how)
    kin._map = lambda rank, what: "held"
    took: list[int] = []
    kin._take = lambda rank, *args: took.append(rank)
    kin.look(0, 0.0, nothing)
    kin.look(0, 0.0, nothing)
    assert took == [3, 3]
    assert kin.problems == {1: "cannot look", 2: "blobs of 7 and 7 bytes"}, "told until it is over"
    bad.clear()
    kin._search_at.clear()
    kin._retry_at.clear()
    kin.cards[1] = SimpleNamespace(serial=11, is_closed=False, lent=lambda: None)
    own.known = lambda: [10, 11, 12, 13]
    kin.look(0, 0.0, nothing)
    assert kin.problems == {}


def test_a_member_that_is_dead_but_in_the_view_does_not_hide_a_running_buffer() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    processes = {0: (os.getpid(), process_start_time(os.getpid())), 1: (gone.pid, 7), 2: (1, 0)}
    words = [word_of(process) for process in processes.values()]
    last = Decision(3, 0, 0, [True, True, False], words, [1, 2, 3])
    assert latency_birth._members(last, processes) == [0]
