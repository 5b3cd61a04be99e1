"""The memory of a run: what each process lends for an epoch, and what others see of it, store by store.

A store goes to the owner's words and to a log; every reader has its own copy, which follows the log with a lag of its
own (stores of one writer stay in order, as on x86-64). Whoever has proof that the writer is dead sees all of its
stores. The protocol on these words is in `group_id.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from epee.engine.bootstrap.group_note import Offer
from epee.memory.signals import SEQ_BITS

from .plan import is_gated

if TYPE_CHECKING:
    from .lane import Engine

LANE = 7
NUM_CELLS = 3
MAX_SLOTS = 12
TAG, FILLED, MERGED, DRAINED, GAVE, REFUSAL, PAYLOAD = range(7)
COMPLETES = 0xC0DE
HALF_WORDS = 2 * MAX_SLOTS
SHARES = PAYLOAD + 2 * HALF_WORDS
ROOT = SHARES + 2
CELL_WORDS = ROOT + 1
CONSUMED = NUM_CELLS * CELL_WORDS
VIEW = CONSUMED + 1
BOX_WORDS = VIEW + 1
SEQ_MASK = (1 << SEQ_BITS) - 1
BLOCKED, MOVED, LOOKED = 0, 1, 2  # looking at others again is no progress


class Outbox:
    """What one process lends for one epoch. `log` holds (time, word, value) of every store."""

    __slots__ = ("fenced", "first_seq", "log", "shown", "words")

    def __init__(self) -> None:
        self.words = [0] * BOX_WORDS
        self.log: list[tuple[float, int, int]] = []
        self.first_seq = 0
        self.fenced = 0  # so many stores are seen by every reader, whatever its lag
        self.shown = 0  # so many have been seen by some reader

    def store(self, now: float, word: int, what: int) -> None:
        """Store a word; readers see it after their lag."""
        self.words[word] = what
        self.log.append((now, word, what))

    def fence(self) -> None:
        """Have all stores seen before the owner loads anything more."""
        self.fenced = len(self.log)


class Mirror:
    """What one reader sees of an outbox."""

    __slots__ = ("lag", "log", "peer_regions", "seen", "words")

    def __init__(self, peer_regions: Outbox, lag: float) -> None:
        self.peer_regions = peer_regions
        self.log = peer_regions.log
        self.words = [0] * BOX_WORDS
        self.seen = 0
        self.lag = lag

    def sync(self, until: float) -> list[int]:
        """Take in the stores whose time has come and return the words."""
        log, seen = self.log, self.seen
        end = len(log)
        if seen == end:
            return self.words
        words, limit, fenced = self.words, until - self.lag, self.peer_regions.fenced
        while seen < end:
            when, word, what = log[seen]
            if when > limit and seen >= fenced:
                break
            words[word] = what
            seen += 1
        self.seen = seen
        if seen > self.peer_regions.shown:
            self.peer_regions.shown = seen
        return words

    def see_all(self) -> None:
        """The writer is dead: all of its stores are seen."""
        self.lag = -1e9

    def coherent(self, until: float) -> list[int]:
        """Like `sync`, for loads behind a fence of the reader: what others have seen is seen here."""
        self.peer_regions.fenced = max(self.peer_regions.fenced, self.peer_regions.shown)
        return self.sync(until)


class Shared:
    """Memory of the host: every outbox of every process, and the knobs of the run; `hosts.py` makes it that of several.

    Attributes:
        hosts: host of each slot, in a run over several.
        copy_of: makes a reader's copy of an outbox, of a slot that takes part since an epoch.
        settle: a process knows that one was removed; returns whether all is there that it will ever see of it.
        heir: of one that was removed in the group of an epoch; -1: there is none.
        is_gated: views with newcomers wait for the gate (`gates.py`).
        shows: the programs call one by one, so between two calls all are shown the same.
        roots: of calls that have one, per slot, since when it takes part, and seq.
        turns, told: the process of an engine tells that it has turned; what it knows of the others.
    """

    def __init__(self, seed: int, rng: Random, raises: bool, max_lag: float) -> None:
        self.seed = seed
        self.rng = rng
        self.raises = raises
        self.max_lag = max_lag
        self.epoch_regions: dict[tuple[int, int, int], Outbox] = {}
        self.hosts: dict[int, int] = {}
        self.copy_of: Callable[[Outbox, float, int, int, int], Mirror] = lambda peer_regions, lag, *_: Mirror(
            peer_regions, lag
        )
        self.settle: Callable[[Engine, int, int], bool] = lambda engine, slot, since: True
        self.heir: Callable[[int, int, int], int] = lambda slot, since, epoch: -1
        self.is_gated = is_gated(seed)
        self.shows = False
        self.roots: dict[tuple[int, int, int], int] = {}
        self.turns: Callable[[Engine, int], None] = lambda engine, epoch: None
        self.told: Callable[[Engine], dict[int, Offer]] = lambda engine: {}

    def key(self, slot: int, incarnation: int, epoch: int) -> tuple[int, int, int]:
        """Return what tells one outbox from another."""
        return (slot, incarnation, 0 if self.seed % 2 else epoch)

    def peer_regions(self, slot: int, incarnation: int, epoch: int) -> Outbox:
        """Return the outbox of a process for an epoch; it is made when first touched."""
        key = self.key(slot, incarnation, epoch)
        peer_regions = self.epoch_regions.get(key)
        if peer_regions is None:
            peer_regions = self.epoch_regions[key] = Outbox()
        return peer_regions

    def boxes_of(self, slot: int, incarnation: int) -> list[Outbox]:
        """Return the outboxes of a process, in the order of their epochs."""
        return [
            self.epoch_regions[key] for key in sorted(self.epoch_regions) if key == self.key(slot, incarnation, key[2])
        ]
