"""Mistakes in the machines of the proxy, each of which the simulator must find: a test of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from epee.link.proxy import peer
from epee.link.proxy.chunks import ChunkReceiver, ChunkRun, ChunkSender
from epee.link.proxy.words import SIZE_BITS

from . import world
from .world import SimTransport, Violation, Wire, World

SEEDS = range(12)


class CreditBeforeTaken(ChunkReceiver):
    """Reports what has arrived."""

    def _is_taken(self, chunk: int) -> bool:
        return True


class CreditOfTheOwner(ChunkReceiver):
    """Waits for its own rank alone."""

    def _is_taken(self, chunk: int) -> bool:
        slot = chunk % self._num_slots
        return bool(self._taken_words[slot * self._num_readers + self._own] == chunk + 1)


class CreditOfOne(ChunkReceiver):
    """Takes the first rank that has taken a chunk for all."""

    def _is_taken(self, chunk: int) -> bool:
        first = chunk % self._num_slots * self._num_readers
        return any(self._taken_words[first + reader] == chunk + 1 for reader in self._readers)


class CreditTooRare(ChunkReceiver):
    """Reports credit when one chunk more than there are slots is taken."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._least = self._num_slots + 1


class AllTakeWhatIsForOne(ChunkReceiver):
    """Waits for all ranks where one is the only reader."""

    def _is_taken(self, chunk: int) -> bool:
        self._is_for_one = [False] * self._num_slots
        return super()._is_taken(chunk)


class WaitsForTheDead(ChunkReceiver):
    """Never drops a reader."""

    def drop_reader(self, position: int) -> None:
        pass


class FreedBeforeRead(ChunkSender):
    """Frees a slot when it is given to the engine."""

    def next_run(self, most: int = 8) -> ChunkRun | None:
        run = super().next_run(most)
        if run is not None:
            super().finish(run.num_chunks)
        return run

    def finish(self, count: int) -> None:
        pass


class SendsWithoutCredit(ChunkSender):
    """Sends whatever is posted."""

    @property
    def room(self) -> int:
        return self._num_slots


class TakesOldWords(ChunkSender):
    """Takes any word that is there for the next chunk's."""

    def next_run(self, most: int = 8) -> ChunkRun | None:
        slot = self.next % self._num_slots
        word = self._posted[slot]
        if not word or self.room <= 0:
            return None
        low = word & ((1 << SIZE_BITS) - 1)
        run = ChunkRun(self.next, slot, 1, low - low % 16, (self.next + 1) << SIZE_BITS | low)
        self.next += self._step
        return run


class RunsOfAnySize(ChunkSender):
    """Sends chunks of different sizes as one run."""

    def next_run(self, most: int = 8) -> ChunkRun | None:
        run = super().next_run(1)
        slot = self.next % self._num_slots
        while run is not None and self._step == 1 and slot and self.room > 0:
            if self._posted[slot] >> SIZE_BITS != self.next + 1:
                break
            run = run._replace(num_chunks=run.num_chunks + 1)
            self.next += 1
            slot = self.next % self._num_slots
        return run


class RunsBeyondTheEnd(ChunkSender):
    """Does not end a run with the last slot."""

    def next_run(self, most: int = 8) -> ChunkRun | None:
        run = super().next_run(most)
        is_at_end = run is not None and self.room > 0 and run.slot + run.num_chunks == self._num_slots
        if run is not None and is_at_end and self._posted[0] >> SIZE_BITS == self.next + 1:
            self.next += self._step
            run = run._replace(num_chunks=run.num_chunks + 1)
        return run


class WordBeforeBytes(Wire):
    """Announces a chunk in front of its bytes."""

    def read(self) -> bool:
        before = len(self.sent)
        if super().read():
            self.sent.insert(before, self.sent.pop())
            return True
        return False


class WordWithinBytes(Wire):
    """Announces a chunk when a part of it has been sent."""

    def read(self) -> bool:
        if super().read():
            word = self.sent.pop()
            self.sent.insert(len(self.sent) - 1, word)
            return True
        return False


class DoubledCredit(SimTransport):
    """Reports credit twice as far."""

    def credit(self, kind: int, taken: int) -> None:
        super().credit(kind, taken + 1)


MACHINES = [
    *((peer, "ChunkReceiver", each) for each in (CreditBeforeTaken, CreditOfTheOwner, CreditOfOne, CreditTooRare)),
    *((peer, "ChunkReceiver", each) for each in (AllTakeWhatIsForOne, WaitsForTheDead)),
    *((peer, "ChunkSender", each) for each in (FreedBeforeRead, SendsWithoutCredit, TakesOldWords, RunsOfAnySize)),
    (peer, "ChunkSender", RunsBeyondTheEnd),
    *((world, "Wire", each) for each in (WordBeforeBytes, WordWithinBytes)),
    (world, "SimTransport", DoubledCredit),
]


def _found(seed: int) -> bool:
    """Return whether a run finds that something is wrong."""
    try:
        dead = 3 if seed % 2 else -1
        World(seed, ((0,), (1, 2, 3)), num_chunks=30, dead=dead, has_ones=not seed % 2).run(30_000)
    except (Violation, IndexError, KeyError):
        return True
    return False


def test_without_a_mistake_nothing_is_found() -> None:
    assert not any(map(_found, SEEDS))


def test_an_epoch_that_begins_with_old_numbers_is_found() -> None:
    def is_found(seed: int) -> bool:
        world_of_two = World(seed, num_chunks=20)
        world_of_two.crash(0, 0, 40 + 7 * seed, 3000)
        world_of_two.begin(0)
        try:
            world_of_two.run()
        except Violation:
            return True
        return False

    assert any(map(is_found, SEEDS))


@pytest.mark.parametrize(("module", "name", "mutant"), MACHINES, ids=lambda each: getattr(each, "__name__", each))
def test_a_mistake_is_found(
    module: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, mutant)
    assert any(map(_found, SEEDS))
