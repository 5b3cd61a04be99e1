"""How a latency buffer takes in the process that took a lost rank's place (groups of the backend "epee").

Words. *Card*: what a process says of itself (`card.py`). *Table*: the decisions of `Buffer.sync`, memory of no
rank (`table.py`). *Memory*: what a rank lends for calls: its inbox and, on CPUs, the region of
`latency/wire.py`, on GPUs the region of `latency/gpu/params.py`. Each memory has a *serial*, a random number.

Data path. The view of the group says which process has each rank. Its registry (`registry.py`) has a line for the
buffer, the line the blob of the card, the card the blobs of the memory and of the table. Nothing goes through the
store, and nobody need run when his memory is looked for.

A replacement makes its memory and its card, finds the oldest running buffer with its arguments that it does not have,
maps the table through a member's descriptor, shows its line and takes part in `agreement.py` like everybody who has
called `sync`: its constructor and the members' `sync` meet there. In its loop everybody does this, at least every 5 ms:

1. *Hear.* The view names a process for a rank that is not the one known: its card is forgotten, its successor's looked
   for; what it has written into this rank's GPU memory is cleared; and this rank makes a new memory (on CPUs; on GPUs
   only a new inbox), which the old process has never mapped. Where the view names another process for this very rank,
   `EvictedError` ends all calls. Such a rank is *expected*: waited for until the time-out, or until it is dead.
2. *Adopt.* A card has another serial than this one knows of it: its memory is mapped. Then, under the lock of the table
   and only while the round is undecided, the new serial is written into this rank's `known` (its own: into `lent`).
3. *Decide.* Whoever sees that all have come, that everybody who came knows everybody's present serial, and that nobody
   expected is missing, decides under the lock. At the time-out those about whose memory they disagree are left out,
   newcomers before members (`Agreement._agreed`).
   A decision in which a memory changed begins an *epoch*, which has its number.
4. *Commit*, after the decision: what was mapped becomes what calls use, all at once; the old mappings are dropped;
   calls of the new epoch have other tags; handles of an old epoch are stale.

Since `known` and `lent` change only under the lock while the round is undecided, what a decision names is what
everybody has mapped when he reads it. Until the commit calls use what they used before, so a `sync` that fails changes
nothing.

Who writes: each process its own card and line; the table, who has the lock.

What a crash between two steps leaves:
- The newcomer dies before its line is complete: nobody finds it; it is expected until its death is seen (pidfd).
- It dies after that: it counts as dead, so it is neither expected nor in. What others have mapped stays unused until
  the next successor's memory replaces it; they have shown it their new memory, so they make another for that one.
- It dies after a decision that has it: it is a dead member like any other.
- A member dies: as in any `sync`. When it held the lock, the kernel drops it; a half-written decision is written anew.
- Members are in a minority of those who live: nobody decides (`NoQuorumError`), a newcomer alone never does.
- Two newcomers for two ranks are taken in by one decision or by two. A second one for the same rank: as the first.
- The newcomer comes before a member has heard of the death: that one's view says so before the others can decide, for
  they need its serials; until then they wait for it.
- Rank 0 is replaced: the table is nobody's, and comes from any member.

Old words. On CPUs nothing that an old process wrote or may still write (it was stopped and voted out, and wakes up)
reaches memory that calls of the new epoch use: all of it is new. On GPUs memory stays, because recorded graphs have its
addresses. There the words of the dead were cleared before the decision, no tag is used again (a decision with a new
epoch puts them `TAG_JUMP` beyond all that were used), and what a woken process still stores bears older tags: its flags
and marks are not believed. Its buffer raises `EvictedError` as soon as its process has heard the view. Not promised:
that it writes nothing. A kernel that was in the midst of storing rows when its process was stopped goes on by itself,
long before anybody can take its place; but a graph that the woken process replays before it looks at the view stores
bytes into the section of its successor, under its own old tags: rows there may be damaged while the flag that covers
them is the successor's. After `TAG_JUMP` such calls even its tags would fit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ...errors import EpeeError, EvictedError, InvalidState, ProtocolError, context
from ...memory.host import HostRegion
from ...view.group import GroupInView
from ...view.process.detector import DeathWatch
from ..config import BufferConfig
from ..control.inbox import Exchange, inbox_layout
from .card import Card, Lent, new_serial
from .group_view import Roster, process_of
from .registry import Line, Registry, find
from .table import Decision, Table, process_of_word, word_of

logger = logging.getLogger("epee")

TAG_JUMP = 1 << 20
_SEARCH_PAUSE_S = 0.002  # between two looks for the line of one process
_RETRY_PAUSE_S = 0.02  # between two attempts to map a memory that could not be mapped
_ONLY_VIEW = 1  # a line's inbox is shown for a view; a card serves for all


class Memory(Protocol):
    """The memory for rows of a path: what it lends and what it maps of the others."""

    def renew(self) -> tuple[bytes, Any]:
        """Make memory that nobody has mapped (or return what must stay): its blob, and what holds it."""

    def attach(self, blob: bytes) -> Any:
        """Map a peer's; returns what holds it."""

    def cleanse(self, rank: int) -> None:
        """Forget what an old process of `rank` has stored into memory of this rank that stays."""

    def use(self, rank: int, held: Any) -> None:
        """Let calls use it for `rank` from now on, and drop what they used. No call is in flight."""

    def drop(self, held: Any) -> None:
        """Unmap what no call uses."""

    def follow(self, rank: int, process: tuple[int, int]) -> None:
        """Watch another process for the death of `rank` from now on."""


class Place:
    """A buffer's place in its group: the view, and this process's line in its registry.

    Args:
        seat: in the group.
        registry: of this process.
    """

    def __init__(self, seat: GroupInView, registry: Registry) -> None:
        self.seat = seat
        self.registry = registry
        self.roster = Roster(seat)
        self.number = 0
        self._line: Line | None = None
        self._pid = os.getpid()

    def open(self, number: int, config: BufferConfig, card: Card) -> None:
        """Show the card in the registry; raises as `Registry.open`."""
        self.number = number
        self._line = self.registry.open(number, max(1, self.roster.newest), config.words())
        self._line.lend_inbox(_ONLY_VIEW, card.blob)

    def processes(self) -> dict[int, tuple[int, int]]:
        """Return the process that has each rank in the newest view; a rank that is lost is not in it."""
        with contextlib.suppress(InvalidState):  # the group is gone: there are no news any more
            self.roster.decided(self.seat.runtime.view())
        return {rank: process_of(member) for rank, member in self.roster.view.members.items()}

    def check(self) -> None:
        """Raise `EvictedError` when the others have gone on without this process; costs a few loads."""
        error = self.seat.runtime.error
        if isinstance(error, EvictedError):
            raise EvictedError(str(error), error.ranks, error.op, error.seq, error.epoch, error.cause)

    def find_card(self, process: tuple[int, int], num_ranks: int) -> Card | None:
        """Return the card of another process for this buffer, None when it has none (yet) or has just ended."""
        registry = find(self.seat.lane, *process)
        line = None if registry is None else registry.numbers().get(self.number)
        return None if line is None else card_of(line, process, num_ranks)

    def close(self) -> None:
        """Take the line back; idempotent. Any thread, at any moment; nothing in a forked child."""
        line, self._line = self._line, None
        if line is not None and os.getpid() == self._pid:
            line.words[0] = 0  # its number: it is free when its view is 0, too
            line.stamp(0)


def card_of(line: Line, process: tuple[int, int], num_ranks: int) -> Card | None:
    """Map the card that a line shows, None when there is none (yet) or its owner has just ended.

    Raises:
        ProtocolError: it is another process's.
    """
    blob = line.inbox(_ONLY_VIEW)
    if blob is None:
        return None
    try:
        card = Card.attach(blob, num_ranks)
    except EpeeError:
        return None  # it has just ended or closed the buffer; whoever waits for it has a time-out
    if card.process != process:
        card.close()
        raise ProtocolError(f"process {process[0]} shows a card that is not its own")
    return card


class Held(NamedTuple):
    """A memory that this rank has mapped, or lends."""

    serial: int
    inbox: HostRegion | None
    blob: bytes
    memory: Any


class Kin:
    """Which process has each rank of a buffer, its card, and which of its memory is mapped here.

    Args:
        config: of the buffer.
        rank: this rank.
        card: of this rank.
        table: of the buffer.
        memory: of the path.
        exchange: of the buffer; brought from epoch to epoch here.
        place: in the group; None where processes are not replaced.
    """

    def __init__(
        self,
        config: BufferConfig,
        rank: int,
        card: Card,
        table: Table,
        memory: Memory,
        exchange: Exchange,
        place: Place | None,
    ) -> None:
        self.config, self.rank, self.card, self.table = config, rank, card, table
        self.place = place
        self._memory = memory
        self._exchange = exchange
        self.cards: dict[int, Card] = {rank: card}
        self.processes: dict[int, tuple[int, int]] = {rank: card.process}
        self._watch = DeathWatch()
        self._used: dict[int, Held] = {}  # by calls
        self._next: dict[int, Held] = {}  # from the next commit on
        self._old_inboxes: list[HostRegion] = []  # that a commit has replaced, and the exchange may still use
        self._is_exposed = False  # a process that has lost its rank has mapped this rank's memory
        self._watched: dict[int, tuple[int, int]] = {}  # by calls
        self._search_at: dict[int, float] = {}
        self._retry_at: dict[int, float] = {}
        self.problems: dict[int, str] = {}  # why a rank's memory could not be mapped at the last attempt
        self._is_closed = False

    # -- at birth

    def meet(
        self, cards: Sequence[Card], inboxes: Sequence[HostRegion], held: Sequence[Any], blobs: Sequence[bytes]
    ) -> None:
        """Begin with what all ranks have made together: everything of everybody is mapped already."""
        for rank, card in enumerate(cards):
            self.cards[rank] = card
            self._follow(rank, card.process)
            self._watched[rank] = card.process
            self._used[rank] = Held(card.serial, inboxes[rank], blobs[rank], held[rank])
            self.card.set_known(rank, card.serial)

    def join(self, held: Held) -> None:
        """Begin as a replacement: with memory of this rank only."""
        self._next[self.rank] = held
        self.card.set_known(self.rank, held.serial)

    # -- in a round

    def dead(self) -> tuple[int, ...]:
        """The ranks whose present process is proved dead."""
        return self._watch.dead()

    def is_lost(self, rank: int, last: Decision) -> bool:
        """Whether the process that had `rank` in the last decision is dead, or has lost it."""
        process = self.processes.get(rank)
        return process is None or word_of(process) != last.processes[rank] or rank in self._watch.dead()

    def expected(self, last: Decision) -> list[bool]:
        """Return for each rank whether a living process has it that has not been in yet."""
        dead = self._watch.dead()
        known = self.processes
        return [
            rank in known and rank not in dead and word_of(known[rank]) != last.processes[rank]
            for rank in range(self.config.num_ranks)
        ]

    def look(self, before: int, deadline: float, interrupt: Callable[[], None]) -> None:
        """Hear of new processes and adopt new memory, as long as no round after `before` is decided.

        Raises:
            EvictedError: this rank has been given to another process.
            ResourceError: no memory is left for a new inbox.
            CommTimeoutError: the holder of the lock does not get on.
        """
        self._hear()
        if self._is_exposed:
            self._renew(before, deadline, interrupt)
        known = self.card.known()
        for rank in range(self.config.num_ranks):
            held = None
            try:
                card = self._card(rank)
                if card is not None and card.serial == known[rank]:
                    self.problems.pop(rank, None)
                elif card is not None and time.monotonic() >= self._retry_at.get(rank, 0.0):
                    lent = card.lent()
                    held = None if lent is None else self._map(rank, lent)
            except EpeeError as error:  # one bad peer is no reason to fail
                self._put_off(rank, error)
            if held is not None:
                self._take(rank, held, before, deadline, interrupt)

    def _hear(self) -> None:
        if self.place is None:
            return
        self.place.check()
        for rank, process in self.place.processes().items():
            if process == self.processes.get(rank):
                continue
            if rank == self.rank:
                raise EvictedError(
                    f"{context('sync', rank=rank)}: process {process[0]} has this rank now; end this one",
                    [rank],
                    "sync",
                    cause="replaced",
                )
            old = self.cards.pop(rank, None)
            if old is not None:
                old.close()
            self.problems.pop(rank, None)
            if rank in self.processes:
                self._memory.cleanse(rank)
                self._is_exposed = True
            self._follow(rank, process)

    def _follow(self, rank: int, process: tuple[int, int]) -> None:
        self.processes[rank] = process
        self._watch.forget(rank)
        if rank != self.rank:
            self._watch.watch(rank, *process)

    def _card(self, rank: int) -> Card | None:
        """Return a peer's card, searched for where it has none yet; None for this rank, too."""
        if rank == self.rank:
            return None
        card = self.cards.get(rank)
        now = time.monotonic()
        if card is not None and card.is_closed:
            self.cards.pop(rank).close()  # the process may make the buffer again
            card = None
        if card is not None or self.place is None or now < self._search_at.get(rank, 0.0):
            return card
        process = self.processes.get(rank)
        if process is not None and rank not in self._watch.dead():
            self._search_at[rank] = now + (_RETRY_PAUSE_S if rank in self.problems else _SEARCH_PAUSE_S)
            card = self.place.find_card(process, self.config.num_ranks)
            if card is not None:
                self.cards[rank] = card
        return card

    def _map(self, rank: int, lent: Lent) -> Held | None:
        """Map what a peer lends; None when it cannot be had now: it has just ended, or made another."""
        same = next((held for held in (self._next.get(rank), self._used.get(rank)) if held is not None), None)
        inbox = None
        try:
            inbox = HostRegion.attach(lent.inbox)
            pid, start_time = self.processes[rank]
            if (inbox.owner_pid, inbox.owner_start_time) != (pid, start_time):
                raise ProtocolError(f"rank {rank} names an inbox that is not its own")
            if inbox.nbytes < inbox_layout(self.config).nbytes:
                raise ProtocolError(f"rank {rank} names an inbox of {inbox.nbytes} bytes; too few")
            is_same = same is not None and same.blob == lent.memory
            memory = same.memory if is_same and same is not None else self._memory.attach(lent.memory)
            return Held(lent.serial, inbox, lent.memory, memory)
        except EpeeError as error:
            if inbox is not None:
                inbox.close()
            self._put_off(rank, error)
            return None  # whoever waits has a time-out

    def _put_off(self, rank: int, error: EpeeError) -> None:
        """Note why the memory of a rank cannot be had now; it is tried again."""
        self._retry_at[rank] = time.monotonic() + _RETRY_PAUSE_S
        if rank not in self.problems:
            logger.info("the memory of rank %d cannot be mapped (yet): %s", rank, error)
        self.problems[rank] = str(error)

    def _renew(self, before: int, deadline: float, interrupt: Callable[[], None]) -> None:
        """Make memory of this rank that no process has mapped which lost its rank."""
        inbox = HostRegion.create(inbox_layout(self.config).nbytes, f"inbox-{self.rank}-{before}")
        try:
            blob, memory = self._memory.renew()
        except BaseException:
            inbox.close()
            raise
        if self._take(self.rank, Held(new_serial(), inbox, blob, memory), before, deadline, interrupt):
            self._is_exposed = False

    def _take(self, rank: int, held: Held, before: int, deadline: float, interrupt: Callable[[], None]) -> bool:
        """Let the next commit have `held`; False when the round has been decided meanwhile."""
        is_taken = False
        try:
            with self.table.locked(deadline, interrupt):
                if self.table.round == before:
                    if rank == self.rank:
                        assert held.inbox is not None
                        self.card.lend(Lent(held.serial, held.inbox.blob, held.blob))
                    self.card.set_known(rank, held.serial)
                    is_taken = True
        finally:
            old = self._next.pop(rank, None) if is_taken else held
            if is_taken:
                self._next[rank] = held
            if old is not None:
                self._drop(rank, old)
        self.table.wake()
        return is_taken

    def _drop(self, rank: int, held: Held) -> None:
        """Unmap what no call uses; a memory that others of the same rank share stays."""
        if held.inbox is not None:
            held.inbox.close()
        others = (self._next.get(rank), self._used.get(rank))
        if held.memory is not None and all(other is None or other.memory is not held.memory for other in others):
            self._memory.drop(held.memory)

    # -- after a decision

    def commit(self, decision: Decision) -> bool:
        """Let calls use what `decision` is about; False when it is what they use already.

        When it raises, the next commit goes on where it stopped.
        """
        if decision.epoch == self._exchange.epoch:
            return False
        for rank, is_member in enumerate(decision.members):
            if not is_member:
                continue
            held = self._next.get(rank)
            if held is not None:
                old = self._used.get(rank)
                self._memory.use(rank, held.memory)
                self._used[rank] = held
                del self._next[rank]
                if old is not None and old.inbox is not None:
                    self._old_inboxes.append(old.inbox)
        for rank in range(self.config.num_ranks):
            self._let_calls_watch(rank, decision)
        inboxes = {rank: self._used[rank].inbox for rank, is_in in enumerate(decision.members) if is_in}
        self._exchange.begin(decision.epoch, {rank: box for rank, box in inboxes.items() if box is not None})
        self._close_old_inboxes()
        return True

    def _close_old_inboxes(self) -> None:
        while self._old_inboxes:
            self._old_inboxes.pop().close()

    def _let_calls_watch(self, rank: int, decision: Decision) -> None:
        """Let calls know whether the process that has a rank is dead; of who is out, the one that had it last."""
        process = process_of_word(decision.processes[rank])
        if rank != self.rank and self._watched.get(rank) != process:
            self._memory.follow(rank, process)
            self._watched[rank] = process

    def close(self) -> None:
        """Leave the registry and drop all mappings that calls do not use; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.card.say_closed()
        if self.place is not None:
            self.place.close()
        for rank in list(self._next):
            self._drop(rank, self._next.pop(rank))
        self._close_old_inboxes()
        for held in self._used.values():
            if held.inbox is not None:
                held.inbox.close()
        for card in self.cards.values():
            card.close()
        self._watch.close()
        self.table.close()
