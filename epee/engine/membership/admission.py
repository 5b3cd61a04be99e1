"""The membership requests of users: the ranks that wait, taking them in, counting them from the next call on.

A rank that never existed is treated as a lost one: both wait for a process that asks for the slot, or for the group
if it is in the job already (`home.Offer`). Members admit it (`recover`), and the view that has it states the call with
which it begins (`members.py`). Ranks that let the group grow at the same point of their program see it before that call
(`show_joined`). Members can also be excluded from the group, while they stay in the job (`put_out`).

The callers are threads of users, without the engine's lock, except where a method states otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ...errors import CommTimeoutError, InvalidState, UnsupportedError
from ...view.protocol.decision import parts_of
from ...view.protocol.messages import PUT_OUT, Decision, Locator, Want
from ...view.protocol.outcome import Course
from ...view.runtime import Runtime
from ..bootstrap.group_note import ASKS, FOUNDER, Offer, locators_of
from ..bootstrap.refusal import refused
from ..entry import ENDED
from ..outbox import has_left
from .members import EpochRegions, Joiners
from .rank_table import RankTable

if TYPE_CHECKING:
    from ..engine import Engine

ADMIT_PAUSE_S = 0.2  # a process that asks later is admitted by the next round
ASK_PAUSE_S = 0.02
CATCH_UP_S = 2.0  # how long to wait for other members' agents
UNSEEN_DEATH_S = 3.0  # a process of some GB takes that long to end on a busy machine


class Admission:
    """The admission of processes by the users of one group.

    Args:
        look: applies all pending decisions, and waits while the group is frozen.
        told: returns the offers of the members, this process among them, and of those that ask to join.
    """

    def __init__(
        self,
        runtime: Runtime,
        engine: Engine,
        rank_table: RankTable,
        course: Course,
        epoch_regions: EpochRegions,
        intake: Joiners,
        look: Callable[[], None],
        told: Callable[[], Mapping[int, Offer]],
    ) -> None:
        self._runtime = runtime
        self._engine = engine
        self._rank_table = rank_table
        self._course = course
        self._epoch_regions = epoch_regions
        self._intake = intake
        self._look = look
        self._told = told
        self._raised: set[tuple[bytes, bytes]] = set()  # attempts of processes of other hosts that were reported here
        self._later: tuple[str, dict[tuple[int, ...], int]] = ("", {})  # see `name_later`

    def waiting(self) -> tuple[int, ...]:
        """Return the ranks for which a process asks to join."""
        return tuple(sorted(self.requests()))

    def requests(self) -> dict[int, int]:
        """Return the ranks for which a process asks to join, and the number of its request (`Offer.request`).

        A process that asks to join the job has none, 0.
        """
        askers = self._askers(self._runtime.view())
        told = self._told() if askers else {}
        numbers = {rank: told[slot].request if slot in told else 0 for rank, slot in askers.items()}
        return dict.fromkeys(self._joiners(), 0) | numbers

    def ready(self) -> set[int]:
        """Return the ranks for which a process asks to join, or has been taken into the newest view."""
        asking = self.waiting()  # before the view, see `Loop._decide`
        return {*asking, *self._rank_table.present(self._runtime.view())}

    def joining(self) -> set[int]:
        """Return the ranks for which a process asks to join, or has been taken in and takes part in a later call."""
        asking, peer_regions = self.waiting(), self._engine.members  # asking before the view, see `Loop._decide`
        since = self.since()
        return {
            *asking,
            *(rank for rank, when in since.items() if rank not in peer_regions.members or when > peer_regions.epoch),
        }

    def expected(self) -> tuple[set[int], set[int]]:
        """Return the ranks that take part in the newest view or ask to join, and those that have left meanwhile.

        A rank that has left its outbox is in the view as long as its process is in the job; it makes no calls any more.
        """
        asking = self.waiting()  # before the view, see `Loop._decide`
        view, full = self._runtime.view(), self._epoch_regions.full
        parts, known = parts_of(view, self._rank_table.group_id), dict(self._rank_table.since)
        there: set[int] = {*asking}
        left: set[int] = set()
        for rank, slot in self._rank_table.present(view).items():
            is_read = known.get(slot) == parts.get(slot)  # else it has joined just now, and its outbox is another
            (left if is_read and rank < full.num_ranks and has_left(full.words[rank]) else there).add(rank)
        return there, left - there

    def present(self) -> dict[int, int]:
        """Return the members of the newest view: rank -> slot."""
        return self._rank_table.present(self._runtime.view())

    def since(self) -> dict[int, int]:
        """Return since which epoch each rank takes part in the newest view.

        Its owner in an earlier one is no member.
        """
        return self._rank_table.since_in(self._runtime.view())

    def is_joiner(self, rank: int) -> bool:
        """Return whether a process asks to join the job for this rank, and not only the group."""
        return rank in self._joiners()

    def _joiners(self) -> dict[int, int]:
        """Return the processes that ask to join the job, and with it its first group: rank -> slot."""
        if not self._rank_table.is_home:
            return {}
        return {self._rank_table.rank_of[slot]: slot for slot in self._runtime.waiting()}

    def _askers(self, view: Decision) -> dict[int, int]:
        """Return the processes of the job that ask to join this group: rank -> slot; of several the lowest.

        `view`: a process that has a part in it with its offer asks no more; read before this.
        """
        rank_table, locators = self._rank_table, locators_of(view, self._rank_table.group_id)
        taking_part = rank_table.present(view)
        found: dict[int, int] = {}
        for slot, offer in sorted(self._told().items(), reverse=True):
            is_free = rank_table.fits(slot, offer.rank) and taking_part.get(offer.rank, slot) == slot
            is_in = taking_part.get(offer.rank) == slot and locators.get(slot) == offer.locator
            if offer.state == ASKS and is_free and not is_in:
                found[offer.rank] = slot
        return found

    def recover(self, ranks: Sequence[int], timeout_s: float) -> None:
        """Admit the processes that wait for `ranks`, all at once; returns when views have had them.

        If a process waits for the rank of a member, that member may have died unseen: it is given some time to
        prove it, else it keeps its rank.

        Raises:
            CommTimeoutError: they do not come.
            UnsupportedError: a process of another host has tried to join this group, which stays on one.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        first = {member.slot: member.nonce for member in self._runtime.view().members}
        while True:
            missing = self._missing(ranks, deadline)
            self._require_hosts(missing)
            again = set(ranks).intersection(self._askers(self._runtime.view()))  # it has dropped what it joined with
            missing = sorted(again.union(missing))
            if self._rank_table.is_home and time.monotonic() - began < UNSEEN_DEATH_S:
                there = {member.slot: member.nonce for member in self._runtime.view().members}
                asked_for = {self._rank_table.slot_of[rank] for rank in ranks}.intersection(self._runtime.waiting())
                unseen = {slot for slot in asked_for if slot in there and there[slot] == first.get(slot)}
                missing = sorted({*missing, *(self._rank_table.rank_of[slot] for slot in unseen)})
            if not missing:
                return
            if time.monotonic() > deadline:
                raise CommTimeoutError(
                    f"rank(s) {', '.join(map(str, missing))} did not come within {timeout_s:.1f} s; start a process "
                    "with is_extension=True for each, and have it ask for this group",
                    missing,
                )
            epoch, all_ask = self._rank_table.epoch, self._let_in(missing)
            self._runtime.await_decision(epoch, ADMIT_PAUSE_S if all_ask else ASK_PAUSE_S)

    def _require_hosts(self, ranks: Collection[int]) -> None:
        """Raise where a process of another host was refused that would have had one of these ranks; once for each."""
        runtime = self._runtime
        told = {rank: who for rank, who in refused(runtime, self._rank_table.group_id).items() if rank in ranks}
        asking = self._askers(runtime.view()) if told else {}
        for rank in sorted(told.keys() - asking.keys()):
            who = told[rank]
            if who.attempt in self._raised:
                continue
            self._raised.add(who.attempt)
            raise UnsupportedError(
                f"rank {rank} cannot be admitted: slot {who.slot} of the job has asked for it, on host "
                f"{runtime.host_of(who.slot)}, and this group stays on the host where it was made, "
                f"{runtime.member.host}; make the group anew with all ranks (new_group), or begin it as one over "
                "several hosts (EPEE_OVER_HOSTS=1)"
            )

    def take_in(self, ranks: Collection[int], until: float) -> None:
        """Have those of `ranks` taken in that ask, as far as this rank knows.

        Returns when a view has one more of them, or, after a moment, if none of them asks; at `until`, a
        `time.monotonic()` value, at the latest.

        Raises:
            EvictedError, NoQuorumError: there will be no view.
        """
        before = set(self.present())
        while (now := time.monotonic()) < until:
            view = self._runtime.view()
            asking = sorted(rank for rank in self._askers(view) if rank in ranks)
            if set(self._rank_table.present(view)).intersection(ranks) - before:
                return
            if not asking:
                time.sleep(min(ASK_PAUSE_S, until - now))
                return
            self._let_in(asking)
            self._runtime.await_decision(view.epoch, min(ADMIT_PAUSE_S, until - now))

    def _let_in(self, ranks: Sequence[int]) -> bool:
        """Have the processes that ask for `ranks` taken in, if all are here; False: some are not.

        A process that is in the job but has never been in this group has, for the agents, a part in it since it joined.
        So it is removed first, and joins as a returning one.
        """
        view = self._runtime.view()  # one view for all steps: later joiners would be removed as strangers
        askers, joiners = self._askers(view), self._joiners()
        if not all(rank in askers or rank in joiners for rank in ranks):
            return False
        slots = sorted(joiners[rank] for rank in ranks if rank not in askers)
        if slots:
            self._runtime.admit(slots)
        coming = {askers[rank] for rank in ranks if rank in askers}
        if coming:
            strangers = tuple(sorted(coming.intersection(parts_of(view, self._rank_table.group_id))))
            members = {*self._rank_table.present(view).values()}
            if strangers:
                self._want(members - {*strangers}, strangers, view.epoch)
                return True
            locators = self._locators(view, members, coming)
            if locators is None:
                return False
            self._want(members | coming, (), view.epoch, locators)
        return True

    def _locators(self, view: Decision, members: Collection[int], coming: Collection[int]) -> list[Locator] | None:
        """Return the locators that a view with joiners must carry in addition to `view`.

        None: not all of it is here yet. Members that joined the first group with the job are described by their
        endpoints.
        """
        told, known = self._told(), locators_of(view, self._rank_table.group_id)
        wanted = set(coming)
        if not self._rank_table.is_home:
            wanted |= {slot for slot in members if slot not in known}
        states = {slot: told[slot].state for slot in wanted if slot in told}
        if any(states.get(slot) != (ASKS if slot in coming else FOUNDER) for slot in wanted):
            return None
        return [Locator(slot, told[slot].locator.pack()) for slot in sorted(wanted)]

    def put_out(self, ranks: Sequence[int], timeout_s: float) -> None:
        """Have members leave the group, and stay in the job; returns when a view has begun without them.

        The other members know it then, but for those that do not answer within 2 s: no rank that is told by this one
        takes them for members.

        Raises:
            CommTimeoutError: the view did not change in time.
            InvalidState: no rank would be left.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            view = self._runtime.view()
            present = self._rank_table.present(view)
            going = {present[rank] for rank in ranks if rank in present}
            if not going:
                break
            staying = {*present.values()} - going
            if not staying:
                raise InvalidState("put_out cannot remove all ranks; leave at least one, or destroy the group")
            if time.monotonic() > deadline:
                raise CommTimeoutError(
                    f"rank(s) {', '.join(map(str, ranks))} were not removed within {timeout_s:.1f} s: the members do "
                    "not agree; call it again",
                    sorted(ranks),
                )
            self._want(staying, tuple(sorted(going)), view.epoch)
            self._runtime.await_decision(view.epoch, ADMIT_PAUSE_S)
        self._runtime.catch_up(CATCH_UP_S, present.values())
        if self._epoch_regions.full.rank not in ranks:
            self.apply_view(deadline)

    def request_exclusion(self, ranks: Collection[int], staying: Collection[int], least: int) -> int:
        """Request a view in which the members `ranks` have no part in the group, and return at once.

        Args:
            ranks: to be excluded; they stay in the job.
            staying: the other members. One that does not answer is excluded as well, if `least` of them remain.
            least: how many members must remain.

        Returns:
            The epoch of the view that the request is about. A later one ends it, whatever it says.
        """
        view = self._runtime.view()
        present = self._rank_table.present(view)
        going = tuple(sorted(present[rank] for rank in ranks if rank in present))
        if going:
            self._want({present[rank] for rank in staying if rank in present}, going, view.epoch, least=least)
        return view.epoch

    def apply_view(self, deadline: float) -> None:
        """Apply the newest view; the next call is planned with its members, if it surely takes part in it.

        Raises:
            EvictedError: this process has no part in it.
        """
        self._await_news(deadline)
        self._engine.look(lambda: self._epoch_regions.show(self._rank_table.epoch))

    def strangers(self) -> set[int]:
        """Return the ranks whose slot of the job has a process in the newest view that never had a part here."""
        rank_of, before = self._rank_table.rank_of, self._rank_table.incarnations
        members = self._runtime.view().members
        return {rank_of[m.slot] for m in members if m.slot in rank_of and before.get(m.slot) != m.incarnation}

    def cause_of_loss(self, rank: int, since: int) -> str:
        """Return why the process that has had a rank since epoch `since` has lost it; "" while it has it.

        The causes are those of removals (`view/protocol/messages.py`), PUT_OUT of one that was excluded on request.
        """
        epoch, cause = self._rank_table.removed.get(rank, (0, ""))
        return cause if epoch > since else ""

    def losses(self, after: int) -> list[tuple[int, int, str]]:
        """Return the ranks that were lost, not excluded on request, in epochs later than `after`: rank, epoch, cause.

        Of each rank the last loss.
        """
        self._look()
        removed = self._rank_table.removed.items()
        return sorted((rank, epoch, cause) for rank, (epoch, cause) in removed if epoch > after and cause != PUT_OUT)

    def _want(
        self,
        members: Collection[int],
        out: tuple[int, ...],
        epoch: int,
        locators: Iterable[Locator] = (),
        least: int = 0,
    ) -> None:
        want = Want(self._rank_table.group_id, tuple(sorted(members)), out, least, locators=tuple(locators))
        self._runtime.want(want, epoch)

    def _await_news(self, deadline: float) -> None:
        """Apply the newest view: it is delivered to the groups a moment after it is shown."""
        epoch = self._runtime.view().epoch
        while True:
            self._look()
            if self._rank_table.epoch >= epoch or time.monotonic() > deadline:
                return
            time.sleep(0.001)

    def _missing(self, ranks: Sequence[int], deadline: float) -> list[int]:
        """Return which of `ranks` are not in the newest view and have not just been: such a one is lost again."""
        self._await_news(deadline)
        present = set(self._course.present())
        seq = self._engine.seq
        return [
            rank
            for rank in ranks
            if self._rank_table.slot_of[rank] not in present and self._intake.first_call.get(rank, 0) <= seq
        ]

    def name_later(self, ranks: Sequence[int]) -> str:
        """Return the name under which the members among global `ranks` meet to make a group now.

        "" if none ever joined. All members ask at the same point of their program, so they have made equally many
        calls, and know of the same joiners. The last part counts groups of the same ranks between two calls.
        """
        engine = self._engine
        if engine.flags & ENDED or not (engine.flags or self._intake.join_epoch):
            return ""
        self._look()
        if not self._intake.join_epoch:
            return ""
        number = max(engine.seq, max(self._intake.first_call.values()) - 1)
        place = f"epee/later/{self._rank_table.group_id}/{self._intake.join_epoch}/{number}"
        if place != self._later[0]:
            self._later = (place, {})
        counts = self._later[1]
        counts[tuple(ranks)] = counts.get(tuple(ranks), 0) + 1
        return f"{place}/{'_'.join(map(str, ranks))}/{counts[tuple(ranks)]}"

    def is_settled(self) -> bool:
        """Return whether this rank's next call is that of the processes given to `show_joined`, or a later one."""
        return self._epoch_regions.peer_regions.epoch >= self._epoch_regions.shown_epoch

    def show_joined(self) -> None:
        """Plan this rank's next call with the processes that have been taken in, if they surely take part.

        The lock is held.
        """
        self._epoch_regions.show(self._intake.join_epoch)

    def set_size(self, size: int) -> None:
        """From this rank's next call on the group counts `size` ranks. The engine's lock is held."""
        self._epoch_regions.set_size(size)
