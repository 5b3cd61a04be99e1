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

Who writes: each process its own rows, when its buffer is made (all ranks have theirs by then) or when it has come into
it, and when it closes it. Who reads: newcomers. What orders it: nothing is needed; a notice is complete or not there. A
crash takes all notices of a process away with its membership. Everything here is a peer's word: lengths, numbers and
sizes are checked, and the lane's outboxes say whose they are (`outbox.OutboxOwner`).
"""

from __future__ import annotations

import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch.distributed as dist

from ...backend.bootstrap.home import Home, pack_home, parse_home
from ...errors import CommTimeoutError, EpeeError, InvalidState, context
from ...view.group import GroupInView
from ...view.process.board import MAX_TOLD_BYTES
from ...view.protocol.decision import parts_of
from ...view.protocol.messages import Decision, LaneState
from ...view.runtime import Runtime
from ...view.transport.wire import LANE_LIMIT
from ..config import CONFIG_NAMES, BufferConfig
from ..membership.birth import fits

MAX_NOTICES = 32  # of one process and group
_LOOK_S = 0.005
_HEAD = struct.Struct("<IIQH")  # number, hosts, epoch, bytes of the note about the lane
_WORDS = struct.Struct("<BIIBIBBQQQ6B")  # `BufferConfig.words`
_SALT = 0xD1B54A32D192ED03
_taken: weakref.WeakKeyDictionary[Runtime, dict[int, set[int]]] = weakref.WeakKeyDictionary()  # places, by group
_had: weakref.WeakKeyDictionary[Runtime, set[int]] = weakref.WeakKeyDictionary()  # lanes of buffers, closed ones too
_lock = threading.RLock()  # a collection below it may take a notice back
assert len(CONFIG_NAMES) == 16  # as `_WORDS` has them


class BufferNotice(NamedTuple):
    """A buffer that runs.

    Attributes:
        number: among the buffers of its group.
        num_hosts: on which it was made; sizes follow from it.
        epoch: of the view in which it was made.
        home: its lane, and the sizes of its outboxes.
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
    is_lane = home.spans and home.lane < LANE_LIMIT
    can_be = number and 2 <= num_hosts <= home.num_ranks == words[0] and is_lane
    return BufferNotice(number, num_hosts, epoch, home, words) if can_be else None


def notice_lane(group_lane: int, place: int) -> int:
    """Return the lane beside which a process tells of the buffer at one of its places."""
    return (group_lane ^ (place + 1) * _SALT) & ((1 << 62) - 1)


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
            raise InvalidState(f"a process has at most {MAX_NOTICES} buffers of one group at a time; close some")
        taken.add(place)
        _had.setdefault(runtime, set()).add(notice.home.lane)
    own = notice_lane(lane, place)
    state = LaneState(own, 0, 0)  # it has no calls

    def take_back() -> None:
        """Tell nothing more of it."""
        with _lock:
            is_first = place in taken
            taken.discard(place)
        if is_first:
            runtime.unregister(own)

    row = None
    try:
        row = runtime.register(own, lambda: state, _nothing, _ignore, _ignore)
        row.tell(notice.pack())
    except BaseException:
        if row is not None:
            runtime.unregister(own)
        with _lock:
            taken.discard(place)
        raise
    return take_back


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
        (notice, rank) for notice, rank in _running(seat, group.rank(), timeout_s) if notice.home.lane not in had
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
        if is_like and theirs[at] and notice.home.lane not in had:
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
    for notice, rank in found.values():
        should = [peer for peer in present if peer != own_rank and since[seat.slots[peer]] <= notice.epoch]
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
    """Do nothing: no calls are made beside a notice."""


def _ignore(_: object) -> None:
    """Do nothing: what becomes of the view is the buffer's lane's to know."""
