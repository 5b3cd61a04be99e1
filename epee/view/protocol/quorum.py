"""The counting rules of `PROTOCOL.md` for a quorum. Pure functions over slots.

Members that are dead count neither for nor against, but only those whose boards were read after their death
(`witnessed`): the board shows whether the dead member had promised or accepted anything, so the reader knows as much as
if it had asked that member.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .messages import NO_BALLOT, Ballot, BoardState, Decision


def has_quorum(members: Collection[int], witnessed: Collection[int], acks: Collection[int]) -> bool:
    """Return whether `acks` are more than half of the members that are not witnessed dead, or half with the lowest.

    Args:
        members: slots of the epoch.
        witnessed: slots that are dead or have left and whose boards were read.
        acks: slots that answered; those outside `members` or inside `witnessed` do not count.
    """
    voters = [slot for slot in members if slot not in witnessed]
    if not voters:
        return False
    num_acks = sum(slot in acks for slot in voters)
    if 2 * num_acks == len(voters):
        return min(voters) in acks
    return 2 * num_acks > len(voters)


def highest_promise(boards: Mapping[int, BoardState], epoch: int) -> Ballot:
    """Return the highest ballot that the dead members had promised for the epoch after `epoch`."""
    return max((b.promised for b in boards.values() if b.decided.epoch == epoch), default=NO_BALLOT)


def highest_accepted(boards: Mapping[int, BoardState], epoch: int) -> tuple[Ballot, Decision | None]:
    """Return the decision that the dead members had accepted for the epoch after `epoch`, in the highest ballot."""
    best: tuple[Ballot, Decision | None] = (NO_BALLOT, None)
    for board in boards.values():
        if board.decided.epoch == epoch and board.accepted is not None and board.accepted_ballot > best[0]:
            best = (board.accepted_ballot, board.accepted)
    return best
