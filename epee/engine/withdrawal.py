"""The abort of a published collective with one outcome on all ranks, by the words of `view/protocol/withdrawal.py`.

A rank aborts a call when its timeout has passed, and when any other error leaves the call: too few ranks for a view, an
exception from a signal handler, a shortage of memory or descriptors.

Each rank writes its own cell only. To abort a call a rank stores the call's tag in GAVE_UP, then 0 in the tag word
(with a fence: both are visible before its next loads): its part is revoked. To complete a call it reads, after
everything has arrived, the tags of all ranks once more (`withdrawn`), stores COMPLETES in GAVE_UP, and only then writes
results. Cells and staging are reused only when this rank has ended the call, so its data is there for as long as it may
have to complete it.

A rank that finds after its abort that another has completed the call completes it, too, whatever the time: between
hosts the answer can come before the data, which arrives on other streams. Until then the call is open.

A rank that was stopped learns of an abort when it continues. A refusal is not revoked: no rank can complete with it,
and its reason is for ranks that arrive late. After GRACE_S, or the timeout if that is shorter, the caller of a call
that is still open gets its error; the repetition of the call continues its number (`Engine.claim`), so no rank pairs it
with another call, and waits for its end for its own timeout. If a rank has ended the call and its words were damaged,
they give no answer: then the call is lost.

Hosts answer one by one, each behind the abort. Among three and more, a part that one answer misses may have been found
on a host where the abort had not arrived yet, so the hosts are asked once more when all have answered
(`end_behind`; all orders: `tests/hosts/test_aborts_model.py`).

A rank inside rounds that others do not need (a gather's senders) has ended the call before another's timeout. A crash
between two stores leaves a rank that is not in the next epoch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ..errors import CommTimeoutError
from ..memory.signals import untag
from ..view.protocol.withdrawal import GRACE_S, End, Look, Stance, end_behind, gave_up, names_of
from .call import EngineCall
from .outbox import (
    COMPLETES,
    CONSUMED,
    CONSUMED_TOO,
    GAVE_UP,
    LIFE,
    SIGNATURE,
    PeerRegions,
    consumed_of,
    failed_by_view,
    has_left,
)
from .signature import REFUSED

_MEANING = {
    End.FAILED: "the call is aborted on all ranks that began it; results are untouched; the group can be used",
    End.OPEN: "rank(s) {} began it and may have completed it, so it is neither aborted nor complete; results are "
    "untouched; repeat the call (wait again for an asynchronous one) to continue it",
    End.LOST: "the call is lost: rank(s) {} have ended it, and their memory does not show whether they completed it "
    "(is their memory damaged?); results are untouched; agree with them before you repeat it",
}


class CallWords(NamedTuple):
    """The words of a call in each rank's outbox.

    Attributes:
        cell: index of the first.
        tag: of the call, stored there last.
        seq: number of the call.
    """

    cell: int
    tag: int
    seq: int


def withdrawn(cell: int, tag: int, peer_regions: PeerRegions) -> list[int]:
    """Return the positions of the peers that have aborted the call with a tag, whose words begin at `cell`."""
    return [peer for peer in peer_regions.peers if is_withdrawn(cell, tag, peer_regions.words[peer])]


def is_withdrawn(cell: int, tag: int, words: memoryview) -> bool:
    """Return whether the rank of these words has aborted the call.

    The header is loaded twice: between the first load and that of GAVE_UP the rank may have begun the call and found an
    error that all find, which leaves the header in its cell for them and sets GAVE_UP as well.
    """
    return words[cell] != tag and words[cell + GAVE_UP] == tag and words[cell] != tag


def has_aborted(cell: int, seq: int, words: memoryview) -> bool:
    """Return whether the rank of these words has aborted call `seq`, in whichever epoch."""
    mark = words[cell + GAVE_UP]
    return mark != COMPLETES and untag(mark)[1] == seq


def was_ended_by_view(cell: int, seq: int, words: memoryview) -> bool:
    """Return whether a change of the view has ended call `seq` on the rank of these words."""
    return untag(failed_by_view(words[cell + GAVE_UP]))[1] == seq


class Withdrawal:
    """A call that this rank has aborted, until its outcome is known.

    It does not hold the call, which holds it: an ended call is gone, with its tensors, once nobody refers to it.

    Args:
        call: it.
        at: its words.
        peer_regions: with which it runs.

    Attributes:
        silent: the ranks that it waited for; none if another rank had aborted the call.
        cause: the error that this rank's caller gets instead of a timeout, if the call fails.
        undecided: the ranks that may still complete the call, as of the last check.
        must_complete: a peer has completed it.
    """

    def __init__(
        self,
        call: EngineCall,
        at: CallWords,
        peer_regions: PeerRegions,
        silent: list[int],
        cause: BaseException | None = None,
    ) -> None:
        self._name, self._at = call.name, at
        self.silent = silent
        self.cause = cause
        self.undecided: list[int] = []
        self.must_complete = False
        # whether the checks ask once more because the abort had arrived everywhere; one other host answers about all
        # its ranks at once, and the words of this host are read behind its answer
        self._is_repeated = len(peer_regions.sites) <= 2
        wait_limit_s = call.deadline - call.started if call.deadline else GRACE_S
        self._grace_s = min(GRACE_S, wait_limit_s)
        self._until = time.monotonic() + self._grace_s
        peer_regions.exports.publish(peer_regions, at.cell + GAVE_UP, at.tag)
        peer_regions.exports.publish(peer_regions, at.cell, 0)

    def is_over(self, call: EngineCall, peer_regions: PeerRegions, lost: Collection[int]) -> bool:
        """Check the call's outcome; `lost` ranks read nothing any more.

        True when it ends here: it has failed, or it `must_complete`.
        """
        stances = self._stances(peer_regions, lost)
        look = end_behind(stances, lost, self._is_repeated)
        self._is_repeated = self._is_repeated or None not in stances.values()
        if look.end is End.COMPLETES:
            self.must_complete = True
            return True
        self.undecided = list(look.ranks) if look.end is End.OPEN else []
        if self.undecided or (look.end is End.LOST and time.monotonic() < self._until):
            return False
        call.fail(self.cause if self.cause and look.end is End.FAILED else self._error(call, peer_regions, look))
        return True

    def raise_if_open(self, call: EngineCall, peer_regions: PeerRegions) -> None:
        """Raise `CommTimeoutError` when others could have decided by now and have not; the call stays open."""
        now = time.monotonic()
        if self.undecided and now > self._until:
            self._until = now + self._grace_s  # for the next wait
            raise self._error(call, peer_regions, Look(End.OPEN, tuple(self.undecided)))

    def _error(self, call: EngineCall, peer_regions: PeerRegions, look: Look) -> CommTimeoutError:
        cell, tag, _ = self._at
        others = [peer_regions.members[peer] for peer in withdrawn(cell, tag, peer_regions)]
        told = [f"rank(s) {names_of(self.silent)} silent"] if self.silent else []
        told = told + gave_up(others) or ["interrupted"]
        told.append(_MEANING[look.end].format(names_of(look.ranks)))
        where = call.describe(peer_regions, elapsed=time.monotonic() - call.started if call.started else 0.0)
        return CommTimeoutError(f"{where}: {'; '.join(told)}", look.ranks or self.silent or others, has_job=True)

    def _stances(self, peer_regions: PeerRegions, lost: Collection[int]) -> dict[int, Stance | None]:
        """Return the state of the call at each peer, behind this rank's abort; None: not known yet.

        Words of this host are loaded when all answers have been taken (`sight` only refers to them), so they are newer.
        """
        sight = [(peer, self._words_behind(peer_regions, peer, lost)) for peer in peer_regions.peers]
        members = peer_regions.members
        return {members[peer]: None if words is None else _stance_of(words, self._at) for peer, words in sight}

    def _words_behind(
        self, peer_regions: PeerRegions, peer: int, lost: Collection[int]
    ) -> Mapping[int, int] | memoryview | None:
        """Return words of a peer as they are where this rank's abort has arrived; None: no answer yet.

        The mirror of a rank on another host is enough for facts that stay true: that the rank has aborted the call, or
        has left (it has reported before how its calls had ended, `Exports.tell_ends`). Else the host is asked
        (`replication/remote_reads.py`).
        """
        exports, words, rank = peer_regions.exports, peer_regions.words[peer], peer_regions.members[peer]
        cell, tag, _ = self._at
        if exports.is_here(rank) or words[cell + GAVE_UP] == tag or has_left(words):
            return words
        if rank in lost:  # everything that exists of it has been received
            return words
        indices = (CONSUMED, CONSUMED_TOO, LIFE, cell, cell + GAVE_UP, cell + SIGNATURE)
        found: Mapping[int, int] | None = exports.looks.at(rank, indices, (self._name, tag, self._is_repeated))
        return found


def _stance_of(words: Mapping[int, int] | memoryview, at: CallWords) -> Stance:
    """Return the outcome of the call at a peer. Each word is loaded before those that were stored before it.

    GAVE_UP distinguishes a revoked part from one that never came. A rank that ended the call with another error, or has
    left the group, does not complete it any more. Words that fit nothing else are damaged or of a later call (this rank
    was voted out), so once the peer has ended the call it is unreadable; before that, the decision about a view that it
    has moved to may still be on its way.
    """
    cell, tag, seq = at
    is_through = consumed_of(words) >= seq
    header = words[cell]
    mark = words[cell + GAVE_UP]
    if mark == tag:
        return Stance.GAVE_UP
    if mark == failed_by_view(tag):
        return Stance.OPEN  # the decision about that view is still to come here
    if header < tag:
        return Stance.MISSING  # also where the call has ended without a header
    if header == tag and mark == COMPLETES:
        return Stance.COMPLETES
    if header == tag and words[cell + SIGNATURE] & 63 == REFUSED:
        return Stance.FAILED
    if has_left(words) or (is_through and header == tag):
        return Stance.GAVE_UP
    return Stance.UNREADABLE if is_through else Stance.OPEN
