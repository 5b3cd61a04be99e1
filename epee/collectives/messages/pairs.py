"""How the hosts of two ranks meet, so that messages can go between their GPUs.

Rows lie in the group's store, under names that only this process, in this group, has. A rank lays one there when it
comes to its first message on CUDA tensors in the group, for all others; it stays.

First message of a pair: each end reads the other's row, maps its memory and goes on; nobody answers. The receiver's
memory is all zero when its row is there, so a sender may write before the receiver has read the sender's row. Where one
of the two rows says that its process cannot (no GPU, no memory), both ends take the way through host memory; likewise
where neither GPU reaches the other's memory, which both find when they map it. A rank that cannot map memory for
another reason (no descriptor is left, say) raises; its peer's waits end by the time-out.

A pair that has lost a message (`csrc/kernels/message/batch.cuh`) meets again, at its next message at each end:

    1. nothing of the pair is in flight here any more: said by a key of this pair and its count of such meetings
    2. when the other end has said so: the pair's words are emptied; said by another key
    3. when the other end has said so, too: messages go again

Who waits here looks for the peer's death, and gives up after the group's time-out: it may come again, to the same
step. A peer whose process is another than before has another name, and the pair begins with the first message again. A
crash between two steps leaves keys that nobody asks for.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

from ...backend.engine.engine import Engine
from ...backend.outbox import OWNER, has_left
from ...errors import CommTimeoutError, ProtocolError, RankFailedError, ResourceError, context
from ..meeting import MeetingRow

NAP_S = 2e-4
_OWNER_WORDS = 4
_FOLDER = "epee/messages"


class PairBoard:
    """What ranks tell each other before their first message.

    Args:
        engine: of the group.
        store: of the group.
        rank: this process's.
        is_dead: whether a rank's process is known to have ended.
    """

    def __init__(self, engine: Engine, store: Any, rank: int, is_dead: Callable[[int], bool]) -> None:
        self._engine, self._store, self._rank, self._is_dead = engine, store, rank, is_dead

    def owner_of(self, rank: int) -> str:
        """Return what names the process that has a rank now, in this group; "" where none has."""
        box = self._engine.members
        if rank not in box.members:
            return ""
        words = box.words[box.members.index(rank)]
        return words[OWNER : OWNER + _OWNER_WORDS].tobytes().hex()

    def publish(self, row: MeetingRow) -> None:
        """Lay down this rank's row."""
        self._set(self.owner_of(self._rank), row.pack())

    def row_of(self, peer: int, name: str) -> MeetingRow:
        """Return a peer's row; waits until it has come to its first message.

        Raises:
            CommTimeoutError: it does not come. RankFailedError: it is dead, or has left. ProtocolError: no row.
        """
        told = self._await(self.owner_of(peer), peer, name, "has not come to its first message on CUDA tensors")
        try:
            return MeetingRow.parse(told)
        except struct.error as exc:
            raise ProtocolError(f"{name}: the row of rank {peer} in the store is none ({exc})") from exc

    def meet_again(self, peer: int, count: int, name: str, empty: Callable[[], None]) -> None:
        """Meet after a lost message, for the `count`-th time; nothing of the pair is in flight here.

        Raises:
            As `row_of`.
        """
        mine, theirs = (self._of_pair(*ends, count) for ends in ((self._rank, peer), (peer, self._rank)))
        late = "has lost a message between the two as well, and has not come to its next one"
        self._set(f"{mine}/still", b"1")
        self._await(f"{theirs}/still", peer, name, late)
        empty()
        self._set(f"{mine}/empty", b"1")
        self._await(f"{theirs}/empty", peer, name, late)

    def _of_pair(self, first: int, second: int, count: int) -> str:
        return f"{self.owner_of(first)}/{self.owner_of(second)}/{count}"

    def _set(self, key: str, value: bytes) -> None:
        try:
            self._store.set(f"{_FOLDER}/{key}", value)
        except RuntimeError as exc:
            raise ResourceError(f"the group's store takes nothing any more: {exc}") from exc

    def _await(self, key: str, peer: int, name: str, late: str) -> bytes:
        started = time.monotonic()
        while True:
            try:
                if self._store.check([f"{_FOLDER}/{key}"]):
                    return bytes(self._store.get(f"{_FOLDER}/{key}"))
            except RuntimeError as exc:
                raise ResourceError(f"{name}: the group's store gives nothing any more: {exc}") from exc
            self._require_peer(peer, name)
            elapsed = time.monotonic() - started
            if elapsed > self._engine.timeout_s:
                facts = context(name, rank=self._rank, peer=peer, elapsed_s=elapsed)
                raise CommTimeoutError(f"{facts}: rank {peer} {late} within the time-out", [peer])
            time.sleep(NAP_S)

    def _require_peer(self, peer: int, name: str) -> None:
        engine = self._engine
        engine.look(lambda: None)  # takes over what is new, raises where the group has ended
        box = engine.members
        is_in = peer in box.members and peer not in engine.mail.out and not self._is_dead(peer)
        if is_in and not has_left(box.words[box.members.index(peer)]):
            return
        raise RankFailedError(
            f"{context(name, rank=self._rank, peer=peer)}: rank {peer} has left or is dead; no message with it",
            [peer],
            name,
            0,
            engine.members.epoch,
            "not in the view",
        )
