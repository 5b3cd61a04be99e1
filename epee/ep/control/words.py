"""The words of a rank's inbox: their offsets, and how a row is stored and read.

    inbox of a rank:  rows  [2 parities][num_ranks][row_words]   written by the source rank, word 0 = tag, last
                      data  [num_ranks][8]                       the owner's own line: `withdrawal.py`
                      reasons [8][32]                            written by the owner: why it refused a GPU call,
                                                                 whose number is word 0, stored last

`inbox.py` documents when each word is written and read, `header.py` has the format of a row. A crash leaves a row
without its tag, which no rank reads.

Everything in a row comes from a peer: it is copied out of shared memory here, and the user of the copy checks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ...memory.layout import Field, Layout
from ...memory.shared import SharedRegion
from ...memory.signals import futex_wake
from ..config import BufferConfig
from .header import HEADER, REASON_BYTES, TEXT_AT, Header, RowFormat, num_row_words
from .withdrawal import LINE_WORDS, EndWords

_NUM_REASONS = 8
_REASON_WORDS = 1 + REASON_BYTES // 8


def inbox_layout(config: BufferConfig) -> Layout:
    """Return the layout of a rank's inbox."""
    return Layout(
        Field("rows", torch.int64, (2, config.num_ranks, num_row_words(config))),
        Field("data", torch.int64, (config.num_ranks, LINE_WORDS)),
        Field("reasons", torch.int64, (_NUM_REASONS, _REASON_WORDS)),
    )


class InboxWords(RowFormat):
    """The inboxes of all members of an epoch, as read by one rank.

    Args:
        config: of the buffer.
        rank: this rank.
        inboxes: of the members, this rank's included; none before the first epoch.

    Attributes:
        own: the words of this rank's inbox.
        own_address: of its first word.
    """

    def __init__(self, config: BufferConfig, rank: int, inboxes: Mapping[int, SharedRegion]) -> None:
        super().__init__(config)
        layout = inbox_layout(config)
        self._rank = rank
        self._rows_at = layout.offset("rows") // 8
        self._data_at = layout.offset("data") // 8
        self._reasons_at = layout.offset("reasons") // 8
        num_words = layout.nbytes // 8
        self._words = {member: inbox.words(0, num_words) for member, inbox in inboxes.items()}
        self._addresses = {member: inbox.address for member, inbox in inboxes.items()}
        self.own, self.own_address = self._words.get(rank, memoryview(b"")), self._addresses.get(rank, 0)

    def release(self) -> None:
        """Release all views, so that their mappings can end."""
        self._words.clear()
        self.own = memoryview(b"")

    def ends(self) -> EndWords:
        """Return the words by which the ranks agree on the end of calls."""
        return EndWords(self._rank, self._words, self.data_at, self.row_at)

    # ---- rows

    def row_at(self, parity: int, src: int) -> int:
        """Return the index of the tag of a rank's row, in any inbox."""
        return self._rows_at + (parity * self._num_ranks + src) * self.num_words

    def store(self, parity: int, mark: int, row: bytes, ranks: Iterable[int]) -> None:
        """Write this rank's row into some inboxes, its tag last; storing it again changes nothing."""
        start, data = self.row_at(parity, self._rank), memoryview(row).cast("Q")
        end = start + self.num_words
        for rank in ranks:
            words = self._words[rank]
            words[start + 1 : end] = data
            words[start] = mark

    def wake(self, parity: int, ranks: Iterable[int]) -> None:
        """Wake the ranks that sleep on the tag of this rank's row."""
        start = self.row_at(parity, self._rank)
        for rank in ranks:
            futex_wake(self._addresses[rank] + 8 * start)

    def copy_all(self, parity: int) -> bytes:
        """Return all rows of this inbox."""
        first = self.row_at(parity, 0)
        return bytes(self.own[first : first + self._num_ranks * self.num_words])

    def copy(self, parity: int, mark: int, src: int) -> bytes:
        """Return a rank's row; from its writer's own inbox if it is not here."""
        at = self.row_at(parity, src)
        there = self.own if self.own[at] == mark else self._words[src]
        return bytes(there[at : at + self.num_words])

    def blank(self, header: Header) -> bytes:
        """Return a row that is empty except for its header."""
        return (bytes(8) + HEADER.pack(*header)).ljust(8 * self.num_words, b"\0")

    def header_if_here(self, parity: int, mark: int, src: int) -> Header | None:
        """Return the header of a rank's row, unchecked, if this inbox has the row with that tag."""
        at = self.row_at(parity, src)
        row = bytes(self.own[at : at + TEXT_AT])
        if int.from_bytes(row[:8], "little") != mark or self.own[at] != mark:
            return None
        return Header(*HEADER.unpack_from(row, 8))

    def own_part(self, rows: bytes) -> bytes:
        """Return this rank's row, without its tag, of copies of all ranks' rows."""
        width = 8 * self.num_words
        return rows[self._rank * width + 8 : (self._rank + 1) * width]

    # ---- ends, reasons

    def data_at(self, src: int) -> int:
        """Return the index of a rank's line of `data`, in any inbox."""
        return self._data_at + src * LINE_WORDS

    def post_reason(self, call: int, reason: bytes) -> None:
        """Publish why this rank refuses GPU call number `call` (above 0); at most `REASON_BYTES` bytes."""
        words = self.own
        at = self._reasons_at + call % _NUM_REASONS * _REASON_WORDS
        words[at] = 0
        words[at + 1 : at + _REASON_WORDS] = memoryview(reason.ljust(REASON_BYTES, b"\0")).cast("Q")
        words[at] = call

    def reason_of(self, src: int, call: int) -> str:
        """Return why a rank refused GPU call number `call`; "" if it has published no reason, or has overwritten it."""
        words = self._words[src]
        at = self._reasons_at + call % _NUM_REASONS * _REASON_WORDS
        if words[at] != call:
            return ""
        text = bytes(words[at + 1 : at + _REASON_WORDS])
        return text.rstrip(b"\0").decode("utf-8", "replace") if words[at] == call else ""
