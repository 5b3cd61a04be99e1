"""The exchange of rows: how every rank learns in one step what all ranks are about to do.

Each rank lends an inbox. A call starts when a rank writes its **row** (what it calls, with what, how many rows for
whom, which slot of its arena the peers may touch) into every inbox, its own included, and ends its announcement by
storing the row's tag. It then waits until its own inbox holds all rows of this call. Since everybody has the same
rows, everybody reaches the same verdict: go on, or raise the same error.

    inbox of a rank:  rows  [2 parities][num_ranks][row_words]   written by the source rank, word 0 = tag, last
                      data  [num_ranks][8]                       word 0: tag of the call whose payload has arrived
                                                                 whole; word 1: tag of the last call given up
                      reasons [8][32]                            written by the owner: why it refused a GPU call,
                                                                 whose number is word 0, stored last

Order: a rank publishes row s only after it has seen all rows s-1. So when row s of a peer is seen, that peer has
finished every call before s, its stores included, and row s+1 of anybody cannot overwrite a row s-1 that is still
needed: two parities suffice. A call that was refused or timed out leaves its rows unread; `settle` reads them before
the next row is published. The same argument lets one `data` word per source serve for ever: it is compared for
equality with the tag of the call. A rank that cannot finish a call whose row it has published stores the call's tag in
another word of its own, so that its peers need not wait for the time-out. (Not in the `data` word: a slow peer may
still have to read the call before in it. A reader looks at `data` again after it has seen a call given up: the data of
that or of an earlier call was stored before.)

What a crash leaves behind: a row without its tag, which nobody reads; or a row with its tag and no payload, which ends
in `RankFailedError` for whoever waits for the payload. No state needs repair: a proved death breaks the buffer.

Everything in a row is a peer's word. It is copied out of shared memory first and checked then, so that it cannot
change between the check and its use.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from ..errors import CommTimeoutError, MismatchError, ProtocolError, RankFailedError, context
from ..memory.arena import num_pool_slots
from ..memory.host import BLOB_BYTES, HostRegion
from ..memory.layout import Field, Layout
from ..memory.signals import SEQ_BITS, futex_wake, tag, wait_equal
from ..view.detector import DeathWatch
from .config import DTYPE_CODES, LAYOUTS, MAX_EXPERT_ALIGNMENT, BufferConfig, describe_word
from .layout import Ints

OP_NAMES = ("none", "dispatch", "combine", "all_gather_bytes")
OP_DISPATCH, OP_COMBINE, OP_GATHER = 1, 2, 3
REASON_BYTES = 248


class Header(NamedTuple):
    """The fixed words of a row, in order, behind the tag. The first `NUM_AGREED` must be equal on all ranks.

    Attributes:
        op: `OP_DISPATCH`, `OP_COMBINE` or `OP_GATHER`.
        layout: index into `LAYOUTS`.
        dtype: index into `DTYPE_CODES`.
        handle: call that made the handle in use, 0 without one; the number of bytes of an `OP_GATHER`.
        with_topk: 1 when routed by topk_idx, 0 by is_token_in_rank.
        with_weights: bytes of one weight that travels, 0 without weights.
        scale_words: 4-byte words of scales per row.
        scale_kind: 0 none, 1 float32, 2 packed int32.
        expert_alignment: rows.
        arena_alignment: alignment that this rank's arena of the layout was made for, at least `expert_alignment`.
        refused: 1 when this rank's call was refused; the row then holds the reason.
        num_tokens: tokens of this rank.
        slot: of this rank's arena, that peers may write (dispatch) or read (combine).
        rank: the writer.
        reserved: 0.
    """

    op: int
    layout: int
    dtype: int
    handle: int
    with_topk: int
    with_weights: int
    scale_words: int
    scale_kind: int
    expert_alignment: int
    arena_alignment: int
    refused: int
    num_tokens: int
    slot: int
    rank: int
    reserved: int = 0


NUM_AGREED = 9
_NUM_HEADER = len(Header._fields)
_HEADER = struct.Struct(f"{_NUM_HEADER}Q")
_TEXT_AT = 1 + _NUM_HEADER
_COUNTS_AT = _TEXT_AT + REASON_BYTES // 8
_DATA_STRIDE = 8  # words: one cache line per writer
_NUM_REASONS = 8
_REASON_WORDS = 1 + REASON_BYTES // 8
Limits: TypeAlias = tuple[tuple[int, int], ...]
assert BLOB_BYTES <= REASON_BYTES


class Rows(NamedTuple):
    """What one exchange brought, copied and checked.

    Attributes:
        headers: one per rank.
        counts: `[num_ranks, num_ranks + num_experts]` int64; rows that each rank sends to each rank, then (token, k)
            slots that it gives each expert.
        texts: the free bytes of each row: the blob of the rank's arena.
    """

    headers: list[Header]
    counts: Ints
    texts: list[bytes]


def inbox_layout(config: BufferConfig) -> Layout:
    """Return the layout of a rank's inbox."""
    row_words = _COUNTS_AT + config.num_ranks + config.num_experts
    row_words += -row_words % _DATA_STRIDE
    return Layout(
        Field("rows", torch.int64, (2, config.num_ranks, row_words)),
        Field("data", torch.int64, (config.num_ranks, _DATA_STRIDE)),
        Field("reasons", torch.int64, (_NUM_REASONS, _REASON_WORDS)),
    )


class Exchange:
    """Row exchange over attached inboxes.

    Args:
        config: of the buffer.
        rank: this rank.
        inboxes: one region per rank, the own one included.
        watch: knows which ranks are dead.
        interrupt: called while waiting; raises to end the wait.

    Attributes:
        epoch: of the view; 0 while membership cannot change.
        pids: the ranks' processes.
        settled: the rows of all calls up to this one have been seen, so all peers have finished the calls before it.
    """

    def __init__(
        self,
        config: BufferConfig,
        rank: int,
        inboxes: Sequence[HostRegion],
        watch: DeathWatch,
        interrupt: Callable[[], None],
    ) -> None:
        self.config = config
        self.rank = rank
        self.epoch = 0
        self.settled = 0
        self._row = (0, b"")  # number and bytes of the last call's row
        self._stored = 0  # the last call whose row has been stored into every inbox
        self._watch = watch
        self._interrupt = interrupt
        layout = inbox_layout(config)
        self._row_words = layout["rows"].shape[2]
        self._rows_at = layout.offset("rows") // 8
        self._data_at = layout.offset("data") // 8
        self._reasons_at = layout.offset("reasons") // 8
        num_words = layout.nbytes // 8
        self._words = [inbox.words(0, num_words) for inbox in inboxes]
        self._addresses = [inbox.address for inbox in inboxes]
        self.pids = [inbox.owner_pid for inbox in inboxes]
        self._limits = _limits(config)
        self._op = "none"

    def publish(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> None:
        """Start the next call: write this rank's row into every inbox.

        Args:
            header: `rank` must be this rank.
            counts: `[num_ranks + num_experts]` int64, or None when the receivers know them from a handle.
            text: at most `REASON_BYTES` bytes.
            deadline: `time.monotonic()` value; peers that have not passed the last call by then end it.
        """
        self.settle(deadline)
        self._op = OP_NAMES[header.op]
        numbers = bytes(8 * (self._row_words - _COUNTS_AT)) if counts is None else counts.tobytes()
        row = _HEADER.pack(*header) + text.ljust(REASON_BYTES, b"\0") + numbers
        # one assignment, so that an interrupt leaves either no call or one that `settle` can finish storing
        self._row = (self.seq + 1, row.ljust(8 * (self._row_words - 1), b"\0"))
        self._store_row()

    @property
    def seq(self) -> int:
        """Number of the last published call, from 1."""
        return self._row[0]

    def _store_row(self) -> None:
        """Write the current row into every inbox; storing it again changes nothing."""
        seq, row = self._row
        start = self._row_at(seq & 1, self.rank)
        mark = tag(self.epoch, seq)
        data = memoryview(row).cast("Q")
        for peer, words in enumerate(self._words):
            words[start + 1 : start + self._row_words] = data
            words[start] = mark
            futex_wake(self._addresses[peer] + 8 * start)
        self._stored = seq

    def gather(self, deadline: float) -> Rows:
        """Wait for all rows of the current call; return them once they are complete, checked and agreed on.

        Raises:
            MismatchError: the ranks disagree, or a peer's call was refused; the same on every rank that was not.
            CommTimeoutError, RankFailedError: a peer did not come.
            ProtocolError: a row cannot be right.
        """
        self._wait_rows(deadline)
        first = self._row_at(self.seq & 1, 0)
        num_ranks, width = self.config.num_ranks, 8 * self._row_words
        copy = bytes(self._words[self.rank][first : first + num_ranks * self._row_words])
        own = copy[self.rank * width + 8 : (self.rank + 1) * width]
        if own != self._row[1]:
            raise ProtocolError(f"{context(self._op, seq=self.seq)}: this rank's own row was changed by somebody else")
        headers = [_parse(_HEADER.unpack_from(copy, src * width + 8), src, self._limits) for src in range(num_ranks)]
        texts = [copy[src * width + 8 * _TEXT_AT :][:REASON_BYTES] for src in range(num_ranks)]
        self._agree(headers, texts)
        words = np.frombuffer(copy, dtype=np.int64).reshape(num_ranks, self._row_words)
        counts = words[:, _COUNTS_AT : _COUNTS_AT + num_ranks + self.config.num_experts]
        return Rows(headers, counts, texts)

    def signal_data(self, dst_rank: int) -> None:
        """Tell `dst_rank` that this rank's payload of the current call lies whole in its arena."""
        index = self._data_at + self.rank * _DATA_STRIDE
        self._words[dst_rank][index] = tag(self.epoch, self.seq)
        futex_wake(self._addresses[dst_rank] + 8 * index)

    def abandon(self) -> None:
        """Tell all peers that this rank's payload of the current call will not come."""
        index = self._data_at + self.rank * _DATA_STRIDE
        for peer, words in enumerate(self._words):
            if peer != self.rank:
                words[index + 1] = tag(self.epoch, self.seq)
                futex_wake(self._addresses[peer] + 8 * index)  # a reader of `data` sleeps on word 0

    def wait_data(self, deadline: float) -> None:
        """Wait until the payload of every peer has arrived whole."""
        want = tag(self.epoch, self.seq)
        for src in range(self.config.num_ranks):
            if src != self.rank:
                self._wait(self._data_at + src * _DATA_STRIDE, want, src, deadline, is_data=True)

    def post_reason(self, call: int, reason: bytes) -> None:
        """Say why this rank refuses GPU call number `call` (above 0); at most `REASON_BYTES` bytes."""
        words = self._words[self.rank]
        at = self._reasons_at + call % _NUM_REASONS * _REASON_WORDS
        words[at] = 0
        words[at + 1 : at + _REASON_WORDS] = memoryview(reason.ljust(REASON_BYTES, b"\0")).cast("Q")
        words[at] = call

    def reason_of(self, src_rank: int, call: int) -> str:
        """Return why a rank refused GPU call number `call`; "" when it has not said, or has said more since."""
        words = self._words[src_rank]
        at = self._reasons_at + call % _NUM_REASONS * _REASON_WORDS
        if words[at] != call:
            return ""
        text = bytes(words[at + 1 : at + _REASON_WORDS])
        return text.rstrip(b"\0").decode("utf-8", "replace") if words[at] == call else ""

    def release(self) -> None:
        """Let go of all views of the inboxes, so that their mappings can end."""
        self._words.clear()

    def settle(self, deadline: float) -> None:
        """Wait until all peers have announced the last call, so that none can be behind it."""
        if self._stored < self.seq:
            self._store_row()
        if self.settled < self.seq:
            self._wait_rows(deadline)

    def _wait_rows(self, deadline: float) -> None:
        want = tag(self.epoch, self.seq)
        for src in range(self.config.num_ranks):
            if src != self.rank:
                self._wait(self._row_at(self.seq & 1, src), want, src, deadline)
        self.settled = self.seq

    def _wait(self, index: int, want: int, src: int, deadline: float, is_data: bool = False) -> None:
        words = self._words[self.rank]
        if words[index] == want:
            return
        started = time.monotonic()

        def check() -> None:
            self._interrupt()
            gave_up = is_data and words[index + 1] >= want
            dead = self._watch.dead()
            if words[index] == want:
                return
            # a peer may have met a death first and given up: the death is the cause, so it comes first
            if src in dead or (dead and gave_up):
                raise self._death(dead, started)
            if gave_up:
                facts = context(self._op, rank=self.rank, peer=src, seq=self.seq, epoch=self.epoch)
                raise MismatchError(f"{facts}: rank {src} gave up this call after an error of its own; see its message")

        if not wait_equal(words, index, want, self._addresses[self.rank], deadline, check):
            elapsed = time.monotonic() - started
            facts = context(self._op, rank=self.rank, peer=src, seq=self.seq, epoch=self.epoch, elapsed=elapsed)
            what = "its rows" if is_data else "its call"
            raise CommTimeoutError(
                f"{facts}: rank {src} did not send {what} (expected tag {want:#x}, got {words[index]:#x}); "
                "the buffer can be used again, raise timeout= if the peer is only slow",
                [src],
            )

    def _death(self, dead: tuple[int, ...], started: float) -> RankFailedError:
        elapsed = time.monotonic() - started
        facts = context(self._op, rank=self.rank, peer=dead[0], seq=self.seq, epoch=self.epoch, elapsed=elapsed)
        names = ", ".join(str(rank) for rank in dead)
        return RankFailedError(
            f"{facts}: rank {names} is dead (its process ended); this buffer cannot go on, make a new one without it",
            dead,
            self._op,
            self.seq,
            self.epoch,
            "process ended",
        )

    def _agree(self, headers: list[Header], texts: list[bytes]) -> None:
        """Raise `MismatchError` unless all ranks made the same call; its text is the same on all of them."""
        first = headers[0]
        for src, header in enumerate(headers):
            if header.refused:
                where = context(OP_NAMES[header.op], seq=self.seq, epoch=self.epoch)
                reason = texts[src].rstrip(b"\0").decode("utf-8", "replace")
                raise MismatchError(f"{where}: rank {src} refused its call, so nobody's took place: {reason}")
        for src, header in enumerate(headers):
            if header[:NUM_AGREED] == first[:NUM_AGREED]:
                continue
            where = context(OP_NAMES[first.op], seq=self.seq, epoch=self.epoch)
            for name, mine, other in zip(Header._fields[:NUM_AGREED], first, header, strict=False):
                if mine != other:
                    raise MismatchError(
                        f"{where}: ranks disagree about {_LABELS.get(name, name)}: rank 0 has {_describe(name, mine)}, "
                        f"rank {src} has {_describe(name, other)}; all ranks must make the same calls in the same order"
                    )

    def _row_at(self, parity: int, src: int) -> int:
        return self._rows_at + (parity * self.config.num_ranks + src) * self._row_words


def _parse(words: tuple[int, ...], src: int, limits: Limits) -> Header:
    header = Header(*words)
    for name, value, (low, high) in zip(Header._fields, header, limits, strict=True):
        if not low <= value <= high:
            raise ProtocolError(f"row of rank {src}: {name} must be {low} ... {high}, got {value}; memory is corrupt")
    if header.rank != src:
        raise ProtocolError(f"row of rank {src} says it is of rank {header.rank}; memory is corrupt")
    return header


def _limits(config: BufferConfig) -> Limits:
    """Return lowest and highest value of each header field."""
    return (
        (1, len(OP_NAMES) - 1),
        (0, len(LAYOUTS) - 1),
        (0, len(DTYPE_CODES) - 1),
        (0, 1 << SEQ_BITS),
        (0, 1),
        (0, 8),
        (0, config.scale_words),
        (0, 2),
        (1, MAX_EXPERT_ALIGNMENT),
        (0, MAX_EXPERT_ALIGNMENT),
        (0, 1),
        (0, config.max_tokens_per_rank),
        (0, num_pool_slots(config.num_slots) - 1),
        (0, config.num_ranks - 1),
        (0, 0),
    )


# How a user would call a header field; the others have the user's own words.
_LABELS = {
    "handle": "the handle in use (number of the call that made it; for all_gather_bytes the number of bytes)",
    "with_topk": "routing by topk_idx (1) or otherwise (0)",
    "with_weights": "topk_weights (bytes of a weight, 0 without)",
    "scale_words": "the width of the FP8 scales",
    "scale_kind": "the dtype of the FP8 scales (0 none, 1 float32, 2 packed int32)",
}


def _describe(name: str, value: int) -> str:
    return OP_NAMES[value] if name == "op" else describe_word(name, value)
