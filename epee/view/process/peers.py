"""The other processes of the job as the operating system shows them, and the data that they wrote.

Data path: an endpoint names a process, its board and its heartbeat. `add` opens a pidfd, checks that it is the intended
process (start time), and maps board and beat while their owner lives; the mappings stay readable after its death. Only
the agent thread calls this module.

Writers: each process writes its own board and beat. Trust: a readable pidfd is proof of death, and so is an address
space that has been freed (`detector.py`); anything else (a beat that stands still, a state in /proc) is for messages to
people and for reports. A process that cannot be watched, because descriptors or memory have run out here, is not dead:
`retry` tries again. A member that cannot be mapped has no board here: it is then no witness, and nothing worse.

A process of another host has neither pidfd nor board here (`RemotePeer`): agents of its host report its end
(`protocol/messages.Obituary`), the process itself its part in groups (`wire.GroupReport`). A joiner may learn a view,
and send its data, before it is added here: the data is kept until then. On each new connection a process sends all its
data, between two marks; what is not repeated there was removed while there was no connection.

A forked child closes its copies of the descriptors; a crash leaves nothing.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable
from pathlib import Path

from ...descriptors import Descriptor
from ...errors import AuthError, ProtocolError, ResourceError, expected, shortage
from ...memory.claim import OwnerEndedError
from ..protocol.messages import BoardState, Decision, Member
from ..transport.wire import BEGIN, END, MAX_GROUPS, MAX_MEMBERS, Endpoint, parse_endpoint
from .board import PERIOD_S, BeatView, BoardView
from .detector import is_readable, is_torn_down, open_process

logger = logging.getLogger("epee")

MAX_PEERS = 512  # members, those before them that may still live, and joiners
FROZEN_S = 6 * PERIOD_S  # a heartbeat that stands still for longer belongs to a process that gets no processor
BUSY_S = 3.0  # an agent thread without an iteration for longer does not get the GIL


class Peer:
    """One process of the job.

    Attributes:
        member: as it was announced; the incarnation may be 0 still.
        endpoint: its address and resources.
        pidfd: -1 before it is watched, and once it is dead.
        is_dead: its death is proved.
        was_member: it was a member in a decision that this process has seen committed.
        answered: the highest number of a question of this process (`Ask`) that it has answered.
        board, beat: None where they could not be mapped.
    """

    def __init__(self, member: Member, endpoint: Endpoint) -> None:
        self.member = member
        self.endpoint = endpoint
        self.pidfd = -1
        self.is_dead = False
        self.is_mappable = True  # as far as is known
        self.is_told = False  # whether the log says that it cannot be watched yet
        self.was_member = False
        self.answered = 0
        self.board: BoardView | None = None
        self.beat: BeatView | None = None
        self._seen: dict[str, tuple[int, float]] = {}  # counter -> its last value and when it changed

    def map(self) -> None:
        """Map board and beat, as far as they are not mapped yet; raises `ProtocolError` or `ResourceError`."""
        if self.board is None:
            board = BoardView.attach(self.endpoint.board)
            if board.owner != (self.endpoint.pid, self.endpoint.start_time):
                board.close()
                raise ProtocolError(
                    f"slot {self.member.slot}'s board belongs to another process than its endpoint says"
                )
            self.board = board
        self.beat = BeatView(self.endpoint.beat)

    @property
    def is_wanting(self) -> bool:
        """True while it is not watched, or not mapped, and may yet be."""
        return not self.is_dead and (self.pidfd < 0 or (self.is_mappable and self.beat is None))

    def look(self, now: float) -> None:
        """Record which of its counters have changed."""
        if self.beat is not None and self.board is not None:
            for name, value in (("beat", self.beat.count), ("turns", self.board.turns)):
                if self._seen.get(name, (-1, 0.0))[0] != value:
                    self._seen[name] = (value, now)

    def health(self, now: float) -> str:
        """Return "dead", "stopped" (SIGSTOP, a debugger), "frozen" (it gets no processor), "busy" or "running"."""
        if self.is_dead:
            return "dead"
        if process_state(self.endpoint.pid) in "Tt":
            return "stopped"
        try:
            self.look(now)
        except expected(ValueError):  # the agent thread has just dropped its board: the process has ended
            return "dead"
        beat, beat_at = self._seen.get("beat", (0, now))
        if beat and now - beat_at > FROZEN_S:
            return "frozen"
        return "busy" if now - self._seen.get("turns", (0, now))[1] > BUSY_S else "running"

    def told(self, group_id: int) -> bytes:
        """Return the data that it publishes for a group; `ValueError` if its board was dropped meanwhile."""
        return b"" if self.board is None else self.board.told(group_id)

    @property
    def has_told(self) -> bool:
        """Whether its data for groups can be read here, or never will be readable."""
        return self.is_dead or self.board is not None or not self.is_mappable

    @property
    def has_left(self) -> bool:
        """True when it has announced that it has left."""
        return self.board is not None and self.board.has_left

    def close(self) -> None:
        """Drop descriptor and mappings; idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        for view in (self.board, self.beat):
            if view is not None:
                view.close()


class GroupReports:
    """The data that a process of another host has sent for its groups.

    Attributes:
        is_whole: it has sent all of it at least once.
    """

    is_whole = False

    def __init__(self) -> None:
        self._told: dict[int, bytes] = {}
        self._unsaid: set[int] | None = None  # groups whose data has not come yet, while the process sends all of it

    def note(self, group_id: int, data: bytes) -> None:
        """Replace the data of a group; the group id of the marks belongs to no group."""
        if (group_id, data) == BEGIN:
            self._unsaid = set(self._told)
        elif (group_id, data) == END:
            for taken_back in self._unsaid or ():
                self._told.pop(taken_back, None)
            self._unsaid = None
            self.is_whole = True
        elif data and (group_id in self._told or len(self._told) < MAX_GROUPS):
            self._told[group_id] = data
        elif not data:
            self._told.pop(group_id, None)
        if self._unsaid:
            self._unsaid.discard(group_id)

    def get(self, group_id: int) -> bytes:
        """Return the data of a group, empty where none was sent."""
        return self._told.get(group_id, b"")


class RemotePeer(Peer):
    """A process of another host, as messages describe it.

    Attributes:
        has_left: its end was that it left.
    """

    has_left = False

    def __init__(
        self, member: Member, endpoint: Endpoint, is_up: Callable[[bytes], bool], groups: GroupReports
    ) -> None:
        super().__init__(member, endpoint)
        self.is_mappable = False
        self._is_up = is_up
        self.groups = groups

    @property
    def is_wanting(self) -> bool:
        """False: it cannot be watched from here."""
        return False

    def told(self, group_id: int) -> bytes:
        """Return the data that it has sent for a group."""
        return self.groups.get(group_id)

    @property
    def has_told(self) -> bool:
        """As `Peer.has_told`."""
        return self.is_dead or self.groups.is_whole

    def health(self, now: float) -> str:
        """Return "dead", "reachable" (its kernel answers; more cannot be seen from here) or "unreachable"."""
        if self.is_dead:
            return "dead"
        return "reachable" if self._is_up(self.member.nonce) else "unreachable"


class Peers:
    """All processes that this process has to watch, by nonce."""

    def __init__(
        self, me: bytes, poll: select.epoll, host: str, is_up: Callable[[bytes], bool] = lambda nonce: False
    ) -> None:
        """`host`: on which this process runs; `is_up` returns whether there is a connection to a process of another
        host."""
        self._me, self._poll, self._host, self._is_up = me, poll, host, is_up
        self._peers: dict[bytes, Peer] = {}
        self._nonce_of: dict[int, bytes] = {}  # of pidfds
        self._ending: list[int] = []  # pidfds of processes that are dead but have not been reaped
        self._early: dict[
            bytes, GroupReports
        ] = {}  # of processes that have not been announced here yet, the oldest first

    def add(self, member: Member, pid: int = 0) -> bool:
        """Watch a member; False when it is proved dead already (its board cannot be mapped any more).

        With `pid`, the process named by the kernel, its endpoint must name the same. A process that cannot be watched
        now is kept for `retry`.

        Raises:
            ProtocolError: its endpoint is invalid.
            ResourceError: there are too many peers.
        """
        if member.nonce == self._me:
            return True
        known = self._peers.get(member.nonce)
        if known is not None:
            if member.incarnation:
                known.member = member
            return self._attend(known)
        if len(self._peers) >= MAX_PEERS:
            raise ResourceError(f"more than {MAX_PEERS} processes have asked to be watched; the last was not heard")
        endpoint = parse_endpoint(member.endpoint)
        if pid not in (0, endpoint.pid):
            raise ProtocolError(f"process {pid} says that it is process {endpoint.pid}; it was not believed")
        is_here = member.host == self._host
        groups = self._early.pop(member.nonce, None) or GroupReports()
        peer = Peer(member, endpoint) if is_here else RemotePeer(member, endpoint, self._is_up, groups)
        self._peers[member.nonce] = peer
        return self._attend(peer)

    def note_end(self, nonce: bytes, has_left: bool) -> bool:
        """Record that a process of another host writes no more, as was reported; True when that is new."""
        peer = self._peers.get(nonce)
        if not isinstance(peer, RemotePeer) or peer.is_dead:
            return False
        peer.is_dead, peer.has_left = True, has_left
        return True

    def note_told(self, nonce: bytes, group_id: int, data: bytes) -> None:
        """Store the data that a process of another host sends for a group."""
        peer = self._peers.get(nonce)
        if isinstance(peer, RemotePeer):
            peer.groups.note(group_id, data)
        elif peer is None and (data or nonce in self._early):
            if nonce not in self._early and len(self._early) >= MAX_MEMBERS:
                del self._early[next(iter(self._early))]
            self._early.setdefault(nonce, GroupReports()).note(group_id, data)

    def retry(self) -> list[Peer]:
        """Try again to watch and map the processes for which it has failed; return those found dead."""
        return [peer for peer in self._peers.values() if peer.is_wanting and not self._attend(peer)]

    def _attend(self, peer: Peer) -> bool:
        """Complete the watch of a peer and the mapping of its board; False when it is proved dead."""
        if not peer.is_wanting:
            return not peer.is_dead
        slot = peer.member.slot
        try:
            if peer.pidfd < 0:
                self._watch(peer)
            if not peer.is_dead and peer.is_mappable:
                peer.map()
        # it dies, or leaves; its end is noticed all the same
        except expected(AuthError, OwnerEndedError, ProtocolError) as exc:
            peer.is_mappable = False
            logger.info("slot %d can be watched, but its board cannot be read: %s", slot, exc)
        except expected(ResourceError) as exc:
            if not peer.is_told:  # once, however often it is tried again
                logger.warning("slot %d cannot be watched, or its board not be read, yet; tried again: %s", slot, exc)
            peer.is_told = True
        return not peer.is_dead

    def _watch(self, peer: Peer) -> None:
        with Descriptor(open_process(peer.endpoint.pid, peer.endpoint.start_time)) as held:
            if held < 0:
                peer.is_dead = True
                return
            try:
                self._poll.register(held, select.EPOLLIN)
            except expected(OSError) as exc:
                raise shortage(f"cannot watch process {peer.endpoint.pid}", exc) from exc
            peer.pidfd = fd = held.keep()
        self._nonce_of[fd] = peer.member.nonce

    def get(self, nonce: bytes) -> Peer | None:
        """Return a peer, None if it is not watched."""
        return self._peers.get(nonce)

    def is_mapped(self, nonce: bytes) -> bool:
        """Return whether a peer's board can be read, also after its death."""
        peer = self._peers.get(nonce)
        return peer is not None and peer.board is not None

    def died(self, fd: int) -> Peer | None:
        """Record the death of the process behind a pidfd, if it is one and readable; return None otherwise.

        The pidfd is polled once more: the event may be an older one, of a descriptor that had this number before.
        """
        if fd not in self._nonce_of or not is_readable(fd):
            return None
        peer = self._peers[self._nonce_of[fd]]
        os.close(self._bury(peer))
        return peer

    def look_at(self, nonce: bytes) -> Peer | None:
        """Check a peer closely that others report dead; return it if it is, and was not known to be."""
        peer = self._peers.get(nonce)
        if (
            peer is None
            or isinstance(peer, RemotePeer)
            or peer.is_dead
            or not is_torn_down(peer.endpoint.pid, peer.endpoint.start_time)
        ):
            return None
        self.reap()
        if peer.pidfd >= 0:
            self._ending.append(self._bury(peer))
        peer.is_dead = True
        return peer

    def reap(self) -> None:
        """Drop the descriptors of processes that were proved dead before they had ended, once they have ended."""
        self._ending = [fd for fd in self._ending if not _has_ended(fd)]

    def _bury(self, peer: Peer) -> int:
        """Record the death of a peer that was watched; return its pidfd."""
        peer.is_dead = True
        fd, peer.pidfd = peer.pidfd, -1
        del self._nonce_of[fd]
        self._poll.unregister(fd)
        return fd

    def await_ends(self, timeout_s: float) -> None:
        """Wait until the dead processes have freed their memory and ended: they hold locks until then."""
        for peer in self._peers.values():  # other processes may have seen its end first
            if peer.pidfd >= 0 and is_torn_down(peer.endpoint.pid, peer.endpoint.start_time):
                self._ending.append(self._bury(peer))
        deadline = time.monotonic() + timeout_s
        while self._ending:
            poll = select.poll()
            poll.register(self._ending[-1], select.POLLIN)
            poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
            os.close(self._ending.pop())

    def read_board(self, nonce: bytes) -> BoardState | None:
        """Return the state on a board, None when it was never written.

        Raises:
            ResourceError: it could not be mapped in time.
            ProtocolError: it is damaged.
        """
        peer = self._peers.get(nonce)
        if peer is None or peer.board is None:
            raise ResourceError("its board was not mapped in time; it is no witness")
        return peer.board.read()

    def left(self) -> list[tuple[bytes, str]]:
        """Return the nonces of processes whose boards say that they have left, and LEFT or EXITED.

        Records at the same time which processes show life.
        """
        now = time.monotonic()
        found = []
        for nonce, peer in self._peers.items():
            peer.look(now)
            if peer.board is not None and peer.board.end:  # a process of another host has none here
                found.append((nonce, peer.board.end))
        return found

    def retire(self, decision: Decision) -> None:
        """Drop processes that are no members any more and are dead or have left. An evicted process that lives stays
        watched."""
        there = {member.nonce for member in decision.members}
        for nonce, peer in list(self._peers.items()):
            if nonce in there:
                peer.was_member = True
            elif peer.is_dead or peer.has_left:
                self._drop(nonce)

    def retire_former(self, decision: Decision) -> None:
        """Drop the former members that have died or left since `decision`, which removed them.

        A joiner stays: a decision that is under way may have made it a member, and its board is then a witness.
        """
        there = {member.nonce for member in decision.members}
        for nonce, peer in list(self._peers.items()):
            if peer.was_member and nonce not in there and (peer.is_dead or peer.has_left):
                self._drop(nonce)

    def _drop(self, nonce: bytes) -> None:
        peer = self._peers.pop(nonce)
        if peer.pidfd >= 0:
            self._poll.unregister(peer.pidfd)
            del self._nonce_of[peer.pidfd]
        peer.close()

    def close(self) -> None:
        """Drop everything; idempotent. Touches nothing that a forked child shares with its parent."""
        for peer in self._peers.values():
            peer.close()
        for fd in self._ending:
            os.close(fd)
        self._ending.clear()
        self._peers.clear()
        self._nonce_of.clear()


def process_state(pid: int) -> str:
    """Return the state letter of a process from /proc (`R`, `S`, `D`, `T`, `Z` ...), "X" for none, "?" if not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except expected(FileNotFoundError, ProcessLookupError):
        return "X"
    except expected(OSError):
        return "?"
    return stat[stat.rindex(b")") + 2 :][:1].decode("ascii", "replace")


def _has_ended(fd: int) -> bool:
    """Return whether the process of a pidfd has ended, and close the pidfd then."""
    if not is_readable(fd):
        return False
    os.close(fd)
    return True
