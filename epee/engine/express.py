"""The short way of a call: from its first store to its last load in one go, when nobody has to be waited for.

The protocol is that of `operation.py` and `withdrawal.py`, in the same order of stores and loads; what is left out are
the waits, the queue and every case that is not the usual one. Wherever something is missing or odd the call goes on
from there on the long way (`Engine.drive`), which finds in the fields and words of the call how far it is. Calls of one
round only, reduced in one step or in two.

In two steps a single peer's withdrawal may be overlooked (it is not looked for again after MERGED): that peer then
waits for this rank's decision, which is to complete the call, and completes it too.
"""

from __future__ import annotations

from .engine_face import EngineFace
from .operation import Operation
from .outbox import (
    CELL_PAYLOAD_BYTES,
    COMPLETES,
    CONSUMED,
    CONSUMED_TOO,
    COUNTED_0,
    COUNTED_1,
    DETAIL,
    DRAINED,
    FILLED,
    GAVE_UP,
    MERGED,
    OFFSET,
    PREAMBLE,
    SEAL_PRIME,
    SIGNATURE,
)
from .waiting import Waiting
from .wake import publish_word
from .withdrawal import withdrawn


def run_short(engine: EngineFace, op: Operation) -> bool:
    """Run a call of one round from end to end when nothing is in its way; False leaves the rest to `Engine.drive`.

    This is `Operation.publish` and `step` without their waits. The lock is held.
    """
    box, plan, cell, seq = op.box, op.plan, op.cell, op.seq
    preamble = plan.preamble
    used = 0 if preamble is None else (8 * len(preamble) + 63) & -64
    if plan.rounds > 1 or seq > box.cells_free_until:
        return False
    own, tag, base = box.own, op.tag, 0
    if plan.put_bytes:
        base = 8 * (cell + PREAMBLE) + used
        if used + plan.put_bytes > CELL_PAYLOAD_BYTES:
            base = box.ring.take(seq, plan.put_bytes, box.least_consumed())
            if base < 0:
                return False
        plan.put(box, 0, base)
    op.base = base
    signature, detail = plan.signature, plan.detail
    own[cell + SIGNATURE] = signature
    own[cell + DETAIL] = detail
    check, place = (tag ^ signature ^ detail) % SEAL_PRIME, base >> 6  # see `seal`
    own[cell + OFFSET] = sealed = (check ^ place) << 32 | place
    own[cell + GAVE_UP] = 0
    if preamble is not None or plan.merge_bytes:
        if preamble is not None:
            own[cell + PREAMBLE : cell + PREAMBLE + len(preamble)] = memoryview(preamble)
        own[cell + FILLED] = COUNTED_1  # a peer may need rounds, and then so do we
        own[cell + MERGED] = own[cell + DRAINED] = COUNTED_0
        op.filled = 1
    op.offsets[box.rank] = base
    if box.exports is not None:
        box.exports.call(box, plan, cell, base)
    publish_word(box, cell, tag)
    op.published = True
    if not _met(op, engine.waits, sealed, check):
        return False
    if preamble is not None:
        plan.agree(box, op.offsets, op)
        op.agreed = True
        if plan.rounds > 1:
            return False
    if plan.merge_bytes and not _merge(op, engine.waits):
        return False
    if engine.flags:
        return False
    if box.num_ranks > 2 and withdrawn(op, box):  # a single peer was looked at when nothing was missing
        return False
    own[cell + GAVE_UP] = COMPLETES
    op.writing = True
    plan.take(box, 0, op.round_offsets(0) if plan.merge_bytes else op.offsets)
    for words in box.peer_words:
        if words[cell] != tag:
            op.look_again(box)
    plan.commit()
    op.done = True
    own[CONSUMED] = own[CONSUMED_TOO] = seq
    engine.contributors = box.members
    return True


def _met(op: Operation, waits: Waiting, sealed: int, check: int) -> bool:
    """Note where the peers' parts are, if all have called the same; False: not all are here, or something is odd.

    Args:
        op: the call.
        waits: polls for a word that is not there yet.
        sealed: this rank's OFFSET word, which peers' mostly equal.
        check: what every OFFSET word of the call is sealed with.
    """
    box, plan, cell, tag, base = op.box, op.plan, op.cell, op.tag, op.base
    signature, detail = plan.signature, plan.detail
    limit = box.payload_bytes - plan.read_bytes
    for peer in box.peers:
        words = box.words[peer]
        if words[cell] != tag and not waits.poll(words, cell, tag):
            return False
        offset = base
        word = words[cell + OFFSET]
        if word != sealed:  # it need not lie where ours does
            place = word & 0xFFFFFFFF
            offset = place << 6
            if word != (check ^ place) << 32 | place or offset > limit:
                return False
        if words[cell + SIGNATURE] != signature or words[cell + DETAIL] != detail:
            return False
        op.offsets[peer] = offset
    return base <= limit


def _merge(op: Operation, waits: Waiting) -> bool:
    """Reduce this rank's share, and see the others' be reduced; False when that takes them a while."""
    box, index = op.box, op.cell + MERGED
    if any(words[op.cell + FILLED] != COUNTED_1 for words in box.peer_words):
        return False
    op.merge(box)
    for words in box.peer_words:  # noqa: SIM110 - a loop costs half
        if words[index] != COUNTED_1 and not waits.poll(words, index, COUNTED_1):
            return False
    return True
