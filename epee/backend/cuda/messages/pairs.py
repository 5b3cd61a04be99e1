"""Meetings of two ranks on the cpu, before messages can go between their GPUs.

Rows lie in the group's store, under names that only these two processes, in this group, have. A rank publishes a row
for each other rank when it reaches its first message on CUDA tensors in the group, and for a joiner when it reaches its
first message after the join; rows are not removed. The row for a joiner beyond the ranks that the memory was made for
has a ring of its own, made before it is published, of which only these two know.

First message of a pair: each end reads the other's row, maps its memory and continues; there is no reply. The
receiver's words of the pair are all zero when its row is published, so a sender may write before the receiver has read
the sender's row: the words are cleared before a row is published for a process that replaces another one of the same
rank, and not before the old process can store nothing any more. If one of the two rows says that its process cannot (no
GPU, no memory), both ends use cpu memory; likewise if neither GPU reaches the other's memory, which both find when they
map it. A rank that cannot map memory for another reason (no descriptor is available, say) raises; its peer's waits end
by the timeout.

A pair that has lost a message (`csrc/kernels/message/batch.cuh`) meets once more, at its next message at each end:

    1. nothing of the pair is unfinished here: announced by a key of this pair and its count of such meetings
    2. after the other end has announced this: the pair's words are cleared; announced by another key
    3. after the other end has announced that, too: messages are sent

A peer whose process has been replaced has another name, and the pair begins with the first message. The surviving rank
goes through these steps, the first four at its next message in the new view, to any peer:

    1. kernels with the old process have ended, and their reports are read: they are no loss of the new pair
    2. the old process has ended, so that its GPU stores nothing here any more
    3. its memory is unmapped, and the words of the pair are cleared
    4. a row is published for the new process, which stores nothing here before it has read that
    5. at the first message with it: its row is read, its memory mapped; its words of the pair are all zero
    6. the thread that reports deaths watches it: the cpu's word for the kernels applies to it from here on
    7. kernels are launched

A kernel may still find, after 6, that the old process is dead, in its GPU's earlier copy of the cpu's word: it reads
the cpu's own word before it loses a message for that. A crash of the old process, or of the new one, at any of these
steps is reported to the kernels after 7, or ends the wait in 5.

Every wait here polls for the peer's death while the store answers, and ends after the group's timeout, also where the
store does not: it may be repeated, from the same step.
A crash between two steps leaves keys that are never read.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from ....engine import BoundedStore, Engine
from ....engine.outbox import OWNER, has_left
from ....errors import (
    CommTimeoutError,
    EpeeError,
    ProtocolError,
    RankFailedError,
    ResourceError,
    context,
    expected,
)
from ..meeting import MeetingRow

NAP_S = 2e-4
_OWNER_WORDS = 4
_FOLDER = "epee/messages"


class PairBoard:
    """The rows and keys that ranks exchange before their first message.

    Args:
        engine: of the group.
        store: of the group.
        rank: this process's.
        is_dead: whether a rank's process is known to have ended.
    """

    def __init__(self, engine: Engine, store: Any, rank: int, is_dead: Callable[[int], bool]) -> None:
        self._engine, self._store, self._rank, self._is_dead = engine, store, rank, is_dead
        self._welcome: set[str] = set()

    def owner_of(self, rank: int) -> str:
        """Return the name of a rank's current process in this group; "" if it has none."""
        peer_regions = self._engine.members
        if rank not in peer_regions.members:
            return ""
        words = peer_regions.words[peer_regions.members.index(rank)]
        return words[OWNER : OWNER + _OWNER_WORDS].tobytes().hex()

    def publish(self, row_for: Callable[[int], MeetingRow]) -> None:
        """Publish this rank's rows for all members that have none; the memory that they write to here is all zero.

        Args:
            row_for: returns the row for a rank.
        """
        mine = self.owner_of(self._rank)
        for peer in self._engine.members.members:
            owner = self.owner_of(peer)
            if owner not in self._welcome:
                self._set(f"{mine}/for/{owner}", row_for(peer).pack(), "the first message")
                self._welcome.add(owner)

    def row_of(self, peer: int, name: str) -> MeetingRow:
        """Return a peer's row; waits until the peer has reached its first message.

        Raises:
            CommTimeoutError: it does not arrive. RankFailedError: it is dead, or has left. ProtocolError: no row.
        """
        key = f"{self.owner_of(peer)}/for/{self.owner_of(self._rank)}"
        told = self._await(key, peer, name, "has not come to its first message on CUDA tensors")
        try:
            return MeetingRow.parse(told)
        except struct.error as exc:
            raise ProtocolError(f"{name}: the record of rank {peer} in the store cannot be read ({exc})") from exc

    def meet_again(self, peer: int, count: int, name: str, empty: Callable[[], None]) -> None:
        """Meet after a lost message, for the `count`-th time; nothing of the pair is unfinished here.

        Raises:
            As `row_of`.
        """
        mine, theirs = (self._of_pair(*ends, count) for ends in ((self._rank, peer), (peer, self._rank)))
        late = "has lost a message between the two as well, and has not come to its next one"
        self._set(f"{mine}/still", b"1", name)
        self._await(f"{theirs}/still", peer, name, late)
        empty()
        self._set(f"{mine}/empty", b"1", name)
        self._await(f"{theirs}/empty", peer, name, late)

    def _of_pair(self, first: int, second: int, count: int) -> str:
        return f"{self.owner_of(first)}/{self.owner_of(second)}/{count}"

    def _set(self, key: str, value: bytes, name: str) -> None:
        with self._reaching(name) as store:
            store.set(f"{_FOLDER}/{key}", value)

    @contextlib.contextmanager
    def _reaching(self, name: str) -> Iterator[BoundedStore]:
        """Yield the group's store, for the time of the group's timeout."""
        try:
            with BoundedStore(self._store, self._engine.timeout_s, self._rank, name) as store:
                yield store
        except expected(EpeeError):
            raise
        except expected(RuntimeError) as exc:
            raise ResourceError(f"{name}: the group's store cannot be reached: {exc}") from exc

    def _await(self, key: str, peer: int, name: str, late: str) -> bytes:
        started = time.monotonic()
        with self._reaching(name) as store:
            while (found := store.find(f"{_FOLDER}/{key}", 0.0)) is None:
                self._require_peer(peer, name)
                elapsed = time.monotonic() - started
                if elapsed > self._engine.timeout_s:
                    facts = context(name, rank=self._rank, peer=peer, elapsed_s=elapsed)
                    raise CommTimeoutError(f"{facts}: rank {peer} {late} within the time-out", [peer])
                time.sleep(NAP_S)
        return found

    def _require_peer(self, peer: int, name: str) -> None:
        engine = self._engine
        engine.look(lambda: None)  # takes over changes, raises if the group has ended
        peer_regions = engine.members
        is_in = peer in peer_regions.members and peer not in engine.mail.out and not self._is_dead(peer)
        if is_in and not has_left(peer_regions.words[peer_regions.members.index(peer)]):
            return
        raise RankFailedError(
            f"{context(name, rank=self._rank, peer=peer)}: rank {peer} has left or is dead; no message reaches it",
            [peer],
            name,
            0,
            engine.members.epoch,
            "not in the view",
        )
