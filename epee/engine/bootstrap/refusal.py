"""The refusal of processes of other hosts by a group of one host, in a job over several: both sides are notified.

Members of a group show their offers beside its row (`home.Offer`), and agents bring them to other hosts. A process
that is about to ask reads there on which host the group is. If that is another one it does not ask: it raises, and
shows the offer with which it would have asked in a row that serves nothing else, as long as it is in the job. Members
that wait for it find that, and raise too, once for each time that it has tried: another process may still come.

Each process writes its own row. Rows are checked as any offer. A crash removes the row.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import NamedTuple

from ...errors import InvalidArgument, UnsupportedError, expected
from ...view.process.board import GroupRow
from ...view.runtime import Runtime
from .group_note import ASKS, Offer, parse_offers

logger = logging.getLogger("epee")

_LOOK_S = 0.005
_SALT = 0xA0761D6478BD642F
_attempts: dict[int, int] = {}  # by group_id
_rows: weakref.WeakKeyDictionary[Runtime, dict[int, GroupRow]] = weakref.WeakKeyDictionary()  # by group_id


def require_host(runtime: Runtime, group_id: int, offer: Offer, timeout_s: float) -> None:
    """Check that a group of one host is on this one, as far as its members show; else notify them.

    Args:
        runtime: of the job.
        group_id: of the group.
        offer: with which this process would ask.
        timeout_s: how long to wait until all members of the job have been heard.

    Raises:
        UnsupportedError: it is on another host.
    """
    own, deadline = runtime.member.host, time.monotonic() + timeout_s
    if all(member.host == own for member in runtime.view().members):
        return
    while True:
        is_all = not runtime.unheard()  # first: the offers are read behind it
        shown = parse_offers(runtime.told(group_id))
        hosts = {runtime.host_of(slot) for slot, other in shown.items() if other.state != ASKS} - {""}
        if hosts or is_all or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_S)
    if not hosts or own in hosts:
        return
    _tell(runtime, _group_id_of(group_id), offer)
    raise UnsupportedError(
        f"rank {offer.rank} cannot join this group: it was made while all its ranks were on one host, "
        f"{min(hosts)}, and stays there, and this process runs on host {own}; make the group anew with all ranks "
        "(new_group), or begin it as one over several hosts (EPEE_OVER_HOSTS=1)"
    )


class Refusal(NamedTuple):
    """A process of another host that would have had a rank of a group.

    Attributes:
        slot: of the job.
        attempt: the same for no other attempt of this group: the process, and how often it has tried.
    """

    slot: int
    attempt: tuple[bytes, bytes]


def refused(runtime: Runtime, group_id: int) -> dict[int, Refusal]:
    """Return which ranks of a group processes of other hosts would have had."""
    nonces = {member.slot: member.nonce for member in runtime.view().members}
    told = parse_offers(runtime.told(_group_id_of(group_id)))
    return {o.rank: Refusal(slot, (nonces[slot], o.blob)) for slot, o in told.items() if slot in nonces}


def _group_id_of(group_id: int) -> int:
    """Return the row in which a group's refused processes are shown."""
    return (group_id ^ _SALT) & ((1 << 62) - 1)


def _tell(runtime: Runtime, group_id: int, offer: Offer) -> None:
    known = _rows.setdefault(runtime, {})
    if group_id not in known:
        try:
            known[group_id] = runtime.register_board(group_id)
        except expected(InvalidArgument) as error:  # too many rows: then members wait until their timeout
            logger.warning("the members of a group are not told that this process was refused: %s", error)
            return
    number = _attempts[group_id] = _attempts.get(group_id, 0) + 1
    known[group_id].tell(offer._replace(blob=number.to_bytes(len(offer.blob), "little")).pack())
