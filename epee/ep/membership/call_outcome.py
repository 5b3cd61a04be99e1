"""What becomes of a call that was under way when the view changed: one pure rule, the same on every survivor.

Each rank keeps a *record* in memory that only it writes (`registry.py`): the newest view that it has heard of, the
epoch that its buffer is in, the last call that it has issued there and the last one whose rows it has **gathered**
(seen of all members). When a rank hears of a view its record is stamped with it, between two steps of its own: from
then on it issues and gathers nothing more in the old epoch by itself. So what the stamped records of all who stay say
is final, and whoever reads them comes to the same verdict:

    somebody has gathered the call    everybody's row is there: it ends in the old epoch, on all of them (WHOLE)
    else, a loss in mode "raise"      it fails, on all of them (FAIL)
    else, all who stay have issued it
        and one has given it up       it is given up, on all of them, and its number is used up (GIVEN_UP)
        and it is a combine           it ends in the old epoch over those who have issued it (AMONG)
    else                              nobody will end it: it runs again in the new epoch (MOVE), where those who have
                                      given it up refuse it

A rank gives a call up (`control/withdrawal.py`) only when nobody has gathered it, and notes so in its record, which is
final with the stamp. It may be one call ahead then, so the newest call that it has given up may be the one after.

The records of those who died or left count as well: their memory does not change any more, and a rank that ended the
call and died at once has shown its result to somebody. The record of a rank that was voted out alive, or put out of the
buffer, does not count: it may change at any moment.

A verdict is acted upon only if the own record is still stamped with the view that it was made for; before that it is
written into the own record (`Judge` says how): a later view, in which some of the records are missing, then leads to
the same verdict. Two ranks that have heard of different views wait for each other's stamp.

A rank enters a new epoch only after all its members have made an inbox for it, which they do when they are through
with the old one. So a record speaks of the old epoch for as long as anybody may ask.

Nothing here touches memory or clocks; `tests/ep/test_verdict.py` runs it in all kinds of orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

FINAL = (1 << 62) - 1  # in the place of a view: the rank has closed its buffer, so its record changes no more


class Record(NamedTuple):
    """What a rank shows of itself.

    Attributes:
        view: the newest view that it has heard of.
        epoch: that its buffer is in; 0 before the first.
        issued: its last call there; 0 for none.
        gathered: the last call there whose rows it has seen of all members.
        withdrawn: the last call there that it has given up.
    """

    view: int
    epoch: int = 0
    issued: int = 0
    gathered: int = 0
    withdrawn: int = 0

    def has_given_up(self, seq: int) -> bool:
        """Return whether call `seq` was given up here; it must be one that somebody has not ended yet."""
        return self.withdrawn >= seq > self.gathered


class Contest(NamedTuple):
    """A call that was issued and not gathered when the view changed; `is_pull`: a combine."""

    epoch: int
    seq: int
    is_pull: bool


class Verdict(Enum):
    """What becomes of it; see above."""

    WHOLE = "whole"
    AMONG = "among"
    FAIL = "fail"
    GIVEN_UP = "given up"
    MOVE = "move"


def missing(view: int, stayed: Mapping[int, Record]) -> list[int]:
    """Return the ranks whose record is not (or not any more) of `view`; while there are any there is no verdict."""
    return [rank for rank, record in stayed.items() if record.view not in (view, FINAL)]


def judge(
    contest: Contest, view: int, stayed: Mapping[int, Record], ended: Mapping[int, Record], fails: bool
) -> Verdict | None:
    """Return what becomes of a call, None while a record is missing.

    Args:
        contest: the call.
        view: the newest view that this rank has heard of.
        stayed: records of the members of the call's epoch that are in `view`, this rank's own included.
        ended: records of those members that have died or left since.
        fails: whether a loss is an error, and somebody was lost.
    """
    if missing(view, stayed):
        return None
    epoch, seq, is_pull = contest
    records = (*stayed.values(), *ended.values())
    if any(record.epoch == epoch and record.gathered >= seq for record in records):
        return Verdict.WHOLE
    if fails:
        return Verdict.FAIL
    if not all(record.epoch == epoch and record.issued >= seq for record in stayed.values()):
        return Verdict.MOVE
    if any(record.has_given_up(seq) for record in stayed.values()):
        return Verdict.GIVEN_UP
    return Verdict.AMONG if is_pull else Verdict.MOVE


def after(verdict: Verdict, seq: int, record: Record) -> Record:
    """Return the own record that tells others, also in later views, what this rank has decided about call `seq`."""
    if verdict is Verdict.WHOLE:
        return record._replace(gathered=seq)
    if verdict is Verdict.GIVEN_UP:
        return record._replace(withdrawn=max(seq, record.withdrawn))
    if verdict is Verdict.AMONG:
        return record
    return record._replace(issued=seq - 1)  # it will never be issued here again
