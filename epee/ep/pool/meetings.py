"""Steps that the ranks of a group take together outside of calls: make further rooms, or meet again in those they have.

Under Mooncake's names a rank may make a second buffer while its peers call `update_ep_member` on their first one: both
are one step of the group. A rank that makes rooms cannot know which of the two its peers do, so each rank writes the
kind of its step into the group's store, and a rank that makes further rooms waits until it has read those of others.

    step/N/R     the kind of rank R's step N: "make" or "again"
    step/next    the number of the next step, written by each rank before it meets the others in their memory (`sync`)

Each rank writes its own steps, once; all ranks write the same next number. Readers are ranks that make rooms on a group
where they have some, and a process that replaces a lost rank, when it has met the others, which make no step before its
first call. The numbers are the same on all ranks, as all take the steps in the same order. A crash leaves steps without
a key: a rank that waits for one skips ranks that the group's mask excludes, and ends by its timeout. Without a store
(its owner has died) rooms are made as if no rank met again.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from typing import Any

import torch.distributed as dist

from ... import env
from ...errors import CommTimeoutError

_log = logging.getLogger(__name__)
_MAKE, _AGAIN = "make", "again"
_PREFIX = "epee/ep/step/"
_POLL_S = 0.002


class Steps:
    """The steps of this process on one group of the backend "epee".

    Args:
        group: whose store and mask are used; kept by its users, not here.

    Attributes:
        newest: the `LatencyRooms` that were made last, None before the first.
        has_memory: rooms of this process have had memory that all ranks made; before that there are no steps.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: weakref.ref[Any] = weakref.ref(group)  # its mask and store are not of torch's class
        self._number = 0
        self.has_memory = False
        self.newest: weakref.ref[Any] | None = None

    def meet(self) -> None:
        """Write the next step's number for a process that joins in the `sync` that follows. Local."""
        self._write("next", str(self._number))

    def join(self) -> None:
        """Read the next step's number from the ranks that this process has met in their memory. Local."""
        group = self._group()
        try:
            store = None if group is None else group.get_group_store()
            if store is not None and store.check([_PREFIX + "next"]):
                self._number = int(store.get(_PREFIX + "next"))
        except (RuntimeError, OSError) as error:
            _log.warning("the number of the next step is not known, the group's store is out of reach: %s", error)

    def meet_again(self) -> None:
        """Notify ranks that make rooms in this step that this one meets them in those that it has. Local."""
        self._write(self._key(self._number), _AGAIN)
        self._number += 1

    def is_met_again(self, timeout_s: float | None) -> bool:
        """Return whether a rank meets again in this step, in which this one makes rooms.

        Raises:
            CommTimeoutError: a rank takes no step.
        """
        group, number = self._group(), self._number
        is_written = self._write(self._key(number), _MAKE)
        self._number += 1
        if group is None or not is_written:
            return False
        limit_s = env.get_float("EPEE_TIMEOUT_S") if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        found: dict[int, str] = {group.rank(): _MAKE}
        while True:
            try:
                found.update(self._read(group, number, set(range(group.size())) - found.keys()))
            except (RuntimeError, OSError) as error:
                _log.warning("the group's store is out of reach, rooms are made as if no rank met again: %s", error)
                return False
            if _AGAIN in found.values():
                return True
            missing = [rank for rank, is_in in enumerate(group.active_ranks().tolist()) if is_in and rank not in found]
            if not missing:
                return False
            if time.monotonic() > deadline:
                raise CommTimeoutError(
                    f"rank {missing[0]} has made no further buffer on this group, nor called update_ep_member, within "
                    f"{limit_s:g} s; all ranks must take this step"
                )
            time.sleep(_POLL_S)

    def _key(self, number: int, rank: int | None = None) -> str:
        """Return the key of a rank's step, of this rank's by default, after the prefix."""
        group = self._group()
        return f"{number}/{rank if rank is not None or group is None else group.rank()}"

    def _write(self, key: str, value: str) -> bool:
        """Write a key; False where there is no store."""
        group = self._group()
        if group is None:
            return False
        try:
            group.get_group_store().set(_PREFIX + key, value)
        except (RuntimeError, OSError) as error:
            _log.warning(
                "peers that make a buffer now cannot see this rank's step: the store is out of reach: %s", error
            )
            return False
        return True

    def _read(self, group: Any, number: int, ranks: set[int]) -> dict[int, str]:
        """Return the steps of those of the ranks that have written them."""
        store = group.get_group_store()
        keys = {rank: _PREFIX + self._key(number, rank) for rank in ranks}
        return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}


def steps_of(group: dist.ProcessGroup) -> Steps | None:
    """Return the steps of this process on a group; None where the backend is not "epee": then making memory meets."""
    if getattr(group, "in_view", None) is None:
        return None
    known = _steps()
    if group not in known:
        known[group] = Steps(group)
    return known[group]


@functools.cache
def _steps() -> weakref.WeakKeyDictionary[dist.ProcessGroup, Steps]:
    return weakref.WeakKeyDictionary()
