"""The links, mirrors and answers between one rank and the other hosts of its group, view by view.

The thread of the links plays this rank's roles (`link/topology.py`), independently of the program: other ranks wait for
it. Decisions come from the agent thread (`decided`); data that comes over links is noted by the thread that pumps
(`fetched`, `opened`, `ended`), and the thread of the links does the rest in its next round (`serve`):

    a view     links of lost ranks end: nothing that they have sent counts from here on (nothing is missing of a rank
               that has left in order, its link ends by itself). Sources whose gateway this rank is now get mirrors
               here.
    links      a needed rank is called until it is there, by the lower rank of the two, or by the rank that asks a
               successor that is no partner (it does not know which ranks need it); a rank that is there again gets a
               new link, whatever there was before.
    questions  FETCH(source, epoch) goes to the answering rank of each mirror that this rank keeps, if it does not
               receive it already: for a living source when its link is new, for a lost one when the view has come.
    answers    FETCH of this rank's own outbox: all of it, then END, then `Exports` sends that gateway later stores. Of
               a lost rank of this host: all, and END. A question of a view that is not known here yet waits for it, as
               does one about a rank that joined by a view that waits here, and is lost again.

    joiners    A view that takes a rank in waits until the engine has applied it (`adopted`), which waits until all
               staying ranks need nothing of the ranks that were lost by then (`loss_resolution.py`). Then there is a
               new placement, of its members, with roles of its own; rows of joiners are blank again, and on their
               hosts gateways request everything once more, as words for joiners have not come there. A loss behind
               it in the meantime changes which rank answers for the older losses, no more (`_hear_ahead`).

The state of a mirror that the ranks of this host need is in the gateway's own outbox, which they map (field "mirrors"):
whether there is one (MADE), its blob, and up to which view it has all that counts (SETTLED). MADE is stored when the
first answer is complete (again where all was requested again), SETTLED with the END of a lost source; each behind the
data that it announces. If no rank can answer for a source any more, its gateway makes the mirror of the one that a
former gateway had, if that one has published that it was complete and this rank reads it; if all have mapped that, it
stores SETTLED alone. Else the mirror that the others have mapped no longer changes. A former gateway that has left in
order goes on receiving until it has all, so its word is waited for while its process lives, `LINGER_S` at most.

The thread of the links writes and, holding the lock of the links, the thread that applies an END. A crash between two
steps is the death of a gateway or answering rank: the next view has another, which begins with the question. A
connection that is reset between two living hosts is made again, and all is requested again; data sent twice changes
nothing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import EpeeError, ProtocolError, expected
from ...link.engine import LinkMaker
from ...link.frames import (
    ASK,
    BEGIN,
    END,
    FETCH,
    NO_WORD,
    PIECES,
    TELL,
    WRITE,
    Frame,
    parse_asked,
    parse_pieces,
)
from ...link.meeting import Connected, Meeting, Partner
from ...link.poller import LINGER_S, Links
from ...link.topology import Roles, Topology
from ...memory.claim import has_ended
from ...memory.shared import BLOB_BYTES, SharedRegion
from ...memory.signals import fence, futex_wake
from ...view.protocol.outcome import MAX_WITNESSED_HOSTS
from ..outbox import (
    BELL,
    CHANNEL_WORDS,
    CONSUMED,
    CONSUMED_TOO,
    FINAL,
    GENERATION,
    LIFE,
    LIFE_BORN,
    LIFE_LEFT,
    LIFE_READY,
    MIRROR_BLOB,
    MIRROR_CUT,
    MIRROR_MADE,
    MIRROR_SETTLED,
    SLEEPERS,
    OutboxOwner,
    PeerRegions,
    has_left,
)
from .exports import Exports
from .mirror import FROM_BIRTH, Mirror
from .remote_reads import Answers
from .snapshot import tell_all

logger = logging.getLogger("epee")

_RETRY_S = 0.2  # after a shortage


class Newcomer(NamedTuple):
    """A process that joins a group: rank, key of its host, endpoint of its links (None: it has left already)."""

    rank: int
    host: str
    partner: Partner | None
    owner: OutboxOwner


class Turn(NamedTuple):
    """A view as it concerns one group.

    Attributes:
        epoch: the epoch that it began.
        present: the ranks that take part.
        left: the ranks, of those that it removed, that had left in order.
        newcomers: the joiners that it takes in; a view that removes others as well is delivered as two.
    """

    epoch: int
    present: frozenset[int]
    left: frozenset[int] = frozenset()
    newcomers: tuple[Newcomer, ...] = ()


class _Question(NamedTuple):
    """The question of a mirror: the rank that is asked, the epoch, and the link (None: there is none yet)."""

    teller: int
    epoch: int
    ear: LinkReader | None


class LinkReader:
    """The reader of the frames of one link; a `link.stream.FrameSink`.

    Args:
        peer: the rank at its other end.
        peer_regions: the peer regions of the group.
        links: through which questions are answered.
        keeper: has the mirrors.

    Attributes:
        answers: that have come to this rank's remote reads.
    """

    def __init__(self, peer: int, peer_regions: PeerRegions, links: Links, keeper: GroupLinks) -> None:
        self.peer = peer
        self.answers = Answers()
        self._peer_regions = peer_regions
        self._channels = peer_regions.channel_base[0]
        self._links, self._keeper = links, keeper
        self._mirror: Mirror | None = None  # of the incoming frames
        self._is_void = False  # the incoming frames are not wanted
        self._void = bytearray()

    def place(self, frame: Frame) -> memoryview:
        """Implement `FrameSink.place`."""
        if self._is_void:
            if len(self._void) < frame.nbytes:
                self._void = bytearray(frame.nbytes)
            return memoryview(self._void)[: frame.nbytes]
        return self._wanted().checked(frame.offset, frame.nbytes, frame.word)

    def _wanted(self) -> Mirror:
        if self._mirror is None:
            raise ProtocolError(f"rank {self.peer} tells what it was not asked for; the connection ends")
        return self._mirror

    def apply(self, frame: Frame, payload: memoryview) -> None:
        """Implement `FrameSink.apply`."""
        kind, _, offset, word, value, note = frame
        if kind in (WRITE, PIECES):
            if self._is_void:
                return
            mirror = self._wanted()
            if kind == PIECES:
                pieces = [(mirror.checked(at, len(data), word), data) for at, data in parse_pieces(payload, offset)]
                for place, data in pieces:
                    place[:] = data
            words = mirror.words
            if note > words[CONSUMED]:
                words[CONSUMED] = words[CONSUMED_TOO] = note
            if word != NO_WORD:
                words[word] = value
                self._wake(mirror, word)
        elif kind == ASK:
            self._answer(value, bytes(payload))
        elif kind == TELL:
            self.answers.put(value, bytes(payload))
        elif kind == FETCH:
            self._keeper.fetched(self.peer, offset, value)
        elif kind == BEGIN:
            self._mirror = self._keeper.opened(self, offset, value)
            self._is_void = self._mirror is None
        elif kind == END:
            self._mirror = self._keeper.ended(self, offset, value)
            self._is_void = False

    def forget(self, mirror: Mirror) -> None:
        """Stop writing a mirror: frames for it are dropped."""
        if self._mirror is mirror:
            self._mirror, self._is_void = None, True

    def close(self) -> None:
        """Release all memory; no frame comes any more."""
        self._mirror = None

    def _wake(self, mirror: Mirror, word: int) -> None:
        """Wake the ranks of this host that sleep on a word of the mirror, or on BELL where a message came."""
        fence()
        peer_regions = self._peer_regions
        for rank in peer_regions.here:
            if peer_regions.words[rank][SLEEPERS]:
                futex_wake(mirror.region.address + 8 * word)
                break
        if word >= self._channels:
            rank = (word - self._channels) // CHANNEL_WORDS
            if rank in peer_regions.here and peer_regions.words[rank][BELL]:
                futex_wake(peer_regions.address[rank] + 8 * BELL)

    def _answer(self, number: int, payload: bytes) -> None:
        asked, peer_regions = parse_asked(payload), self._peer_regions
        for rank, word in asked:
            is_elsewhere = rank >= peer_regions.capacity or (
                rank < len(peer_regions.host_of) and rank not in peer_regions.here
            )
            if is_elsewhere or word >= len(peer_regions.own):
                raise ProtocolError(f"rank {self.peer} asks for word {word} of rank {rank}; it must not")
        fence()  # data before the question is stored, and visible, before these are loaded
        # of a rank that has just joined, and is not known to this rank yet, there is nothing
        self._links.tell(
            self.peer,
            number,
            [peer_regions.words[rank][word] if rank in peer_regions.here else 0 for rank, word in asked],
        )


class GroupLinks:
    """The links, mirrors and answers of one rank.

    Args:
        topology: the host of each rank.
        peer_regions: the peer regions of all ranks; this rank's own, and those of its host, are mapped.
        links: without a link so far.
        meeting: makes connections.
        owners: per rank the owner named in its outbox and mirrors.
        maker: makes a link of each connection.

    Attributes:
        peer_regions, owners: as the arguments.
        exports: sends stores to the others.
        mirrors: that this rank keeps, by source.
        epoch: of the newest view whose roles are played.
        port: where links with this rank are made.
    """

    def __init__(
        self,
        topology: Topology,
        peer_regions: PeerRegions,
        links: Links,
        meeting: Meeting,
        owners: dict[int, OutboxOwner],
        maker: LinkMaker,
    ) -> None:
        self.port = meeting.port
        self.mirrors: dict[int, Mirror] = {}
        self.epoch = 1
        self.peer_regions, self.owners = peer_regions, owners
        self._links, self._meeting, self._maker = links, meeting, maker
        self._roles = Roles(topology, [rank for rank, host in enumerate(topology.host_of) if host >= 0])
        self._ahead: Roles | None = None  # roles by which lost ranks are answered for, while a view with joiners waits
        self._heard = 0  # epoch of the last view that was received ahead
        self._adopted = 0  # of the newest view with joiners that the engine has applied
        self._joined: dict[int, int] = {}  # rank -> epoch, of ranks that joined while this rank was there, and itself
        self._ears: dict[int, LinkReader] = {}
        self._answers: dict[int, Answers] = {}  # of these
        self._questions: dict[int, _Question] = {}  # by source
        self._fetches: dict[tuple[int, int], int] = {}  # (peer, source) -> epoch, of questions that wait for an answer
        self._news: deque[Turn] = deque()
        self._departed: set[int] = set()  # ranks that have left in order
        # source that no rank can answer for -> the view that lost it, and until when a former gateway's word is awaited
        self._awaited: dict[int, tuple[int, float]] = {}
        self._alone: set[int] = set()  # of lost ranks those of which the cut of that view says what counts
        self._own = peer_regions.own
        self._retry_at = 0.0
        self.exports = exports = Exports(topology, peer_regions, links, self._answers)
        exports.on_close, exports.is_receiving = self._close, self._is_receiving

    def start(self, met: Mapping[int, Connected], mirrors: Mapping[int, SharedRegion]) -> None:
        """Begin with these connections and mirrors; the thread of the links runs from here on.

        Raises:
            ResourceError: the system has no thread left.
        """
        for source, region in mirrors.items():
            self.mirrors[source] = Mirror(source, region, self.peer_regions, is_from_birth=True)
            self._questions[source] = _Question(source, self.epoch, None)
        for peer, connected in met.items():
            self._take(peer, connected)
        self._links.attend(self._meeting, self.serve)
        self._links.start(self._lost, self.exports.tell_progress)

    def note_made(self) -> None:
        """Note in the mirrors kept here that their ranks have been ready, where their word has not arrived.

        The ranks have agreed on that (`BootstrapAttempt.settle`). The word of a rank that has died may never arrive.
        """
        with self._links.lock:
            for mirror in self.mirrors.values():
                if mirror.words[LIFE] == LIFE_BORN:
                    mirror.words[LIFE] = LIFE_READY
        fence()

    @property
    def topology(self) -> Topology:
        """The placement of the ranks, in the view whose roles are played."""
        return self._roles.topology

    def begin(self, epoch: int, since: Mapping[int, int], joined: bool = False) -> None:
        """Take the epoch in which the group begins, or this rank joins, and since when its ranks take part."""
        self.epoch = epoch
        self._roles = Roles(self._roles.topology, self._roles.present, since)
        if joined:
            self._joined[self._roles.topology.rank] = self._own[GENERATION] = epoch

    def adopted(self, epoch: int) -> None:
        """Note that the engine has applied a view with joiners; the engine's lock is held."""
        self._adopted = epoch
        self._links.ring()

    def decided(self, turn: Turn) -> None:
        """Receive a view, from the agent thread, in order."""
        self._news.append(turn)
        self._links.ring()

    @property
    def is_told(self) -> bool:
        """True when all other hosts receive the stores of this rank."""
        return self._roles.gateways().keys() <= self.exports.routes.gateways.keys()

    # ---- data that comes over links; the lock of the links is held

    def fetched(self, peer: int, source: int, epoch: int) -> None:
        """Note a request for the whole state of a source."""
        if not 0 <= source < self.peer_regions.capacity:
            raise ProtocolError(
                f"rank {peer} asks for rank {source} of {self.peer_regions.capacity}; the connection ends"
            )
        self._fetches[peer, source] = epoch  # a newer question about the same is asked because the older is void
        self._links.ring()

    def opened(self, ear: LinkReader, source: int, epoch: int) -> Mirror | None:
        """Return the mirror for the answer to a FETCH that begins; None: the answer is not wanted any more."""
        question = self._questions.get(source)
        is_wanted = question is not None and question.ear is ear and question.epoch == epoch
        return self.mirrors.get(source) if is_wanted else None

    def ended(self, ear: LinkReader, source: int, epoch: int) -> Mirror | None:
        """Note that an answer is complete, or that a peer sends nothing more.

        Return the mirror for its own frames now.
        """
        own = self.mirrors.get(ear.peer) if self._is_fed_by(ear) else None
        if epoch == FINAL and source == ear.peer:
            if own is not None and has_left(own.words):
                self._settle(source, FINAL)
            return None
        if self.opened(ear, source, epoch) is not None:
            self._complete(self.mirrors[source])
            if source != ear.peer:
                self._settle(source, epoch)
        return own

    def _is_receiving(self) -> bool:
        """Return whether a mirror that this rank keeps may still lack what counts of its source."""
        return any(
            not self._own[self.peer_regions.mirror_base[source] + MIRROR_SETTLED] and not self._is_cut_off(source)
            for source in self.mirrors
        )

    def _is_cut_off(self, source: int) -> bool:
        """Return whether a source has left, and its link has ended: this rank may have left, too, and asks nobody."""
        question = self._questions.get(source)
        return has_left(self.mirrors[source].words) and (question is None or question.ear is None)

    def _is_fed_by(self, ear: LinkReader) -> bool:
        question = self._questions.get(ear.peer)
        return question is not None and question.ear is ear

    def _complete(self, mirror: Mirror, epoch: int = 0) -> None:
        """Announce the mirror of a source to the ranks of this host; `epoch`: made for this view, 0: for the last."""
        base, blob = self.peer_regions.mirror_base[mirror.source], mirror.region.blob
        if mirror.is_whole and self._own[base + MIRROR_MADE] >= self._own[GENERATION]:
            return  # else all was requested again as a rank has joined here
        mirror.is_whole = True
        first = base + MIRROR_BLOB
        self._own[first : first + len(blob) // 8] = memoryview(blob).cast("Q")
        fence()
        is_had_by_all = mirror.is_from_birth and not self._own[GENERATION]  # later joiners have not mapped it
        self._own[base + MIRROR_MADE] = FROM_BIRTH if is_had_by_all else epoch or self.epoch

    def _settle(self, source: int, epoch: int) -> None:
        """Announce to the ranks of this host that the mirror of a source has all that counts of it in a view."""
        fence()
        index = self.peer_regions.mirror_base[source] + MIRROR_SETTLED
        if self._own[index] < epoch:
            self._own[index] = epoch

    def _lost(self, peer: int) -> None:
        """Note that the link to a peer has ended."""
        self._unlink(peer)
        self._links.ring()

    def _unlink(self, peer: int) -> None:
        self.exports.unroute(peer)
        ear = self._ears.get(peer)
        self._fetches = {fetch: epoch for fetch, epoch in self._fetches.items() if fetch[0] != peer}
        for source, question in self._questions.items():
            if question.ear is ear:
                self._questions[source] = question._replace(ear=None)

    # ---- the thread of the links

    def serve(self) -> bool:
        """Do the pending work; True: call again soon."""
        if time.monotonic() < self._retry_at:
            return True
        try:
            while self._news and (not self._news[0].newcomers or self._adopted >= self._news[0].epoch):
                self._take_over(self._news[0])
                self._news.popleft()
            if self._news:
                self._hear_ahead()
            self._meet()
            self._mourn()
            self._ask()
            if self._fetches:
                self._answer()
        except expected(EpeeError, OSError) as exc:
            logger.warning("rank %d cannot do its part between hosts now, and tries again: %s", self.topology.rank, exc)
            self._retry_at = time.monotonic() + _RETRY_S
            return True
        return self._meeting.is_busy or bool(self._awaited)

    def _take_over(self, turn: Turn) -> None:
        """Play the roles of a view from now on; may be run again where it was interrupted."""
        if turn.newcomers:
            self._bring_in(turn)
            return
        before, roles = self._roles, Roles(self.topology, turn.present, self._roles.since)
        lost = before.present - roles.present
        self._departed |= turn.left
        with self._links.lock:
            for rank in lost:
                self._meeting.forget(rank)
                if rank not in turn.left:
                    self._unlink(rank)
                    self._links.drop(rank)
        num_hosts = len({self.topology.host_of[rank] for rank in before.present})
        has_cut = num_hosts > MAX_WITNESSED_HOSTS  # as `Course` has it
        self._alone.update(rank for rank in lost if has_cut or not roles.is_witnessed(rank))
        for source in self.topology.elsewhere:
            if not roles.is_kept_here(source):
                continue
            if source in roles.present and source not in self.mirrors:
                self._make(source, _Question(source, turn.epoch, None))
            is_silent = source not in roles.present and (source not in turn.left or not self._says_goodbye(source))
            is_mine = source in lost or source in self._questions or not before.is_kept_here(source)
            if is_silent and is_mine:  # it is lost now, or its answering rank or gateway is another now
                self._inherit(source, turn.epoch, roles, source in lost)
        with self._links.lock:
            self._roles, self.epoch = roles, turn.epoch

    def _hear_ahead(self) -> None:
        """Find other ranks that answer for lost ones while a view with joiners waits, if the previous are lost."""
        if self._ahead is None:
            self._ahead, self._heard = self._roles, self._news[0].epoch
        for turn in list(self._news):
            if turn.epoch <= self._heard:
                continue
            before = self._ahead
            after = before.without(before.present - turn.present)
            for source in self.topology.elsewhere:
                is_lost = source not in self._roles.present and not self._says_goodbye(source)
                if is_lost and after.is_kept_here(source):
                    self._inherit(source, turn.epoch, after, False)
            with self._links.lock:
                self._ahead, self._heard = after, turn.epoch

    def _judging(self, source: int) -> Roles:
        """Return the roles in which a source is answered for."""
        return self._ahead if self._ahead is not None and source not in self._roles.present else self._roles

    def _bring_in(self, turn: Turn) -> None:
        """Begin a new placement, with joiners; may be run again where it was interrupted."""
        before, new = self._roles, {one.rank: one for one in turn.newcomers}
        keys = {rank: new[rank].host if rank in new else before.topology.key_of(rank) for rank in turn.present}
        since = {**before.since, **dict.fromkeys(new, turn.epoch)}
        roles = Roles(before.topology.moved(keys), turn.present, since)
        with self._links.lock:
            self._awaited.clear()  # all staying ranks had settled what they needed
            for rank, one in new.items():
                self._welcome(rank, one, turn.epoch)
            for source in list(self.mirrors):
                if source in new or source not in turn.present or not roles.is_kept_here(source):
                    self._discard(source)
        has_come_here = any(roles.topology.is_here(rank) for rank in new)
        for source in roles.topology.elsewhere:
            question = _Question(source, turn.epoch, None)
            if not roles.is_kept_here(source):
                continue
            if source not in self.mirrors:
                self._make(source, question)
            elif has_come_here and self._questions[source].epoch < turn.epoch:
                with self._links.lock:
                    self._questions[source] = question
        with self._links.lock:
            self._roles, self.epoch, self._ahead = roles, turn.epoch, None
            fence()
            self._own[GENERATION] = turn.epoch

    def _welcome(self, rank: int, one: Newcomer, epoch: int) -> None:
        """Allow a joiner to call; nothing is left of the previous owner of its rank. The lock of the links is held."""
        self._meeting.forget(rank)
        self._unlink(rank)
        self._links.drop(rank)
        self._ears.pop(rank, None)
        self._answers.pop(rank, None)
        self._alone.discard(rank)
        self._departed.discard(rank)
        self._awaited.pop(rank, None)
        self.owners[rank], self._joined[rank] = one.owner, epoch
        if one.partner is not None:
            self._meeting.admit(rank, one.partner)
        row = self.peer_regions.mirror_base[rank]
        self._own[row + MIRROR_MADE] = self._own[row + MIRROR_SETTLED] = self._own[row + MIRROR_CUT] = 0

    def _discard(self, source: int) -> None:
        """Stop keeping a mirror; its readers may continue. The lock of the links is held."""
        mirror = self.mirrors.pop(source)
        self._questions.pop(source, None)
        for ear in self._ears.values():
            ear.forget(mirror)
        mirror.close()
        mirror.region.hide()

    def _make(self, source: int, question: _Question) -> None:
        region = SharedRegion.create(self.peer_regions.payload_bytes, f"mirror{source}", only_owner_writes=True)
        self.owners[source].sign(region)
        with self._links.lock:
            self.mirrors[source] = Mirror(source, region, self.peer_regions)
            self._questions[source] = question

    def _says_goodbye(self, source: int) -> bool:
        """Return whether a rank that has left sends on its link, or has sent, that nothing more comes."""
        question = self._questions.get(source)
        return question is not None and question.teller == source and question.ear is not None

    def _inherit(self, source: int, epoch: int, roles: Roles, is_new: bool) -> None:
        """Ensure that the mirror of a lost source gets all that counts; `is_new`: it is lost in `epoch`."""
        row, question = self.peer_regions.mirror_base[source], self._questions.get(source)
        teller = roles.teller(source)
        settled = self._own[row + MIRROR_SETTLED]
        if settled and (settled == FINAL or not is_new):
            self._awaited.pop(source, None)
            return
        if question is not None and question.teller == teller and not is_new:
            return
        if teller is None:
            _, until = self._awaited.setdefault(source, (epoch, time.monotonic() + LINGER_S))
            if source in self._departed and time.monotonic() < until and self._is_still_told(source):
                return
            with self._links.lock:
                self._questions.pop(source, None)
                words = self._settled_words(source)
                is_had = words is not None and (
                    words[row + MIRROR_MADE] == FROM_BIRTH or self._take_on(source, words, epoch)
                )
                if not is_had:
                    # the view that lost it determines what counts, else this one: no rank here has received all
                    self._own[row + MIRROR_CUT] = 0 if source in self._alone else epoch
                self._settle(source, epoch)
            del self._awaited[source]  # last: after a shortage all of this is done again
            return
        self._awaited.pop(source, None)
        question = _Question(teller, epoch, None)
        if source in self.mirrors:
            with self._links.lock:
                self._questions[source] = question
        else:
            self._make(source, question)

    def _is_still_told(self, source: int) -> bool:
        """Return whether a former gateway of this host that has left in order still receives what a source has sent."""
        row, own = self.peer_regions.mirror_base[source], self.mirrors.get(source)
        if own is not None and own.is_whole:
            return False  # the source has told this rank since: what the former gateway has is old
        for rank in self.topology.here:
            words, region = self.peer_regions.words[rank], self.peer_regions.regions[rank]
            is_former = rank != self.topology.rank and words[GENERATION] == self._own[GENERATION]
            is_open = words[row + MIRROR_MADE] and not words[row + MIRROR_SETTLED] and not words[row + MIRROR_CUT]
            has_left_alive = words[LIFE] == LIFE_LEFT and not has_ended(region.owner_pid, region.owner_start_time)
            if is_former and is_open and has_left_alive:
                return True
        return False

    def _settled_words(self, source: int) -> memoryview | None:
        """Return the words of a former gateway whose mirror of a source has all that counts; None: there is none.

        Any of this host in the present placement: its successor may have left before it received anything.
        """
        row = self.peer_regions.mirror_base[source]
        for rank in self.topology.here:
            words = self.peer_regions.words[rank]
            is_former = rank != self.topology.rank and words[GENERATION] == self._own[GENERATION]
            if is_former and words[row + MIRROR_SETTLED] and not words[row + MIRROR_CUT]:
                return words
        return None

    def _take_on(self, source: int, words: memoryview, epoch: int) -> bool:
        """Keep a copy of the mirror that a former gateway has declared complete.

        False: this rank does not read that one. It is as if that gateway had sent all to this one. The lock of the
        links is held.
        """
        region, first = self.peer_regions.regions[source], self.peer_regions.mirror_base[source] + MIRROR_BLOB
        blob = words[first : first + BLOB_BYTES // 8].tobytes()
        if not words[self.peer_regions.mirror_base[source] + MIRROR_MADE] or region.blob != blob:
            return False
        if source not in self.mirrors:
            self._make(source, _Question(source, epoch, None))
        self._questions.pop(source, None)
        mirror = self.mirrors[source]

        def write(offset: int, data: Any, word: int, value: int, note: int) -> None:
            """Store in the mirror, as a link reader does."""
            mirror.checked(offset, len(data), word)[:] = data
            if note:
                mirror.words[CONSUMED] = mirror.words[CONSUMED_TOO] = note
            if word != NO_WORD:
                mirror.words[word] = value

        tell_all(write, self.peer_regions, source, region, self._roles.living(self.topology.host), self._joined)
        self._complete(mirror, epoch)
        return True

    def _mourn(self) -> None:
        """Have a successor answer for ranks that left in order, where their links have ended before their goodbye; ask
        again where a former gateway still receives."""
        for source, (epoch, _) in list(self._awaited.items()):
            self._inherit(source, epoch, self._ahead or self._roles, True)
        for source, question in list(self._questions.items()):
            if question.teller == source and question.ear is None and source not in self._roles.present:
                epoch = self.epoch if self._ahead is None else self._heard
                self._inherit(source, epoch, self._ahead or self._roles, True)

    def _meet(self) -> None:
        """Have links with all needed ranks."""
        if self.topology.rank in self._roles.present:
            partners = self._roles.partners()
            tellers = {question.teller for question in self._questions.values() if question.ear is None}
            for peer in {*partners, *tellers}:
                if peer in self._roles.present and not self._links.has(peer):
                    self._meeting.want(peer, alone=peer not in partners)
        self._meeting.step()
        for peer, connected in self._meeting.take().items():
            self._take(peer, connected)

    def _take(self, peer: int, connected: Connected) -> None:
        """Use a connection with a peer, replacing the previous one."""
        with self._links.lock:
            ear = LinkReader(peer, self.peer_regions, self._links, self)
            link = self._maker.make(peer, connected, ear)
            if peer in self._ears:
                self._unlink(peer)
            self._ears[peer], self._answers[peer] = ear, ear.answers
            self._links.add(link)

    def _ask(self) -> None:
        """Ask the answering rank, where none has been asked yet and there is a link."""
        for source, question in list(self._questions.items()):
            if question.ear is not None or not self._links.has(question.teller):
                continue
            with self._links.lock:
                if self._questions.get(source) is question:
                    self._questions[source] = question._replace(ear=self._ears[question.teller])
                    self._links.say(question.teller, FETCH, source, question.epoch)

    def _answer(self) -> None:
        with self._links.lock:
            for (peer, source), epoch in list(self._fetches.items()):
                if epoch > self._newest(source):
                    continue
                is_mine = peer in self._roles.present and self._tells(source, peer)
                if not is_mine and self._is_coming(source, epoch):
                    continue  # about a rank that joined and is lost again: the peer has the view that waits here
                if is_mine:
                    self._tell(peer, source, epoch)
                self._fetches.pop((peer, source), None)

    def _is_coming(self, source: int, epoch: int) -> bool:
        """Return whether a view up to that of an epoch takes in a process for the rank, and waits to be applied."""
        return any(turn.epoch <= epoch and source in {one.rank for one in turn.newcomers} for turn in list(self._news))

    def _newest(self, source: int) -> int:
        """Return the newest view by which this rank knows the answering rank of a source."""
        return self.epoch if self._judging(source) is self._roles else self._heard

    def _tells(self, source: int, peer: int) -> bool:
        """Return whether this rank answers a peer for `source`, by the newest view."""
        host, roles = self.topology.host_of[peer], self._judging(source)
        if source >= len(self.topology.host_of) or host == self.topology.host or not self.topology.is_here(source):
            return False
        return roles.teller(source) == self.topology.rank and roles.gateway(source, host) == peer

    def _tell(self, peer: int, source: int, epoch: int) -> None:
        """Answer a question. The lock of the links is held, so the answer is not mixed with anything.

        A partial answer ends the link: later data would be taken for a part of it. On the next one all is requested
        again.
        """
        host = self.topology.host_of[peer]
        readers = self._judging(source).living(host)

        def write(offset: int, data: object, word: int, value: int, note: int) -> None:
            """Write to the peer."""
            self._links.write(peer, offset, data, word, value, note)

        if source == self.topology.rank:
            self.exports.route(host, peer)  # first: stores from here on are sent behind the answer
        self._links.say(peer, BEGIN, source, epoch)
        try:
            tell_all(write, self.peer_regions, source, self.peer_regions.regions[source], readers, self._joined)
        except BaseException:
            self._links.drop(peer)
            self._lost(peer)
            raise
        self._links.say(peer, END, source, epoch)
        if source == self.topology.rank and has_left(self._own):
            self._links.say(peer, END, source, FINAL)

    def _close(self) -> None:
        for ear in self._ears.values():
            ear.close()
        self._maker.close()
        for mirror in self.mirrors.values():
            mirror.close()
            mirror.region.close()
        self.mirrors.clear()
        self._ears.clear()
        self._answers.clear()
