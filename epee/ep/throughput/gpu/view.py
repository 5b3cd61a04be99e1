"""The words of the control block that hold the members, and the first call number; and the clearing of peers' words.

The CPU writes them while no call of any member is in flight; the kernels of this rank read them in every call, so that
a graph replays into the view that is current then (`csrc/common/call.cuh`). Peers neither read nor write them, so a
member that is faster than this one finds nothing half done: its words are in its own control block.

A crash during a change leaves words that only the crashed process would have read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ....gpu.params import HAUNTED_WORDS, SOME_HAUNTED, control_layout
from ....gpu.platform import LentRegion

_FIELDS_BY_RANK = {  # of the control block, which peers write: the axis of the rank
    "counts": 1,
    "dispatch_done": 0,
    "combine_ready": 1,
    "combine_done": 0,
    "combine_failed": 1,
    "barrier": 0,
    "streams": 0,
    "staged": 0,
}
_COMPARED = ("counts", "combine_ready")  # whose high halves are compared with a call's number: later, or not


class ViewWords:
    """The words of the view that a rank's kernels read.

    Args:
        control: this rank's control block.
        num_ranks: of the buffer.
    """

    def __init__(self, control: LentRegion, num_ranks: int) -> None:
        self._control, self._layout = control, control_layout(num_ranks)
        self._mask = self._number = 0
        self.haunted: frozenset[int] = frozenset()  # as last written for the kernels

    @property
    def seq(self) -> int:
        """Number of the last call that the kernels have finished; waits for the current stream."""
        return int(self._words("seq"))

    def write(self, active: Sequence[bool], tag: int, haunted: Collection[int] = ()) -> None:
        """Write the members, that call `tag` was the last one, and which slots no call may grant; no kernel may be in
        flight.

        The number of the view is the low half of `tag`. All members have left all earlier calls, so none has failed
        that a peer may still be in.
        """
        self._number = tag & 0xFFFFFFFF
        self._mask = sum(1 << rank for rank, is_in in enumerate(active) if is_in)
        self.tell_haunted(haunted)
        self._words("seq").fill_(tag)
        self._words("exchanged").fill_(tag)
        # a failed call may have left the last two, a replay before the view was entered the two before them
        for name in ("failed", "news", "reported", "gate", "grid", "next_token"):
            self._words(name).zero_()

    def shut(self, tag: int) -> None:
        """Let no kernel reach a peer before the next `write`; graphs may be replayed. No kernel may be in flight.

        This rank is alone then, in a view that no handle belongs to, and may grant no slot.
        """
        self.write([], tag, range(64 * HAUNTED_WORDS))
        self.haunted = frozenset()  # no call from the CPU may change that

    def tell_haunted(self, slots: Collection[int]) -> None:
        """Write which slots no call may grant, because ranks outside the view may still write them: graphs own slots,
        and name them in every replay. On the current stream.
        """
        self.haunted = frozenset(slots)
        bits = sum(1 << slot for slot in slots)
        for index in range(HAUNTED_WORDS):
            self._words("haunted")[index].copy_(_signed(bits >> 64 * index & (1 << 64) - 1)[0])
        flag = SOME_HAUNTED if slots else 0
        self._words("view").copy_(_signed(self._mask, self._number | flag))

    # -- what peers store

    def clear_source(self, rank: int) -> None:
        """Clear the words that a process of `rank` has stored here, so that none passes for one of its successor."""
        for name in _FIELDS_BY_RANK:
            self._words_of(rank, name).zero_()

    def note_calls(self, rank: int, tag: int) -> None:
        """Set the words of a rank whose halves are compared with a call's number as if it had been in call `tag`.

        A word that is much older, or 0 for a joiner, would pass for a later call as soon as the two are 2^31 apart.
        """
        half = (tag & 0xFFFFFFFF) << 32
        for name in _COMPARED:
            self._words_of(rank, name).fill_(half - (1 << 64) if half >> 63 else half)

    def _words_of(self, rank: int, name: str) -> torch.Tensor:
        """Return the words of a field that `rank` writes."""
        return self._words(name).view(self._layout[name].shape).select(_FIELDS_BY_RANK[name], rank)

    def _words(self, name: str) -> torch.Tensor:
        field = self._layout[name]
        return self._control.lease(self._layout.offset(name), field.nbytes, None).view(field.dtype)


def _signed(*words: int) -> torch.Tensor:
    signed = [word - (1 << 64) if word >> 63 else word for word in words]
    return torch.tensor(signed, dtype=torch.int64, device="cpu")
