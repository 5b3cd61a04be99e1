"""The number of ranks that a group counts, call by call, and the mask that shows which of them take part.

The size of a group is the length of the user's lists with one element per rank, lost ranks included. It belongs to
calls, not to moments: a joiner beyond the end raises it from its first call on, and a rank that shrinks the group
does so from its next call on. So it is the same for one call on all ranks, whenever they receive a change
(decision 42).

Groups under Mooncake's names show a loss at once (`Mask.lose`): the agent thread, or a wait that has proof of a death,
writes the zero into the program's tensor, and the size follows, while the words of the calls are handled in order.
So the program may give a call the size before a loss or the size after it, and either fits (`members.fitted`). A tensor
that could be split for either is split for the size that the program was given last (`Mask.told`).

Nothing here is shared with other processes. The user's tensor `active_ranks`, if there is one, is written here only,
and never read: the words in this module are authoritative. One element is written for each change, by the thread that
applies the change (mostly the one whose call meets it). On a GPU that is a kernel on this thread's current stream, so
kernels behind the call on that stream see it; no thread waits for it.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Collection, Iterable

import torch

from ...arrays import array_of, writing
from ...errors import expected, ignored
from ..limits import MAX_RANKS

logger = logging.getLogger("epee")


class Sizes:
    """The sizes of one group: `at(seq)` holds for the calls that are still to come."""

    def __init__(self, size: int) -> None:
        self._changes = [(1, size)]  # (first call, size), ascending

    def at(self, seq: int) -> int:
        """Return how many ranks the group counts in call `seq`."""
        return next(size for first, size in reversed(self._changes) if first <= seq)

    def grow(self, first: int, size: int) -> None:
        """From call `first` on the group counts at least `size` ranks."""
        self._note(first, max(size, self.at(first)))
        self._changes = [(start, max(size, old) if start >= first else old) for start, old in self._changes]

    def put(self, first: int, size: int) -> None:
        """From call `first` on the group counts `size` ranks, until a later change that is known already."""
        self._note(first, size)

    def _note(self, first: int, size: int) -> None:
        self._changes = sorted([(start, old) for start, old in self._changes if start != first] + [(first, size)])

    def firsts(self, after: int) -> set[int]:
        """Return the calls above `after` with which a size begins."""
        return {first for first, _ in self._changes if first > after}

    def forget(self, seq: int) -> None:
        """Drop what no call after `seq` needs."""
        while len(self._changes) > 1 and self._changes[1][0] <= seq + 1:
            del self._changes[0]


class Mask:
    """1 for each rank that takes part in the next call, else 0; and the tensor that shows it to the program.

    Attributes:
        limit: the length of the user's tensor, or what it would be.
        span: 1 + the highest rank with a 1 in what the program is shown.
        keeps_lost: the shown tensor keeps the 1 of a lost rank until the program removes it (`put_out`).
        shows_at_once: a loss is shown as soon as this process knows of it (`lose`), not with the call that meets it.
        epoch: of the newest view of which `lose` has shown a loss; 0 for none.
        told: the size that the program was given last, for which its lists are most likely made.
    """

    def __init__(
        self,
        limit: int,
        members: Collection[int],
        shown: torch.Tensor | None = None,
        keeps_lost: bool = False,
        shows_at_once: bool = False,
    ) -> None:
        """`shown`: the user's int32 tensor `[limit]`, on any device; all of it is written."""
        self.limit = limit
        self.keeps_lost = keeps_lost
        self.shows_at_once = shows_at_once
        self.epoch = 0
        self._lost_in: dict[int, int] = {}  # rank -> the view without the process that `lose` was about
        self._agreed: set[int] = set()  # those of which the members have agreed on that view
        self._lock = threading.RLock()  # a signal handler may come here again
        self._words = array("i", [int(rank in members) for rank in range(MAX_RANKS)])
        self._program = array("i", self._words)
        self.span = self.told = _span(self._program)
        self._live = torch.frombuffer(self._program, dtype=torch.int32)
        self._shown = shown
        # Not by torch on the CPU: the background thread writes, too, and inside torch it would end a process at exit.
        self._host = array_of(shown).data if shown is not None and shown.is_cpu else None
        if shown is not None:
            with writing(shown):
                shown.copy_(self._live[:limit])
        # The agent thread writes on a stream of its own: another thread may be recording a graph on the current one.
        self._side: torch.cuda.Stream | None = None
        if shows_at_once and shown is not None and shown.is_cuda and torch.cuda.is_available():
            self._side = torch.cuda.Stream(shown.device)
            self._write(0, self._program[0], is_aside=True)  # loads the kernel, which cannot be done while one records

    def __getitem__(self, rank: int) -> int:
        return self._words[rank]

    def __setitem__(self, rank: int, value: int) -> None:
        self.put(rank, value)

    def put(self, rank: int, value: int, is_asked: bool = False, epoch: int = 0) -> None:
        """Note whether a rank takes part in calls of an epoch; `is_asked`: the program has asked for it: no loss."""
        if self._lost_in and value and rank in self._lost_in:
            with self._lock:
                is_back = epoch >= self._lost_in[rank]
                if is_back:  # another process has the rank
                    del self._lost_in[rank]
                    self._agreed.discard(rank)
                    self._show(rank, 1)
            self._words[rank] = value
            return
        if self._words[rank] == value:
            return  # the user's tensor is written only when needed
        if value or is_asked or not self.keeps_lost:
            self._show(rank, value)
        self._words[rank] = value

    def lose(self, ranks: Iterable[int], epoch: int, is_agreed: bool) -> None:
        """Show that ranks are lost before calls meet it, where that is wanted; any thread, may be repeated.

        Args:
            ranks: those that are lost.
            epoch: the first view that is known, or sure, to be without them.
            is_agreed: the members have agreed on that view; else there is proof of the death.
        """
        if not self.shows_at_once:
            return
        with self._lock:
            for rank in ranks:
                self._lost_in[rank] = max(epoch, self._lost_in.get(rank, 0))
                if not self.keeps_lost:
                    self._show(rank, 0, is_aside=True)
                if is_agreed:
                    self._agreed.add(rank)
                    self.epoch = max(self.epoch, epoch)

    def has_lost(self, ranks: Iterable[int], epoch: int) -> bool:
        """Return whether all these members of an epoch have been lost since, as far as `lose` was called for them."""
        return all(self._lost_in.get(rank, 0) > epoch for rank in ranks)

    def has_agreed(self, ranks: Iterable[int]) -> bool:
        """Return whether the members have agreed on a view without these ranks, and it is shown."""
        return all(rank in self._agreed or not self._words[rank] for rank in ranks)

    def join(self) -> None:
        """Order the current stream after what the agent thread has written to a mask on a GPU."""
        if self._side is not None and self._shown is not None and not torch.cuda.is_current_stream_capturing():
            with ignored(RuntimeError):  # the GPU is broken, see `_write`
                torch.cuda.current_stream(self._shown.device).wait_stream(self._side)

    def put_out(self, ranks: Iterable[int]) -> None:
        """Hide those of `ranks` that do not take part: the program has acknowledged their loss."""
        for rank in ranks:
            if not self._words[rank]:
                self._show(rank, 0)

    def place_on(self, device: torch.device) -> tuple[int, int]:
        """Return address and length of the user's tensor, if it lies on that GPU and shows each loss at once; or 0, 0.

        Kernels may write the zeros of ranks that calls on the GPU lose; the group takes each loss over afterwards.
        """
        shown = self._shown
        if shown is None or not shown.is_cuda or shown.device != device or self.keeps_lost:
            return 0, 0
        return shown.data_ptr(), self.limit

    def foreshow(self, rank: int) -> None:
        """Show that calls on the GPU have left a rank out, before the group takes the loss over; any thread."""
        if not self.keeps_lost:
            self._write(rank, 0)

    def rewrite(self) -> None:
        """Show what the group knows where `foreshow` was quicker: a lost rank may be there again."""
        for rank in range(MAX_RANKS):
            self._write(rank, self._program[rank])

    def _show(self, rank: int, value: int, is_aside: bool = False) -> None:
        with self._lock:
            if self._program[rank] == value:
                return
            self._program[rank] = value
            self.span = _span(self._program)
            self._write(rank, value, is_aside)

    def _write(self, rank: int, value: int, is_aside: bool = False) -> None:
        if rank >= self.limit:
            return
        if self._host is not None:
            self._host[rank] = value
        elif self._shown is not None:
            try:
                with writing(self._shown):
                    self._fill(self._shown[rank : rank + 1], value, is_aside)
            except expected(RuntimeError) as exc:  # the GPU is broken; the group and its calls do not need it
                logger.warning("active_ranks on %s is not kept up to date any more: %s", self._shown.device, exc)
                self._shown = None

    def _fill(self, element: torch.Tensor, value: int, is_aside: bool) -> None:
        if self._side is None:
            element.fill_(value)
        elif is_aside:
            with torch.cuda.stream(self._side):
                element.fill_(value)
        else:
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(element.device).wait_stream(self._side)
            element.fill_(value)

    def first(self, num_ranks: int) -> list[int]:
        """Return the values of the first `num_ranks` ranks."""
        return self._words[:num_ranks].tolist()

    def kept(self) -> set[int]:
        """Return the lost ranks that the program is still shown as if they took part."""
        return {rank for rank, value in enumerate(self._words) if not value and self._program[rank]}

    def live(self, num_ranks: int) -> torch.Tensor:
        """Return the int32 tensor that shows the program at least `num_ranks` ranks, and goes on doing so.

        It is the user's, if that is long enough.
        """
        if self._shown is not None and num_ranks <= self.limit:
            return self._shown
        return self._live[: max(num_ranks, self.limit)]


def _span(words: array[int]) -> int:
    return max((1 + rank for rank, value in enumerate(words) if value), default=0)
