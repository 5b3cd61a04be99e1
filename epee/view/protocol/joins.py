"""The join requests that a member knows of, and the choice of those that may be proposed.

A joiner repeats its request to every member that it knows of. A request that is not repeated is dropped, so no member
waits for a joiner that died. Its slot must be free: without an occupant, or with one that is dead, has left or is being
evicted. An occupant that seems alive is asked for a sign of life; if it answers the joiner is refused, if it stays
silent for long it is replaced (a process restarted faster than its predecessor's death was seen).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .messages import Member

MAX_PENDING = 256


class Request:
    """A pending join. Times are the agent's.

    Attributes:
        admitted: it may be proposed; else a user has to admit it first.
        not_before: time from which on it may be proposed.
        tries: how often it was proposed in vain, because a member did not answer.
        probed: time at which the occupant of its slot was first asked for a sign of life.
        probe_again: the request was repeated since the occupant was last asked; the question may have been lost, or
        have arrived before a new occupant knew that it is one.
    """

    def __init__(self, member: Member, now: float, admitted: bool) -> None:
        self.member = member
        self.heard = now
        self.admitted = admitted
        self.not_before = now
        self.tries = 0
        self.probed: float | None = None
        self.probe_again = False
        self.occupant_lives = False


class Joins:
    """The requests that one agent knows of, in order of arrival."""

    def __init__(self) -> None:
        self.requests: dict[bytes, Request] = {}

    def note(self, member: Member, now: float, admitted: bool) -> bool:
        """Store a request or its repetition; True when it is new. More than `MAX_PENDING` are not stored."""
        request = self.requests.get(member.nonce)
        if request is not None:
            request.heard = now
            request.admitted |= admitted
            request.probe_again = True
            return False
        if len(self.requests) >= MAX_PENDING:
            return False
        self.requests[member.nonce] = Request(member, now, admitted)
        return True

    def expire(self, before: float) -> None:
        """Drop requests that were not repeated since `before`."""
        stale = [nonce for nonce, request in self.requests.items() if request.heard < before]
        for nonce in stale:
            del self.requests[nonce]

    def drop(self, nonce: bytes) -> None:
        """Drop one request, if it exists."""
        self.requests.pop(nonce, None)

    def admit(self, slots: Collection[int]) -> None:
        """Mark the requests for these slots as admitted by a user."""
        for request in self.requests.values():
            if request.member.slot in slots:
                request.admitted = True

    def postpone(self, until: float) -> None:
        """Propose none of the present requests before `until`, because some member did not answer in time."""
        for request in self.requests.values():
            request.not_before = until
            request.tries += 1

    def num_tries(self) -> int:
        """Return the highest number of tries of the requests that may be proposed; each time it may take longer."""
        return max((request.tries for request in self.requests.values() if request.admitted), default=0)

    def heard_from(self, nonce: bytes, occupants: Mapping[int, Member]) -> None:
        """Record a sign of life of a process that was asked because of a joiner."""
        for request in self.requests.values():
            occupant = occupants.get(request.member.slot)
            if request.probed is not None and occupant is not None and occupant.nonce == nonce:
                request.occupant_lives = True

    def ready(
        self, now: float, occupants: Mapping[int, Member], leaving: Collection[int], patience_s: float
    ) -> tuple[list[Member], set[int]]:
        """Return the joiners that may be proposed now, and the silent occupants that they replace."""
        members: list[Member] = []
        replaced: set[int] = set()
        for request in self.requests.values():
            slot = request.member.slot
            if not request.admitted or now < request.not_before:
                continue
            if slot not in occupants or slot in leaving:
                members.append(request.member)
            elif request.probed is not None and not request.occupant_lives and now - request.probed >= patience_s:
                members.append(request.member)
                replaced.add(slot)
        return members, replaced

    def unprobed(self, occupants: Mapping[int, Member], leaving: Collection[int]) -> list[Request]:
        """Return the admitted requests whose slot has an occupant that is to be asked, perhaps a second time."""
        return [
            request
            for request in self.requests.values()
            if request.admitted
            and (request.probed is None or request.probe_again)
            and request.member.slot in occupants
            and request.member.slot not in leaving
        ]
