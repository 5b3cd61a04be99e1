"""What users ask of a group that takes processes in: who waits, take them in, count them from the next call on.

A rank that was never there is the same as a lost one: both wait for a process that asks for the slot. Members admit it
(`recover`), and the view that has it says with which call it begins (`intake.py`). Ranks that let the group grow at the
same point of their program see it before that call (`show_joined`).

Who calls: the threads of users, without the engine's lock, except where a method says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ...errors import CommTimeoutError, InvalidState
from ...view.protocol.outcome import Course
from ...view.runtime import Runtime
from ..engine.entry import ENDED
from .boxes import Boxes
from .engine_of_lane import EngineOfLane
from .intake import Intake
from .occupants import Occupants

ADMIT_PAUSE_S = 0.2  # a process that asks later is admitted by the next round
ASK_PAUSE_S = 0.02
UNSEEN_DEATH_S = 3.0  # a process of some GB takes that long to end on a busy machine


class Admission:
    """How the users of one group let processes in.

    Args:
        look: has all news taken over, and waits while the lane is frozen.
    """

    def __init__(
        self,
        runtime: Runtime,
        engine: EngineOfLane,
        occupants: Occupants,
        course: Course,
        boxes: Boxes,
        intake: Intake,
        look: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._engine = engine
        self._occupants = occupants
        self._course = course
        self._boxes = boxes
        self._intake = intake
        self._look = look
        self._later: tuple[str, dict[tuple[int, ...], int]] = ("", {})  # see `name_later`

    def waiting(self) -> tuple[int, ...]:
        """Return the ranks for which a process asks to come in."""
        if not self._occupants.is_home:
            return ()
        return tuple(
            self._occupants.rank_of[slot] for slot in self._runtime.waiting() if slot in self._occupants.rank_of
        )

    def ready(self) -> set[int]:
        """Return the ranks for which a process asks to come in, or has been taken into the newest view."""
        if not self._occupants.is_home:
            return set()
        asking = self.waiting()  # before the view, see `Loop._decide`
        return {*asking, *(self._occupants.rank_of[member.slot] for member in self._runtime.view().members)}

    def recover(self, ranks: Sequence[int], timeout_s: float) -> None:
        """Admit the processes that wait for `ranks`, all at once; returns when views have had them.

        Where a process waits for the place of a member, that member may have died unseen: it is given some time to
        prove it, else it has its place by right.

        Raises:
            CommTimeoutError: they do not come.
            InvalidState: the group takes nobody in.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        first = {member.slot: member.nonce for member in self._runtime.view().members}
        while True:
            missing = self._missing(ranks, deadline)
            if self._occupants.is_home and time.monotonic() - began < UNSEEN_DEATH_S:
                there = {member.slot: member.nonce for member in self._runtime.view().members}
                asked_for = {self._occupants.slot_of[rank] for rank in ranks}.intersection(self._runtime.waiting())
                unseen = {slot for slot in asked_for if slot in there and there[slot] == first.get(slot)}
                missing = sorted({*missing, *(self._occupants.rank_of[slot] for slot in unseen)})
            if not missing:
                return
            if not self._occupants.is_home:
                raise InvalidState(
                    f"rank {missing[0]} is lost, and a group made with new_group takes nobody in: recover the rank in "
                    "the default group, then make this one again with new_group on all its ranks"
                )
            if time.monotonic() > deadline:
                raise CommTimeoutError(
                    f"rank(s) {', '.join(map(str, missing))} did not come within {timeout_s:.1f} s; start a process "
                    "with is_extension=True for each",
                    missing,
                )
            slots = {self._occupants.slot_of[rank] for rank in missing}
            all_ask = slots <= set(self._runtime.waiting())
            if all_ask:
                self._runtime.admit(sorted(slots))
            self._runtime.await_decision(self._occupants.epoch, ADMIT_PAUSE_S if all_ask else ASK_PAUSE_S)

    def _missing(self, ranks: Sequence[int], deadline: float) -> list[int]:
        """Return which of `ranks` are not in the newest view and have not just been: such a one is lost again."""
        epoch = self._runtime.view().epoch
        while True:  # the view is told to the lanes a moment after it is shown
            self._look()
            if self._occupants.epoch >= epoch or time.monotonic() > deadline:
                break
            time.sleep(0.001)
        present = set(self._course.present())
        seq = self._engine.seq
        return [
            rank
            for rank in ranks
            if self._occupants.slot_of[rank] not in present and self._intake.first_call.get(rank, 0) <= seq
        ]

    def name_later(self, ranks: Sequence[int]) -> str:
        """Return under which name the members among global `ranks` meet to make a group now; "" if nobody ever joined.

        All members ask at the same point of their program, so they have made equally many calls, and know of the same
        newcomers. The last part counts groups of the same ranks between two calls.
        """
        engine = self._engine
        if engine.flags & ENDED or not (engine.flags or self._intake.join_epoch):
            return ""
        self._look()
        if not self._intake.join_epoch:
            return ""
        number = max(engine.seq, max(self._intake.first_call.values()) - 1)
        place = f"epee/later/{self._occupants.lane}/{self._intake.join_epoch}/{number}"
        if place != self._later[0]:
            self._later = (place, {})
        counts = self._later[1]
        counts[tuple(ranks)] = counts.get(tuple(ranks), 0) + 1
        return f"{place}/{'_'.join(map(str, ranks))}/{counts[tuple(ranks)]}"

    def is_settled(self) -> bool:
        """Return whether this rank's next call is that of those for whom `show_joined` was called, or a later one."""
        return self._boxes.box.epoch >= self._boxes.shown_epoch

    def show_joined(self) -> None:
        """Plan this rank's next call with those who have been taken in, if it is surely theirs. The lock is held."""
        self._boxes.show(self._intake.join_epoch)

    def set_size(self, size: int) -> None:
        """From this rank's next call on the group counts `size` ranks. The engine's lock is held."""
        self._boxes.set_size(size)
