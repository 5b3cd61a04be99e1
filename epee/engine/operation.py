"""One collective call in progress: publish, wait for every header, exchange rounds, commit.

Data path of a call with one round (everything small): `put` writes this rank's contribution into its outbox, the header
follows, the tag last. When the headers of all peers have arrived and agree, `take` reads their contributions and
writes the results. Nothing else is exchanged: a peer that has this rank's header needs nothing more from it.

Large calls have several rounds. Counters in the cell show a rank's progress: FILLED (contribution of round k is there),
MERGED (this rank's share of round k is reduced and may be fetched; two-phase calls only), DRAINED (this rank has read
round k). With room for all rounds nothing is taken before everything has arrived (`late`), so results appear at once
or not at all. Without, rounds alternate between two halves of the staging block and results go to a private copy that
is committed at the end.

Errors leave the results untouched. An error that every rank finds in the same headers (`MismatchError`) fails the call
where it is found. Any other error of a published call, a timeout or another exception, aborts it, so that it ends alike
on all ranks (`withdrawal.py`); while that is open the call is, too. The call's sequence number is used up on every rank
either way, so the next call pairs up again.

A crash between two stores leaves a counter or tag at its old value: the readers see a shorter prefix, never a partial
round.

An exception from a signal handler can come between any two lines. So the words of this rank's cell are authoritative
and the fields here copies of them, brought up to date by `resync`; every step may be run again from its start, since it
writes the same bytes to the same offsets; and once `writing` is set, `finish` completes the results, whose sources stay
in the outboxes until this rank publishes that it has ended the call.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, NamedTuple

from ..errors import (
    CommTimeoutError,
    EvictedError,
    InvalidState,
    MismatchError,
    ProtocolError,
    expected,
    is_own,
)
from ..memory.layout import align_up
from ..memory.signals import SEQ_BITS
from ..view.awaited import RENEWED_S
from .call import NOTHING, EngineCall
from .outbox import (
    CELL_PAYLOAD_BYTES,
    CELL_WORDS,
    COMPLETES,
    DETAIL,
    DRAINED,
    FILLED,
    GAVE_UP,
    MERGED,
    NUM_CELLS,
    OFFSET,
    PREAMBLE,
    SIGNATURE,
    PeerRegions,
    count_of,
    counted,
    seal,
    unsealed,
)
from .p2p.message import Message
from .plan import Make, Plan, RefusedPlan
from .signature import REFUSED, unpack
from .withdrawal import CallWords, Withdrawal, is_withdrawn, withdrawn


class Block(NamedTuple):
    """The condition that a call waits for: `words[rank][word] >= value` (rank of the group).

    Rank -1: no word, step again.
    """

    rank: int
    word: int
    value: int


LAST_SEQ = (1 << SEQ_BITS) - (1 << 32)  # far before a number reaches the bits of the epoch; then calls end in words
NO_ROOM = Block(-1, 0, 0)
MOVED_ON = NO_ROOM  # a peer runs the call in a later epoch; there is no word to wait for, only a decision


def timeout_of(opts: Any, default_s: float) -> float:
    """Return how long a call with torch's options `opts`, which may be None, waits for silent ranks, in seconds."""
    own = opts.timeout.total_seconds() if opts is not None else 0.0  # below 0: not set
    return own if own > 0 else default_s


class Operation(EngineCall):
    """A call with its sequence number. `step` advances it as far as possible and returns the condition it waits for."""

    published = False
    writing = False  # results are being written: the call can only be finished now
    mismatch = False
    damaged = -1  # a peer whose header does not fit together
    seen = 0
    base = 0
    filled = merged = drained = 0
    agreed = False
    by_view = False  # it failed because of a change of the view, on all ranks alike: no rank waits for its header
    is_counted = False  # it failed on this host only: others have completed it, or may, and its part here stays
    make: Make | None = None  # plans the call again for other outboxes; None for refusals
    lost: Collection[int] = ()  # ranks that read nothing any more
    lost_here: tuple[int, ...] = ()  # the ranks that it has lost on its way to a later epoch
    withdrawal: Withdrawal | None = None  # this rank's timeout, or another's, has passed
    completing = False  # it was aborted here, but a peer had completed it: it must complete here, too
    told: BaseException | None = None  # the error that its caller got before the outcome; the plan is detached then

    def __init__(self, plan: Plan, seq: int, peer_regions: PeerRegions, timeout_s: float, opts: Any = None) -> None:
        self.plan = plan
        self.seq = seq
        self.peer_regions = peer_regions
        self.tag = peer_regions.epoch_bits | seq
        self.cell = peer_regions.first_cell + seq % NUM_CELLS * CELL_WORDS
        self.offsets = [0] * peer_regions.num_ranks
        self._timeout_s = timeout_s
        self._opts = opts

    # ---- publish

    def publish(self, peer_regions: PeerRegions) -> bool:
        """Write the first contribution and the header; False when the outbox has no room, or a call is in the way."""
        if self.before:
            if not self.is_free(peer_regions):
                return False
            self.plan = (
                self.plan if self.make is None else self.make(peer_regions)
            )  # its copies of the input were too early
            self.let_begin()
        plan = self.plan
        cell = self.cell
        if self.seq > peer_regions.cells_free_until:
            free_until = peer_regions.least_consumed() + NUM_CELLS
            peer_regions.cells_free_until = min(free_until, LAST_SEQ)  # so that every call behind it comes here
            if self.seq > LAST_SEQ and not isinstance(plan, RefusedPlan):
                raise InvalidState(
                    f"{self.describe(peer_regions)}: this group has made {LAST_SEQ} calls, which is "
                    "all that its numbers allow; "
                    "the call fails on every rank; destroy the group and make a new one"
                )
            if self.seq > free_until:
                return False
        if plan.put_bytes and not self._place(peer_regions, plan, cell):
            return False
        own = peer_regions.own
        own[cell + SIGNATURE] = plan.signature
        own[cell + DETAIL] = plan.detail
        own[cell + OFFSET] = seal(self.tag, plan.signature, plan.detail, self.base)
        self.filled = 1
        own[cell + FILLED] = counted(1)
        own[cell + MERGED] = own[cell + DRAINED] = counted(0)
        own[cell + GAVE_UP] = 0
        if plan.preamble is not None:
            own[cell + PREAMBLE : cell + PREAMBLE + len(plan.preamble)] = memoryview(plan.preamble)
        self.offsets[peer_regions.rank] = self.base
        peer_regions.exports.publish_call(peer_regions, cell, self.tag, plan, self.base)
        self.published = True
        if plan.rounds > 1:
            while self.filled < plan.num_halves:
                self._fill(peer_regions)
        return True

    def _place(self, peer_regions: PeerRegions, plan: Plan, cell: int) -> bool:
        room = CELL_PAYLOAD_BYTES
        place = 8 * cell + 64
        if plan.preamble is not None:
            used = align_up(8 * len(plan.preamble), 64)
            room -= used
            place += used
        if plan.put_bytes <= room:
            self.base = place
        else:
            self.base = peer_regions.ring.take(self.seq, plan.put_bytes, peer_regions.least_consumed())
            if self.base < 0:
                return False
        plan.put(peer_regions, 0, self.base)
        return True

    def _fill(self, peer_regions: PeerRegions) -> None:
        plan, k = self.plan, self.filled
        offset = self.base + k % plan.num_halves * plan.round_bytes
        if plan.put_bytes:
            plan.put(peer_regions, k, offset)
        peer_regions.exports.publish_block(peer_regions, self.cell + FILLED, counted(k + 1), plan, k, offset)
        self.filled += 1

    # ---- step

    def step(self, peer_regions: PeerRegions) -> Block | None:
        """Go as far as possible; None when the call is done (`error` says how it ended)."""
        if self.done:
            return None
        if not self.published and not self.publish(peer_regions):
            return NO_ROOM
        if self.withdrawal is not None and not self.completing:
            return self._end_withdrawn(peer_regions)
        cell, tag, peers, plan = self.cell, self.tag, peer_regions.peers, self.plan
        for position in range(self.seen, len(peers)):
            peer = peers[position]
            words = peer_regions.words[peer]
            if words[cell] != tag and not (self.completing and words[cell + GAVE_UP] == tag):
                self.seen = position
                if is_withdrawn(cell, tag, words):
                    self.withdraw(peer_regions, self.missing())
                    return self._end_withdrawn(peer_regions)
                return Block(peer_regions.members[peer], cell, tag) if words[cell] < tag else MOVED_ON
            signature, detail, sealed = words[cell + SIGNATURE], words[cell + DETAIL], words[cell + OFFSET]
            if signature != plan.signature or detail != plan.detail:
                self.mismatch = True
            self.offsets[peer] = offset = unsealed(sealed)
            if sealed != seal(tag, signature, detail, offset):
                self.damaged = peer
        self.seen = len(peers)
        try:
            self._check(peer_regions)
        except expected(MismatchError, ProtocolError) as exc:
            if is_own(exc) and self._has_moved_on(peer_regions):
                return MOVED_ON
            raise
        if plan.rounds > 1 or plan.merge_bytes:
            block = self._rounds(peer_regions)
            if block is not None:
                return block
        if not self.completing and withdrawn(cell, tag, peer_regions):
            self.withdraw(peer_regions, [])
            return self._end_withdrawn(peer_regions)
        self.finish(peer_regions)
        return None

    def withdraw(self, peer_regions: PeerRegions, silent: list[int], cause: BaseException | None = None) -> None:
        """Abort the call, which `silent` ranks kept waiting (none: another rank has aborted it).

        `step` returns the outcome. If it fails, it does with `cause`, else with a `CommTimeoutError`. A refusal ends
        here, and stays: no rank can complete a call with it, and its reason is for ranks that arrive late.
        """
        if isinstance(self.plan, RefusedPlan):
            told = f"{self.describe(peer_regions)}: refused here, and aborted by another rank"
            self.fail(cause or CommTimeoutError(told, silent, has_job=True))
        else:
            at = CallWords(self.cell, self.tag, self.seq)
            self.withdrawal = Withdrawal(self, at, peer_regions, silent, cause)

    def give_up(self, cause: BaseException) -> None:
        """End the call here because of `cause`, alike on all ranks; it may stay open, see `withdrawal.py`."""
        if self.done or self.completing or self.writing:
            return
        if not self.published or (isinstance(cause, MismatchError | ProtocolError) and is_own(cause)):
            self.fail(cause)  # the peers will find a refusal, or have found the same
            return
        if self.withdrawal is None:
            self.withdraw(self.peer_regions, [], cause)
        if self.withdrawal is not None and not self.done:
            self._is_over(self.withdrawal, self.peer_regions)

    def disown(self, cause: BaseException) -> None:
        """Abort the call for a caller that gets `cause` and cannot reach it any more.

        Results that have completed, or still may, go to private copies, for the call's repetition.

        Raises:
            MemoryError: there is none for the copies.
        """
        self.give_up(cause)
        if not self.done or self.error is None:
            self.plan.detach()
            self.tensors, self.touched = NOTHING, ((), ())  # no call waits for its memory
            self.told = cause

    def _end_withdrawn(self, peer_regions: PeerRegions) -> Block | None:
        if self.withdrawal is not None and not self._is_over(self.withdrawal, peer_regions):
            return NO_ROOM
        return None if self.done else self.step(peer_regions)

    def _is_over(self, withdrawal: Withdrawal, peer_regions: PeerRegions) -> bool:
        is_over = withdrawal.is_over(self, peer_regions, self.lost)
        self.completing = self.completing or withdrawal.must_complete
        return is_over

    def _check(self, peer_regions: PeerRegions) -> None:
        """Compare the headers of the peers; all are there."""
        plan = self.plan
        if self.damaged >= 0:
            raise ProtocolError(
                f"{self.describe(peer_regions)}: the header of rank "
                f"{peer_regions.members[self.damaged]} does not fit together (it names "
                f"offset {self.offsets[self.damaged]}); is its memory damaged? No result was written; the group "
                "can be used"
            )
        if self.mismatch:
            raise self._mismatch(peer_regions)
        if plan.read_bytes and not self.drained:
            self._check_offsets(peer_regions, plan.read_bytes)
        if plan.preamble is not None:
            plan.agree(peer_regions, self.offsets, self.cell, self)
            self.agreed = True

    def _has_moved_on(self, peer_regions: PeerRegions) -> bool:
        """Return whether a peer has moved the call to a later epoch while its header was read (void then)."""
        if self.completing or all(words[self.cell] == self.tag for words in peer_regions.peer_words):
            return False
        self.seen, self.mismatch, self.agreed, self.damaged = 0, False, False, -1
        return True

    def renew(self, peer_regions: PeerRegions, plan: Plan) -> None:
        """Begin again in the epoch of `peer_regions`: no result was written, and no rank completes the old attempt.

        The tag is cleared first, so that a peer that reads the old header notices.
        """
        peer_regions.own[self.cell] = 0
        peer_regions.ring.give_up(self.seq)
        self.peer_regions, self.plan = peer_regions, plan
        self.tag = peer_regions.epoch_bits | self.seq
        self.offsets = [0] * peer_regions.num_ranks
        self.published = self.mismatch = self.agreed = self.completing = False
        self.withdrawal = None
        self.damaged = -1
        self.seen = self.base = self.filled = self.merged = self.drained = self.wait_rounds = 0
        if self.deadline:  # the others need a moment for the decision, too: a rank that is late for it is not silent
            self.deadline = max(self.deadline, time.monotonic() + min(self.deadline - self.started, RENEWED_S))

    @property
    def rounds_known(self) -> bool:
        """True when the number of rounds is final."""
        return self.plan.preamble is None or self.agreed

    def finish(self, peer_regions: PeerRegions) -> None:
        """Write the results; everything has arrived. May be run again after an interrupt inside it."""
        plan = self.plan
        if not self.completing:
            peer_regions.own[self.cell + GAVE_UP] = COMPLETES  # from here on a rank that has aborted it waits for it
        self.writing = True
        if plan.num_halves >= plan.rounds:
            for k in range(plan.rounds):
                plan.take(peer_regions, k, self.round_offsets(k))
        self.look_again(peer_regions)
        plan.commit()
        self.done = True

    def look_again(self, peer_regions: PeerRegions) -> None:
        """Verify that the data read belonged to the call, also if a peer has aborted it in the meantime.

        A peer writes a cell anew only when this rank has ended the call, or when this rank was voted out: after a stop
        between the check of the headers and the copy, the copied bytes may be anything.

        Raises:
            EvictedError: a header has changed.
        """
        cell, tag = self.cell, self.tag
        for words in peer_regions.peer_words:
            if words[cell] != tag != words[cell + GAVE_UP]:
                raise EvictedError(
                    f"{self.describe(peer_regions)}: the other ranks continued while this rank was stopped; "
                    "the result of this call "
                    "must not be used; start this rank again with is_extension=True",
                    [peer_regions.members[peer_regions.rank]],
                    self.name,
                    self.seq,
                    peer_regions.epoch,
                    "stood still",
                )

    def resync(self, peer_regions: PeerRegions) -> None:
        """After an interrupt: restore the call's progress from the words of this rank's cell."""
        cell, own = self.cell, peer_regions.own
        has_begun_to_withdraw = own[cell + GAVE_UP] == self.tag and not self.done
        self.published = self.tag in (own[cell], own[cell + GAVE_UP])
        if own[cell] == self.tag and own[cell + GAVE_UP] == COMPLETES and not self.done:
            self.writing = True  # a peer may have seen that
        if has_begun_to_withdraw and self.withdrawal is None:
            self.withdraw(peer_regions, [])  # a peer may have seen it
        has_counts = bool(self.plan.rounds > 1 or self.plan.merge_bytes)
        if own[cell] == self.tag and not self.done:
            peer_regions.exports.call_again(peer_regions, self.plan, cell, self.base, has_counts)
        if self.published and has_counts:
            self.filled, self.merged, self.drained = (count_of(own[cell + word]) for word in (FILLED, MERGED, DRAINED))

    def _check_offsets(self, peer_regions: PeerRegions, nbytes: int) -> None:
        limit = peer_regions.payload_bytes - nbytes
        for peer in peer_regions.peers:
            if self.offsets[peer] > limit or self.offsets[peer] & 63:
                raise ProtocolError(
                    f"{self.describe(peer_regions)}: rank {peer_regions.members[peer]} put {nbytes} "
                    f"bytes at offset {self.offsets[peer]} "
                    f"of its outbox of {peer_regions.payload_bytes} bytes; is its memory damaged?"
                )

    # ---- rounds

    def _rounds(self, peer_regions: PeerRegions) -> Block | None:
        """Move rounds as far as they go; None when everything that the results need has arrived."""
        plan = self.plan
        while True:
            block = self._fill_more(peer_regions)
            moved = block is None and self.filled < plan.rounds
            if moved:
                self._fill(peer_regions)
            if plan.merge_bytes and self.merged < min(plan.rounds, self.filled):
                waits = self._behind(peer_regions, FILLED, self.merged + 1)
                if waits is None:
                    self.merge(peer_regions)
                    moved = True
                block = waits or block
            ready = self.merged if plan.merge_bytes else self.filled
            if plan.num_halves >= plan.rounds:  # room for all: nothing is taken before everything is there
                if ready == plan.rounds:
                    return self._behind(peer_regions, MERGED if plan.merge_bytes else FILLED, plan.rounds)
            elif self.drained < ready:
                waits = self._behind(peer_regions, MERGED if plan.merge_bytes else FILLED, self.drained + 1)
                if waits is None:
                    self._drain(peer_regions)
                    moved = True
                block = waits or block
            if self.drained == plan.rounds:
                return None
            if not moved:
                assert block is not None, "a call that cannot move waits for somebody"
                return block

    def _fill_more(self, peer_regions: PeerRegions) -> Block | None:
        """Return the rank that the next round to fill waits for, if any: all ranks must have read its half."""
        free_after = self.filled - self.plan.num_halves + 1  # rounds that must be drained
        if self.filled >= self.plan.rounds or free_after <= 0:
            return None
        block = self._behind(peer_regions, DRAINED, free_after)
        if block is None and self.drained < free_after:
            block = Block(peer_regions.members[peer_regions.rank], self.cell + DRAINED, counted(free_after))
        return block

    def _drain(self, peer_regions: PeerRegions) -> None:
        self.plan.take(peer_regions, self.drained, self.round_offsets(self.drained))
        peer_regions.exports.publish(peer_regions, self.cell + DRAINED, counted(self.drained + 1))
        self.drained += 1

    def _behind(self, peer_regions: PeerRegions, word: int, value: int) -> Block | None:
        index, wanted = self.cell + word, counted(value)
        for peer in peer_regions.peers:
            found = peer_regions.words[peer][index]
            if found > wanted and count_of(found) < 0:
                raise self._damaged_count(peer_regions, peer, found)
            if found < wanted and not (word == DRAINED and peer_regions.members[peer] in self.lost):
                return Block(peer_regions.members[peer], index, wanted)
        return None

    def _damaged_count(self, peer_regions: PeerRegions, peer: int, word: int) -> ProtocolError:
        return ProtocolError(
            f"{self.describe(peer_regions)}: rank {peer_regions.members[peer]} counts its rounds with "
            f"{word:#x}, which cannot be; is its "
            "memory damaged? No result was written; the group can be used"
        )

    def merge(self, peer_regions: PeerRegions) -> None:
        """Reduce this rank's share of the next round."""
        plan, k = self.plan, self.merged
        half = k % plan.num_halves
        offsets = [offset + half * plan.round_bytes for offset in self.offsets]
        own = self.base + plan.num_halves * plan.round_bytes + half * plan.merge_bytes
        plan.merge(peer_regions, k, offsets, own)
        peer_regions.exports.publish_share(peer_regions, self.cell + MERGED, counted(k + 1), plan, k, own)
        self.merged += 1

    def round_offsets(self, k: int) -> list[int]:
        """Return where `take` finds round `k` in each outbox."""
        plan = self.plan
        half = k % plan.num_halves
        shift = half * plan.round_bytes
        if plan.merge_bytes:
            shift = plan.num_halves * plan.round_bytes + half * plan.merge_bytes
        return [offset + shift for offset in self.offsets]

    # ---- ends

    @property
    def name(self) -> str:
        """The collective's name."""
        return self.plan.name

    def start_clock(self) -> float:
        """Return the present time, at which the call begins to wait unless it has begun."""
        now = time.monotonic()
        if not self.deadline:
            self.started = now
            self.deadline = now + timeout_of(self._opts, self._timeout_s)
        return now

    def _position(self, peer_regions: PeerRegions) -> dict[str, object]:
        own = self.peer_regions
        return {"rank": own.members[own.rank], "seq": self.seq, "epoch": own.epoch}

    def label(self) -> str:
        """Name the call for the error of another one."""
        return f"{self.plan.name} seq {self.seq}"

    def missing(self) -> list[int]:
        """Return the ranks whose header has not arrived."""
        peer_regions = self.peer_regions
        return [peer_regions.members[peer] for peer in peer_regions.peers if self.is_missing(peer_regions.words[peer])]

    def is_missing(self, words: memoryview) -> bool:
        """Return whether the rank of these words has put no header for this call, nor revoked one."""
        return words[self.cell] < self.tag != words[self.cell + GAVE_UP]

    def _mismatch(self, peer_regions: PeerRegions) -> MismatchError:
        plan, cell = self.plan, self.cell
        groups: dict[str, list[int]] = {}
        for rank in range(peer_regions.num_ranks):
            words = peer_regions.words[rank]
            text = self._words_of(peer_regions, rank, words[cell + SIGNATURE], words[cell + DETAIL])
            groups.setdefault(text, []).append(peer_regions.members[rank])
        told = "; ".join(f"{_ranks(ranks)} {text}" for text, ranks in groups.items())
        if len(groups) == 1:
            told += " with different lists of shapes"
        if plan.signature & 63 == REFUSED:
            return MismatchError(f"{self.describe(peer_regions)}: refused here, so it failed everywhere: {told}")
        return MismatchError(
            f"{self.describe(peer_regions)}: the ranks disagree: {told}; no result was written, the group can be used; "
            "make the calls agree"
        )

    def _words_of(self, peer_regions: PeerRegions, rank: int, signature: int, detail: int) -> str:
        if signature & 63 != REFUSED:
            return f"called {unpack(signature)}"
        offset = unsealed(peer_regions.words[rank][self.cell + OFFSET])
        length = min(detail, CELL_PAYLOAD_BYTES)
        text = peer_regions.bytes_at(rank, offset, length).decode(errors="replace")
        return f"refused the call: {text}"


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


Driven = Operation | Message  # the kinds of call that an engine drives


class CallsOfWork:
    """Base of the works that callers hold.

    Attributes:
        ops: the calls that the work stands for.
    """

    ops: list[Driven]
