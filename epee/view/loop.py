"""The agent thread: one loop that feeds the pure agent with what happens and does what it asks for, in its order.

Data path: a `select.epoll` over the listening socket, the connections, the pidfds of the others and an eventfd for this
process's own wishes. Each thing that is ready becomes an event; the effects of a step are carried out one after the
other before the next event is taken, so a board is written before the message that rests on it leaves. Nothing in here
waits for a peer, and no lock is held.

Who writes: this thread alone touches the agent, the sockets, the board's state and `Shared`; other threads append to
the inbox and read `Shared`, whose fields are replaced as a whole. The hooks of the lanes are called on this thread.

A crash of the process ends the loop between any two effects; others read the board. An error in here is a bug: it is
logged, kept in `Shared.failure`, told to the lanes as trouble, and the process stops taking part.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
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
    shortage,
)
from .process.board import Board, LaneRow, read_board_of
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
from .protocol.messages import DEAD, Accept, Commit, Decision, Join, LaneState, Member, Message, Report
from .transport.auth import Identity
from .transport.directory import Door, JobDirectory, socket_name
from .transport.switchboard import Switchboard

logger = logging.getLogger("epee")

IDLE_S = 1.0  # the loop turns at least this often, and at least twice in what the agent takes for a stop of its process
ENDING_S = 2.0  # how long it waits for the dead to be gone, so that the last of all can remove the folder
FLUSH_S = 0.5  # how long a process that leaves goes on sending


class Hooks(NamedTuple):
    """What an engine gives for a lane. All are called on the agent thread, must be quick and must not wait.

    Attributes:
        freeze: stop completing and starting calls; say how far the lane is.
        thaw: go on.
        decided: a new view; in order, each once.
        trouble: calls cannot end well any more (evicted, the agent failed) or for the time being (no quorum).
    """

    freeze: Callable[[], LaneState]
    thaw: Callable[[], None]
    decided: Callable[[Decision], None]
    trouble: Callable[[Exception], None]


class Shared:
    """What other threads may read at any time.

    Attributes:
        decision: the view; None before there is one.
        error: why calls cannot end well: `EvictedError`, or `NoQuorumError` for the time being.
        refused: why this process may not join; empty otherwise.
        waiting: slots of processes that ask to join, ascending.
        failure: a bug that ended the loop.
        has_ended: the loop is over.
    """

    def __init__(self) -> None:
        self.decision: Decision | None = None
        self.error: PeerError | None = None
        self.refused = ""
        self.waiting: tuple[int, ...] = ()
        self.failure: BaseException | None = None
        self.has_ended = False


class Loop:
    """See above. Make it, then call `run` on a thread of its own."""

    def __init__(self, job: JobDirectory, door: Door, board: Board, agent: Agent) -> None:
        """Take over `door`, which is closed at the end; raises `ResourceError`."""
        self.shared = Shared()
        self.agent = agent
        self.board = board
        self._job = job
        self._inbox: deque[Callable[[], None]] = deque()
        self._events: deque[Event] = deque()
        self._lanes: dict[int, Hooks] = {}
        self._is_frozen = False
        self._is_running = True
        self._waiting: dict[bytes, int] = {}
        self._known: dict[bytes, Member] = {}  # members that a joiner has read of, should it lose sight of the folder
        self._is_folder_there = True
        self._later: list[Callable[[], None]] = []  # registrations that wait for the thaw
        self.owes_lane = False  # who joins promises nothing before it can say how far its lane is
        self._owed: Freeze | None = None
        self._next_look = self._deadline = 0.0
        settings = agent.settings
        self._idle_s = min(IDLE_S, settings.answer_s + settings.patience_s / 2)
        me = agent.me
        with contextlib.ExitStack() as undo:
            try:
                self._poll = undo.enter_context(select.epoll())
                self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                undo.callback(os.close, self._bell)
                self._poll.register(self._bell, select.EPOLLIN)
                self.switchboard = Switchboard(job, Identity(*me[:3]), door, self._poll)
            except OSError as exc:
                if isinstance(exc, EpeeError):
                    raise
                raise shortage(f"the agent of slot {me.slot} cannot listen", exc) from exc
            undo.pop_all()
        self.peers = Peers(me.nonce, self._poll)
        self._bell_lock = threading.Lock()  # so that nobody rings a descriptor that was closed
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
        """Turn until `stop`, an eviction or a refusal."""
        try:
            self._begin()
            while self._is_running:
                self._turn()
        except BaseException as exc:  # kept, logged and told: nobody else would see it on this thread
            logger.exception("the agent of slot %d has failed; this process no longer takes part", self.agent.me.slot)
            self.shared.failure = exc
            self._tell_trouble(InvalidState(f"the agent thread has failed: {exc!r}; start the process again"))
        finally:
            self.shared.has_ended = True
            self.board.wake()
            self.peers.await_ends(ENDING_S)
            self.close()
            self._inbox.clear()  # who waits for an answer sees that the loop has ended

    def step(self, event: Event) -> None:
        """Give one event to the agent, do what follows, and all that follows from that."""
        self._events.append(event)
        self._drain()

    def _drain(self) -> None:
        while self._events:
            for effect in self.agent.step(self._events.popleft(), time.monotonic()):
                self._do(effect)

    def register(self, lane: int, hooks: Hooks, answer: Callable[[LaneRow], None]) -> None:
        """Take a lane in, once nothing is frozen; tell its row."""
        if self._is_frozen and self._is_running:
            self._later.append(lambda: self.register(lane, hooks, answer))
            return
        self._lanes[lane] = hooks
        answer(self.board.row(lane))
        self.owes_lane = False
        if self._owed is not None:
            self._freeze(self._owed)
            self._drain()

    def unregister(self, lane: int, row: LaneRow) -> None:
        """Forget a lane."""
        if self._lanes.pop(lane, None) is not None:
            row.clear()

    def look_at(self, slot: int) -> None:
        """Look closely at a member that somebody takes for dead, and bury it if it is."""
        member = self.agent.members.get(slot)
        peer = self.peers.look_at(member.nonce) if member is not None else None
        if peer is not None:
            self._bury(peer.member)

    def ask_to_join(self) -> None:
        """Ask all whose sockets are in the folder, and all members that they knew, to take this process in.

        Their boards are mapped before: once this process is a member, one of them may die at once, and its board must
        be readable here then.
        """
        contacts = {}
        try:
            found = self._job.sockets()
        except OSError as exc:  # `_look_around` asks again
            logger.warning("cannot look into %s: %s; tried again", self._job.path, exc)
            return
        for slot, nonce, _ in found:
            if nonce != self.agent.me.nonce:
                contacts[nonce] = Member(slot, 0, nonce, b"")
                self._meet_members_of(contacts[nonce])
        self.step(JoinAsked(tuple({**contacts, **self._known}.values())))

    def _meet_members_of(self, contact: Member) -> None:
        """Map the boards of all members that a process in the folder knows of; it may be dead, or no member itself."""
        pid = self.switchboard.reach(contact, time.monotonic())
        if pid == 0 or self.peers.get(contact.nonce) is not None:
            return
        with contextlib.suppress(AuthError, ProtocolError, ResourceError):
            state = read_board_of(pid)
            for member in state.decided.members if state is not None else ():
                if self._meet(member):
                    self._known[member.nonce] = member

    def stop(self, is_leaving: bool) -> None:
        """End the loop; tell the others before if this process leaves for good."""
        if is_leaving:
            self.board.leave()
        if is_leaving and self._is_running and not self.agent.ended:
            self.step(LeaveAsked())
            self._flush()
        self._is_running = False

    # ---- the loop

    def _begin(self) -> None:
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

    def _handle(self, fd: int) -> None:
        dead = self.peers.died(fd)
        if dead is not None:
            self._bury(dead.member)
        elif self.switchboard.owns(fd):  # else an earlier descriptor of this turn has closed it
            for sender, message in self.switchboard.handle(fd, time.monotonic()):
                if self._is_running:
                    self._receive(sender, message)

    def _bury(self, member: Member) -> None:
        self.switchboard.forget(member.nonce)
        self._job.remove(socket_name(member.slot, member.nonce))
        self._known.pop(member.nonce, None)
        self._set_waiting(member.nonce, None)
        self.step(Died(member.nonce))

    def _receive(self, sender: bytes, message: Message) -> None:
        """Map the boards of those whom a message brings, then let the agent answer it."""
        members: tuple[Member, ...] = ()
        if isinstance(message, Accept):
            members = message.decision.members
        elif isinstance(message, Commit):
            members = message.decisions[-1].members if message.decisions else ()
        elif isinstance(message, Join):
            pid = self.switchboard.pid_of(sender) if sender == message.member.nonce else 0
            if not self._meet(message.member, pid) or not self.peers.is_mapped(message.member.nonce):
                return
        elif isinstance(message, Report):
            for cause in message.causes:
                if cause.cause == DEAD:
                    self.look_at(cause.slot)
        for member in members:
            self._meet(member)
        self.step(MessageReceived(sender, message))

    def _meet(self, member: Member, pid: int = 0) -> bool:
        """Watch a process from now on; False if its endpoint is no good."""
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
        for nonce in self.peers.left():
            self.step(Left(nonce))
        if self.agent.decided.members:
            self.step(Tick())
        elif self._is_running and not self.agent.ended:
            self.ask_to_join()  # the folder may show others by now

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
        self._owed = effect if self.owes_lane else None
        if self.owes_lane:
            return
        self._is_frozen = True
        states = tuple(self._lanes[lane].freeze() for lane in sorted(self._lanes))
        self._events.append(Frozen(effect.epoch, states))

    def _thaw(self, effect: Thaw) -> None:
        self._is_frozen = False
        self._owed = None
        for hooks in list(self._lanes.values()):
            hooks.thaw()
        later, self._later = self._later, []
        for wish in later:
            wish()

    def _decide(self, decision: Decision) -> None:
        for member in decision.members:
            self._meet(member)
        self.shared.decision = decision
        self.shared.error = None
        for member in decision.members:  # after it is shown: who looks here first and there then misses nobody
            self._set_waiting(member.nonce, None)
        for hooks in list(self._lanes.values()):
            hooks.decided(decision)
        self.board.decide(decision.epoch)
        self.peers.retire(decision)

    def _evicted(self, effect: Evicted) -> None:
        me, epoch = self.agent.me.slot, effect.epoch
        text = f"slot {me} was voted out of the group in epoch {epoch} ({effect.cause}); it may come back by joining"
        self._fail(EvictedError(text, [me], epoch=epoch, cause=effect.cause))
        self._is_running = False

    def _no_quorum(self, effect: NoQuorum) -> None:
        now, me = time.monotonic(), self.agent.me
        others = {m.slot: self.peers.get(m.nonce) for m in self.agent.decided.members if m.nonce != me.nonce}
        health = {slot: "unknown" if peer is None else peer.health(now) for slot, peer in sorted(others.items())}
        silent = [slot for slot, seen in health.items() if seen != "running"] or list(health)
        told = ", ".join(f"{slot} ({health[slot]})" for slot in silent)
        text = (
            f"slot {me.slot} cannot reach enough members to agree on what follows epoch {effect.epoch}: no answer from "
            f"slot(s) {told}; retry, calls go on when they answer, or make a new group"
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
        for hooks in list(self._lanes.values()):
            hooks.trouble(error)

    def _note_waiting(self, effect: JoinPending) -> None:
        self._set_waiting(effect.member.nonce, effect.member.slot)

    def _set_waiting(self, nonce: bytes, slot: int | None) -> None:
        if slot is not None:
            self._waiting[nonce] = slot
        elif self._waiting.pop(nonce, None) is None:
            return
        self.shared.waiting = tuple(sorted(set(self._waiting.values())))

    # ---- the end

    def _flush(self) -> None:
        """Send what is queued, for a moment: who does not read it learns it from the board."""
        until = time.monotonic() + FLUSH_S
        while not self.switchboard.is_idle and time.monotonic() < until:
            for fd, _ in self._poll.poll(max(0.0, until - time.monotonic())):
                if fd == self._bell:
                    os.eventfd_read(self._bell)
                elif self.switchboard.owns(fd):
                    self.switchboard.handle(fd, time.monotonic())  # what comes now is for nobody
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
            os.close(self._bell)
            self._bell = -1
        self._job.leave()

    def forked(self) -> None:
        """In a forked child: close the copies, touch nothing that is shared with the parent."""
        self._bell_lock = threading.Lock()
        self._job.forget()
        self.close()
