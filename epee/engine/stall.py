"""The examination of a long wait: failures that explain it, and the end of the call because of them.

Evidence, strongest first: the peer's process has ended (`view/process/detector.py`), it has left the group (its LIFE
word), it has aborted the same call (GAVE_UP), the deadline has passed. Before a call is failed because of a peer, the
word that it waits for is read once more: what a peer stored before it died counts. Everything runs under the engine's
lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import CommTimeoutError, PeerError, RankFailedError
from ..view.protocol.withdrawal import GRACE_S
from .membership.group_membership import GroupMembership
from .operation import Block, Driven, Operation
from .outbox import GAVE_UP, PeerRegions, has_exited, leavers
from .p2p.message import ANY, STAYS_OPEN, Message
from .withdrawal import withdrawn

if TYPE_CHECKING:
    from .engine import Engine

ENDED = "its process has ended"
HAS_LEFT = "has left the group (destroyed or aborted it)"
GAVE_THE_CALL_UP = "gave the call up"
LEAVE_GRACE_S = 0.5  # a process that leaves the group at its end leaves the view a moment later
_MEANING: dict[str, tuple[type[PeerError], str]] = {
    ENDED: (RankFailedError, "make a new group without the rank"),
    HAS_LEFT: (PeerError, "make a new group, with or without the rank"),
    GAVE_THE_CALL_UP: (
        PeerError,
        "the group works on: the next call pairs by its number, all may repeat this one",
    ),
}


def examine(engine: Engine, block: Block | None, head: Driven, op: Driven, until: float | None) -> None:
    """Examine why a word has not arrived: peers that are dead or have left end the head; so does its deadline."""
    now = head.start_clock()
    engine.end_with_others()
    membership = engine.membership
    if isinstance(head, Operation) and not head.done and membership.unsettled():
        _examine_unsettled(engine, membership, head, now)
        raise_if_overdue(engine, op, until, now)
        return
    silent = [block.rank] if block is not None and block.rank >= 0 else []
    if isinstance(head, Operation):
        unready = [] if head.published else membership.unready(head.peer_regions)
        silent = (
            unready
            or head.missing()
            or behind(engine, block)
            or engine.unsettled.behind(head.peer_regions, head.lost)
            or silent
        )
    awaited = silent if isinstance(head, Operation) else sorted(engine.mail.awaited(head))
    found = engine.watch.look(sorted(awaited))
    if found:
        membership.found_dead(found)
    if not head.done:
        membership.show(head, awaited)
    if isinstance(head, Operation) and _is_withdrawn(head, silent):
        undecided = head.withdrawal.undecided if head.withdrawal is not None else []
        if undecided and now > head.deadline:
            membership.insist(head, undecided, now)  # without its view the outcome may never be known
        raise_if_overdue(engine, op, until, now)
        return  # the next step finds the outcome
    is_late = not _lost_peer(engine, block, head, now) and now > head.deadline
    if is_late and isinstance(head, Operation):
        is_late = not membership.insist(head, silent, now)
    if is_late:
        head.holds_back = engine.order.held_by(head)
    if is_late and isinstance(head, Operation) and _can_withdraw(head):
        head.withdraw(head.peer_regions, silent)
    elif is_late and isinstance(head, Message):
        _end_late(engine, head, silent, now)
    elif is_late:
        told = f"rank(s) {', '.join(map(str, silent))} silent" if silent else "no room: peers are behind"
        head.fail(
            CommTimeoutError(
                f"{head.describe(engine.peer_regions, elapsed=now - head.started)}: {told}; the call "
                "is given up; the group "
                "can be used: the next call pairs by its number",
                silent,
                has_job=True,
            )
        )
    if head.done:
        if isinstance(head, Message):
            if head.error is not None:
                engine.mail.cancel(head)
            engine.retire(head)
        else:
            engine.retire_heads()
    raise_if_overdue(engine, op, until, now)


def _examine_unsettled(engine: Engine, membership: GroupMembership, head: Operation, now: float) -> None:
    """Examine a call that cannot be decided: this host lacks data that lost ranks of other hosts had sent."""
    lost, tellers = membership.unsettled(), membership.tellers()
    found = engine.watch.look(tellers)
    if found:
        membership.found_dead(found)
    membership.show(head, tellers or lost)
    if now <= head.deadline or membership.insist(head, tellers, now) or not membership.unsettled() or head.done:
        return
    if _can_withdraw(head) and head.withdrawal is None:
        head.withdraw(head.peer_regions, tellers or lost)
    if head.withdrawal is not None:
        head.withdrawal.undecided = lost  # its outcome is not known before all is here: waiters get an error meanwhile
    elif not head.done:
        told = f"what rank(s) {', '.join(map(str, lost))} had said before the view changed is not all here"
        head.fail(
            CommTimeoutError(
                f"{head.describe(engine.peer_regions, elapsed=now - head.started)}: {told}, rank(s) "
                f"{', '.join(map(str, tellers)) or 'none'} could tell; the call is given up; the next one pairs by its "
                "number",
                tellers or lost,
                has_job=True,
            )
        )
    engine.retire_heads()


def _end_late(engine: Engine, head: Message, silent: list[int], now: float) -> None:
    """End a message whose timeout has passed, unless it turns out to be delivered."""
    is_undecided = engine.mail.take_back(head)
    if head.done or (is_undecided and now < head.deadline + GRACE_S):
        return
    told = f"rank(s) {', '.join(map(str, silent))} silent" if silent else ""
    if is_undecided:
        told += f"; {STAYS_OPEN}"
    elif head.is_send:
        told += "; the message is taken back and will not be delivered; it may be sent again"
    else:
        told = told or "nothing with this tag was sent to this rank by any other"
        told += "; nothing was taken; the receive may be posted again"
    where = head.describe(engine.peer_regions, elapsed=now - head.started)
    head.fail(CommTimeoutError(f"{where}: {told.lstrip('; ')}", silent, has_job=True))


def _can_withdraw(head: Operation) -> bool:
    return head.published and not head.done and not head.completing


def _is_withdrawn(head: Operation, silent: list[int]) -> bool:
    """Return whether the call is aborted, here or by another rank (read now): then it is aborted here too."""
    if not _can_withdraw(head):
        return False
    if head.withdrawal is None:
        others = [head.peer_regions.members[peer] for peer in withdrawn(head, head.peer_regions)]
        if others:
            head.withdraw(head.peer_regions, [rank for rank in silent if rank not in others])
    return head.withdrawal is not None or head.done


def raise_if_overdue(engine: Engine, op: Driven, until: float | None, now: float) -> None:
    """Raise `CommTimeoutError` when `wait()` has lasted until `until`; the call goes on."""
    if until is not None and now > until and not op.done:
        is_told = isinstance(op, Operation) and op.told is not None
        told = "its end is still open; repeat the call" if is_told else "the call goes on and may be waited for again"
        raise CommTimeoutError(
            f"{op.describe(engine.peer_regions, elapsed=now - op.started)}: not done within the "
            f"time-out of wait(); {told}",
            has_job=True,
        )


def raise_if_open(head: Driven, op: Driven) -> None:
    """Raise `CommTimeoutError` for a waiter blocked by an aborted call, when others have not decided in time.

    A caller that claims an unclaimed call has a timeout of its own (`until`).
    """
    if not isinstance(head, Operation) or head.withdrawal is None:
        return
    if (head is op and head.told is None) or op.start_clock() > op.deadline:
        head.withdrawal.raise_if_open(head, head.peer_regions)


def behind(engine: Engine, block: Block | None) -> list[int]:
    """Return all ranks that are behind on the word that a call waits for."""
    if block is None or block.rank < 0:
        return []
    return [rank for rank in engine.members.members if engine.peer_regions.words[rank][block.word] < block.value]


def _lost_peer(engine: Engine, block: Block | None, head: Driven, now: float) -> bool:
    """Fail the head when it waits for a rank that cannot come any more. Its words are read a last time before."""
    gone = leavers(engine.peer_regions)
    dead = {*engine.watch.dead(), *(peer for peer in gone if has_exited(engine.peer_regions.words[peer]))}
    for peer in gone:
        engine.mask[peer] = 0
    gone = [peer for peer in gone if not has_exited(engine.peer_regions.words[peer])]
    if isinstance(head, Operation):
        concerned = set(head.missing())
        if block is not None and block.rank >= 0 and engine.peer_regions.words[block.rank][block.word] < block.value:
            concerned.add(block.rank)
            if block.word != head.cell and engine.peer_regions.words[block.rank][head.cell + GAVE_UP] == head.tag:
                head.fail(_peer_error(engine.peer_regions, [block.rank], head, now, GAVE_THE_CALL_UP))
                return True
    else:
        concerned = engine.mail.awaited(head)
        if block is None or block.rank < 0:
            concerned = set() if engine.mail.step(head) is None else concerned
        elif engine.peer_regions.words[block.rank][block.word] >= block.value:
            concerned = set()
    lost = sorted(concerned.intersection(dead))
    if isinstance(head, Message):  # a rank that left in order has left, whether or not its process has ended since
        lost = [rank for rank in lost if rank not in gone]
        if head.wanted == ANY:
            lost = []  # the view reports it in a moment, and continues without them
    if not head.done and isinstance(head, Operation):
        quitters = engine.membership.ended_without(head)
        if quitters:
            head.fail(_unmet(engine, quitters, head, now))
            return True
    if isinstance(head, Operation) and (lost or now - head.started < LEAVE_GRACE_S):
        return head.done  # a lost rank leaves the view as well, and the view decides the outcome of the call
    if lost:
        engine.membership.found_dead(lost)
        head.fail(_peer_error(engine.peer_regions, lost, head, now, ENDED))
        return True
    left = sorted(concerned.intersection(gone))
    if left and (isinstance(head, Operation) or len(left) == len(concerned)):
        head.fail(_peer_error(engine.peer_regions, left, head, now, HAS_LEFT))
        return True
    return head.done


def _unmet(engine: Engine, quitters: list[int], head: Operation, now: float) -> PeerError:
    """Return the error of a call that others have ended without putting anything into it."""
    lost = engine.membership.removed_in(head.peer_regions.epoch)
    names = ", ".join(map(str, quitters))
    told = head.describe(engine.peer_regions, peer=names, elapsed=now - head.started)
    text = f"{told}: not possible for rank(s) {names} in this view; results are untouched; the next call runs in it"
    kind = RankFailedError if lost else PeerError
    return kind(text, lost or quitters, head.name, head.seq, head.peer_regions.epoch, GAVE_THE_CALL_UP)


def _peer_error(peer_regions: PeerRegions, ranks: list[int], head: Driven, now: float, cause: str) -> PeerError:
    kind, remedy = _MEANING[cause]
    seq = head.seq
    told = head.describe(peer_regions, peer=", ".join(map(str, ranks)), elapsed=now - head.started)
    return kind(
        f"{told}: {cause}; results are untouched; {remedy}",
        ranks,
        head.name,
        seq,
        peer_regions.epoch,
        cause,
    )
