"""The control plane of one process, as engines and users call it. The work is done by the agent thread (`loop.py`).

Data path: `Runtime(job, slot)` makes the process's board, heartbeat and socket; its `member` is sent to the others by
any means (the store, once). `start(members)` begins with the first view; `join()` asks the processes in the job's
folder, and the given members of other hosts, to be added. From then on the view changes by agreement only
(`protocol/PROTOCOL.md`): engines register their groups, report the ranks that they wait for in vain, and learn
decisions.

Callers: any thread. Reads (`view`, `error`) take no lock and cost an attribute. Everything else is a request to the
agent thread; where the caller waits for the answer the wait is bounded.

A process that ends without `close` reports that in its last message (EXITED): for the others its rank has failed,
unless the program has destroyed its groups (LEFT). One that is killed is noticed by its pidfd; a forked child has no
part in it and gets `ForkError`.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing.util
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence

import torch.distributed as dist

from ..errors import (
    CommTimeoutError,
    EpeeError,
    ForkError,
    InvalidArgument,
    InvalidState,
    NoQuorumError,
    PeerError,
    SlotTakenError,
    context,
    expected,
    ignored,
)
from ..memory.shared import process_start_time
from ..threads import BackgroundThread
from .loop import Hooks, Loop
from .process.board import Board, GroupRow, acquire_beat, release_beat
from .protocol.agent import Agent
from .protocol.events import Accused, Admit, AgentSettings, Wanted
from .protocol.messages import BY_ITSELF, EXITED, LEFT, SLOT_TAKEN, Decision, GroupState, Member, Want
from .transport.directory import JobDirectory
from .transport.switchboard import BACKLOG
from .transport.wire import GROUP_ID_LIMIT, MAX_GROUPS, MAX_MEMBERS, NONCE_BYTES, Endpoint, pack_endpoint

ANSWER_S = 5.0  # time limit of the agent thread for a request
CLOSE_S = 5.0
CATCH_UP_POLL_S = 0.001  # between checks for answers of other members


def first_view(members: Sequence[Member]) -> Decision:
    """Return the view that initial members start with: epoch 1, each slot in its first incarnation."""
    return Decision(1, tuple(sorted(member.as_incarnation(1) for member in members)))


class Runtime:
    """One process's part in the view.

    Attributes:
        settings: its timeouts and policies; the same for all members.
    """

    def __init__(
        self,
        job: JobDirectory,
        slot: int,
        settings: AgentSettings | None = None,
        extra: bytes = b"",
        listener: socket.socket | None = None,
    ) -> None:
        """Make board, heartbeat, socket and identity; nothing runs yet, so a process that connects gets no answer.

        Args:
            job: the folder of the job; the runtime leaves it when it ends.
            slot: this process's rank number in the job.
            settings: the same for all members.
            extra: data about this process for other members' engines, at most 640 bytes.
            listener: a non-blocking TCP socket that listens at the address under which other hosts reach this process;
            the runtime owns it from now on. None where the job keeps to one host.
        Raises:
            InvalidArgument: `slot`, `settings` or `extra` break a rule.
            ResourceError, UnsupportedError: the system gives no memory, timer or descriptor, or the folder was removed.
        """
        if not 0 <= slot < MAX_MEMBERS:
            raise InvalidArgument(f"slot must lie in 0 ... {MAX_MEMBERS - 1}, got {slot}; jobs have 64 ranks at most")
        self.settings = _checked(settings or AgentSettings())
        self._pid = os.getpid()
        self._job = job
        self._listener = listener
        self._beat = acquire_beat()
        with contextlib.ExitStack() as undo:
            undo.callback(release_beat, self._beat)
            if listener is not None:
                undo.callback(listener.close)
            self._board = Board(slot)
            undo.callback(self._board.close)
            nonce = secrets.token_bytes(NONCE_BYTES)
            self._door = job.listen(slot, nonce, BACKLOG)
            undo.callback(job.remove, self._door.name)
            undo.callback(self._door.close)
            start_time = process_start_time(self._pid)
            where = ("", 0) if listener is None else listener.getsockname()[:2]
            endpoint = Endpoint(self._pid, start_time, self._door.fd, self._board.blob, self._beat.blob, extra, *where)
            self._me = Member(slot, 0, nonce, pack_endpoint(endpoint), job.host)
            undo.pop_all()
        self._loop: Loop | None = None
        self._thread: BackgroundThread | None = None
        self._rows: dict[int, GroupRow] = {}
        self._questions = itertools.count(1)  # of `catch_up`
        self._is_closed = False
        _runtimes.add(self)
        _at_exit()

    # ---- bootstrap

    @property
    def member(self) -> Member:
        """The member that this process is; the incarnation is 0 until it has joined."""
        return self._loop.agent.me if self._loop is not None else self._me

    def listen(self) -> None:
        """Create the loop that answers at the socket once this process has started; `start` and `join` do it, too.

        Raises:
            ResourceError: descriptors have run out.
        """
        self._require_usable()
        if self._loop is None:
            agent = Agent(self._me, self.settings)
            self._loop = Loop(self._job, self._door, self._board, agent, self._listener)

    def start(self, members: Sequence[Member]) -> Decision:
        """Begin with the first view, which consists of all initial members and is the same for all; return it.

        Raises:
            InvalidArgument: this process is not among them.
            ResourceError: as `listen`; or no thread is left.
        """
        first = first_view(members)
        mine = [member for member in first.members if member.nonce == self._me.nonce]
        if not mine or len({member.slot for member in first.members}) != len(first.members):
            raise InvalidArgument(f"members must hold slot {self._me.slot} (this process) and every slot once")
        self.listen()
        assert self._loop is not None
        self._loop.agent = Agent(mine[0], self.settings, first)
        self._loop.shared.decision = first
        self._run()
        return first

    def join(self, timeout_s: float, has_group: bool = False, contacts: Sequence[Member] = ()) -> Decision:
        """Ask to be added as a new member; return the first view that has this process.

        Later ones may be known already: the members do not wait for this thread. Members of this host are found in the
        job's folder.

        Args:
            timeout_s: how long to wait for it.
            has_group: a group is registered as soon as this returns; until then this process promises nothing, because
            it may soon be the only one that knows the progress of the group.
            contacts: members on other hosts, as a store lists them; former members among them do no harm.
        Raises:
            SlotTakenError: another process holds the slot, or was faster.
            InvalidState: the members have refused it for another reason.
            CommTimeoutError: no member has answered in time; the request is dropped.
        """
        self.listen()
        assert self._loop is not None
        self._loop.owes_group_state = has_group
        self._loop.contacts = tuple(member for member in contacts if member.host != self._job.host)
        self._run()
        self._loop.post(self._loop.ask_to_join)
        try:
            decision = self.await_decision(0, timeout_s) and self._loop.agent.joined
        except expected(EpeeError):
            self.close()
            raise
        if decision is None:
            self.close()
            where = context("join", rank=self._me.slot, elapsed=timeout_s)
            told = (
                f"{where}: no member has called group.recover_ranks([{self._me.slot}]) within {timeout_s:g} s, or the "
                f"job in {self._job.path} is dead"
            )
            raise CommTimeoutError(told, has_job=False)
        return decision

    # ---- called by engines

    def register(
        self,
        group_id: int,
        freeze: Callable[[], GroupState],
        thaw: Callable[[], None],
        decided: Callable[[Decision], None],
        trouble: Callable[[Exception], None],
        asked: Callable[[], None] = lambda: None,
    ) -> GroupRow:
        """Take part with a group (process group or buffer) from now on; return its row for hang reports.

        The callables are called on the agent thread (see `loop.Hooks`). A decision that falls between this call and the
        first read of `view` reaches the group both ways; epochs show it. While an agreement is under way the call
        waits.

        Args:
            group_id: id that all members of the group share.
        Raises:
            InvalidArgument: the id is out of range or taken, or there are too many groups.
            InvalidState: closed, or the agent did not answer.
        """
        if not 0 <= group_id <= GROUP_ID_LIMIT or group_id in self._rows:
            raise InvalidArgument(f"group_id must lie in 0 ... {GROUP_ID_LIMIT} and be new, got {group_id}")
        if len(self._rows) >= MAX_GROUPS:
            raise InvalidArgument(f"a process takes part in {MAX_GROUPS} groups and buffers at most; destroy some")
        loop, hooks = self._running(), Hooks(freeze, thaw, decided, trouble, asked)

        given_up = threading.Event()

        def wish(done: Callable[[], None]) -> None:
            """Register on the agent thread."""

            def keep(row: GroupRow) -> None:
                """Store the row, or free it where the caller has stopped waiting."""
                if given_up.is_set():
                    loop.unregister(group_id, row)
                    return
                self._rows[group_id] = row
                done()

            loop.register(group_id, hooks, keep)

        try:
            self._ask(wish)
        except expected(EpeeError):
            given_up.set()
            raise
        return self._rows[group_id]

    def register_board(self, group_id: int) -> GroupRow:
        """Take part with a group without calls, for the data that it publishes (`GroupRow.tell`); as `register`."""
        return self.register(group_id, lambda: GroupState(group_id, 0, 0), lambda: None, lambda _: None, lambda _: None)

    def unregister(self, group_id: int) -> None:
        """Unregister a group; its callables are not called any more once this has returned. Idempotent."""
        row = self._rows.pop(group_id, None)
        loop = self._loop
        if row is None or loop is None or loop.shared.has_ended:
            return

        def forget(done: Callable[[], None]) -> None:
            """Unregister on the agent thread."""
            loop.unregister(group_id, row)
            done()

        try:
            self._ask(forget)
        except expected(EpeeError):
            if not loop.shared.has_ended:  # else it was evicted just now, and nothing is called any more
                raise

    def since(self, epoch: int) -> tuple[Decision, ...]:
        """Return the decisions after `epoch` that are stored, oldest first."""
        found: list[Decision] = []
        loop = self._running()

        def look(done: Callable[[], None]) -> None:
            """Copy the history on the agent thread."""
            found.extend(decision for decision in loop.agent.history if decision.epoch > epoch)
            done()

        self._ask(look)
        return tuple(found)

    def accuse(self, slot: int, group_id: int, seq: int, epoch: int) -> None:
        """Report that call `seq` of group `group_id` waits for `slot` without progress; name all, and repeat.

        `epoch`: that of the last decision that the group had adopted when it checked; if it is not the newest one, the
        accusation does not count.
        """
        decision = self.view()
        for member in decision.members:
            if member.slot == slot:
                self._post_event(Accused(slot, member.incarnation, group_id, seq, epoch))

    def want(self, want: Want, epoch: int) -> None:
        """Request that members leave, or come back to, one group, and stay in the job. Repeat it; a decision ends it.

        `epoch`: that of the last decision that the group had adopted when it decided so.
        """
        self._post_event(Wanted(want, epoch))

    def view(self) -> Decision:
        """Return the view as this process knows it. No lock, no wait.

        Raises:
            ForkError, InvalidState: there is none (see the message).
        """
        loop = self._loop
        if loop is None or loop.shared.decision is None or os.getpid() != self._pid:
            self._require_usable()
            raise InvalidState("this process is no member yet; call start or join")
        return loop.shared.decision

    @property
    def lost_at(self) -> float:
        """Return the `time.monotonic()` value at which the last view that lost a member was shown here; 0.0: none."""
        return 0.0 if self._loop is None else self._loop.shared.lost_at

    def catch_up(self, timeout_s: float, slots: Collection[int] | None = None) -> None:
        """Exchange what is decided with other members: the view is then at least as new as theirs at this call, and
        theirs as this one's.

        A member that is dead, or does not answer within `timeout_s` seconds, is not waited for.

        Args:
            slots: the members to wait for; None: all.
        """
        loop, own, now = self._running(), self.member.nonce, time.monotonic()
        asked = [m for m in self.view().members if m.nonce != own and (slots is None or m.slot in slots)]
        found = (loop.peers.get(member.nonce) for member in asked)
        awaited = [peer for peer in found if peer is not None]
        until, ask_at, question = now + timeout_s, now, next(self._questions)
        while now < until and not loop.shared.has_ended:
            members = {loop.peers.get(member.nonce) for member in self.view().members}
            awaited = [p for p in awaited if p.answered < question and not p.is_dead and p in members]
            if not awaited:
                return
            if now >= ask_at:  # again: a message may be lost
                loop.post(lambda: loop.ask_members(question))
                ask_at = now + self.settings.answer_s
            time.sleep(CATCH_UP_POLL_S)
            now = time.monotonic()

    @property
    def error(self) -> PeerError | None:
        """The reason for which calls cannot end well: `EvictedError` for good, `NoQuorumError` for the time being;
        else None."""
        return None if self._loop is None else self._loop.shared.error

    def look_at(self, slot: int) -> None:
        """Report that member `slot` has died, as a rank that waited for it has seen; the agent checks it itself."""
        loop = self._running()
        loop.post(lambda: loop.look_at(slot))

    def set_death_window(self, seconds: float) -> None:
        """Let a decision on a death wait so long for further deaths, from now on (`AgentSettings.death_window_s`).

        Raises:
            InvalidArgument: not a number of seconds from 0 on.
        """
        self.settings = _checked(self.settings._replace(death_window_s=seconds))
        loop = self._running()
        loop.post(lambda: loop.agent.adopt(self.settings))

    def await_decision(self, after_epoch: int, timeout_s: float) -> Decision | None:
        """Wait for a view of a later epoch; None when there is none in time.

        Raises:
            EvictedError, NoQuorumError: there will be none, or not soon.
            InvalidState: the process was closed or refused meanwhile.
        """
        self._require_usable()
        shared = self._running().shared
        deadline = time.monotonic() + timeout_s
        while True:
            decision = shared.decision
            if decision is not None and decision.epoch > after_epoch:
                return decision
            if shared.error is not None:
                raise shared.error
            if shared.refused:
                kind = SlotTakenError if shared.refused == SLOT_TAKEN else InvalidState
                raise kind(f"slot {self._me.slot} may not join: {shared.refused}")
            if shared.has_ended:
                self._require_usable()
                raise InvalidState("the agent has ended; this process no longer takes part") from shared.failure
            if time.monotonic() > deadline:
                return None
            self._board.await_change(decision.epoch if decision is not None else 0)

    # ---- called by users

    def waiting(self) -> tuple[int, ...]:
        """Return the slots for which a process asks to join, ascending."""
        return self._running().shared.waiting

    def admit(self, slots: Sequence[int]) -> None:
        """Add the processes that wait for these slots (with `AgentSettings.admit="ask"`). Any one member suffices."""
        self._post_event(Admit(tuple(slots)))

    def health(self, slot: int) -> str:
        """Return "running", "busy" (it holds the GIL), "stopped", "frozen" or "dead"; "unknown" for no member.

        Of a member on another host it is "reachable", "unreachable" or "dead". It is for messages: only "dead" is a
        proof.
        """
        if slot == self._me.slot:
            return "running"
        loop = self._running()
        for member in self.view().members:
            peer = loop.peers.get(member.nonce)
            if member.slot == slot and peer is not None:
                return peer.health(time.monotonic())
        return "unknown"

    def is_dead(self, member: Member) -> bool:
        """Return whether this process's agent has proof that a member is dead."""
        peer = self._running().peers.get(member.nonce)
        return peer is not None and peer.is_dead

    def host_of(self, slot: int) -> str:
        """Return the key of the host on which a member runs; "" for no member."""
        return next((member.host for member in self.view().members if member.slot == slot), "")

    def told(self, group_id: int) -> dict[int, bytes]:
        """Return the data that the other members publish for a group: slot -> bytes, of those that publish any.

        Inside a host it stands on their boards at once; from other hosts it comes a moment later.
        """
        loop, found = self._running(), {}
        for member in self.view().members:
            peer = loop.peers.get(member.nonce)
            if peer is not None:
                with ignored(ValueError):  # closed meanwhile
                    found[member.slot] = peer.told(group_id)
        return {slot: data for slot, data in found.items() if data}

    def unheard(self) -> list[int]:
        """Return the slots of the other members whose data for groups is not, or not completely, known here yet."""
        loop, own = self._running(), self.member.nonce
        found = []
        for member in self.view().members:
            peer = loop.peers.get(member.nonce)
            if member.nonce != own and (peer is None or not peer.has_told):
                found.append(member.slot)
        return found

    def dropped(self) -> dict[str, int]:
        """Return how often connections or messages of others were dropped, by reason."""
        return {} if self._loop is None else dict(self._loop.switchboard.dropped)

    def leave(self) -> None:
        """Announce to the others that this process leaves, and leave; `close` afterwards is harmless."""
        self.close()

    def close(self, cause: str = LEFT) -> None:
        """Leave if it has not happened yet, end the thread and free everything; idempotent.

        Args:
            cause: the cause that is reported to the others: LEFT or EXITED. At the end of the process `note_exit` gives
            it.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        _runtimes.discard(self)
        loop, thread = self._loop, self._thread
        with contextlib.ExitStack() as rest:  # whatever a step raises, the others are done
            rest.callback(release_beat, self._beat)
            if loop is not None and thread is threading.current_thread():
                loop.post(lambda: loop.stop(max(cause, _end, key=BY_ITSELF.index)))
                return  # called by a hook; the board is freed with the last reference
            rest.callback(self._board.close)
            if loop is None:
                rest.callback(self._job.leave)
                self._close_doors()
            elif thread is None:  # it could not be started
                loop.close()
            else:
                loop.post(lambda: loop.stop(max(cause, _end, key=BY_ITSELF.index)))
                thread.join(CLOSE_S)
                if not thread.is_alive():
                    loop.close()  # for a thread that an interrupt of `begin` has kept from running

    # ---- internal

    def _run(self) -> None:
        assert self._loop is not None
        if self._thread is not None:
            raise InvalidState("this process has started already")
        self._thread = thread = BackgroundThread(self._loop.run, f"epee-agent-{self._me.slot}")
        try:
            thread.begin("the agent of this process, which watches the ranks of the job")
        except BaseException:
            if not thread.is_alive():
                self._thread = None
            raise

    def _running(self) -> Loop:
        self._require_usable()
        if self._loop is None or self._thread is None:
            raise InvalidState("this process has not started; call start or join")
        return self._loop

    def _post_event(self, event: Accused | Admit | Wanted) -> None:
        loop = self._running()
        loop.post(lambda: loop.step(event))

    def _ask(self, wish: Callable[[Callable[[], None]], None]) -> None:
        """Let the agent thread do something and wait until it calls back."""
        loop, done = self._running(), threading.Event()
        if threading.current_thread() is self._thread:
            wish(done.set)
            return
        loop.post(lambda: wish(done.set))
        deadline = time.monotonic() + ANSWER_S + self.settings.no_quorum_s
        while not done.wait(0.05):
            if loop.shared.has_ended or time.monotonic() > deadline:
                if done.wait(0.05):
                    return
                raise loop.shared.error or NoQuorumError("the agent is busy: too few members answer to agree on a view")

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError("the control plane was made before a fork; make groups and buffers in the child itself")
        if self._is_closed:
            raise InvalidState("the control plane is closed")

    def forked(self) -> None:
        """Close the copies of the parent's descriptors in a forked child."""
        if self._loop is not None:
            self._loop.forked()
        elif not self._is_closed:
            self._close_doors()
            self._job.forget()
        self._board.close()

    def _close_doors(self) -> None:
        try:
            self._door.close()
        finally:
            if self._listener is not None:
                self._listener.close()


def _checked(settings: AgentSettings) -> AgentSettings:
    if settings.policy not in ("evict", "error", "wait") or settings.admit not in ("auto", "ask"):
        raise InvalidArgument(
            f"policy must be evict, error or wait and admit auto or ask, got {settings.policy!r} and {settings.admit!r}"
        )
    for name in ("answer_s", "wait_limit_s", "no_quorum_s", "silence_s"):
        value = getattr(settings, name)
        if not 0 < value < 1e6:
            raise InvalidArgument(f"{name} must be a number of seconds above 0, got {value!r}")
    if not 0 <= settings.death_window_s < 1e6:
        raise InvalidArgument(f"death_window_s must be a number of seconds from 0 on, got {settings.death_window_s!r}")
    return settings


_groups: set[int] = set()  # ids of groups of the backend that the program has not destroyed
_end = LEFT  # what this process reports when it leaves a job
_runtimes: set[Runtime] = set()  # kept until they are closed: the thread would go on without its owner
_has_finalizer: set[int] = set()  # pids: a forked child inherits this, but not the finalizer


def begin_group(group: int) -> None:
    """Record that this process has a group, under any number, until `end_group`."""
    _groups.add(group)


def end_group(group: int) -> None:
    """Record that the program has destroyed a group."""
    _groups.discard(group)


def has_groups() -> bool:
    """Return whether there are groups, of any backend, that the program has made and not destroyed."""
    return bool(_groups) or dist.is_initialized()


def note_exit() -> str:
    """Record that the interpreter ends; return the cause that this process reports to its peers.

    LEFT where the program has destroyed its groups, torch's default group included, and EXITED otherwise: a program
    that ends by an exception or by `sys.exit` has failed for its peers, whatever its exit code.
    """
    global _end
    if has_groups():
        _end = EXITED
    return _end


def _close_all() -> None:
    note_exit()
    for runtime in list(_runtimes):
        runtime.close()


def _at_exit() -> None:
    """Run at the exit of the process: children of `multiprocessing` skip what `atexit` keeps and run their
    finalizers only."""
    if os.getpid() not in _has_finalizer:
        _has_finalizer.add(os.getpid())
        multiprocessing.util.Finalize(None, _close_all, exitpriority=100)


def _mark_forked() -> None:
    _groups.clear()
    for runtime in list(_runtimes):
        runtime.forked()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_mark_forked)
