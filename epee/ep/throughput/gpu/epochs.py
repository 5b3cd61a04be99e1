"""How a `Buffer` on GPUs goes from epoch to epoch: who has died, who takes part, and whose memory is mapped.

Data path: none. A call asks here, before it begins, whether a rank is dead or gone, and after an error whether that is
why; `sync` lets the machine (`machine.py`) go on in an agreed view.

Protocol. A crash leaves kernels of the peers waiting; a thread that sees the death tells them, and the call ends with
an error that names it (`gpu/death_notifier.py`). `sync` agrees on who is left and goes on from a common call number
in a new epoch: the kernels read the mask from memory, host-side exchanges are among its members, older handles are
stale.

Replacements. The kernels' arguments, in graphs as well, hold addresses of the peers' memory. So a newcomer's memory is
mapped where that of the process before it was, and a graph from before serves on. It goes by `membership/synced.py`:

    newcomer            makes its memory, with stand-ins where the others' will be (`gpu/lent.py`), and
                        waits in `sync`
    every member        prepares: its GPU is idle; it clears the words that others have stored for a rank which has
                        another process now, and goes on `TAG_JUMP` above all call numbers that anybody has used
                        (`REMEMBERED_CALLS` where nobody is new); from here on its memory serves the new epoch
    every member        lends: blobs of the two regions that it has had from the beginning lie behind its inbox
    every member        waits for the others' inboxes, maps what differs from what it has, and enters; its kernels run
                        only then, and reach only who is prepared
    expert layout       its memory is lent at the first combine; the first one of an epoch maps it with newcomers, too
                        (`place.py`)

Who dies between two of these steps is lost in the calls of the epoch, and so is a newcomer whose constructor fails
there, until it comes again and all sync. Who cannot map a living newcomer's memory does not enter: its call says so,
which nobody else hears of, the next one tries again, and the others wait for it meanwhile, up to their time-outs.
Graphs that are replayed between preparing and entering reach nobody: their dispatches fail.
Another rank may be lost at the same time: the view leaves it out, on the newcomer a stand-in is there until it is
replaced itself.

A process that was stopped, voted out and replaced may wake up and go on. Its words bear older numbers and count for
nothing; slots that it may still write are not lent until it has ended (`slots.py`, ghosts). Not promised: that its
words do not overwrite those of its successor, whose call then times out.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from ....errors import EpeeError, InvalidArgument, MismatchError, PeerError, RankFailedError, context
from ....gpu.death_notifier import DeathNotifier
from ....gpu.params import REMEMBERED_CALLS
from ....memory.host import HostRegion
from ....view.process.detector import DeathWatch, is_leaving
from ...control.membership import Agreed
from ...control.words import inbox_layout
from ...membership.memory import TAG_JUMP, CallNumbers, Memory, lend_blob, lent_blob
from ...membership.path_lane import LoneLane
from ...membership.synced import SyncedLane
from ...paths import Making
from .machine import Machine
from .slots import FIRST_GHOST

_log = logging.getLogger(__name__)


class Epochs(Memory):
    """The epochs of one buffer, and the deaths in them. All paths over one memory share it.

    Args:
        making: of the path.
        lane: in which the ranks agree.
        machine: kernels and memory.

    Attributes:
        notifier: tells kernels of deaths.
    """

    def __init__(self, making: Making, lane: SyncedLane | LoneLane, machine: Machine) -> None:
        self._config, self._rank, self._control, _, self._watch, self._closing = making
        self._lane, self._machine = lane, machine
        self._ghosts = DeathWatch()  # processes that had a rank which another one has now
        self._ghost_of: dict[tuple[int, int], int] = {}  # their numbers there
        self._fresh: dict[int, set[int]] = {}  # the ghosts of ranks that have changed hands since the last epoch
        self._numbers = CallNumbers(machine.tags, machine.platform.is_capturing)
        device = machine.device
        self.notifier = DeathNotifier(device.mark_dead, device.waiting, f"epee-throughput-{self._rank}")

    def begin(self, deadline: float) -> None:
        """Hear of deaths from now on, and take part: at once, or behind the `sync` that takes this process in."""
        self.notifier.start(self._lane.processes)
        self._lane.memory = self
        if not self._lane.is_in:
            self._lane.join(deadline)

    def close(self) -> None:
        """Watch nobody any more. Idempotent."""
        self._ghosts.close()
        self._lane.memory = Memory()  # no circle keeps a closed path

    # -- entering an epoch (`Memory`)

    def follow(self, rank: int, process: tuple[int, int]) -> None:
        """Tell kernels of the death of another process, and remember the one before."""
        before = self._lane.processes.get(rank)
        if before is not None:
            is_dead = before not in self._ghost_of and rank in self._watch.dead()  # who has the rank is watched later
            ghost = self._ghost_of.setdefault(before, FIRST_GHOST + len(self._ghost_of))
            self._ghosts.watch(ghost, *before)
            self._fresh.setdefault(rank, set()).add(ghost)
            if is_dead:
                self._machine.bury([ghost])
        self.notifier.follow(rank, process)

    def prepare(self, agreed: Agreed, fresh: Collection[int]) -> None:
        """Forget the words of who was replaced, and let kernels go on in the epoch's view, from another call number."""
        self._numbers.judge(agreed)
        self._bury()
        active = [rank in agreed.ranks for rank in range(self._config.num_ranks)]
        step = TAG_JUMP if agreed.is_fresh else REMEMBERED_CALLS
        ghosts = {rank: self._fresh.get(rank, set()) for rank in fresh}
        self._machine.set_view(active, agreed.used + step, ghosts, is_open=False)
        self._fresh.clear()

    def _bury(self) -> None:
        """Let go of what those might write whose processes have ended, with their GPUs' work.

        Not of what is put down to a rank that has changed hands since it was granted: it is its ghost's, until
        `prepare` says so, whatever has become of the process that has the rank now.
        """
        self._machine.bury([*(rank for rank in self._watch.dead() if rank not in self._fresh), *self._ghosts.dead()])

    def fill(self, region: HostRegion) -> None:
        """Lend this rank's memory on the GPU."""
        lend_blob(region, inbox_layout(self._config).nbytes, b"".join(self._machine.blobs))

    def move(self, regions: Mapping[int, HostRegion]) -> None:
        """Map the memory of those who lend another than before, where theirs was.

        Raises:
            EpeeError: that of a rank that lives, and lends it still, cannot be mapped.
        """
        at = inbox_layout(self._config).nbytes
        for rank in sorted(regions.keys() - {self._rank}):
            blob = lent_blob(regions[rank], at)
            half = len(blob) // 2
            try:
                self._machine.replace_peer(rank, (blob[:half], blob[half:]))
            except EpeeError as error:
                if self._lane.lends(rank) and not is_leaving(*self._lane.processes[rank]):
                    raise
                _log.info("rank %d has ended, or let go of its memory, before it was mapped: %s", rank, error)
        self._machine.open_view()

    # -- who takes part

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks that the view leaves out."""
        exchange = self._control.exchange
        if exchange.reduced_members is None:
            return ()
        return tuple(rank for rank in range(self._config.num_ranks) if rank not in exchange.members)

    def dead(self) -> tuple[int, ...]:
        """Return the ranks of the view that are dead."""
        dead = self._watch.dead()
        if dead or self._ghost_of:
            self._bury()
        return tuple(rank for rank in dead if rank in self._machine.members)

    def face_death(self, op: str, is_capturing: bool, needs_all: bool = True) -> None:
        """Refuse a call once a rank is dead or, if it `needs_all`, gone from the epoch in another way."""
        if is_capturing:
            return
        state = self._lane.state()
        told = self.notifier.told  # before the kernel of the system says so; what kernels were told stays true
        if dead := self.dead() or tuple(rank for rank in told if rank in self._machine.members):
            raise self._death(op, dead)
        self._lane.require_place(is_masked=False)
        if needs_all:
            self._lane.require_members(op, self._machine.num_calls)
            self._lane.note_calm(state)

    def blame_death(self, op: str, error: EpeeError, is_capturing: bool) -> None:
        """Raise that a rank is dead where that is the cause of `error`.

        A peer that refused its call and ended its process right after is no such case: the refusal is what happened.
        """
        has_cause = isinstance(error, (PeerError, InvalidArgument, MismatchError))
        if not (has_cause or is_capturing or self._closing.asked) and (dead := self.dead()):
            raise self._death(op, dead) from error

    def _death(self, op: str, dead: Sequence[int]) -> RankFailedError:
        seq, epoch = self._machine.num_calls, self._control.exchange.epoch
        names = ", ".join(str(rank) for rank in dead)
        return RankFailedError(
            f"{context(op, rank=self._rank, peer=dead[0], seq=seq, epoch=epoch)}: rank {names} is dead (its process "
            "ended); call buffer.sync() on all survivors, then the next call runs without it",
            dead,
            op,
            seq,
            epoch,
            "process ended",
        )

    def interrupt(self) -> None:
        """End the kernels' waits, for which the host waits, where a rank has died or somebody wants to close."""
        if self._closing.asked:
            self._machine.device.abort()
        elif self.dead():
            self._machine.device.mark_dead(self._watch.dead())
