"""Limit on the multiprocessors of a buffer while other buffers of this process use the same GPU.

Blocks of a call wait for other ranks and keep their multiprocessor meanwhile. So two buffers in use at once could
starve each other: on one GPU all multiprocessors belong to one, on the other GPU to the other, and both wait. On one
stream this cannot happen, as the kernels run one after another. So a buffer that finds others on other streams (or in
graphs, which may be replayed anywhere) takes so little that all of them but the widest fit together and leave `RESERVE`
multiprocessors. Then the widest buffer always finds that many, which is enough for all its blocks one after the other:
only blocks that already run wait for other ranks (see the kernels). It ends, and so do the others.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import ClassVar

import torch

from ..errors import ResourceError

RESERVE = 26  # the sending blocks of a default call, plus two


class Share:
    """One buffer's share of a GPU.

    Attributes:
        stream: of its last call, None before the first.
        width: the most multiprocessors that its kernels have taken at once.
        in_graphs: whether a graph has recorded its kernels.
        num_changes: changes of any input of `limit`, in this process.
        seen: `num_changes` when `limit` read it last. While it is the same, `limit` would return the same for the same
            stream. The end of a buffer is not counted: this one may then take more, and does so later.
    """

    num_changes: ClassVar[int] = 0

    def __init__(self, device: torch.device, num_sms: int) -> None:
        self._stream: int | None = None
        self.width = 0
        self._in_graphs = False
        self._num_sms = num_sms
        self.seen = -1
        self._asked: tuple[int, bool] | None = None  # at the last call of `limit`, and its answer
        self._answer = num_sms, True
        with _lock:
            self._all = _shares.setdefault(str(device), {})
            self._all[id(self)] = weakref.ref(self)
        _note_change()
        weakref.finalize(self, self._all.pop, id(self), None)

    @property
    def stream(self) -> int | None:
        """Stream of the last call, None before the first."""
        return self._stream

    @stream.setter
    def stream(self, stream: int | None) -> None:
        if stream != self._stream:
            self._stream = stream
            _note_change()

    def widen(self, width: int) -> None:
        """Note that kernels have taken more multiprocessors at once than before."""
        self.width = width
        _note_change()

    @property
    def in_graphs(self) -> bool:
        """Whether a graph has recorded the buffer's kernels."""
        return self._in_graphs

    @in_graphs.setter
    def in_graphs(self, in_graphs: bool) -> None:
        if in_graphs != self._in_graphs:
            self._in_graphs = in_graphs
            _note_change()

    def still(self, stream: int) -> tuple[int, bool] | None:
        """Return the last result of `limit` if it would be the same for an eager call on `stream`, the stream of the
        last launch; else None."""
        is_same = self.seen == Share.num_changes and self._stream == stream
        return self._answer if is_same and self._asked == (stream, False) else None

    def limit(self, stream: int, is_capturing: bool) -> tuple[int, bool]:
        """Return how many multiprocessors a call on `stream` may take, and whether it has the GPU to itself.

        Raises:
            ResourceError: too many buffers are in use at once.
        """
        asked = stream, is_capturing
        if self.seen == Share.num_changes and asked == self._asked:
            return self._answer
        seen = Share.num_changes  # before the reads below: a change meanwhile is read by the next call
        answer = self._look(stream, is_capturing)
        self._answer, self._asked, self.seen = answer, asked, seen
        return answer

    def _look(self, stream: int, is_capturing: bool) -> tuple[int, bool]:
        if len(self._all) == 1:
            return self._num_sms, True
        with _lock:
            others = [share for ref in list(self._all.values()) if (share := ref()) is not None and share is not self]
        widths = [
            min(other.width, self._num_sms)
            for other in others
            if other.width and (is_capturing or other.in_graphs or other.stream != stream)
        ]
        return width_beside(widths, self._num_sms), not widths

    def leave(self) -> None:
        """Note that the buffer is closed."""
        with _lock:
            self._all.pop(id(self), None)
        _note_change()


def _note_change() -> None:
    Share.num_changes += 1


_lock = threading.Lock()
_shares: dict[str, dict[int, weakref.ref[Share]]] = {}


def width_beside(widths: Sequence[int], num_sms: int) -> int:
    """Return how many of `num_sms` multiprocessors a call may take beside others that take `widths`.

    Raises:
        ResourceError: less than two are left.
    """
    reserve = min(RESERVE, num_sms // 4)
    if sum(widths) + reserve <= num_sms:
        return num_sms
    left = num_sms - reserve - (sum(widths) - max(widths))
    if left < 2:
        raise ResourceError(
            f"{len(widths)} other buffers of this process use the GPU on other streams or in graphs and take {widths} "
            f"of its {num_sms} multiprocessors; use fewer at once, give them a smaller num_sms, or one stream"
        )
    return left
