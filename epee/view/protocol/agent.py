"""The agent of one process: the state machine that holds the view and agrees with other agents on the next one.

`step(event, now)` returns the effects to carry out, in order. The module has no thread, socket, clock or random number;
the runtime and the simulator drive the same code. The protocol is described and proved in `PROTOCOL.md`. This module is
the part that answers: it promises, accepts, learns decisions. `proposer.py` is the part that acts.

Writers and readers: an agent writes its own board only, before the answer that depends on it. After its death other
agents read the board, so a promise or an acceptance that any of them may have counted can always be found.

Groups are frozen from the first promise for an epoch until the next decision is known: `Freeze`, then `Frozen` from the
local engines, then the promise, always with the same numbers.

A crash between any two effects leaves a board that is at least as new as every message sent: the write comes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from .decision import BLANK, cause_of, is_null
from .events import (
    Accused,
    Admit,
    AgentSettings,
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
    ReadBoard,
    Send,
    Thaw,
    Tick,
    Wanted,
    WriteBoard,
)
from .messages import (
    BY_ITSELF,
    DEAD,
    NO_BALLOT,
    STALLED,
    UNREACHABLE,
    Accept,
    Accepted,
    Ask,
    Ballot,
    BoardState,
    Commit,
    Decision,
    GroupState,
    Join,
    JoinRefused,
    Member,
    Message,
    Nack,
    Obituary,
    Prepare,
    Promise,
    Removal,
    Report,
)
from .outcome import first_seq
from .proposer import Proposer, obituary_of

BLANK_BOARD = BoardState(BLANK, NO_BALLOT, NO_BALLOT, None)
HISTORY = 64  # decisions kept for processes that lag by more than one: evicted ones, or those put out of a group
HISTORY_MEMBERS = 1 << 14  # or more, as many as name this number of members together, some 4 MB
COMMIT_LIMIT = 8  # decisions in one message
MAX_SLOTS = 4096


class Agent(Proposer):
    """One process of the job.

    An initial member is made with the first decision (the same at all initial members); a joiner without one, and gets
    its incarnation when it is added. The first step writes the board.

    Attributes:
        me: this process; its incarnation is 0 until it is a member.
        decided: the last decision that is known; `BLANK` (epoch 0) before there is one.
        joined: the decision that added this process; None for an initial member.
        next_tick: time at which `step(Tick(), now)` is due at the latest; infinite when nothing is waited for.
        ended: True when the agent does nothing any more (evicted, refused, left).
    """

    def __init__(self, me: Member, settings: AgentSettings, first: Decision | None = None) -> None:
        super().__init__(me, settings)
        self.history: deque[Decision] = deque()
        self._past: dict[bytes, Member] = {}
        self._proofs: dict[bytes, str] = {}
        self._wills: dict[bytes, BoardState] = {}  # states read from the boards of processes that died on other hosts
        self.joined: Decision | None = None
        # group -> the decision that brought this process back, where that was later than its join
        self._came_back: dict[int, Decision] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            MessageReceived: self._received,
            Died: lambda event: self._proof(event.nonce, DEAD),
            Left: lambda event: self._proof(event.nonce, event.cause),
            HostLost: self._host_lost,
            BoardRead: self._board_read,
            Accused: self._accused,
            Wanted: self._wanted,
            Frozen: self._frozen,
            JoinAsked: self._join_asked,
            Admit: self._admit,
            LeaveAsked: self._leave_asked,
            Tick: lambda event: None,
        }
        self._messages: dict[type, Callable[[bytes, Any], None]] = {
            Prepare: self._prepare,
            Promise: self._promise,
            Nack: self._nack,
            Accept: self._accept,
            Accepted: self._accepted,
            Commit: self._commit,
            Report: self._report,
            Join: self._join,
            JoinRefused: self._join_refused,
            Ask: self._ask,
            Obituary: self._obituary,
        }
        if first is not None:
            self._enter(first)
            self._write_board()

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event at time `now` (seconds, any monotonic clock) and return the effects in order."""
        if not self.ended:
            self._advance_clock(now)
            self._handlers[type(event)](event)
        if not self.ended:
            self._drive()
            self._set_tick(now)
        out, self._out = self._out, []
        return out

    # ---- messages of other agents

    def _received(self, event: MessageReceived) -> None:
        if event.sender == self.me.nonce:
            return
        if self.joins.requests:
            self.joins.heard_from(event.sender, self.members)
        self._messages[type(event.message)](event.sender, event.message)

    def _out_of_step(self, sender: bytes, epoch: int) -> bool:
        """Handle a message about another epoch than ours: one of the two agents has to learn decisions first."""
        if epoch == self.epoch:
            return sender not in self.slot_of
        if epoch < self.epoch:
            self._reply(sender, Commit(self._since(epoch)))
        elif self.epoch:
            self._reply(sender, Ask(self.epoch))
        return True

    def _prepare(self, sender: bytes, message: Prepare) -> None:
        if self._out_of_step(sender, message.epoch) or message.ballot.slot != self.slot_of[sender]:
            return
        if message.ballot < self.promised:
            self._reply(sender, Nack(message.ballot, self.epoch, self.promised))
            return
        self._yield_to(message.ballot)
        self._ask_for_promise(message.ballot)

    def _ask_for_promise(self, ballot: Ballot) -> None:
        """Promise `ballot` as soon as the groups are frozen."""
        if ballot >= self._pending:
            self._pending = ballot
        if self._groups is not None:
            self._give_promise()
        elif not self._freezing:
            self._freezing = True
            self._out.append(Freeze(self.epoch))

    def _frozen(self, event: Frozen) -> None:
        if self._freezing and event.epoch == self.epoch:
            self._freezing = False
            self._groups = self._told(event.groups)
            self._give_promise()

    def _told(self, groups: tuple[GroupState, ...]) -> tuple[GroupState, ...]:
        """Return the group states to promise: a joiner has completed no call from before its join."""
        return tuple(
            s if s.completed >= self._first_seq(s.group_id) else GroupState(s.group_id, 0, *s[2:]) for s in groups
        )

    def _first_seq(self, group_id: int) -> int:
        came = self._came_back.get(group_id, self.joined)
        return 0 if came is None else first_seq(came, group_id)

    def _give_promise(self) -> None:
        ballot, self._pending = self._pending, NO_BALLOT
        assert self._groups is not None
        if ballot < self.promised or ballot == NO_BALLOT:
            return
        if ballot != self.promised:
            self.promised = ballot
            self._write_board()
        answer = Promise(ballot, self.epoch, self.accepted_ballot, self.accepted, self._groups)
        if ballot.slot == self.me.slot:
            self._promise(self.me.nonce, answer)
        else:
            self._out.append(Send(self.members[ballot.slot], answer))

    def _accept(self, sender: bytes, message: Accept) -> None:
        if self._out_of_step(sender, message.epoch) or message.ballot.slot != self.slot_of[sender]:
            return
        if message.decision.epoch != self.epoch + 1:
            return
        if message.ballot < self.promised:
            self._reply(sender, Nack(message.ballot, self.epoch, self.promised))
            return
        self._yield_to(message.ballot)
        self._take(message.ballot, message.decision)
        self._reply(sender, Accepted(message.ballot, self.epoch))

    def _take(self, ballot: Ballot, decision: Decision) -> None:
        """Accept a decision: the board is written first."""
        if self.accepted_ballot != ballot:
            self.promised = self.accepted_ballot = ballot
            self.accepted = decision
            self._write_board()

    def _commit(self, sender: bytes, message: Commit) -> None:
        for decision in message.decisions:
            if self.ended or not self._may_tell(sender, decision):
                return
            if not self.epoch:
                self._begin_with(sender, decision)
            elif decision.epoch == self.epoch + 1:
                self._learn(decision)
            elif decision.epoch > self.epoch:
                if self._is_in(decision):
                    self._reply(sender, Ask(self.epoch))
                else:
                    self._end(decision)

    def _begin_with(self, sender: bytes, decision: Decision) -> None:
        """Begin, as a joiner, with the decision that added this process, not with a later one that arrived first."""
        for member in decision.members:
            if member.nonce == self.me.nonce:
                if member.incarnation == decision.epoch:
                    self._learn(decision)
                else:
                    self._reply(sender, Ask(member.incarnation - 1))

    def _is_in(self, decision: Decision) -> bool:
        return any(member.nonce == self.me.nonce for member in decision.members)

    def _may_tell(self, sender: bytes, decision: Decision) -> bool:
        """Return whether a process can know a decision: it is or was a member, or has become one by it."""
        if sender in self.slot_of or sender in self._past or sender in self._contacts:
            return True
        return any(member.nonce == sender for member in decision.members)

    def _ask(self, sender: bytes, message: Ask) -> None:
        if 0 < self.epoch < message.epoch:  # who asks knows more: what it knows comes first, its next question later
            self._reply(sender, Ask(self.epoch))
        elif self.epoch:
            self._reply(sender, Commit(self._since(message.epoch), message.question))

    def _report(self, sender: bytes, message: Report) -> None:
        if self._out_of_step(sender, message.epoch):
            return
        by = self.slot_of[sender]
        for cause in message.causes:
            member = self.members.get(cause.slot)
            if member is None or member.incarnation != cause.incarnation:
                continue
            if cause.cause in BY_ITSELF and cause.slot == by:
                self._proof(sender, cause.cause)
            elif cause.cause == STALLED:
                self._note_accusation(cause.slot, by)
            elif cause.cause == UNREACHABLE:
                self._note_lost(member.host, by)
        for want in message.wants:
            self._note_want(want)

    # ---- learning decisions

    def _learn(self, decision: Decision) -> None:
        """Adopt a decision that was chosen."""
        mine = next((member for member in decision.members if member.nonce == self.me.nonce), None)
        if mine is None:
            self._end(decision)
            return
        if not self.epoch:
            self.joined = decision
        was_frozen = self._freezing or self._groups is not None
        changed = not is_null(decision, self.decided)
        self.me = mine
        if changed:
            self._tries = 0
        elif self._wants:
            self._tries += 1
            self._no_wants_before = self._t + self.settings.wait_limit_s
        own = {part.group_id: part.since for part in decision.parts if part[1:3] == mine[:2]}
        self._came_back = {group_id: came for group_id, came in self._came_back.items() if group_id in own}
        self._came_back.update((group_id, decision) for group_id, since in own.items() if since == decision.epoch)
        self._enter(decision)
        self._write_board()
        self._out.append(Decide(decision))
        if was_frozen:
            self._out.append(Thaw())
        if not changed:
            self.joins.postpone(self._t + self.settings.wait_limit_s)
        self._settle_joins(decision)

    def _enter(self, decision: Decision) -> None:
        """Enter the epoch of `decision`: everything about the step to it is over."""
        for member in self.decided.members:
            self._past[member.nonce] = member
        while len(self._past) > HISTORY:
            del self._past[next(iter(self._past))]
        self.decided = decision
        self.epoch = decision.epoch
        self.history.append(decision)
        while len(self.history) > max(HISTORY, HISTORY_MEMBERS // max(1, len(decision.members))):
            self.history.popleft()
        self.members = {member.slot: member for member in decision.members}
        self.slot_of = {member.nonce: member.slot for member in decision.members}
        self.promised = self.accepted_ballot = self._pending = NO_BALLOT
        self.accepted = None
        self._groups = None
        self._freezing = False
        self._fresh_epoch()
        self.gone = {}
        self.boards = {}
        self._read = set()
        for nonce, cause in list(self._proofs.items()):
            if nonce in self._past and nonce not in self.slot_of:
                del self._proofs[nonce]
                self._wills.pop(nonce, None)
            elif nonce in self.slot_of:
                self._mark_gone(nonce, cause)

    def _end(self, decision: Decision) -> None:
        cause = cause_of(decision, self.me.slot, self.me.incarnation)
        self.ended = True
        self._out.append(Evicted(decision.epoch, cause))

    def _proof(self, nonce: bytes, cause: str) -> None:
        """Record permanently that a process writes no more, whether it is a member already or not."""
        if nonce == self.me.nonce or nonce in self._proofs:
            return
        self.joins.drop(nonce)
        if nonce in self._past and nonce not in self.slot_of:
            return
        if not self.epoch and nonce in self._contacts and self._contacts[nonce].host == self.me.host:
            self._out.append(ReadBoard(self._contacts[nonce]))  # it may have added this process before it died
        self._proofs[nonce] = cause
        while len(self._proofs) > MAX_SLOTS:
            del self._proofs[next(iter(self._proofs))]
        if nonce in self.slot_of:
            self._mark_gone(nonce, cause)

    def _mark_gone(self, nonce: bytes, cause: str) -> None:
        slot = self.slot_of[nonce]
        self.gone[slot] = cause
        if cause == DEAD and self._dead_since is None:
            self._dead_since = self._t
        if self.members[slot].host == self.me.host:
            self._out.append(ReadBoard(self.members[slot]))
        elif nonce in self._wills:
            self._note_board(slot, self._wills[nonce])
        self._hurry(slot)

    def _board_read(self, event: BoardRead) -> None:
        slot = self.slot_of.get(event.nonce)
        if not self.epoch and event.state is not None:
            self._begin_with(event.nonce, event.state.decided)
        if slot is None or slot not in self.gone:
            return
        if event.state is not None and event.state.decided.epoch == self.epoch + 1:
            self._learn(event.state.decided)
            return
        self._read.add(slot)
        self._mourned_at = self._t - self.settings.wait_limit_s  # at once
        if event.state is not None:
            self._note_board(slot, event.state)

    def _obituary(self, sender: bytes, message: Obituary) -> None:
        """Handle the obituary of a process, sent by an agent of its host or by itself when it leaves.

        It is as good as reading the board.
        """
        owner, by = self._known(message.nonce), self._known(sender)
        if owner is None or by is None or owner.host != by.host or owner.host == self.me.host:
            return
        if sender == message.nonce and message.cause not in BY_ITSELF:
            return
        if message.board is not None:
            self._wills[message.nonce] = message.board
            while len(self._wills) > MAX_SLOTS:
                del self._wills[next(iter(self._wills))]
        self._proof(message.nonce, message.cause)
        slot = self.slot_of.get(message.nonce)
        if slot is not None and message.board is not None and slot not in self.boards:
            self._note_board(slot, message.board)

    def _known(self, nonce: bytes) -> Member | None:
        slot = self.slot_of.get(nonce)
        return self.members[slot] if slot is not None else self._past.get(nonce)

    def _note_board(self, slot: int, state: BoardState) -> None:
        """Store the board state of a process that has failed or left, if it can witness for this epoch."""
        if state.decided.epoch <= self.epoch:
            self.boards[slot] = state
        else:  # its promise for our epoch is no longer on its board, so it is no witness: this agent lags behind
            self._ask_everybody()

    # ---- helpers

    def _write_board(self) -> None:
        self._out.append(WriteBoard(BoardState(self.decided, self.promised, self.accepted_ballot, self.accepted)))

    def _since(self, epoch: int) -> tuple[Decision, ...]:
        """Return the decisions after `epoch`, oldest first; only the newest where the oldest is no longer stored."""
        later = [decision for decision in self.history if decision.epoch > epoch]
        if later and later[0].epoch > epoch + 1:
            return (later[-1],)
        return tuple(later[:COMMIT_LIMIT])

    def _reply(self, sender: bytes, message: Message) -> None:
        """Answer a process if it is known: a member, one of an earlier epoch, or a joiner."""
        slot = self.slot_of.get(sender)
        member = self.members[slot] if slot is not None else self._past.get(sender) or self._contacts.get(sender)
        if member is None and sender in self.joins.requests:
            member = self.joins.requests[sender].member
        if member is not None:
            self._out.append(Send(member, message))

    # ---- joins

    def _join_asked(self, event: JoinAsked) -> None:
        if not self.epoch and not self._refusal:
            self._contacts = {member.nonce: member for member in event.contacts}
            self._join_at = self._t

    def _join_refused(self, sender: bytes, message: JoinRefused) -> None:
        """Stop asking, but do not end at once: the sender may be leaving itself, and a decision may be under way."""
        if not self.epoch and message.nonce == self.me.nonce and not self._refusal:
            self._refusal = message.reason or "refused"
            self._join_at = self._t + self.settings.wait_limit_s

    def _join(self, sender: bytes, message: Join) -> None:
        """Handle a join request: from the joiner itself, or passed on by a member, which means that it is admitted."""
        member, nonce = message.member, message.member.nonce
        if not self.epoch or (sender != nonce and sender not in self.slot_of):
            return
        if nonce in self.slot_of:
            first = next((d.epoch for d in self.history if any(m.nonce == nonce for m in d.members)), 1)
            self._out.append(Send(member, Commit(self._since(first - 1))))
            return
        if nonce in self._proofs:
            return
        if nonce in self._past or not 0 <= member.slot < MAX_SLOTS:
            self._refuse(member, "this process was a member before" if nonce in self._past else "no such slot")
            return
        admitted = self.settings.admit == "auto" or sender != nonce
        is_new = self.joins.note(member.as_incarnation(0), self._t, admitted)
        if is_new:
            self._out.append(JoinPending(member))
        if admitted and sender == nonce:
            self._pass_on(message)

    def _admit(self, event: Admit) -> None:
        self.joins.admit(event.slots)
        for request in self.joins.requests.values():
            if request.member.slot in event.slots:
                self._pass_on(Join(request.member))

    def _leave_asked(self, event: LeaveAsked) -> None:
        me = self.me
        will = obituary_of(
            me, event.cause, BoardState(self.decided, self.promised, self.accepted_ballot, self.accepted)
        )
        for member in self.decided.members:
            if member.host != me.host:
                self._out.append(Send(member, will))
            elif member.slot != me.slot:
                self._out.append(Send(member, Report(self.epoch, (Removal(me.slot, me.incarnation, event.cause),))))
        self.ended = True
