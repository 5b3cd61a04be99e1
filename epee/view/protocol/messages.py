"""What agents tell each other, and what they agree on. Plain values: no behaviour, no clocks, no sockets.

The protocol is that of `PROTOCOL.md`; its words are used here. `agent.py` is the machine that consumes
and produces these values, `wire.py` turns them into checked bytes and back.
"""

from __future__ import annotations

from typing import NamedTuple

FOREVER = (1 << 40) - 1  # a cut above every seq: what the removed slot has left complete counts

DEAD, STALLED, LEFT = "dead", "stalled", "left"  # causes of a removal
EXITED = "exited"  # another: its process ended without destroying its groups; it reported that itself, as LEFT
BY_ITSELF = (LEFT, EXITED)  # causes that a process reports of itself as its last message: it writes no more
UNREACHABLE = "unreachable"  # another: its whole host gave no sign any more
MAY_LIVE = (STALLED, UNREACHABLE)  # who was removed for these may still be alive, and write
PUT_OUT = "put out"  # as a cause in one lane: the process stays in the job
SLOT_TAKEN = "slot taken"  # why most joiners that are refused are
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
        incarnation: 1 for the first process of a slot, +1 for each that follows.
        nonce: 128 random bits that tell this process from any other.
        endpoint: what others need to reach it, opaque here: path of its socket, blob of its board, pid, start time.
        host: key of the host that it runs on. Members of one host see each other's boards and deaths; of the others
            they are told (`Obituary`).
    """

    slot: int
    incarnation: int
    nonce: bytes
    endpoint: bytes
    host: str = ""

    def as_incarnation(self, incarnation: int) -> Member:
        """Return the same process with another incarnation: it is known only when a decision has taken it in."""
        return self._replace(incarnation=incarnation)


class Removal(NamedTuple):
    """A member of the previous epoch that is not in this one; `cause`: DEAD, STALLED, LEFT, EXITED or UNREACHABLE."""

    slot: int
    incarnation: int
    cause: str
    host: str = ""


class Cut(NamedTuple):
    """The last seq of `lane` to which the contributions count of slots that were removed, or put out, alive.

    It holds for the dead as well of whose host nobody is left in the lane: nobody can tell what they have left.
    `holder`: the lowest slot that had completed this call; what it has of the removed goes as far as the cut. -1: a
    host's own business, nobody needs to ask.
    """

    lane: int
    seq: int
    holder: int = -1


class Start(NamedTuple):
    """The first seq of `lane` in which those who joined take part.

    `among`: the call before it can do without those who are removed, and all who stay had begun it.
    """

    lane: int
    seq: int
    among: bool = False


class Part(NamedTuple):
    """How a member's part in one lane differs from its part in the job; where nothing is said they are the same.

    Attributes:
        lane: id of the lane.
        slot, incarnation: the member.
        since: the epoch in which it came (back) into the lane; below 0 it is out, since epoch `-since`.
        locator: what others need to know of its part, opaque here: as long as it has the part, with all who come in.
    """

    lane: int
    slot: int
    incarnation: int
    since: int
    locator: bytes = b""


class Locator(NamedTuple):
    """What others need to know of a member's part in a lane (`Part.locator`)."""

    slot: int
    data: bytes


class Want(NamedTuple):
    """What a member asks for in one lane.

    Attributes:
        lane: id of the lane.
        members: slots that are to take part from the next epoch on; who is out comes back.
        out: slots that are to take part no more, though they stay in the job.
        least: how many of those who take part now must stay. `members` that do not answer are left out if so many are
            left; 0: all of them must answer.
        seq: the last call that any of `members` has issued, as far as who asks knows. The lane's `Start` is above it:
            those who come back cannot tell, they are in no view of it.
        locators: of those who come, and of those who take part already and have none in the view. So a decision alone
            says all about who comes in, and tells who comes of the others, whoever dies and whatever is lost.
    """

    lane: int
    members: tuple[int, ...]
    out: tuple[int, ...] = ()
    least: int = 0
    seq: int = 0
    locators: tuple[Locator, ...] = ()


class Decision(NamedTuple):
    """What one epoch is: chosen once, the same for everybody. All its tuples are sorted.

    `parts` speaks of members, and of those removed in this very epoch (who joins must know whether they had a part).
    `met`: the lanes for which this epoch meets a want, be it that nobody goes or comes.
    """

    epoch: int
    members: tuple[Member, ...]
    removed: tuple[Removal, ...] = ()
    cuts: tuple[Cut, ...] = ()
    starts: tuple[Start, ...] = ()
    parts: tuple[Part, ...] = ()
    met: tuple[int, ...] = ()


class LaneState(NamedTuple):
    """How far a frozen agent is in one lane: highest seq completed, highest seq issued.

    `is_pull`: the last call issued is open, and can do without those who are removed (AMONG in `outcome.py`); all calls
    before it are settled (nobody will ask about them).
    """

    lane: int
    completed: int
    issued: int
    is_pull: bool = False


class Prepare(NamedTuple):
    """Phase 1: promise to take no lower ballot for the epoch after `epoch`, freeze, and tell your state."""

    ballot: Ballot
    epoch: int


class Promise(NamedTuple):
    """The answer to `Prepare`: what was accepted before (None with `NO_BALLOT`) and where the lanes are."""

    ballot: Ballot
    epoch: int
    accepted_ballot: Ballot
    accepted: Decision | None
    lanes: tuple[LaneState, ...]


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
    """Decisions that were chosen, in order of their epochs; the receiver skips those it has."""

    decisions: tuple[Decision, ...]


class Report(NamedTuple):
    """Causes for a change, told to the coordinator: slots and causes as in `Removal`, seen in `epoch`.

    A report of DEAD or LEFT is a hint to look; the coordinator acts on proofs only, its own and obituaries. Of a host
    that is UNREACHABLE all members are named. `wants` are sorted.
    """

    epoch: int
    causes: tuple[Removal, ...]
    wants: tuple[Want, ...] = ()


class Join(NamedTuple):
    """A process asks to take `slot`; `incarnation` of `member` is 0 (the decision sets it)."""

    member: Member


class JoinRefused(NamedTuple):
    """The answer to a `Join` that cannot be met; `reason` is a sentence (slot taken, job closed ...)."""

    slot: int
    nonce: bytes
    reason: str


class Ask(NamedTuple):
    """What is the view after `epoch`? The answer is a `Commit`, empty when there is none newer."""

    epoch: int


class BoardState(NamedTuple):
    """What an agent keeps on its board: written before it answers, readable after its death.

    `decided` is the last decision it knows; `promised` and `accepted` are for the epoch after that one.
    """

    decided: Decision
    promised: Ballot
    accepted_ballot: Ballot
    accepted: Decision | None


class Obituary(NamedTuple):
    """The process `nonce` writes no more, and this is what stands on its board. Told to members on other hosts.

    Who tells it: each agent of its host that has the proof and has read the board afterwards; or the process itself, as
    its last word, if it leaves. Of the `decided` of the board the epoch is told alone, its members are left out.

    Attributes:
        cause: DEAD, LEFT or EXITED.
        board: None when it cannot be read: the process is then no witness.
    """

    nonce: bytes
    cause: str
    board: BoardState | None


Message = Prepare | Promise | Nack | Accept | Accepted | Commit | Report | Join | JoinRefused | Ask | Obituary
