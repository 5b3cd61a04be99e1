"""What processes did, as records, and the rules that every history must obey. For simulated and real runs alike.

A record is 64 bytes, so that a real process can append it to a file or a ring at its own pace; the checker merges the
records of all processes (each in its own order) and knows nothing about how they came about. What a result should be
is told by a function, because only the maker of the inputs knows.

Rules: V-1 same view for the same epoch, V-2 one decision per epoch (the counting of votes is checked where votes are
visible), V-9 what an evicted process reports, V-11 masks change with the epoch only, C-3 one outcome per call, C-4 and
E-3 whole blocks or none, C-5 nothing written on error, C-10 and C-11 results are those of the contributors named, V-10
who joins begins with the view that took it in, C-12 behind a call that ended alike a program is shown the same
everywhere, and never who was lost before the call ended.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

VIEW, ISSUED, DONE, EVICTED, NO_QUORUM, DIED, SHOWN = range(1, 8)  # kinds
# status of DONE; FAILED: at a decision; those after it are local; LOST: its end elsewhere is not known here;
# ROOTLESS: in the first view without its root, for all who had called with that one
OK, FAILED, TIMEOUT, GAVE_UP, GONE, LOST, ROOTLESS = range(1, 8)
KIND_NAMES = ("", "VIEW", "ISSUED", "DONE", "EVICTED", "NO_QUORUM", "DIED", "SHOWN")
STATUS_NAMES = ("", "OK", "FAILED", "TIMEOUT", "GAVE_UP", "GONE", "LOST", "ROOTLESS")

_FORMAT = struct.Struct("<dHHIQQQQQQ")


class Record(NamedTuple):
    """One thing that a process did or saw.

    Attributes:
        time_s: its clock.
        slot, incarnation: who.
        kind: VIEW, ISSUED, DONE, EVICTED, NO_QUORUM, DIED (written by whoever killed it), or SHOWN: what a program is
            shown behind a call that ended with a result, or ROOTLESS, before it makes the next.
        status: of DONE.
        group_id, seq: the call; 0 elsewhere.
        epoch: of the view; of DONE the epoch in which the call ran or at which it failed; of SHOWN that of the view.
        contributors: bit mask of slots: who is in the result; of VIEW the members, of SHOWN the active ones, of a
            ROOTLESS call its root. Slots above 63 are left out.
        digest: of a result, 0 when nothing was written; of VIEW a digest of the whole decision.
    """

    time_s: float
    slot: int
    incarnation: int
    kind: int
    status: int = 0
    group_id: int = 0
    seq: int = 0
    epoch: int = 0
    contributors: int = 0
    digest: int = 0

    def pack(self) -> bytes:
        """Return the record as 64 bytes."""
        kind = self.kind | self.status << 8
        head = (self.time_s, self.slot, kind, self.incarnation)
        return _FORMAT.pack(*head, self.group_id, self.seq, self.epoch, self.contributors, self.digest, 0)

    @staticmethod
    def unpack(data: bytes) -> Record:
        """Return the record that `pack` wrote."""
        time_s, slot, kind, incarnation, group_id, seq, epoch, contributors, digest, _ = _FORMAT.unpack(data)
        return Record(time_s, slot, incarnation, kind & 255, kind >> 8, group_id, seq, epoch, contributors, digest)

    def __str__(self) -> str:
        name = KIND_NAMES[self.kind] + (f" {STATUS_NAMES[self.status]}" if self.status else "")
        call = f" group_id {self.group_id} seq {self.seq}" if self.seq else ""
        return (
            f"{self.time_s:.6f} slot {self.slot}.{self.incarnation} {name}{call} epoch {self.epoch} "
            f"who {slots_of(self.contributors)}"
        )


class Violation(NamedTuple):
    """A rule that a history breaks."""

    rule: str
    text: str


# what the result of (group_id, seq) must be at `slot`, in a view given as slot -> incarnation of the contributors
Expected = Callable[[int, int, int, dict[int, int]], int]
MayShrink = Callable[[int, int], bool]  # whether (group_id, seq) can do without contributors of the call before


def slots_of(mask: int) -> list[int]:
    """Return the slots of a mask, ascending."""
    return [slot for slot in range(64) if mask >> slot & 1]


class History:
    """The records of a run, sorted out. `digest` of VIEW records must identify a decision."""

    def __init__(self, records: Iterable[Record], members: dict[int, dict[int, int]]) -> None:
        """Take the records and, per epoch, slot -> incarnation as any process that held the epoch told it."""
        self.members = members
        self.by_process: dict[tuple[int, int], list[Record]] = defaultdict(list)
        self.evicted: set[tuple[int, int]] = set()
        for record in records:
            process = (record.slot, record.incarnation)
            self.by_process[process].append(record)
            if record.kind == EVICTED:
                self.evicted.add(process)


def _never(group_id: int, seq: int) -> bool:
    return False


def check(
    history: History,
    expected: Expected,
    voted_out: set[tuple[int, int]],
    may_shrink: MayShrink = _never,
    mixed_from: float = float("inf"),
) -> list[Violation]:
    """Return what is wrong with a history.

    Args:
        expected: the result of a call.
        voted_out: the processes (slot, incarnation) removed while alive.
        may_shrink: calls that can do without who is lost.
        mixed_from: calls overlap, and this one was made with different roots: from here on losses may be told unlike.
    """
    found: list[Violation] = []
    _check_views(history, found)
    for process, records in history.by_process.items():
        _check_process(process, records, history, expected, may_shrink, found)
    _check_uniform(history, voted_out | history.evicted, mixed_from, found)
    return found


def _check_views(history: History, found: list[Violation]) -> None:
    first: dict[int, Record] = {}
    for process, records in history.by_process.items():
        last = 0
        for record in records:
            if record.kind != VIEW:
                continue
            other = first.setdefault(record.epoch, record)
            if other.digest != record.digest:
                found.append(Violation("V-1", f"two decisions of epoch {record.epoch}: {other} and {record}"))
            if last and record.epoch != last + 1:
                found.append(Violation("V-11", f"{process} went from epoch {last} to {record.epoch}"))
            if not last and record.epoch != record.incarnation:
                found.append(Violation("V-10", f"{process} came in by another view than its first: {record}"))
            last = record.epoch


def _check_process(
    process: tuple[int, int],
    records: list[Record],
    history: History,
    expected: Expected,
    may_shrink: MayShrink,
    found: list[Violation],
) -> None:
    """Check what one process reports against itself."""
    held = ended_in = 0
    before: dict[int, Record] = {}
    ended: set[tuple[int, int]] = set()
    out = False
    for record in records:
        if record.kind == VIEW:
            held = record.epoch
        elif record.kind == EVICTED:
            out = True
        elif record.kind == SHOWN and record.epoch < ended_in:
            found.append(Violation("C-12", f"shown an older view than that of the call, epoch {ended_in}: {record}"))
        elif record.kind == DONE:
            call, ended_in = (record.group_id, record.seq), record.epoch
            if call in ended:
                found.append(Violation("C-11", f"a call ended twice: {record}"))
            ended.add(call)
            if record.status != OK:
                if record.digest:
                    found.append(Violation("C-5", f"an error wrote to its output: {record}"))
                continue
            if out:
                found.append(Violation("V-9", f"a result after the process knew that it was voted out: {record}"))
            _check_result(process, record, held, history, expected, found)
            last = before.get(record.group_id)
            if last is not None and last.seq < record.seq:
                shrunk = last.epoch == record.epoch and last.contributors & ~record.contributors
                shrunk = shrunk and not may_shrink(record.group_id, record.seq)
                if record.epoch < last.epoch or shrunk:
                    found.append(Violation("V-11", f"the mask flips back: {last} then {record}"))
            before[record.group_id] = record


def _check_result(
    process: tuple[int, int],
    record: Record,
    held: int,
    history: History,
    expected: Expected,
    found: list[Violation],
) -> None:
    members = history.members.get(record.epoch, {})
    contributors = slots_of(record.contributors)
    if record.epoch > held or any(slot not in members for slot in contributors):
        found.append(Violation("C-3", f"contributors are not members of the view: {record}, members {members}"))
        return
    if process[0] not in contributors:
        found.append(Violation("C-3", f"the process itself is no contributor: {record}"))
    want = expected(record.group_id, record.seq, record.slot, {slot: members[slot] for slot in contributors})
    if want != record.digest:
        found.append(Violation("C-10", f"not the result of its contributors: {record}"))


def _check_uniform(
    history: History, voted_out: set[tuple[int, int]], mixed_from: float, found: list[Violation]
) -> None:
    """C-3: everybody but those voted out alive ends a call alike: with a result or without, whatever the error.

    A result has the same (epoch, contributors) for all, and calls that end at a decision, or with the same lost root,
    end at the same; a program is shown the same behind it (C-12). Nobody who is
    in a result ends the call with an error. Those who died or left later are held to it as well, but not where somebody
    was voted out or put out alive: what such a one had contributed may have been used by them alone, who cannot tell
    any more. A call that a process says is lost may have ended otherwise elsewhere. Behind a call that was made with
    different roots while others were open, errors may be of different epochs (docs/limits.md): results are held to it.
    """
    first: dict[tuple[int, int, int, int], Record] = {}
    errors: list[Record] = []
    shown: dict[tuple[int, int, int, int], Record] = {}
    key = (0, 0, 0, 0)
    last = history.members.get(max(history.members, default=0), {})
    for process, records in history.by_process.items():
        has_gone = records[-1].kind == DIED or last.get(process[0]) != process[1]
        if process in voted_out or (voted_out and has_gone):
            continue
        for record in records:
            if record.kind == SHOWN:
                other = shown.setdefault(key, record)
                if other.contributors != record.contributors:
                    found.append(Violation("C-12", f"shown otherwise behind one call: {other} and {record}"))
            if record.kind != DONE or record.status in (GONE, LOST):
                continue
            if record.status != OK:
                errors.append(record)
            if record.status not in (OK, FAILED, ROOTLESS) or (record.status != OK and record.seq >= mixed_from):
                continue
            key = (record.group_id, record.seq, record.status, record.contributors if record.status == ROOTLESS else 0)
            other = first.setdefault(key, record)
            if (other.epoch, other.contributors) != (record.epoch, record.contributors):
                found.append(Violation("C-3", f"two outcomes of one call: {other} and {record}"))
    for error in errors:
        result = first.get((error.group_id, error.seq, OK, 0))
        members = history.members.get(result.epoch, {}) if result is not None else {}
        is_in = result is not None and error.slot in slots_of(result.contributors)
        if is_in and members.get(error.slot) == error.incarnation:
            found.append(Violation("C-3", f"a result and an error of one call: {result} and {error}"))
