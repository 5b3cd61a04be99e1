"""The epochs of a `Buffer` on GPUs: deaths, members, and whose memory is mapped.

Data path: none. A call checks here, before it begins, whether a rank is dead or has left, and after an error whether
that is the cause; `sync` lets the machine (`machine.py`) continue in an agreed view.

Protocol. A crash leaves kernels of the peers waiting; a thread that sees the death notifies them, and the call ends
with an error that names it (`gpu/death_notifier.py`). `sync` agrees on the remaining members and continues from a
common call number in a new epoch: the kernels read the mask from memory, CPU-side exchanges are among its members,
older handles are stale.

Replacements. The kernels' arguments, in graphs as well, hold addresses of the peers' memory. So a joiner's memory is
mapped at the addresses of the previous process's memory, and an older graph stays usable. The steps follow
`members/gpu_members.py`:

    joiner              makes its memory, with placeholders where the others' will be (`gpu/lent.py`), and waits in
                        `sync`
    every member        prepares: its GPU is idle; it clears the words that others have stored for a rank which has
                        another process now, and continues `TAG_JUMP` above all call numbers that any rank has used
                        (`REMEMBERED_CALLS` if no member is new); from here on its memory serves the new epoch
    every member        shows in its outbox the blobs of the two regions that it has had from the beginning
    every member        waits until all are ready, maps what differs from what it has, and enters; its kernels run only
                        then, and reach only prepared ranks
    expert layout       its memory is lent at the first combine; the first one of an epoch maps it with joiners, too
                        (`place.py`)

A rank that dies between two of these steps is lost in the calls of the epoch, and so is a joiner whose constructor
fails there, until it starts again and all sync. A rank that cannot map a living joiner's memory does not enter: its
call raises that, the other ranks are not notified, the next call tries again, and the others wait for it meanwhile, up
to their timeouts. Graphs that are replayed between preparing and entering reach no rank: their dispatches fail. Another
rank may be lost at the same time: the view excludes it, and the joiner keeps a placeholder for it until it is replaced
itself.

A process that was stopped, voted out and replaced may wake up and continue. Its words have older numbers and are
ignored; slots that it may still write are not lent until it has ended (`slots.py`, evicted processes). Not guaranteed:
that its words do not overwrite those of its successor, whose call then times out.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ....errors import EpeeError, InvalidArgument, MismatchError, PeerError, RankFailedError, context, expected
from ....gpu.death_notifier import DeathNotifier
from ....gpu.params import REMEMBERED_CALLS
from ....view.process.detector import DeathWatch, is_leaving
from ...epoch_memory import TAG_JUMP, CallNumbers, Memory
from ...losses import death
from ...members.gpu_members import GpuMembers
from ...members.membership import Agreed
from ...paths import Making
from .machine import Machine
from .slots import FIRST_GHOST

_log = logging.getLogger(__name__)


class AnyEpochs(Protocol):
    """The interface of calls on GPUs to the ranks of a buffer.

    Attributes:
        notifier: notifies kernels of deaths.
    """

    notifier: DeathNotifier

    def begin(self, deadline: float) -> None:
        """Receive deaths from now on, and take part."""

    def close(self) -> None:
        """Stop watching. Idempotent."""

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks that the view excludes."""

    def face_death(self, op: str, is_capturing: bool, needs_all: bool = True) -> None:
        """Refuse a call that cannot end well."""

    def blame_death(self, op: str, error: EpeeError, is_capturing: bool) -> None:
        """Raise that a rank is dead if that is the cause of `error`."""

    def interrupt(self) -> None:
        """End the kernels' waits, for which the CPU waits, if they wait in vain."""


class Epochs(Memory):
    """The epochs of one buffer, and the deaths in them. All paths over one memory share it.

    Args:
        making: of the path.
        members: the group in which the ranks agree.
        machine: kernels and memory.

    Attributes:
        notifier: notifies kernels of deaths.
    """

    def __init__(self, making: Making, members: GpuMembers, machine: Machine) -> None:
        self._config, self._rank, self._exchange, _, self._watch, self._closing, *_ = making
        self._members, self._machine = members, machine
        self._ghosts = DeathWatch()  # evicted processes, whose rank another process has now
        self._ghost_of: dict[tuple[int, int], int] = {}  # their numbers there
        self._fresh: dict[int, set[int]] = {}  # evicted processes of ranks that have been replaced since the last epoch
        self._numbers = CallNumbers(machine.tags, machine.platform.is_capturing)
        device = machine.device
        self.notifier = DeathNotifier(device.mark_dead, device.waiting, f"epee-throughput-{self._rank}")
        machine.look = self.notifier.look

    def begin(self, deadline: float) -> None:
        """Receive deaths from now on, and take part: at once, or after the `sync` that admits this process."""
        self.notifier.start(self._members.processes)
        self._members.memory = self
        if not self._members.is_in:
            self._members.join(deadline)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._ghosts.close()
        self._members.memory = Memory()  # no reference cycle keeps a closed path

    # -- entering an epoch (`Memory`)

    def follow(self, rank: int, process: tuple[int, int]) -> None:
        """Notify kernels of the death of another process, and remember the previous one."""
        before = self._members.processes.get(rank)
        if before is not None:
            # the rank's current process is watched later
            is_dead = before not in self._ghost_of and rank in self._watch.dead()
            ghost = self._ghost_of.setdefault(before, FIRST_GHOST + len(self._ghost_of))
            self._ghosts.watch(ghost, *before)
            self._fresh.setdefault(rank, set()).add(ghost)
            if is_dead:
                self._machine.bury([ghost])
        self.notifier.follow(rank, process)

    def prepare(self, agreed: Agreed, fresh: Collection[int]) -> None:
        """Clear the words of replaced ranks, and let kernels continue in the epoch's view, from another call number."""
        self._numbers.judge(agreed)
        self._bury()
        active = [rank in agreed.ranks for rank in range(self._config.num_ranks)]
        step = TAG_JUMP if agreed.is_fresh else REMEMBERED_CALLS
        ghosts = {rank: self._fresh.get(rank, set()) for rank in fresh}
        self._machine.set_view(active, agreed.used + step, ghosts, is_open=False)
        self._fresh.clear()

    def _bury(self) -> None:
        """Release what ended processes might have written, once their GPUs' work has ended.

        This excludes what is recorded for a rank that has been replaced since it was granted: it belongs to the evicted
        process, until `prepare` reassigns it, whatever happens to the process that has the rank now.
        """
        self._machine.bury([*(rank for rank in self._watch.dead() if rank not in self._fresh), *self._ghosts.dead()])

    @property
    def blob(self) -> bytes:  # type: ignore[override]
        """The blobs of what this rank has lent from the beginning, both in one."""
        return b"".join(self._machine.blobs)

    def move(self, blobs: Mapping[int, bytes]) -> None:
        """Map the memory of ranks that lend another than before, at the same addresses.

        Raises:
            EpeeError: that of a rank that lives, and lends it still, cannot be mapped.
        """
        for rank, blob in blobs.items():
            half = len(blob) // 2
            try:
                self._machine.replace_peer(rank, (blob[:half], blob[half:]))
            except expected(EpeeError) as error:
                if self._members.lends(rank) and not is_leaving(*self._members.processes[rank]):
                    raise
                _log.info("rank %d has ended, or let go of its memory, before it was mapped: %s", rank, error)
        self._machine.open_view()

    # -- members

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks that the view excludes."""
        members = self._exchange.reduced_members
        return () if members is None else tuple(rank for rank in range(self._config.num_ranks) if rank not in members)

    def dead(self) -> tuple[int, ...]:
        """Return the ranks of the view that are dead."""
        dead = self._watch.dead()
        if dead or self._ghost_of:
            self._bury()
        return tuple(rank for rank in dead if rank in self._machine.members)

    def face_death(self, op: str, is_capturing: bool, needs_all: bool = True) -> None:
        """Refuse a call once a rank is dead or, if it `needs_all`, has left the epoch in another way."""
        if is_capturing:
            return
        # read before the kernel of the system reports it; what kernels were notified of stays true
        told = self.notifier.told
        if dead := self.dead() or tuple(rank for rank in told if rank in self._machine.members):
            raise self._death(op, dead)
        if self._members.is_calm():
            return
        state = self._members.state()
        self._members.require_place(is_masked=False)
        if needs_all:
            self._members.require_members(op, self._machine.num_calls)
            self._members.note_calm(state)

    def blame_death(self, op: str, error: EpeeError, is_capturing: bool) -> None:
        """Raise that a rank is dead if that is the cause of `error`.

        A peer that refused its call and ended its process right after is no such case: the refusal is the cause.
        """
        has_cause = isinstance(error, (PeerError, InvalidArgument, MismatchError))
        if not (has_cause or is_capturing or self._closing.asked) and (dead := self.dead()):
            raise self._death(op, dead) from error

    def _death(self, op: str, dead: Sequence[int]) -> RankFailedError:
        seq, epoch = self._machine.num_calls, self._exchange.epoch
        where = context(op, rank=self._rank, peer=dead[0], seq=seq, epoch=epoch)
        remedy = "call buffer.sync() on all survivors, then the next call runs without it"
        return death(where, dead, op, seq, epoch, remedy)

    def interrupt(self) -> None:
        """End the kernels' waits, for which the CPU waits, if a rank has died or another thread wants to close."""
        if self._closing.asked:
            self._machine.device.abort()
        elif self.dead():
            self._machine.device.mark_dead(self._watch.dead())
