"""The agent thread: one loop that feeds the pure agent with events and carries out its effects, in order.

Data path: a `select.epoll` over the listening sockets, the connections, the pidfds of other processes and an eventfd
for requests of this process. Each ready descriptor becomes an event; the effects of a step are carried out one after
the other before the next event is taken, so a board is written before the message that depends on it leaves. The loop
never waits for a peer, and holds no lock.

In a job over several hosts each agent has a connection of its own to each agent of another host
(`transport/switchboard.py` decides when to make it again). On a new connection it first sends what the peer may have
missed: the epoch it knows, as a request for a newer one, and the state of its groups (inside a host that stands on the
board). Ends of processes arrive as obituaries, which the agent evaluates; a host that cannot be reached is an event
like another, repeated as long as it is so.

Writers and readers: this thread alone uses the agent, the sockets, the board's state and `Shared`; other threads append
to the inbox and read `Shared`, whose fields are replaced as a whole. The hooks of the groups are called on this thread.

A crash of the process ends the loop between any two effects; other processes read the board. An error in the loop is a
bug: it is logged, kept in `Shared.failure`, reported to the groups as trouble, and the process stops taking part.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..errors import (
    AuthError,
    EpeeError,
    EvictedError,
    InvalidState,
    NoQuorumError,
    PeerError,
    ProtocolError,
    ResourceError,
    expected,
    shortage,
)
from .process.board import Board, GroupRow, read_board_of
from .process.peers import Peers
from .protocol.agent import BLANK_BOARD, Agent
from .protocol.events import (
    BoardRead,
    Decide,
    Died,
    Effect,
    Event,
    Evicted,
    Freeze,
    Frozen,
    HostLost,
    JoinAsked,
    JoinPending,
    LeaveAsked,
    Left,
    MessageReceived,
    NoQuorum,
    ReadBoard,
    Refused,
    Send,
    Thaw,
    Tick,
    WriteBoard,
)
from .protocol.messages import (
    BY_ITSELF,
    DEAD,
    Accept,
    Ask,
    Commit,
    Decision,
    GroupState,
    Join,
    Member,
    Message,
    Obituary,
    Report,
)
from .transport.auth import Identity
from .transport.directory import Door, JobDirectory, socket_name
from .transport.switchboard import Switchboard
from .transport.wire import BEGIN, END, PING, GroupReport

logger = logging.getLogger("epee")

# maximum time of an iteration; it also runs at least twice in what the agent takes for a stop of its process
IDLE_S = 1.0
ENDING_S = 2.0  # time to wait for the ends of the dead processes, so that the last of all can remove the folder
FLUSH_S = 0.5  # time for which a leaving process goes on sending


class Hooks(NamedTuple):
    """The callbacks of an engine for a group. All run on the agent thread, must be quick and must not wait.

    Attributes:
        freeze: stop completing and starting calls; return the progress of the group.
        thaw: go on.
        decided: a new view; in order, each once.
        trouble: calls cannot end well any more (evicted, the agent failed) or for the time being (no quorum).
        asked: the set of processes that ask to join the job has changed; or a process of another host has sent what it
        shows of its part in the group.
    """

    freeze: Callable[[], GroupState]
    thaw: Callable[[], None]
    decided: Callable[[Decision], None]
    trouble: Callable[[Exception], None]
    asked: Callable[[], None] = lambda: None


class Shared:
    """State that other threads may read at any time.

    Attributes:
        decision: the view; None before there is one.
        lost_at: `time.monotonic()` value at which the last view without a former member was shown here.
        error: reason for which calls cannot end well: `EvictedError`, or `NoQuorumError` for the time being.
        refused: reason for which this process may not join; empty otherwise.
        waiting: slots of processes that ask to join, ascending.
        failure: a bug that ended the loop.
        has_ended: the loop is over.
    """

    def __init__(self) -> None:
        self.decision: Decision | None = None
        self.lost_at = 0.0
        self.error: PeerError | None = None
        self.refused = ""
        self.waiting: tuple[int, ...] = ()
        self.failure: BaseException | None = None
        self.has_ended = False


class Loop:
    """The loop of the agent thread. Make it, then call `run` on a thread of its own."""

    def __init__(
        self, job: JobDirectory, door: Door, board: Board, agent: Agent, listener: socket.socket | None = None
    ) -> None:
        """Take ownership of `door`, and `listener` for other hosts, which are closed at the end; raises
        `ResourceError`."""
        self.shared = Shared()
        self.agent = agent
        self.board = board
        self._job = job
        self._inbox: deque[Callable[[], None]] = deque()
        self._events: deque[Event] = deque()
        self._groups: dict[int, Hooks] = {}
        self._is_frozen = False
        self._is_running = True
        self._waiting: dict[bytes, int] = {}
        # members that a joiner has read of, in case the folder becomes unreadable
        self._known: dict[bytes, Member] = {}
        self._is_folder_there = True
        self._later: list[Callable[[], None]] = []  # registrations that wait for the thaw
        self.owes_group_state = False  # a joiner promises nothing before it can report the progress of its group
        self._owed: Freeze | None = None
        self._next_look = self._deadline = 0.0
        settings = agent.settings
        self._idle_s = min(IDLE_S, settings.answer_s + settings.wait_limit_s / 2)
        me = agent.me
        with contextlib.ExitStack() as undo:
            try:
                self._poll = undo.enter_context(select.epoll())
                self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                undo.callback(os.close, self._bell)
                self._poll.register(self._bell, select.EPOLLIN)
                self.switchboard = Switchboard(job, Identity(*me[:3]), door, self._poll, listener, self._greeting)
            except expected(OSError) as exc:
                if isinstance(exc, EpeeError):
                    raise
                raise shortage(f"the agent of slot {me.slot} cannot listen", exc) from exc
            undo.pop_all()
        self.peers = Peers(me.nonce, self._poll, job.host, self.switchboard.abroad.is_up)
        self._spans = listener is not None
        self._ping_at = 0.0
        self._looked_at = time.monotonic()
        self._told: dict[int, bytes] = {}  # what the groups publish, for members on other hosts
        self._is_in = False  # whether the process is in a view, of a job over several hosts
        self._lost_at: dict[str, float] = {}  # lost host -> time of the last report to the agent
        self.contacts: tuple[Member, ...] = ()  # members on other hosts that may be asked to admit this process
        # so that no thread signals a descriptor that was closed; a garbage collection under it may post another wish
        self._bell_lock = threading.RLock()
        self._effects: dict[type, Callable[..., None]] = {
            Send: lambda effect: self.switchboard.send(effect.to, effect.message, time.monotonic()),
            WriteBoard: lambda effect: self.board.write(effect.state),
            ReadBoard: self._read_board,
            Freeze: self._freeze,
            Thaw: self._thaw,
            Decide: lambda effect: self._decide(effect.decision),
            Evicted: self._evicted,
            NoQuorum: self._no_quorum,
            JoinPending: self._note_waiting,
            Refused: self._refuse,
        }

    # ---- called by other threads

    def post(self, wish: Callable[[], None]) -> None:
        """Let the agent thread call `wish` soon."""
        self._inbox.append(wish)
        with self._bell_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    # ---- called on the agent thread

    def run(self) -> None:
        """Run until `stop`, an eviction or a refusal."""
        try:
            self._begin()
            while self._is_running:
                self._turn()
        except BaseException as exc:  # kept, logged and reported: nothing else would show it on this thread
            logger.exception("the agent of slot %d has failed; this process no longer takes part", self.agent.me.slot)
            self.shared.failure = exc
            self._tell_trouble(InvalidState(f"the agent thread has failed: {exc!r}; start the process again"))
        finally:
            self.shared.has_ended = True
            self.board.wake()
            self.peers.await_ends(ENDING_S)
            self.close()
            self._inbox.clear()  # a thread that waits for an answer sees that the loop has ended

    def step(self, event: Event) -> None:
        """Pass one event to the agent, carry out the effects, and those that follow from them."""
        self._events.append(event)
        self._drain()

    def _drain(self) -> None:
        while self._events:
            for effect in self.agent.step(self._events.popleft(), time.monotonic()):
                self._do(effect)

    def register(self, group_id: int, hooks: Hooks, answer: Callable[[GroupRow], None]) -> None:
        """Register a group, once nothing is frozen; pass its row to `answer`."""
        if self._is_frozen and self._is_running:
            self._later.append(lambda: self.register(group_id, hooks, answer))
            return
        self._groups[group_id] = hooks
        on_tell = (lambda data: self.post(lambda: self._tell(group_id, data))) if self._spans else None
        answer(self.board.row(group_id, on_tell))
        self.owes_group_state = False
        if self._owed is not None:
            self._freeze(self._owed)
            self._drain()

    def unregister(self, group_id: int, row: GroupRow) -> None:
        """Unregister a group."""
        if self._groups.pop(group_id, None) is not None:
            row.clear()
            self._tell(group_id, b"")

    def look_at(self, slot: int) -> None:
        """Check a member that is reported dead, and record its death if it is."""
        member = self.agent.members.get(slot)
        peer = self.peers.look_at(member.nonce) if member is not None else None
        if peer is not None:
            self._bury(peer.member)

    def ask_members(self, question: int) -> None:
        """Ask all other members for later decisions than this process knows; answers repeat the number `question`."""
        for member in self.agent.decided.members:
            if member.nonce != self.agent.me.nonce:
                self.switchboard.send(member, Ask(self.agent.epoch, question), time.monotonic())

    def ask_to_join(self) -> None:
        """Ask all processes with a socket in the folder, and all members that they knew, to add this process.

        Their boards are mapped before: once this process is a member, one of them may die at once, and its board must
        be readable here then.
        """
        contacts = {member.nonce: member for member in self.contacts}
        try:
            found = self._job.sockets()
        except expected(OSError) as exc:  # `_look_around` repeats it
            logger.warning("cannot look into %s: %s; tried again", self._job.path, exc)
            return
        for slot, nonce, _ in found:
            if nonce != self.agent.me.nonce:
                contacts[nonce] = Member(slot, 0, nonce, b"", self._job.host)
                self._meet_members_of(contacts[nonce])
        self.step(JoinAsked(tuple({**contacts, **self._known}.values())))

    def _meet_members_of(self, contact: Member) -> None:
        """Map the boards of all members that a process in the folder knows; it may be dead, or no member itself."""
        pid = self.switchboard.reach(contact, time.monotonic())
        if pid == 0 or self.peers.get(contact.nonce) is not None:
            return
        with contextlib.suppress(AuthError, ProtocolError, ResourceError):
            state = read_board_of(pid)
            for member in state.decided.members if state is not None else ():
                if self._meet(member):
                    self._known[member.nonce] = member

    def stop(self, cause: str) -> None:
        """End the loop; report before that this process leaves for good: LEFT, or EXITED."""
        self.board.leave(cause)
        if self._is_running and not self.agent.ended:
            self.step(LeaveAsked(cause))
            self._flush()
        self._is_running = False

    # ---- the loop

    def _begin(self) -> None:
        self._looked_at = time.monotonic()
        decided = self.agent.decided
        if decided.members:
            self._decide(decided)
        self.step(Tick())

    def _turn(self) -> None:
        now = time.monotonic()
        due = min(self.agent.next_tick, self._deadline, self._next_look)
        ready = self._poll.poll(min(max(due - now, 0.0), self._idle_s))
        self.board.turn()
        for fd, _ in ready:
            if fd == self._bell:
                os.eventfd_read(self._bell)
            else:
                self._handle(fd)
        while self._inbox and self._is_running:
            self._inbox.popleft()()
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + self._idle_s
            self._look_around()
        if now >= self.agent.next_tick and self._is_running:
            self.step(Tick())
        self._deadline = self.switchboard.expire(now)
        if self._spans and self._is_running:
            self._look_abroad(now)

    def _look_abroad(self, now: float) -> None:
        """Connect to processes of other hosts without a connection, and report the lost hosts."""
        abroad, pause_s = self.switchboard.abroad, self.agent.settings.wait_limit_s / 3
        # an iteration takes no longer: this process was stopped
        abroad.skip(max(0.0, now - self._looked_at - 2 * self._idle_s))
        self._looked_at = now
        self.switchboard.keep_up(now)
        if now >= self._ping_at:
            self._ping_at = now + abroad.ping_s
            for member in abroad.up():
                self.switchboard.send(member, PING, now)
        lost = abroad.lost(now)
        self._lost_at = {host: at for host, at in self._lost_at.items() if host in lost}
        for host in lost:
            if now - self._lost_at.get(host, -pause_s) >= pause_s:
                self._lost_at[host] = now
                self.step(HostLost(host))
        again = (at + pause_s for at in self._lost_at.values())
        self._deadline = min([self._deadline, self._ping_at, abroad.next(now), *again])

    def _greeting(self, to: Member) -> list[Message | GroupReport]:
        """Return the messages to send to a process of another host on a new connection."""
        if not self.agent.epoch:
            return []
        return [
            Ask(self.agent.epoch),
            BEGIN,
            *(GroupReport(group_id, data) for group_id, data in self._told.items()),
            END,
        ]

    def _tell(self, group_id: int, data: bytes) -> None:
        """Send a group's data to members on other hosts; what is lost on the way comes with the next connection."""
        if not data and self._told.pop(group_id, None) is None:
            return
        if data:
            self._told[group_id] = data
        for member in self.agent.decided.members:
            if member.host != self._job.host:
                self.switchboard.send(member, GroupReport(group_id, data), time.monotonic())

    def _handle(self, fd: int) -> None:
        dead = self.peers.died(fd)
        if dead is not None:
            self._bury(dead.member)
        elif self.switchboard.owns(fd):  # else an earlier descriptor of this iteration has closed it
            for sender, message in self.switchboard.handle(fd, time.monotonic()):
                if self._is_running:
                    self._receive(sender, message)

    def _bury(self, member: Member) -> None:
        self.switchboard.forget(member.nonce)
        self._job.remove(socket_name(member.slot, member.nonce))
        self._known.pop(member.nonce, None)
        self._set_waiting(member.nonce, None)
        peer = self.peers.get(member.nonce)
        # what the process reported before it ended counts
        end = "" if peer is None or peer.board is None else peer.board.end
        self.step(Left(member.nonce, end) if end else Died(member.nonce))

    def _receive(self, sender: bytes, message: Message | GroupReport) -> None:
        """Map the boards of the processes that a message introduces, then let the agent answer it."""
        if isinstance(message, GroupReport):
            self.peers.note_told(sender, message.group_id, message.data)
            if message.group_id in self._groups:
                self._groups[message.group_id].asked()
            if self.agent.epoch and sender not in self.agent.slot_of:  # it was evicted, and may not have noticed it
                self.step(MessageReceived(sender, Ask(self.agent.epoch - 1)))
            return
        members: tuple[Member, ...] = ()
        if isinstance(message, Accept):
            members = message.decision.members
        elif isinstance(message, Commit):
            members = message.decisions[-1].members if message.decisions else ()
        elif isinstance(message, Join):
            pid = self.switchboard.pid_of(sender) if sender == message.member.nonce else 0
            if not self._may_join(message.member, pid, sender == message.member.nonce):
                return
        elif isinstance(message, Report):
            for cause in message.causes:
                if cause.cause == DEAD:
                    self.look_at(cause.slot)
        for member in members:
            self._meet(member)
        self.step(MessageReceived(sender, message))
        if isinstance(message, Obituary):
            self._note_ends()
        peer = self.peers.get(sender)
        if isinstance(message, Commit) and peer is not None:
            peer.answered = max(peer.answered, message.answers)

    def _may_join(self, member: Member, pid: int, asks_itself: bool) -> bool:
        """Watch a process that asks to join; False if its request is not to be handled (yet)."""
        is_here = member.host == self._job.host
        if not is_here and (not self._spans or pid):
            self.switchboard.dropped["malformed"] += 1
            logger.warning("slot %d says that it runs on another host; it was not heard", member.slot)
            return False
        if is_here and asks_itself and not pid:
            self.switchboard.dropped["malformed"] += 1
            logger.warning("slot %d calls from another host and says that it runs on this one", member.slot)
            return False
        return self._meet(member, pid) and (not is_here or self.peers.is_mapped(member.nonce))

    def _note_ends(self) -> None:
        """Record the end of peers on other hosts that the agent knows to write no more."""
        for slot, cause in self.agent.gone.items():
            nonce = self.agent.members[slot].nonce
            if self.peers.note_end(nonce, cause in BY_ITSELF):
                self.switchboard.forget(nonce)
                self._set_waiting(nonce, None)

    def _meet(self, member: Member, pid: int = 0) -> bool:
        """Watch a process from now on; False if its endpoint is invalid."""
        try:
            is_alive = self.peers.add(member, pid)
        except ProtocolError as exc:
            self.switchboard.dropped["malformed"] += 1
            logger.warning("slot %d has an endpoint that cannot be right: %s", member.slot, exc)
            return False
        except ResourceError as exc:  # there are too many
            logger.warning("slot %d cannot be watched: %s", member.slot, exc)
            return True
        if not is_alive:
            self._events.append(Died(member.nonce))
        return True

    def _look_around(self) -> None:
        if self._is_folder_there and not self._job.is_there():
            self._is_folder_there = False
            logger.warning(
                "the folder %s of this job was removed: the job goes on, but nobody can join it any more; let "
                "EPEE_RUNTIME_DIR name a folder that nobody cleans",
                self._job.path,
            )
        self.peers.reap()
        for dead in self.peers.retry():
            self._bury(dead.member)
        self.peers.retire_former(self.agent.decided)
        for nonce, cause in self.peers.left():
            self.step(Left(nonce, cause))
        if self.agent.decided.members:
            self.step(Tick())
        elif self._is_running and not self.agent.ended:
            self.ask_to_join()  # the folder may list others by now

    # ---- effects

    def _do(self, effect: Effect) -> None:
        self._effects[type(effect)](effect)

    def _read_board(self, effect: ReadBoard) -> None:
        nonce = effect.member.nonce
        try:
            self._events.append(BoardRead(nonce, self.peers.read_board(nonce) or BLANK_BOARD))
        except (ProtocolError, ResourceError) as exc:
            logger.warning("slot %d is no witness: %s", effect.member.slot, exc)
            self._events.append(BoardRead(nonce, None))

    def _freeze(self, effect: Freeze) -> None:
        self._owed = effect if self.owes_group_state else None
        if self.owes_group_state:
            return
        self._is_frozen = True
        states = tuple(self._groups[group_id].freeze() for group_id in sorted(self._groups))
        self._events.append(Frozen(effect.epoch, states))

    def _thaw(self, effect: Thaw) -> None:
        self._is_frozen = False
        self._owed = None
        for hooks in list(self._groups.values()):
            hooks.thaw()
        later, self._later = self._later, []
        for wish in later:
            wish()

    def _decide(self, decision: Decision) -> None:
        for member in decision.members:
            self._meet(member)
        if decision.removed or any(part.since == -decision.epoch for part in decision.parts):
            self.shared.lost_at = time.monotonic()  # before it is shown: who knows the view knows this
        self.shared.decision = decision
        self.shared.error = None
        # after it is shown: a reader that checks here first and there then misses no member
        for member in decision.members:
            self._set_waiting(member.nonce, None)
        for hooks in list(self._groups.values()):
            hooks.decided(decision)
        self.board.decide(decision.epoch)
        self.peers.retire(decision)
        if self._spans:
            self._follow(decision)

    def _follow(self, decision: Decision) -> None:
        """Keep connections to the members on other hosts, from now on."""
        peers = ((member, self.peers.get(member.nonce)) for member in decision.members)
        self.switchboard.abroad.follow([m for m, peer in peers if peer is None or not peer.is_dead], time.monotonic())
        self._deadline = 0.0  # in this iteration
        if not self._is_in:  # the members that it has asked to add it have a connection already, and got no greeting
            self._is_in = True
            for member in decision.members:
                self.switchboard.greet(member, time.monotonic())

    def _evicted(self, effect: Evicted) -> None:
        me, epoch = self.agent.me.slot, effect.epoch
        text = (
            f"slot {me} was voted out of the group in epoch {epoch} ({effect.cause}); start the process again with "
            "is_extension=True"
        )
        self._fail(EvictedError(text, [me], epoch=epoch, cause=effect.cause))
        self._is_running = False

    def _no_quorum(self, effect: NoQuorum) -> None:
        now, me = time.monotonic(), self.agent.me
        others = {m.slot: self.peers.get(m.nonce) for m in self.agent.decided.members if m.nonce != me.nonce}
        health = {slot: "unknown" if peer is None else peer.health(now) for slot, peer in sorted(others.items())}
        silent = [slot for slot, seen in health.items() if seen not in ("running", "reachable")] or list(health)
        told = ", ".join(f"{slot} ({health[slot]})" for slot in silent)
        text = (
            f"slot {me.slot} cannot reach enough members to agree on what follows epoch {effect.epoch}: no answer from "
            f"slot(s) {told}; repeat the call, which continues when they answer, or make a new group"
        )
        self._fail(NoQuorumError(text, silent, epoch=effect.epoch, cause="no quorum"))

    def _refuse(self, effect: Refused) -> None:
        self.shared.refused = effect.reason
        self._is_running = False

    def _fail(self, error: PeerError) -> None:
        self.shared.error = error
        self._tell_trouble(error)
        self.board.wake()

    def _tell_trouble(self, error: Exception) -> None:
        for hooks in list(self._groups.values()):
            hooks.trouble(error)

    def _note_waiting(self, effect: JoinPending) -> None:
        self._set_waiting(effect.member.nonce, effect.member.slot)

    def _set_waiting(self, nonce: bytes, slot: int | None) -> None:
        if slot is not None:
            self._waiting[nonce] = slot
        elif self._waiting.pop(nonce, None) is None:
            return
        before, self.shared.waiting = self.shared.waiting, tuple(sorted(set(self._waiting.values())))
        if before != self.shared.waiting:
            for hooks in list(self._groups.values()):
                hooks.asked()

    # ---- the end

    def _flush(self) -> None:
        """Send what is queued, for a moment: a peer that does not read it learns it from the board."""
        until = time.monotonic() + FLUSH_S
        while not self.switchboard.is_idle and time.monotonic() < until:
            for fd, _ in self._poll.poll(max(0.0, until - time.monotonic())):
                if fd == self._bell:
                    os.eventfd_read(self._bell)
                elif self.switchboard.owns(fd):
                    self.switchboard.handle(fd, time.monotonic())  # messages that arrive now are dropped
                else:
                    self.peers.died(fd)

    def close(self) -> None:
        """Close the sockets and leave the folder; idempotent."""
        self.shared.has_ended = True
        if self._poll.closed:
            return
        self.switchboard.close()
        self.peers.close()
        self._poll.close()
        with self._bell_lock:
            bell, self._bell = self._bell, -1
            os.close(bell)
        self._job.leave()

    def forked(self) -> None:
        """Close the copies in a forked child; touch nothing that is shared with the parent."""
        self._bell_lock = threading.RLock()
        self._job.forget()
        self.close()
