"""The shared memory of `LatencyBuffer`: who writes what where, and what orders it.

Each rank lends one region. Calls are numbered; call n uses slot `n % num_slots` of every region. In a slot every source
has a **section** of its own that no other rank writes:

    region of a rank:  freed   [num_slots]          written by the owner: the last call whose section may be overwritten
                       cut     [num_ranks]          written by the source: up to which call it sends nothing here
                       waiting [1]                  written by the owner: its last wait: which call, until when
                       ends    [num_slots]          written by the owner: tag of the last call that it has begun; how
                                                    it ended (`control/withdrawal.py`)
                       head    [num_slots][source]  word 0 = tag of the call, stored last; header and a refusal's reason
                       early   [num_slots][source]  tag of a combine whose weights have arrived
                       payload [num_slots][source]  what the call's sizes make of it (`region.SectionCut`): token,
                                                    expert ids and weights of each row; weights of a combine; rows,
                                                    then scales

Order: a source writes a section of call n only after the owner has freed call `n - num_slots` (`freed`), then stores
the tag. The owner waits for exactly this tag, reads, and frees the slot when its receive half is over, whether
everything came or not. A source that was given up may still be writing when its slot is freed: into its own section,
which the owner reads again only under a later tag, and the source stores that one after it has finished with the
earlier call.

A rank that waits in an earlier call for somebody else is not silent: the time-out for it starts when its own wait ends
(`waiting`), or a rank that stays away would make those who waited for it in vain look late to the others.

A call without a mask ends alike on all: who has all halves looks whether a peer has given the call up before it goes
on, and who gives it up goes on after all if a peer has all of its halves. A rank says that it has begun a call before
it sends anything, so where that word is missing nobody has all halves, and nobody will.

`cut` tells a rank that a peer counts it out, so that it need not wait for the time-out to find out. It names the call:
who has not begun the next one yet may count this rank in again there, so that is waited for.

A `sync` begins an epoch (`membership/synced.py`): all regions are new, calls are counted from 1, and tags name it. So
nothing can be seen of what somebody stores who is in an older one. Who is not in it has a region of this rank's own.

What a crash leaves: a section without its tag, which nobody reads. A word is a peer's word: it is copied before it is
checked and used.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...errors import ProtocolError
from ...memory.signals import SEQ_BITS, SLEEP_S, SPIN_LOADS, YIELD_S, fence, futex_sleep, futex_wake, tag, untag
from ..config import MAX_LATENCY_TOKENS, BufferConfig
from ..control.withdrawal import EndWords
from ..throughput.placement import Ints
from .region import HEAD_WORDS, REASON_BYTES, RegionFields, SectionCut
from .rows import Floats, WireRows

OP_NAMES = ("none", "dispatch", "combine")
LATENCY_DISPATCH, LATENCY_COMBINE = 1, 2


class SectionHeader(NamedTuple):
    """The words before a section: what a source says of its half of a call. The first five must be equal on all ranks.

    Attributes:
        op: `LATENCY_DISPATCH` or `LATENCY_COMBINE`.
        kind: of the rows: 0 bfloat16, 1 FP8, 2 FP8 with rounded scales, 3 with packed ones; combine: 4 bfloat16,
            5 float32.
        handle: combine: the call that made the handle; 0 in dispatch.
        with_weights: combine: 1 when weights are pushed first.
        refused: 1 when the rank cannot make this call; the reason follows.
        num_rows: rows in the section.
        had: combine: 1 when the source had this rank's tokens in its dispatch.
        sizes: a code of the call's sizes (`SectionCut.code`).
    """

    op: int
    kind: int
    handle: int
    with_weights: int
    sizes: int = 0
    refused: int = 0
    num_rows: int = 0
    had: int = 0


NUM_AGREED = 5
HEAD_NAMES = tuple(SectionHeader.__annotations__)
_HEAD = struct.Struct(f"{len(HEAD_NAMES)}Q{REASON_BYTES}s")
assert 8 + _HEAD.size == 8 * HEAD_WORDS
_LIMITS = ((1, 2), (0, 5), (0, 1 << SEQ_BITS), (0, 1), (0, 1 << 32), (0, 1))


class Patience(NamedTuple):
    """How long a half waits.

    Attributes:
        deadline: `time.monotonic()` value.
        timeout_s: seconds that a peer has after it stopped waiting for others.
    """

    deadline: float
    timeout_s: float


class Wire:
    """Numbers the calls, posts this rank's halves and waits for the peers'.

    Args:
        config: of the buffer.
        rank: this rank.
        blank: stands for the ranks that are not there; memory that nobody else has.
        ended: returns the ranks of which nothing more will come.
        interrupt: called while waiting; raises to end the wait.
        show: called while waiting with the call's name and number and whom it waits for, for hang reports.
        epoch: returns the epoch, which goes into every tag.
        poison: fill slots with 0xFF when they are freed.

    Attributes:
        regions: one per rank, the own one included.
        seq: the last call that was begun in the epoch, from 1.
        op: name of the call whose half is under way.
    """

    def __init__(
        self,
        config: BufferConfig,
        rank: int,
        blank: RegionFields,
        ended: Callable[[], Collection[int]],
        interrupt: Callable[[], None],
        show: Callable[[str, int, list[int]], None],
        epoch: Callable[[], int],
        poison: bool,
    ) -> None:
        self.config = config
        self.rank = rank
        self.regions = [blank] * config.num_ranks
        self.seq = 0
        self.ended = ended
        self.interrupt = interrupt
        self.op = ""
        self._show = show
        self._blank = blank
        self._epoch = epoch
        self._poison = poison
        self._open: set[int] = set()  # slots whose receive half is still to come
        self._cut: set[int] = set()  # peers that were told that they are counted out

    def begin_epoch(self, regions: Mapping[int, RegionFields]) -> None:
        """Go on in other memory, from call 1; who is not in `regions` is not there. No call is under way."""
        old = self.regions
        self.regions = [regions.get(rank, self._blank) for rank in range(self.config.num_ranks)]
        self.seq = 0
        self._open.clear()
        self._cut.clear()
        for region in old:
            if region is not self._blank:
                region.close()

    # -- slots

    def is_free(self) -> bool:
        """Whether the next call has a slot: its last user has received."""
        return (self.seq + 1) % self.config.num_slots not in self._open

    @property
    def num_open(self) -> int:
        """Calls that were sent and not received."""
        return len(self._open)

    def begin(self) -> int:
        """Start the next call; returns its number."""
        self.seq += 1
        self._open.add(self.slot(self.seq))
        return self.seq

    def slot(self, seq: int) -> int:
        """Return the slot of a call."""
        return seq % self.config.num_slots

    def free(self, seq: int) -> None:
        """End a call's receive half: peers may write the call that comes next into its slot."""
        slot = self.slot(seq)
        own = self.regions[self.rank]
        if self._poison:
            own.poison(slot)
        index = own.at("freed", slot)
        own.words[index] = tag(self._epoch(), seq)
        futex_wake(own.address + 8 * index)
        self._open.discard(slot)

    # -- how a call without a mask ends

    def say_begun(self, seq: int) -> None:
        """Say that this rank takes part in a call; before it sends anything of it."""
        own = self.regions[self.rank]
        own.words[own.at("ends", self.slot(seq))] = tag(self._epoch(), seq)
        fence()  # before the look for those who have given the call up

    def end_words(self, seq: int) -> EndWords:
        """Return the words by which the ranks agree on how a call ends."""
        line = self.regions[self.rank].at("ends", self.slot(seq))
        words = {rank: region.words for rank, region in enumerate(self.regions)}
        return EndWords(self.rank, words, lambda rank: line, lambda parity, rank: line)

    def is_given_up(self, seq: int) -> bool:
        """Whether a peer has given the call up."""
        return bool(self.end_words(seq).withdrawn(tag(self._epoch(), seq)))

    # -- whom this rank talks to

    def set_cut(self, active: Sequence[bool], seq: int) -> None:
        """Tell peers that they are counted out up to call `seq`, or in again.

        Between two halves only: what was sent has its tag.
        """
        for peer, is_active in enumerate(active):
            if peer == self.rank or (is_active and peer not in self._cut):
                continue
            region = self.regions[peer]
            region.words[region.at("cut", self.rank)] = 0 if is_active else seq
            (self._cut.discard if is_active else self._cut.add)(peer)
            for slot in range(self.config.num_slots):  # the peer sleeps on what it waits for
                futex_wake(region.address + 8 * region.at("head", slot, self.rank))
                futex_wake(region.address + 8 * region.at("early", slot, self.rank))

    def is_cut_by(self, peer: int, seq: int) -> bool:
        """Whether `peer` has said that it sends nothing here in call `seq`."""
        own = self.regions[self.rank]
        return own.words[own.at("cut", peer)] >= seq

    # -- waiting

    def has_room(self, dst: int, seq: int, patience: Patience) -> bool:
        """Wait until `dst` has freed what call `seq` will overwrite."""
        region = self.regions[dst]
        index = region.at("freed", self.slot(seq))
        last = seq - self.config.num_slots
        epoch = self._epoch()

        def is_there(word: int) -> bool:
            """Tell whether the last call that `dst` freed is the one that has to be, or a later one."""
            found, done = untag(word)
            return last <= 0 or (done >= last and found == epoch)

        return self._wait(region, index, is_there, dst, seq, patience)

    def has_come(self, src: int, seq: int, patience: Patience, field: str = "head") -> bool:
        """Wait until the half of `src` in call `seq` (or, `field="early"`, its weights) lies in this rank's region.

        False when it did not come in time, when `src` is dead or has cut this rank off. Waiting for weights also ends
        when the rest has come.
        """
        own = self.regions[self.rank]
        want = tag(self._epoch(), seq)
        index = own.at(field, self.slot(seq), src)
        head = own.at("head", self.slot(seq), src)

        def is_there(word: int) -> bool:
            """Tell whether the awaited tag is there, or that of the whole half."""
            return word == want or own.words[head] == want

        return self._wait(own, index, is_there, src, seq, patience)

    def is_here(self, src: int, seq: int) -> bool:
        """Whether the half of a peer has come."""
        own = self.regions[self.rank]
        return own.words[own.at("head", self.slot(seq), src)] == tag(self._epoch(), seq)

    def is_early(self, src: int, seq: int) -> bool:
        """Whether the weights that `src` pushes for a combine have come."""
        own = self.regions[self.rank]
        return own.words[own.at("early", self.slot(seq), src)] == tag(self._epoch(), seq)

    def _wait(
        self, region: RegionFields, index: int, is_there: Callable[[int], bool], peer: int, seq: int, patience: Patience
    ) -> bool:
        words = region.words
        for _ in range(SPIN_LOADS):
            if is_there(words[index]):
                return True
        yield_until = min(time.monotonic() + YIELD_S, patience.deadline)
        while time.monotonic() < yield_until:
            if is_there(words[index]):
                return True
            os.sched_yield()
        try:
            return self._sleep(region, index, is_there, peer, seq, patience)
        finally:
            self._say_waiting(seq, time.monotonic())

    def _sleep(
        self, region: RegionFields, index: int, is_there: Callable[[int], bool], peer: int, seq: int, patience: Patience
    ) -> bool:
        words = region.words
        until = patience.deadline
        limit = until + self.config.num_ranks * patience.timeout_s
        self._say_waiting(seq, until)
        while True:
            seen = words[index]
            if is_there(seen):
                return True
            self.interrupt()
            self._show(self.op, seq, [peer])
            now = time.monotonic()
            if peer in self.ended() or self.is_cut_by(peer, seq) or self.is_given_up(seq):
                return is_there(words[index])  # what was stored before it died counts
            if now > until:
                later = min(self._waits_until(peer, seq) + patience.timeout_s, limit)
                if later <= now:
                    return is_there(words[index])
                until = later
                self._say_waiting(seq, until)
            if until - now < 2 * SLEEP_S:
                time.sleep(min(until - now, 0.0005))  # the futex sleeps longer than that
            else:
                futex_sleep(region.address + 8 * index, seen)

    def _say_waiting(self, seq: int, until: float) -> None:
        """Tell the peers until when this rank waits; at the end of the wait, when that was."""
        own = self.regions[self.rank]
        index = own.at("waiting")
        own.words[index + 1] = int(until * 1e6)
        own.words[index] = seq

    def _waits_until(self, peer: int, seq: int) -> float:
        """Return until when a peer waits for others, or has waited, in call `seq` or before; else minus infinity."""
        region = self.regions[peer]
        index = region.at("waiting")
        call, until_us = region.words[index], region.words[index + 1]
        return until_us / 1e6 if 0 < call <= seq else -math.inf

    # -- what is written and read

    def post(self, dst: int, seq: int, head: SectionHeader, reason: bytes = b"") -> None:
        """Store a header and, last, the tag: everything else of the section has been written."""
        region = self.regions[dst]
        index = region.at("head", self.slot(seq), self.rank)
        region.words[index + 1 : index + HEAD_WORDS] = memoryview(_HEAD.pack(*head, reason[:REASON_BYTES])).cast("Q")
        region.words[index] = tag(self._epoch(), seq)
        futex_wake(region.address + 8 * index)
        futex_wake(region.address + 8 * region.at("early", self.slot(seq), self.rank))

    def post_early(self, dst: int, seq: int) -> None:
        """Say that the weights of a combine have been written."""
        region = self.regions[dst]
        index = region.at("early", self.slot(seq), self.rank)
        region.words[index] = tag(self._epoch(), seq)
        futex_wake(region.address + 8 * index)

    def is_posted(self, dst: int, seq: int) -> bool:
        """Whether this rank's half of call `seq` has been posted at `dst`."""
        region = self.regions[dst]
        return region.words[region.at("head", self.slot(seq), self.rank)] == tag(self._epoch(), seq)

    def head_of(self, src: int, seq: int) -> tuple[SectionHeader, str]:
        """Return the header of a half that has come, checked, and the reason of a refusal.

        Raises:
            ProtocolError: it cannot be right.
        """
        own = self.regions[self.rank]
        index = own.at("head", self.slot(seq), src)
        *fields, reason = _HEAD.unpack(bytes(own.words[index + 1 : index + HEAD_WORDS]))
        head = SectionHeader(*fields)
        limits = (*_LIMITS, (0, MAX_LATENCY_TOKENS), (0, 1))
        for name, value, (low, high) in zip(HEAD_NAMES, head, limits, strict=True):
            if not low <= value <= high:
                raise ProtocolError(f"rank {src}: {name} must be {low} ... {high}, got {value}; memory is corrupt")
        return head, reason.rstrip(b"\0").decode("utf-8", "replace")

    def write_rows(self, dst: int, seq: int, rows: WireRows, index: torch.Tensor | None, cut: SectionCut) -> None:
        """Write rows (those of `index`, or all) into the section at `dst`."""
        region, slot = self.regions[dst], self.slot(seq)
        count = len(rows.data) if index is None else len(index)
        first = cut.rows_at
        for part in rows:
            if part is not None:
                target = region.rows(slot, self.rank, count, part.shape[1], part.dtype, first)
                if index is None:
                    target.copy_(part)
                else:
                    torch.index_select(part, 0, index, out=target)
                first = cut.scales_at

    def read_rows(
        self,
        src: int,
        seq: int,
        num_rows: int,
        dtype: torch.dtype,
        cut: SectionCut,
        scales: tuple[int, torch.dtype] | None = None,
    ) -> WireRows:
        """Return views of the rows (and scales: their number and dtype) that `src` wrote here."""
        region, slot = self.regions[self.rank], self.slot(seq)
        data = region.rows(slot, src, num_rows, cut.config.hidden, dtype, cut.rows_at)
        if scales is None:
            return WireRows(data, None)
        return WireRows(data, region.rows(slot, src, num_rows, *scales, first=cut.scales_at))

    def write_meta(self, dst: int, seq: int, tokens: Ints, ids: Ints, weights: Floats, cut: SectionCut) -> None:
        """Write tokens, their expert ids and weights beside the rows."""
        place = self.regions[dst].cut(cut).meta[self.slot(seq), self.rank, : len(tokens)]
        num_topk = cut.config.num_topk
        place[:, 0] = tokens
        place[:, 1 : 1 + num_topk] = ids
        place[:, 1 + num_topk :] = weights.view(np.int32)

    def read_meta(self, src: int, seq: int, num_rows: int, cut: SectionCut) -> tuple[Ints, Ints, Floats]:
        """Return tokens, ids among this rank's experts (-1 elsewhere) and weights that `src` wrote, copied and checked.

        Raises:
            ProtocolError: the tokens are not ascending, or too many, or out of range.
        """
        meta = self.regions[self.rank].cut(cut).meta[self.slot(seq), src, :num_rows].astype(np.int64)
        num_topk, num_local = cut.config.num_topk, cut.config.num_local_experts
        tokens = meta[:, 0]
        bounds = np.concatenate([[-1], tokens, [cut.config.max_tokens_per_rank]])
        if len(tokens) < num_rows or (np.diff(bounds) <= 0).any():
            raise ProtocolError(f"rank {src} names tokens that cannot be; memory is corrupt")
        local = meta[:, 1 : 1 + num_topk] - self.rank * num_local
        local[(local < 0) | (local >= num_local)] = -1
        weights = meta[:, 1 + num_topk :].astype(np.int32).view(np.float32)
        return tokens, local, weights

    def write_weights(self, dst: int, seq: int, weights: Floats, cut: SectionCut) -> None:
        """Write the weights of a combine, a row for each token that was sent to `dst`."""
        self.regions[dst].cut(cut).weights[self.slot(seq), self.rank, : len(weights)] = weights

    def read_weights(self, src: int, seq: int, num_rows: int, cut: SectionCut) -> Floats:
        """Return a copy of the weights that `src` pushed."""
        return self.regions[self.rank].cut(cut).weights[self.slot(seq), src, :num_rows].copy()

    def close(self) -> None:
        """Drop all views."""
        for region in {id(region): region for region in (*self.regions, self._blank)}.values():
            region.close()
        self.regions.clear()
