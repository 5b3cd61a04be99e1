"""The memory of a `Buffer` on CPUs: this rank's arenas, one for each layout, and the mapped arenas of the peers.

A rank makes an arena at the first call of its layout, and again, larger, if a call's alignment needs more room. Its
blob travels with each call's row, so peers map it when they first see it. The owner takes and frees slots; peers write
rows into a slot that the owner has granted in the row of the call. Order: a slot that was announced is used again only
when all peers have passed that call (`DirectExchange.settled`). A crash leaves a slot that is no longer
announced; the memory is freed with the last process that has it mapped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ...errors import EpeeError, ProtocolError, expected
from ...gpu.payload import LAYOUTS
from ...memory.arena import Arena, Slots, num_pool_slots
from ...memory.layout import Field
from ...memory.shared import BLOB_BYTES
from ..checks import PayloadRows
from ..config import BufferConfig
from ..handle import Payload
from ..members.direct import DirectExchange
from ..members.header import ExchangedRows
from .rows import rows_of, typed


class OwnArenas:
    """This rank's arenas.

    Args:
        config: of the buffer.
        rank: this one.
        poison: fill slots with 0xFF before each use.

    Attributes:
        num_copied: results that were copied out because no slot was free.
    """

    def __init__(self, config: BufferConfig, rank: int, poison: bool) -> None:
        self.num_copied = 0
        self._config = config
        self._rank = rank
        self._poison = poison
        self._own: dict[str, Arena] = {}
        self._alignment = dict.fromkeys(LAYOUTS, 0)  # that the arena of each layout was made for

    @property
    def nbytes(self) -> int:
        """Bytes that this rank's arenas map; pages never touched cost nothing."""
        return sum(arena.region.mapped_bytes for arena in self._own.values())

    def of(self, layout: str, alignment: int, seq: int, settled: int) -> tuple[Arena, int]:
        """Return the arena of a layout and the alignment that it was made for, `alignment` at least.

        Where peers may still access all slots, because calls have failed one after another, it is made anew.

        Args:
            layout, alignment: of the call to come.
            seq, settled: as of `SlotPool.between_calls`.
        """
        arena = self._own.get(layout)
        needed = alignment if layout == "expert" else 1
        if arena is not None and arena.pool.between_calls(seq, settled) and self._alignment[layout] >= needed:
            return arena, self._alignment[layout]
        needed = max(needed, self._alignment[layout])
        slot_layout = self._config.slot_layout(layout, needed)
        new = Arena(slot_layout, self._config.num_slots, f"{layout}-{self._rank}-{os.getpid()}")
        if arena is not None:
            arena.close()
        self._own[layout] = new
        self._alignment[layout] = needed
        return new, needed

    def take(self, arena: Arena) -> int:
        """Return a free slot."""
        slot = arena.pool.take()
        if self._poison:
            arena.poison(slot)
        return slot

    def result(self, payload: PayloadRows, num_recv: int, arena: Arena, slot: int) -> Payload:
        """Return the received rows: a lease on the slot, or a copy when the maximum is leased."""
        fields = [Field("payload", payload.dtype, (num_recv, self._config.hidden))]
        if payload.scales is not None:
            assert payload.scale_dtype is not None
            fields.append(Field("scales", payload.scale_dtype, (num_recv, payload.scales.shape[1])))
        if num_recv == 0:
            arena.pool.give_back(slot)
            tensors = [torch.empty(field.shape, dtype=field.dtype, device="cpu") for field in fields]
        elif arena.pool.can_lease("result"):
            tensors = arena.lease(slot, fields, "result")
        else:
            tensors = [typed(arena, slot, field).clone() for field in fields]
            arena.pool.give_back(slot)
            self.num_copied += 1
        return tensors[0] if len(tensors) == 1 else (tensors[0], tensors[1])

    def close(self) -> None:
        """Drop all memory; tensors that the user still holds keep theirs. Idempotent."""
        for arena in self._own.values():
            arena.close()
        self._own.clear()


def clear_padding(payload: PayloadRows, padding: Sequence[tuple[int, int]], arena: Arena, slot: int) -> None:
    """Write zeros to the rows that only fill up blocks."""
    for first, end in padding:
        rows_of(arena, slot, "payload", first, end - first, payload.rows.shape[1]).fill(0)
        if payload.scales is not None:
            rows_of(arena, slot, "scales", first, end - first, payload.scales.shape[1]).fill(0)


class Arenas(OwnArenas):
    """The arenas of all ranks of a host.

    Args:
        config, rank, poison: as of `OwnArenas`.
        exchange: of the buffer's rows; knows which calls the peers have passed.
    """

    def __init__(self, config: BufferConfig, rank: int, exchange: DirectExchange, poison: bool) -> None:
        super().__init__(config, rank, poison)
        self._exchange = exchange
        self._peers: dict[str, dict[int, Slots]] = {layout: {} for layout in LAYOUTS}
        self._blobs: dict[str, dict[int, bytes]] = {layout: {} for layout in LAYOUTS}

    def let_go(self, arena: Arena, slot: int, last_seq: int) -> None:
        """Free a slot. Once the call was announced, peers may touch it until they have passed the call."""
        seq = self._exchange.engine.seq
        if seq > last_seq:
            arena.pool.cool(slot, seq)
        else:
            arena.pool.give_back(slot)

    def attach(self, layout: str, rows: ExchangedRows, deadline: float) -> dict[int, Slots]:
        """Return the slots of all with a part in the call; one that has died before it was mapped has none.

        What is new is mapped: a peer's first arena, or one that it has made larger.

        Raises:
            ProtocolError: a peer names memory that is not its own, or not of the size that its call needs.
        """
        peers, blobs = self._peers[layout], self._blobs[layout]
        for src in rows.parties:
            text = rows.texts[src]
            if src == self._rank:
                peers[src] = self._own[layout]
            elif blobs.get(src) != text:
                try:
                    self._attach_one(layout, src, rows)
                except expected(EpeeError):
                    if not self._exchange.membership.await_end_of(src, deadline):
                        raise
        return peers

    def _attach_one(self, layout: str, src: int, rows: ExchangedRows) -> None:
        peers, blobs = self._peers[layout], self._blobs[layout]
        text, header = rows.texts[src], rows.headers[src]
        alignment = max(1, header.arena_alignment)
        if layout == "expert" and alignment < header.expert_alignment:
            raise ProtocolError(
                f"rank {src}: its arena is aligned to {alignment}, its call to {header.expert_alignment} rows"
            )
        slot_layout = self._config.slot_layout(layout, alignment)
        new = Slots.attach(text[:BLOB_BYTES], slot_layout, num_pool_slots(self._config.num_slots))
        if new.region.owner_pid != self._exchange.pids[src]:
            new.close()
            raise ProtocolError(f"the arena that rank {src} names belongs to process {new.region.owner_pid}")
        if src in peers:
            peers[src].close()
        peers[src], blobs[src] = new, text

    def close(self) -> None:
        """Drop all memory; tensors that the user still holds keep theirs. Idempotent."""
        for peers in self._peers.values():
            for slots in peers.values():
                slots.close()
            peers.clear()
        for blobs in self._blobs.values():
            blobs.clear()
        super().close()
