"""The messages between agents, and the decisions that they agree on. Plain values: no behaviour, no clocks, no sockets.

The protocol and its terms are those of `PROTOCOL.md`. `agent.py` is the state machine that consumes and produces these
values; `wire.py` encodes them as bytes, and decodes and checks those.
"""

from __future__ import annotations

from typing import NamedTuple

FOREVER = (1 << 40) - 1  # a cut above every seq: everything that the removed slot has left complete counts

DEAD, STALLED, LEFT = "dead", "stalled", "left"  # causes of a removal
EXITED = "exited"  # another: the process ended without destroying its groups; it reported that itself, as for LEFT
BY_ITSELF = (LEFT, EXITED)  # causes that a process reports about itself in its last message: it writes no more
UNREACHABLE = "unreachable"  # another: its whole host no longer answered
MAY_LIVE = (STALLED, UNREACHABLE)  # a member removed for one of these may still be alive, and write
PUT_OUT = "put out"  # as a cause in one group: the process stays in the job
SLOT_TAKEN = "slot taken"  # the usual reason for which a joiner is refused
MAX_PARTS = 4096  # in one decision


class Ballot(NamedTuple):
    """Ordered by round, then by the slot of the proposer; `NO_BALLOT` is below all."""

    round: int
    slot: int


NO_BALLOT = Ballot(0, -1)


class Member(NamedTuple):
    """One process of the job.

    Attributes:
        slot: its rank number in the job.
        incarnation: 1 for the first process of a slot; for a joiner the epoch in which it joined.
        nonce: 128 random bits that distinguish this process from any other.
        endpoint: what others need to reach it, opaque here: path of its socket, blob of its board, pid, start time.
        host: key of the host that it runs on. Members of one host see each other's boards and deaths; those of other
        hosts receive them as messages (`Obituary`).
    """

    slot: int
    incarnation: int
    nonce: bytes
    endpoint: bytes
    host: str = ""

    def as_incarnation(self, incarnation: int) -> Member:
        """Return the same process with another incarnation, which a decision has set by adding the process."""
        return self._replace(incarnation=incarnation)


class Removal(NamedTuple):
    """A member of the previous epoch that is not in this one; `cause`: DEAD, STALLED, LEFT, EXITED or UNREACHABLE."""

    slot: int
    incarnation: int
    cause: str
    host: str = ""


class Cut(NamedTuple):
    """The last seq of `group_id` to which the contributions of slots count that were removed, or put out, alive.

    It also holds for dead slots without a remaining member of the group on their host: no process can report what they
    have left. `holder`: the lowest slot that had completed this call; its data of the removed slots extends to the cut.
    -1: the cut concerns one host only, no rank needs to ask.
    """

    group_id: int
    seq: int
    holder: int = -1


class Start(NamedTuple):
    """The first seq of `group_id` in which joiners take part.

    `among`: the call before it does not need the removed slots, and all remaining members had begun it.
    """

    group_id: int
    seq: int
    among: bool = False


class Part(NamedTuple):
    """The difference between a member's part in one group and its part in the job; without an entry they are the same.

    Attributes:
        group_id: id of the group.
        slot, incarnation: the member.
        since: the epoch in which it came (back) into the group; below 0 it is out, since epoch `-since`.
        locator: what others need to know of its part, opaque here; kept as long as it has the part, and sent to all
        joiners.
    """

    group_id: int
    slot: int
    incarnation: int
    since: int
    locator: bytes = b""


class Locator(NamedTuple):
    """The data that others need about a member's part in a group (`Part.locator`)."""

    slot: int
    data: bytes


class Want(NamedTuple):
    """A member's request for a set of members of one group.

    Attributes:
        group_id: id of the group.
        members: slots that are to take part from the next epoch on; a slot that is out comes back.
        out: slots that are to take part no more, though they stay in the job.
        least: how many of the current participants must stay. `members` that do not answer are left out if so many
        remain; 0: all of them must answer.
        seq: the last call that any of `members` has issued, as far as the requester knows. The group's `Start` is above
        it: members that come back cannot report it, because they are in no view of the group.
        locators: those of the slots that come, and of participants without one in the view. A decision alone thus
        describes all joiners, and gives them the other members, whichever process dies and whichever message is lost.
    """

    group_id: int
    members: tuple[int, ...]
    out: tuple[int, ...] = ()
    least: int = 0
    seq: int = 0
    locators: tuple[Locator, ...] = ()


class Decision(NamedTuple):
    """The content of one epoch: chosen once, the same for all members. All its tuples are sorted.

    `parts` describes members, and those removed in this very epoch (a joiner must know whether they had a part). `met`:
    the groups for which this epoch meets a want, even if no member leaves or joins.
    """

    epoch: int
    members: tuple[Member, ...]
    removed: tuple[Removal, ...] = ()
    cuts: tuple[Cut, ...] = ()
    starts: tuple[Start, ...] = ()
    parts: tuple[Part, ...] = ()
    met: tuple[int, ...] = ()


class GroupState(NamedTuple):
    """The progress of a frozen agent in one group: highest seq completed, highest seq issued.

    `is_pull`: the last call issued is open, and does not need removed slots (AMONG in `outcome.py`); all calls before
    it are settled (no rank will ask about them).
    """

    group_id: int
    completed: int
    issued: int
    is_pull: bool = False


class Prepare(NamedTuple):
    """Phase 1: promise to take no lower ballot for the epoch after `epoch`, freeze, and report your state."""

    ballot: Ballot
    epoch: int


class Promise(NamedTuple):
    """The answer to `Prepare`: the proposal accepted before (None with `NO_BALLOT`) and the states of the groups."""

    ballot: Ballot
    epoch: int
    accepted_ballot: Ballot
    accepted: Decision | None
    groups: tuple[GroupState, ...]


class Nack(NamedTuple):
    """The answer to a ballot that is too low: `promised` is higher."""

    ballot: Ballot
    epoch: int
    promised: Ballot


class Accept(NamedTuple):
    """Phase 2: take `decision` (of epoch `epoch` + 1) as the proposal of `ballot`."""

    ballot: Ballot
    epoch: int
    decision: Decision


class Accepted(NamedTuple):
    """The answer to `Accept`."""

    ballot: Ballot
    epoch: int


class Commit(NamedTuple):
    """Chosen decisions, in order of their epochs; the receiver skips those it has.

    `answers` is the `question` of the `Ask` that it answers; 0 where nobody asked, or the question had no number.
    """

    decisions: tuple[Decision, ...]
    answers: int = 0


class Report(NamedTuple):
    """Causes for a change, sent to the coordinator: slots and causes as in `Removal`, seen in `epoch`.

    A report of DEAD or LEFT is a hint to check; the coordinator acts on proofs only, its own and obituaries. For a host
    that is UNREACHABLE all its members are named. `wants` are sorted.
    """

    epoch: int
    causes: tuple[Removal, ...]
    wants: tuple[Want, ...] = ()


class Join(NamedTuple):
    """A process's request for `slot`; `incarnation` of `member` is 0 (the decision sets it)."""

    member: Member


class JoinRefused(NamedTuple):
    """The answer to a `Join` that cannot be met; `reason` is a sentence (slot taken, job closed ...)."""

    slot: int
    nonce: bytes
    reason: str


class Ask(NamedTuple):
    """A request for the decisions after `epoch`. The answer is a `Commit`, empty when there is none newer; an agent
    that does not know `epoch` yet asks for it instead.

    `question` is a number of the asking process that the answer repeats, or 0: a `Commit` that was sent before the
    question cannot be taken for its answer (`Runtime.catch_up`).
    """

    epoch: int
    question: int = 0


class BoardState(NamedTuple):
    """The state that an agent keeps on its board: written before it answers, readable after its death.

    `decided` is the last decision it knows; `promised` and `accepted` are for the epoch after that one.
    """

    decided: Decision
    promised: Ballot
    accepted_ballot: Ballot
    accepted: Decision | None


class Obituary(NamedTuple):
    """Notice that the process `nonce` writes no more, with the content of its board. Sent to members on other hosts.

    Senders: each agent of its host that has the proof and has read the board afterwards; or the process itself, as its
    last message, if it leaves. Of the board's `decided` only the epoch is sent, without its members.

    Attributes:
        cause: DEAD, LEFT or EXITED.
        board: None when it cannot be read: the process is then no witness.
    """

    nonce: bytes
    cause: str
    board: BoardState | None


Message = Prepare | Promise | Nack | Accept | Accepted | Commit | Report | Join | JoinRefused | Ask | Obituary
