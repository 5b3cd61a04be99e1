"""The input and output of an agent: events, effects, settings. Plain values, as in `messages.py`.

The runtime (sockets, boards, pidfds, engines) turns what happens into events and carries out the effects of a step **in
their order**: a `WriteBoard` must be readable by others before the `Send` that follows it leaves. The simulator does
the same with virtual time. A process is named by its nonce, because a slot may have had several; only the local engine
uses slots.
"""

from __future__ import annotations

from typing import NamedTuple

from .messages import LEFT, BoardState, Decision, GroupState, Member, Message, Want


class AgentSettings(NamedTuple):
    """The timeouts and policies of an agent; the same for all members.

    Attributes:
        policy: the effect of an accusation: "evict" removes the accused, "error" and "wait" leave the view unchanged. A
        lost host is removed under any policy.
        answer_s: time within which a live process answers, when nothing is wrong.
        wait_limit_s: time that a coordinator waits for a silent member before "evict" leaves it out where some member
            is accused, and time for which an accusation or the request of a joiner stays valid without being repeated.
        no_quorum_s: after this time without a decision that is needed the agent reports `NoQuorum`.
        admit: "auto" adds joiners as they come, "ask" waits for an `Admit` at any one member.
        silence_s: how long a member that is not accused may owe an answer before it is removed together with a lost
        host: as long as a host may be silent.
        death_window_s: how long a decision on a death waits for further deaths. It counts from the first death that the
        coordinator knows of in an epoch; other pending changes wait as well.
    """

    policy: str = "error"
    answer_s: float = 0.1
    wait_limit_s: float = 0.8
    no_quorum_s: float = 5.0
    admit: str = "auto"
    silence_s: float = 10.0
    death_window_s: float = 0.0


# ---- events


class MessageReceived(NamedTuple):
    """A message of an authenticated process; `sender` is its nonce."""

    sender: bytes
    message: Message


class Died(NamedTuple):
    """Proof of death of the process with this nonce, which runs on this host (its pidfd is readable). May repeat."""

    nonce: bytes


class Left(NamedTuple):
    """The process with this nonce has left for good: it has announced it, and writes nothing any more.

    Attributes:
        cause: LEFT or EXITED.
    """

    nonce: bytes
    cause: str = LEFT


class HostLost(NamedTuple):
    """No agent of a host can be reached: all connections were reset and cannot be made again, or are silent.

    Its members may live, so this is an accusation of all of them at once; it is repeated, like `Accused`, while it
    holds (at least twice in `wait_limit_s`). It counts under any policy.
    """

    host: str


class BoardRead(NamedTuple):
    """The answer to `ReadBoard`. `state` is None when the board cannot be read: the slot is then no witness.

    A board that was never written reads as `BLANK_BOARD`.
    """

    nonce: bytes
    state: BoardState | None


class Accused(NamedTuple):
    """The local engine waited for this member until its timeout, without progress.

    The engine names all members that are behind, not one, and repeats this while it goes on waiting (at least twice
    in `wait_limit_s`): accusations do not survive a decision. An accusation formed before a decision that the engine
    has not adopted yet does not count either: a rank that has moved on to the new view looks silent in the old one.

    Attributes:
        epoch: that of the last decision that the engine had adopted when it checked which members are behind.
    """

    slot: int
    incarnation: int
    group_id: int
    seq: int
    epoch: int


class Wanted(NamedTuple):
    """The local engine requests that members leave, or come back to, one group, after the group has agreed on it.

    It repeats this while it waits (at least twice in `wait_limit_s`): wants do not survive a decision, whatever it
    says, because their reasons may no longer hold. Of two that contradict each other the first is met, or none.

    Attributes:
        epoch: that of the last decision that the engine had adopted; an older one does not count.
    """

    want: Want
    epoch: int


class Frozen(NamedTuple):
    """The local engines have stopped for `Freeze(epoch)`: nothing completes or starts until `Thaw`, in any group."""

    epoch: int
    groups: tuple[GroupState, ...]


class JoinAsked(NamedTuple):
    """This process wants to join; `contacts` are members that it knows of (from the store or the directory)."""

    contacts: tuple[Member, ...]


class Admit(NamedTuple):
    """A user of this member asks to add the processes that wait for these slots.

    The calls are `recover_ranks` and `extend_group_size_to`.
    """

    slots: tuple[int, ...]


class LeaveAsked(NamedTuple):
    """This process leaves; its engines have stopped. Afterwards the agent does nothing any more.

    Attributes:
        cause: LEFT or EXITED.
    """

    cause: str = LEFT


class Tick(NamedTuple):
    """Time has passed; due at `Agent.next_tick`, harmless at any time."""


Event = (
    MessageReceived
    | Died
    | Left
    | HostLost
    | BoardRead
    | Accused
    | Wanted
    | Frozen
    | JoinAsked
    | Admit
    | LeaveAsked
    | Tick
)


# ---- effects


class Send(NamedTuple):
    """Send `message` to a process; it may be lost, delayed or duplicated."""

    to: Member
    message: Message


class WriteBoard(NamedTuple):
    """Replace the state on this process's board, at once or not at all, before any `Send` that follows."""

    state: BoardState


class ReadBoard(NamedTuple):
    """Read the board of a process of this host that is dead or has left; answered by `BoardRead`."""

    member: Member


class Freeze(NamedTuple):
    """Stop all engines: no call completes, none gets a new seq. Answered by `Frozen` with the same epoch."""

    epoch: int


class Thaw(NamedTuple):
    """The engines may go on (after the `Decide` before it, if any)."""


class Decide(NamedTuple):
    """A new view. In order of epochs, each once, to members only."""

    decision: Decision


class Evicted(NamedTuple):
    """This process is not in the view of `epoch`; the agent does nothing any more."""

    epoch: int
    cause: str


class NoQuorum(NamedTuple):
    """No agreement on what follows `epoch` within `no_quorum_s`. A later `Decide` ends this state."""

    epoch: int


class JoinPending(NamedTuple):
    """A process asks to join (reported once): `Admit` of its slot would add it."""

    member: Member


class Refused(NamedTuple):
    """This process may not join."""

    reason: str


Effect = Send | WriteBoard | ReadBoard | Freeze | Thaw | Decide | Evicted | NoQuorum | JoinPending | Refused
