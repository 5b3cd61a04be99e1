"""Which buffers run on a group over several hosts: what its members tell of them, and what a newcomer finds.

A buffer over hosts is an engine with a lane of its own (`birth.py`). A process that has taken a lost rank's place in
the group learns of it by a **notice**: number of the buffer among those of the group, its lane, the sizes of its
outboxes, what it was made with. Each member tells its notices on its board, beside a lane that is there for nothing
else; the agents bring them to other hosts (`view/process/board.py`, `LaneTold`). So neither the store nor a call of the
group is needed, and whoever has died takes its notices along.

    a buffer runs    when a member tells of it, and all do that were in the job when it was made. Who was and does not
                     has closed it: then it is over.
    a newcomer       waits until it has heard everything that the members tell, then takes part in the oldest running
                     buffer of the kind that it does not have. Where there is none, all make a new one together.

So survivors that want a new buffer with the newcomer close the old one before they take it into the group, as on one
host: what they take back before is not told to it.

A buffer that was made while all its ranks were on one host stays on that host: a newcomer of another host is refused
before any call of the group, one of that host finds it there (`membership/birth.py`). So such a buffer is told, too,
with one host; who is of another host tells nothing of it, and is not asked whether it has closed it.

Who writes: each process its own rows, when its buffer is made (all ranks have theirs by then) or when it has come into
it, and when it closes it. Who reads: newcomers. What orders it: nothing is needed; a notice is complete or not there. A
crash takes all notices of a process away with its membership. Everything here is a peer's word: lengths, numbers and
sizes are checked, and the lane's outboxes say whose they are (`outbox.OutboxOwner`).
"""

from __future__ import annotations

import logging
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch.distributed as dist

from ...engine.bootstrap.home import Home, pack_home, parse_home
from ...engine.limits import MIN_STAGING_BYTES, MODES
from ...errors import CommTimeoutError, EpeeError, InvalidState, UnsupportedError, context
from ...view.group import GroupInView
from ...view.process.board import MAX_TOLD_BYTES
from ...view.protocol.decision import parts_of
from ...view.protocol.messages import Decision
from ...view.runtime import Runtime
from ...view.transport.wire import LANE_LIMIT
from ..config import CONFIG_NAMES, BufferConfig
from ..membership.birth import fits

logger = logging.getLogger("epee")

MAX_NOTICES = 32  # of one process and group
_LOOK_S = 0.005
_HEAD = struct.Struct("<IIQH")  # number, hosts, epoch, bytes of the note about the lane
_WORDS = struct.Struct("<BIIBIBBQQQ6B")  # `BufferConfig.words`
_SALT = 0xD1B54A32D192ED03
_KIND = ("num_ranks", "kind of buffer")  # in what a newcomer's `Buffer` is like the one that it would come into
_SHAPE = (*_KIND, "num_experts", "hidden", "num_topk", "max_tokens_per_rank", "num_slots")  # a group may have several
_taken: weakref.WeakKeyDictionary[Runtime, dict[int, set[int]]] = weakref.WeakKeyDictionary()  # places, by group
_had: weakref.WeakKeyDictionary[Runtime, set[int]] = weakref.WeakKeyDictionary()  # lanes of buffers, closed ones too
_lock = threading.RLock()  # a collection below it may take a notice back
assert len(CONFIG_NAMES) == 16  # as `_WORDS` has them


class BufferNotice(NamedTuple):
    """A buffer that runs.

    Attributes:
        number: among the buffers of its group.
        num_hosts: on which it was made; sizes follow from it. 1: it stays there.
        epoch: of the view in which it was made.
        home: its lane, and, over several hosts, the sizes of its outboxes.
        words: as of `BufferConfig.words`.
    """

    number: int
    num_hosts: int
    epoch: int
    home: Home
    words: tuple[int, ...]

    def pack(self) -> bytes:
        """Return the bytes that are told."""
        home = pack_home(self.home)
        data = _HEAD.pack(self.number, self.num_hosts, self.epoch, len(home)) + home + _WORDS.pack(*self.words)
        assert len(data) <= MAX_TOLD_BYTES
        return data


def parse_notice(data: bytes) -> BufferNotice | None:
    """Return what a member tells of a buffer, None where it cannot be right."""
    try:
        number, num_hosts, epoch, length = _HEAD.unpack_from(data)
        home = parse_home(data[_HEAD.size : _HEAD.size + length])
        words = _WORDS.unpack(data[_HEAD.size + length :])
    except (EpeeError, struct.error):
        return None
    is_lane = home.spans == (num_hosts > 1) and home.lane < LANE_LIMIT
    can_be = number and 1 <= num_hosts <= home.num_ranks == words[0] and is_lane
    return BufferNotice(number, num_hosts, epoch, home, words) if can_be else None


def notice_lane(group_lane: int, place: int) -> int:
    """Return the lane beside which a process tells of the buffer at one of its places."""
    return (group_lane ^ (place + 1) * _SALT) & ((1 << 62) - 1)


class _NoPlaceLeft(InvalidState):
    """A process tells of as many buffers of a group as it can."""


def tell(seat: GroupInView, notice: BufferNotice) -> Callable[[], None]:
    """Tell the members that this process has a buffer; return what takes it back (idempotent).

    Raises:
        InvalidState: this process has too many buffers of the group.
    """
    runtime, lane = seat.runtime, seat.lane
    with _lock:
        taken = _taken.setdefault(runtime, {}).setdefault(lane, set())
        place = next((place for place in range(MAX_NOTICES) if place not in taken), None)
        if place is None:
            raise _NoPlaceLeft(f"a process has at most {MAX_NOTICES} buffers of one group at a time; close some")
        taken.add(place)
        _had.setdefault(runtime, set()).add(notice.home.lane)
    own = notice_lane(lane, place)

    def take_back() -> None:
        """Tell nothing more of it."""
        with _lock:
            is_first = place in taken
            taken.discard(place)
        if is_first:
            runtime.unregister(own)

    row = None
    try:
        row = runtime.register_board(own)
        row.tell(notice.pack())
    except BaseException:
        if row is not None:
            runtime.unregister(own)
        with _lock:
            taken.discard(place)
        raise
    return take_back


def tell_of_one_host(
    seat: GroupInView, number: int, lane: int, config: BufferConfig, like: BufferNotice | None, first: int
) -> Callable[[], None]:
    """Tell the members that this process has a buffer that stays on its host; return what takes it back.

    Args:
        number, lane: of the buffer.
        like: what was told of it here, where this process has come into it.
        first: the epoch in which all have made it together; 0 where that is not so.
    """
    epoch = like.epoch if like is not None else first or seat.runtime.view().epoch
    home = Home(lane, config.num_ranks, MIN_STAGING_BYTES, MODES[0])
    try:
        return tell(seat, BufferNotice(number, 1, epoch, home, config.words()))
    except _NoPlaceLeft as error:  # it works all the same; only who comes from another host waits in vain
        logger.info("a buffer of one host is not told to processes that come: %s", error)
        return _nothing


class OnOneHost(NamedTuple):
    """A buffer that a newcomer would come into, and that stays on one host.

    Attributes:
        notice: what is told of it, by `rank`.
        host, own: keys of its host, and of that of the newcomer.
    """

    notice: BufferNotice
    rank: int
    host: str
    own: str

    def require_here(self, kind: str, own_rank: int) -> None:
        """Raise `UnsupportedError` where the newcomer, who makes a buffer of this `kind`, is of another host."""
        if self.host != self.own:
            raise UnsupportedError(
                f"{kind} (rank={own_rank}): rank {self.rank} has a {kind} of the group that was made while all ranks "
                f"were on one host, {self.host}; such a buffer stays there, and this process runs on host {self.own}; "
                "close it on all ranks before this process comes into the group, and make it anew together"
            )


def find_on_one_host(
    group: dist.ProcessGroup, seat: GroupInView | None, config: BufferConfig, is_cuda: bool, timeout_s: float
) -> OnOneHost | None:
    """Return the running buffer of one host that this process, a newcomer, would come into; None: none. Local.

    Args:
        is_cuda: the buffer is to be one of GPUs, whatever `config` says so far.
        Others as of `find_running`, which raises the same.
    """
    if seat is None or not seat.is_joiner or not seat.spans:
        return None
    runtime, own = seat.runtime, config.words()
    had = _had.get(runtime, set())
    device = CONFIG_NAMES.index("device")
    names = _SHAPE if config.is_latency else _KIND
    like = [CONFIG_NAMES.index(name) for name in names]
    for notice, rank in _running(seat, group.rank(), timeout_s):
        theirs = notice.words
        is_like = all(theirs[at] == own[at] for at in like) and (theirs[device] > 0) == is_cuda
        if is_like and notice.home.lane not in had:  # the oldest is the one to come into
            is_alone = notice.num_hosts == 1
            host = runtime.host_of(seat.slots[rank])
            return OnOneHost(notice, rank, host, runtime.member.host) if is_alone else None
    return None


def find_running(
    group: dist.ProcessGroup, seat: GroupInView | None, config: BufferConfig, timeout_s: float
) -> BufferNotice | None:
    """Return the running buffer over hosts that this process, a newcomer, has to come into; None: there is none. Local.

    Args:
        group: of the buffer.
        seat: its part in the view, None where it has none.
        config: of the buffer that is made.
        timeout_s: how long to wait until all members have been heard.

    Raises:
        MismatchError: `Buffer`: one runs that was made with other arguments.
        CommTimeoutError: a member has not been heard.
    """
    if seat is None or not seat.is_joiner or not seat.spans or config.is_cuda:
        return None
    had = _had.get(seat.runtime, set())
    running = [
        (notice, rank)
        for notice, rank in _running(seat, group.rank(), timeout_s)
        if notice.num_hosts > 1 and notice.home.lane not in had
    ]
    for notice, rank in running:
        if fits(notice.words, rank, config, group.rank()):
            return notice
    return None


def awaited_room(group: dist.ProcessGroup, seat: GroupInView | None, config: BufferConfig, timeout_s: float) -> int:
    """Return as `membership.birth.awaited_bytes`, of buffers over hosts; raises as `find_running`."""
    if seat is None or not seat.is_joiner or not seat.spans or config.is_cuda:
        return 0
    at, own = CONFIG_NAMES.index("room_bytes"), config.words()
    had = _had.get(seat.runtime, set())
    found = []
    for notice, _ in _running(seat, group.rank(), timeout_s):
        theirs = notice.words
        is_like = theirs[:at] + theirs[at + 1 :] == own[:at] + own[at + 1 :]
        if notice.num_hosts > 1 and is_like and theirs[at] and notice.home.lane not in had:
            found.append(theirs[at])
    return own[at] if own[at] in found else found[0] if found else 0


def _running(seat: GroupInView, own_rank: int, timeout_s: float) -> list[tuple[BufferNotice, int]]:
    """Return the buffers that run, oldest first, each with a rank that has it."""
    _await_words(seat.runtime, own_rank, timeout_s)
    view = seat.runtime.view()
    present = present_ranks(seat, view)
    told = _told(seat)
    since = {member.slot: member.incarnation for member in view.members}
    found: dict[int, tuple[BufferNotice, int]] = {}
    for rank in present:
        for notice in told.get(seat.slots[rank], {}).values():
            found.setdefault(notice.home.lane, (notice, rank))
    running = []
    host_of = {member.slot: member.host for member in view.members}
    for notice, rank in found.values():
        may = [p for p in present if notice.num_hosts > 1 or host_of[seat.slots[p]] == host_of[seat.slots[rank]]]
        should = [peer for peer in may if peer != own_rank and since[seat.slots[peer]] <= notice.epoch]
        if all(notice.home.lane in told.get(seat.slots[peer], {}) for peer in should):
            running.append((notice, rank))
    return sorted(running, key=lambda found: found[0].number)


def _await_words(runtime: Runtime, own_rank: int, timeout_s: float) -> None:
    """Wait until what the members tell is known here."""
    started = time.monotonic()
    while missing := runtime.unheard():
        elapsed = time.monotonic() - started
        if elapsed > timeout_s:
            raise CommTimeoutError(
                f"{context('Buffer', rank=own_rank, elapsed=elapsed)}: slot(s) {', '.join(map(str, missing))} of the "
                "job have not told which buffers they have; can their hosts be reached?",
                missing,
            )
        time.sleep(_LOOK_S)


def _told(seat: GroupInView) -> Mapping[int, Mapping[int, BufferNotice]]:
    """Return what each slot tells: by lane of the buffer."""
    found: dict[int, dict[int, BufferNotice]] = {}
    for place in range(MAX_NOTICES):
        for slot, data in seat.runtime.told(notice_lane(seat.lane, place)).items():
            notice = parse_notice(data)
            if notice is not None:
                found.setdefault(slot, {})[notice.home.lane] = notice
    return found


def present_ranks(seat: GroupInView, view: Decision) -> list[int]:
    """Return which ranks have a process that takes part in the group in a view, ascending."""
    members = {member.slot: member for member in view.members}
    parts = parts_of(view, seat.lane)
    found = []
    for rank, slot in enumerate(seat.slots):
        member = members.get(slot)
        if member is None or slot not in parts:
            continue
        if seat.known.get(slot) == member.incarnation or seat.takes_part(member):
            found.append(rank)
    return found


def _nothing() -> None:
    """Do nothing: nobody was told."""
