"""What a rank does for the hosts of its group between views, on one side alone: nothing is sent."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from epee.engine.outbox import (
    FINAL,
    GENERATION,
    LIFE,
    LIFE_LEFT,
    MIRROR_CUT,
    MIRROR_MADE,
    MIRROR_SETTLED,
    OutboxOwner,
    PeerRegions,
    outbox_layout,
)
from epee.engine.replication.links import GroupLinks, LinkReader, Newcomer, Turn
from epee.engine.replication.mirror import FROM_BIRTH
from epee.errors import ProtocolError, ResourceError
from epee.link.frames import BEGIN, END, FETCH, NO_WORD, Frame
from epee.link.topology import Topology
from epee.memory.shared import SharedRegion

STAGING_BYTES = 1 << 16
KEYS = ["a", "a", "b", "b"]  # rank 2 keeps the mirror of rank 0, and rank 3 that of rank 1


class NoLinks:
    """Links and a meeting that carry nothing; what is said is kept."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.said: list[tuple[int, int, int, int]] = []

    def say(self, *what: int) -> None:
        self.said.append(what)  # type: ignore[arg-type]

    def has(self, peer: int) -> bool:
        return False

    def take(self) -> dict[int, Any]:
        return {}

    @property
    def is_busy(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@pytest.fixture
def regions() -> Iterator[list[SharedRegion]]:
    """What the ranks of host b have mapped from birth on."""
    nbytes = outbox_layout(4, STAGING_BYTES).nbytes
    names = ("mirror0", "mirror1", "outbox2", "outbox3")
    made = [SharedRegion.create(nbytes, name, only_owner_writes=True) for name in names]
    yield made
    for region in made:
        region.close()


def ways_of(rank: int, regions: list[SharedRegion], keys: list[str] = KEYS) -> tuple[GroupLinks, PeerRegions, NoLinks]:
    links: Any = NoLinks()
    peer_regions = PeerRegions(rank, regions, STAGING_BYTES, 1, len(keys))
    owners = [OutboxOwner(bytes(16), 1, slot) for slot in range(len(keys))]
    ways = GroupLinks(Topology(rank, keys), peer_regions, links, links, owners, links)
    ways.start({}, {source: regions[source] for source in {rank - 2} & {0, 1}})
    return ways, peer_regions, links


def hear(ways: GroupLinks, peer: int, *frames: Frame, source: int | None = None) -> None:
    """Have frames of a peer come, on a link on which it has been asked for `source`, itself if none is named."""
    ear = LinkReader(peer, ways.peer_regions, ways._links, ways)
    source = peer if source is None else source
    if source in ways._questions:
        ways._questions[source] = ways._questions[source]._replace(ear=ear)
    for frame in frames:
        ear.apply(frame, memoryview(b""))


def word(kind: int, source: int, epoch: int) -> Frame:
    return Frame(kind, 0, source, NO_WORD, epoch, 0)


def test_questions_are_kept_once_per_peer_and_source_however_many_come(regions: list[SharedRegion]) -> None:
    """A peer that asks again and again, of views that are to come, keeps nobody else's question out."""
    ways, _, links = ways_of(2, regions)
    for epoch in range(2, 100):
        hear(ways, 0, word(FETCH, 2, epoch))
    hear(ways, 1, word(FETCH, 3, 100))
    assert ways._fetches == {(0, 2): 99, (1, 3): 100}
    ways._take_over(Turn(99, frozenset({0, 1, 2})))
    ways._answer()
    assert [what for what in links.said if what[1] in (BEGIN, END)] == [(0, BEGIN, 2, 99), (0, END, 2, 99)]
    ways._take_over(Turn(100, frozenset({0, 1, 2})))
    ways._answer()
    assert links.said[-1] == (1, END, 3, 100), "of the lost rank its heir tells"


@pytest.mark.parametrize("source", [4, 1 << 40])
def test_a_question_for_a_rank_that_is_none_ends_the_link(regions: list[SharedRegion], source: int) -> None:
    ways, _, _ = ways_of(2, regions)
    with pytest.raises(ProtocolError, match=f"rank 0 asks for rank {source} of 4"):
        hear(ways, 0, word(FETCH, source, 1))
    assert not ways._fetches


@pytest.mark.parametrize("left", [[{3}], [{1, 3}, {3}]])
@pytest.mark.parametrize("born", [1, 5])
def test_what_a_lost_keeper_had_from_birth_counts_for_its_heir(
    regions: list[SharedRegion], born: int, left: list[set[int]]
) -> None:
    """Rank 2 has been told all of rank 0, which is lost, and is lost with the rest of rank 0's host, or before it.

    Rank 3 reads the mirror that rank 2 made at birth, as whoever has judged calls by it, in whatever epoch that was.
    """
    (second, box2, _), (third, box3, _) = ways_of(2, regions), ways_of(3, regions)
    row = box2.mirror_base[0]
    for ways in (second, third):
        ways.begin(born, dict.fromkeys(range(4), born))
    hear(second, 0, word(BEGIN, 0, 1), word(END, 0, 1))
    for ways in (second, third):
        ways._take_over(Turn(born + 1, frozenset({1, 2, 3})))
    hear(second, 1, word(BEGIN, 0, born + 1), word(END, 0, born + 1), source=0)
    assert box3.words[2][row + MIRROR_SETTLED] == born + 1
    for epoch, present in enumerate(left, born + 2):
        third._take_over(Turn(epoch, frozenset(present)))
    assert box3.own[row + MIRROR_SETTLED] == epoch
    assert box3.own[row + MIRROR_CUT] == 0, "what counts of rank 0 stays what it was"
    assert not box3.own[row + MIRROR_MADE]


@pytest.mark.parametrize("left", [[{3}], [{1, 3}, {3}]])
@pytest.mark.parametrize("is_read", [True, False])
def test_what_a_lost_keeper_had_since_a_join_counts_for_who_reads_it(
    regions: list[SharedRegion], is_read: bool, left: list[set[int]]
) -> None:
    """As before, with a mirror that rank 2 has made for a later view: others of its host may not read it yet.

    Rank 2 is lost with the rest of rank 0's host, or before it.
    """
    (second, box2, _), (third, box3, _) = ways_of(2, regions), ways_of(3, regions)
    row, cell = box2.mirror_base[0], box2.first_cell
    for ways in (second, third):
        ways.begin(5, dict.fromkeys(range(4), 5))
    box2.own[GENERATION] = box3.own[GENERATION] = 5
    mirror = second.mirrors[0]
    mirror.words[cell : cell + 2] = memoryview(struct.pack("<2Q", 1 << 40 | 7, 77)).cast("Q")
    hear(second, 0, word(BEGIN, 0, 1), word(END, 0, 1))
    assert box2.own[row + MIRROR_MADE] == 5 != FROM_BIRTH
    for ways in (second, third):
        ways._take_over(Turn(6, frozenset({1, 2, 3})))
    hear(second, 1, word(BEGIN, 0, 6), word(END, 0, 6), source=0)
    if is_read:
        box3.regions[0] = SharedRegion.attach(mirror.region.blob, False)
    else:  # the one before: any other
        box3.regions[0] = box3.regions[1]
    for epoch, present in enumerate(left, 7):
        third._take_over(Turn(epoch, frozenset(present)))
    assert box3.own[row + MIRROR_SETTLED] == epoch
    assert (box3.own[row + MIRROR_MADE], box3.own[row + MIRROR_CUT]) == ((epoch, 0) if is_read else (0, epoch))
    if is_read:
        assert third.mirrors[0].words[cell : cell + 2].tolist() == [1 << 40 | 7, 77]
        assert third._questions.get(0) is None, "nobody is asked"


def test_what_a_lost_keeper_had_counts_though_its_heir_has_not_been_told() -> None:
    """Rank 2 has been told all of rank 0 and is lost; rank 3 takes over from it and is lost before rank 1 tells it."""
    keys, born, nbytes = [*KEYS, "b"], 1, outbox_layout(5, STAGING_BYTES).nbytes
    regions = [SharedRegion.create(nbytes, f"region{rank}", only_owner_writes=True) for rank in range(5)]
    made = [ways_of(rank, regions, keys) for rank in (2, 3, 4)]
    row = made[0][1].mirror_base[0]
    for ways, _, _ in made:
        ways.begin(born, dict.fromkeys(range(5), born))
    hear(made[0][0], 0, word(BEGIN, 0, 1), word(END, 0, 1))
    for ways, _, _ in made:
        ways._take_over(Turn(2, frozenset({1, 2, 3, 4})))
    hear(made[0][0], 1, word(BEGIN, 0, 2), word(END, 0, 2), source=0)
    for ways, _, _ in made[1:]:
        ways._take_over(Turn(3, frozenset({1, 3, 4})))
    last, peer_regions, _ = made[2]
    assert (peer_regions.words[2][row + MIRROR_SETTLED], peer_regions.words[3][row + MIRROR_SETTLED]) == (2, 0)
    last._take_over(Turn(4, frozenset({4})))
    assert (peer_regions.own[row + MIRROR_SETTLED], peer_regions.own[row + MIRROR_CUT]) == (4, 0), (
        "what counts of rank 0 stays"
    )
    for region in regions:
        region.close()


def test_a_shortage_while_a_lost_rank_is_inherited_is_no_end(
    regions: list[SharedRegion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 3 waits for rank 2, as above, and then cannot take on what that one had: it tries again."""
    (second, box2, _), (third, box3, _) = ways_of(2, regions), ways_of(3, regions)
    row = box2.mirror_base[0]
    for ways in (second, third):
        ways.begin(5, dict.fromkeys(range(4), 5))
    box2.own[GENERATION] = box3.own[GENERATION] = 5
    hear(second, 0, word(BEGIN, 0, 1), word(END, 0, 1))
    second.mirrors[0].words[LIFE] = box2.own[LIFE] = LIFE_LEFT
    third._take_over(Turn(6, frozenset({3}), frozenset({0, 1, 2})))
    hear(second, 0, word(END, 0, FINAL))
    create = SharedRegion.create
    monkeypatch.setattr(SharedRegion, "create", lambda *_, **__: (_ for _ in ()).throw(ResourceError("no memory")))
    third.serve()
    assert box3.own[row + MIRROR_SETTLED] == 0
    monkeypatch.setattr(SharedRegion, "create", create)
    third._retry_at = 0.0
    third.serve()
    assert (box3.own[row + MIRROR_SETTLED], box3.own[row + MIRROR_CUT]) == (6, 0)
    assert box3.own[row + MIRROR_MADE] == 6, "it has a mirror of its own"


def test_each_keeper_that_has_left_is_waited_for() -> None:
    """Ranks 2 and 3 have kept the mirror of rank 0 and have left, rank 2's process has ended; rank 4 is the last."""
    keys = ["a", "b", "b", "b", "b"]
    nbytes = outbox_layout(5, STAGING_BYTES).nbytes
    regions = [SharedRegion.create(nbytes, f"outbox{rank}", only_owner_writes=True) for rank in range(5)]
    last, peer_regions, _ = ways_of(4, regions, keys)
    row = peer_regions.mirror_base[0]
    for rank in (2, 3):
        words = regions[rank].words(0, len(peer_regions.own))
        words[row + MIRROR_MADE], words[LIFE] = FROM_BIRTH, LIFE_LEFT
    regions[2].owner_start_time -= 1  # another process's: that one has ended
    last._take_over(Turn(2, frozenset({4}), frozenset({0, 1, 2, 3})))
    assert peer_regions.own[row + MIRROR_SETTLED] == 0, "rank 3 may receive more"
    regions[3].words(0, len(peer_regions.own))[row + MIRROR_SETTLED] = FINAL
    last.serve()
    assert (peer_regions.own[row + MIRROR_SETTLED], peer_regions.own[row + MIRROR_CUT]) == (2, 0)
    for region in regions:
        region.close()


@pytest.mark.parametrize("lives", [True, False])
def test_what_a_keeper_that_has_left_still_receives_counts_for_its_heir(
    regions: list[SharedRegion], lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but rank 3 have left in order, and rank 2, whose process lives or not, awaits the last word of rank 0."""
    (second, box2, _), (third, box3, _) = ways_of(2, regions), ways_of(3, regions)
    row = box2.mirror_base[0]
    hear(second, 0, word(BEGIN, 0, 1), word(END, 0, 1))
    second.mirrors[0].words[LIFE] = box2.own[LIFE] = LIFE_LEFT
    assert second.exports.is_receiving()
    third._take_over(Turn(2, frozenset({3}), frozenset({0, 1, 2})))
    third.serve()
    assert box3.own[row + MIRROR_SETTLED] == 0, "rank 2 may receive more"
    if lives:
        hear(second, 0, word(END, 0, FINAL))
        assert not second.exports.is_receiving()
    else:
        monkeypatch.setattr("epee.engine.replication.links.has_ended", lambda *_: True)
    third.serve()
    assert box3.own[row + MIRROR_SETTLED] == 2
    assert box3.own[row + MIRROR_CUT] == 0
    assert not third.serve(), "nothing is left to do"


def test_a_question_about_a_newcomer_that_is_lost_again_waits_for_the_view_that_has_it(
    regions: list[SharedRegion],
) -> None:
    """The peer has taken over both views; here the one with the newcomer waits, and its rank is that of another."""
    ways, _, links = ways_of(2, regions)
    ways._take_over(Turn(2, frozenset({0, 2, 3})))
    one = Newcomer(1, "b", None, OutboxOwner(bytes(16), 1, 1))
    ways.decided(Turn(3, frozenset({0, 1, 2, 3}), frozenset(), (one,)))
    ways.decided(Turn(4, frozenset({0, 2, 3})))
    hear(ways, 0, word(FETCH, 1, 4))
    ways._hear_ahead()
    ways._answer()
    assert ways._fetches == {(0, 1): 4}
    assert not [what for what in links.said if what[1] == BEGIN]
    while ways._news:
        ways._take_over(ways._news.popleft())
    ways._answer()
    assert links.said[-1] == (0, END, 1, 4)
