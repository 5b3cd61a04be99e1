"""What goes into an agent and what comes out: events, effects, settings. Plain values, as in `messages.py`.

The runtime (sockets, boards, pidfds, engines) turns what happens into events and carries out the effects of a step
**in their order**: a `WriteBoard` must be readable by others before the `Send` that follows it leaves. The simulator
does the same with virtual time. A process is named by its nonce, because a slot may have had several; only the local
engine speaks of slots.
"""

from __future__ import annotations

from typing import NamedTuple

from .messages import LEFT, BoardState, Decision, LaneState, Member, Message, Want


class AgentSettings(NamedTuple):
    """The patience of an agent; the same for all members.

    Attributes:
        policy: what an accusation does: "evict" removes the accused, "error" and "wait" leave the view alone. A host
            that is lost goes whatever it says.
        answer_s: how long a live process takes to answer at most, when nothing is wrong.
        patience_s: how long a coordinator waits for a silent member before "evict" leaves it out where somebody is
            accused, and how long an accusation or the word of a joiner stays valid without being repeated.
        no_quorum_s: after this time without a decision that is needed the agent tells `NoQuorum`.
        admit: "auto" takes joiners in as they come, "ask" waits for an `Admit` at any one member.
        silence_s: how long a member that nobody accuses may owe an answer before it goes along with a lost host: as
            long as a host may be silent.
        death_window_s: how long a decision on a death waits for further deaths. It counts from the first death that the
            coordinator knows of in an epoch; what else is to be decided waits as well.
    """

    policy: str = "error"
    answer_s: float = 0.1
    patience_s: float = 0.8
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
    """The process with this nonce has left for good: it has said so, and writes nothing any more.

    Attributes:
        cause: LEFT or EXITED.
    """

    nonce: bytes
    cause: str = LEFT


class HostLost(NamedTuple):
    """No agent of a host can be reached: all connections were reset and cannot be made again, or are silent.

    Its members may live, so this is an accusation, of all of them at once; repeated, like `Accused`, while it is so (at
    least twice in `patience_s`). It counts whatever the policy is.
    """

    host: str


class BoardRead(NamedTuple):
    """The answer to `ReadBoard`. `state` is None when the board cannot be read: the slot is then no witness.

    A board that was never written reads as `BLANK_BOARD`.
    """

    nonce: bytes
    state: BoardState | None


class Accused(NamedTuple):
    """The local engine waited for this member until its time-out, without progress.

    The engine names all members that are behind, not one, and repeats this while it goes on waiting (at least twice
    in `patience_s`): accusations do not survive a decision. One that was formed before a decision which the engine has
    not taken over yet does not count either: a rank that has moved on to the new view looks silent in the old one.

    Attributes:
        epoch: of the last decision that the engine had taken over when it looked who is behind.
    """

    slot: int
    incarnation: int
    lane: int
    seq: int
    epoch: int


class Wanted(NamedTuple):
    """The local engine asks that members go, or come back, in one lane, because it has found that they shall.

    It repeats this while it waits (at least twice in `patience_s`): wants do not survive a decision, whatever it says,
    because what they rest on may be over. Of two that contradict each other the first is met, or none.

    Attributes:
        epoch: of the last decision that the engine had taken over; an older one does not count.
    """

    want: Want
    epoch: int


class Frozen(NamedTuple):
    """The local engines have stopped for `Freeze(epoch)`: nothing completes or starts until `Thaw`. All lanes."""

    epoch: int
    lanes: tuple[LaneState, ...]


class JoinAsked(NamedTuple):
    """This process wants to join; `contacts` are members that it knows of (from the store or the directory)."""

    contacts: tuple[Member, ...]


class Admit(NamedTuple):
    """A user of this member asks to take in who waits for these slots (`recover_ranks`, `extend_group_size_to`)."""

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
    """Send `message` to a process; it may be lost, late, or twice."""

    to: Member
    message: Message


class WriteBoard(NamedTuple):
    """Replace what this process shows on its board, at once or not at all, before any `Send` that follows."""

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
    """A process asks to join (told once): `Admit` of its slot would take it in."""

    member: Member


class Refused(NamedTuple):
    """This process may not join."""

    reason: str


Effect = Send | WriteBoard | ReadBoard | Freeze | Thaw | Decide | Evicted | NoQuorum | JoinPending | Refused
