"""Notices of the buffers that run on a group: published by members, read by joiners.

A buffer has an engine with a group id of its own (`birth.py`). A process that has taken a lost rank in the
group learns of the buffer by a **notice**: number of the buffer among those of the group, its group id, the sizes of
its outboxes, and its configuration. Each member publishes its notices on its board, under a group id used for nothing
else; the agents carry them to other hosts (`view/process/board.py`, `GroupReport`). So neither the store nor a call of
the group is needed, and the notices of a dead process disappear with it.

    a buffer runs    if a member has a notice of it, and so have all members that were in the job when it was made. A
                     member that was in the job then and has no notice has closed the buffer: then it is over.
    a joiner         waits until it has received all notices of the members, then takes part in the oldest running
                     buffer of the kind that it does not have. If there is none, all ranks make a new one together.

So survivors that want a new buffer with the joiner close the old one before they admit it to the group, as on one host:
a notice removed before that is not sent to it.

A buffer that was made while all its ranks were on one host stays on that host: a joiner on another host is refused
before any call of the group, one on that host takes part in it. So such a buffer is announced with one host; a member
on another host publishes no notice of it, and is not asked whether it has closed it.

Each process writes its own rows, when its buffer is made (all ranks have theirs by then) or when it has joined a
buffer, and when it closes it. Joiners read them. No order is needed; a notice is complete or not there. A crash removes
all notices of a process with its membership. Every notice comes from a peer: lengths, numbers and sizes are checked,
and the outboxes name their owner (`outbox.OutboxOwner`).
"""

from __future__ import annotations

import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch.distributed as dist

from ...engine import Home, pack_home, parse_home
from ...errors import CommTimeoutError, EpeeError, ResourceError, UnsupportedError, context, expected
from ...view.group import GroupInView
from ...view.process.board import MAX_TOLD_BYTES
from ...view.protocol.decision import parts_of
from ...view.protocol.messages import Decision
from ...view.runtime import Runtime
from ...view.transport.wire import GROUP_ID_LIMIT
from ..config import CONFIG_NAMES, BufferConfig
from ..making import fits

MAX_NOTICES = 32  # of one process and group
_TOO_MANY = f"a process has at most {MAX_NOTICES} buffers of one group at a time; close some"
_LOOK_S = 0.005
_CATCH_UP_S = 5.0  # for removals that are on their way; as long as `join` of a member takes at most for decisions
_HEAD = struct.Struct("<IIQH")  # number, hosts, epoch, bytes of the note about the group
_WORDS = struct.Struct("<BIIBIBBQQQ6B")  # `BufferConfig.words`
_SALT = 0xD1B54A32D192ED03
_KIND = ("num_ranks", "kind of buffer")  # the fields in which a joiner's `Buffer` must equal the running one
_SHAPE = (*_KIND, "num_experts", "hidden", "num_topk", "max_tokens_per_rank", "num_slots")  # a group may have several
# used board indices, by group
_taken: weakref.WeakKeyDictionary[Runtime, dict[int, set[int]]] = weakref.WeakKeyDictionary()
# group ids of buffers, closed ones too
_had: weakref.WeakKeyDictionary[Runtime, set[int]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # a garbage collection under it may remove a notice
assert len(CONFIG_NAMES) == 16  # as in `_WORDS`


class BufferNotice(NamedTuple):
    """A running buffer.

    Attributes:
        number: among the buffers of its group.
        num_hosts: on which it was made; sizes follow from it. 1: it stays on one host.
        epoch: of the view in which it was made.
        home: its group id, and, over several hosts, the sizes of its outboxes.
        words: as of `BufferConfig.words`.
    """

    number: int
    num_hosts: int
    epoch: int
    home: Home
    words: tuple[int, ...]

    def pack(self) -> bytes:
        """Return the notice as published."""
        home = pack_home(self.home)
        data = _HEAD.pack(self.number, self.num_hosts, self.epoch, len(home)) + home + _WORDS.pack(*self.words)
        assert len(data) <= MAX_TOLD_BYTES
        return data


def parse_notice(data: bytes) -> BufferNotice | None:
    """Return the notice of a member, None if its bytes cannot be right."""
    try:
        number, num_hosts, epoch, length = _HEAD.unpack_from(data)
        home = parse_home(data[_HEAD.size : _HEAD.size + length])
        words = _WORDS.unpack(data[_HEAD.size + length :])
    except expected(EpeeError, struct.error):
        return None
    is_group = home.spans == (num_hosts > 1) and home.group_id < GROUP_ID_LIMIT
    can_be = number and 1 <= num_hosts <= home.num_ranks == words[0] and is_group
    return BufferNotice(number, num_hosts, epoch, home, words) if can_be else None


def notice_group_id(group_id: int, place: int) -> int:
    """Return the group id under which a process publishes the notice with index `place`."""
    return (group_id ^ (place + 1) * _SALT) & ((1 << 62) - 1)


def require_slot(job_handle: GroupInView) -> None:
    """Raise `ResourceError` if this process has as many notices of a group as it can publish."""
    with _lock:
        is_full = len(_taken.get(job_handle.runtime, {}).get(job_handle.group_id, ())) >= MAX_NOTICES
    if job_handle.is_open and is_full:
        raise ResourceError(_TOO_MANY)


def tell(job_handle: GroupInView, notice: BufferNotice) -> Callable[[], None]:
    """Publish the notice of a buffer of this process; return the function that removes it (idempotent).

    Raises:
        ResourceError: this process has too many buffers of the group.
    """
    runtime, group_id = job_handle.runtime, job_handle.group_id
    with _lock:
        taken = _taken.setdefault(runtime, {}).setdefault(group_id, set())
        place = next((place for place in range(MAX_NOTICES) if place not in taken), None)
        if place is None:
            raise ResourceError(_TOO_MANY)
        taken.add(place)
        note_had(job_handle, notice)
    own = notice_group_id(group_id, place)

    def take_back() -> None:
        """Remove the notice."""
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


class OnOneHost(NamedTuple):
    """A buffer that a joiner would take part in, and that stays on one host.

    Attributes:
        notice: the notice, published by `rank`.
        host, own: keys of its host, and of that of the joiner.
    """

    notice: BufferNotice
    rank: int
    host: str
    own: str

    def require_here(self, kind: str, own_rank: int) -> None:
        """Raise `UnsupportedError` if the joiner, which makes a buffer of this `kind`, is on another host."""
        if self.host != self.own:
            raise UnsupportedError(
                f"{kind} (rank={own_rank}): rank {self.rank} has a {kind} of the group that was made while all ranks "
                f"were on one host, {self.host}; such a buffer stays there, and this process runs on host {self.own}; "
                "close it on all ranks before this process comes into the group, and make it anew together"
            )


def find_on_one_host(
    group: dist.ProcessGroup, job_handle: GroupInView, config: BufferConfig, is_cuda: bool, timeout_s: float
) -> OnOneHost | None:
    """Return the running buffer of one host that this process would take part in, or None. Local.

    Args:
        job_handle: the job handle of a process that joins a group over several hosts.
        is_cuda: the buffer is to be one of GPUs, whatever `config` says so far.
        Others as of `find_running`, which raises the same.
    """
    runtime, own = job_handle.runtime, config.words()
    had = _had.get(runtime, set())
    device = CONFIG_NAMES.index("device")
    names = _SHAPE if config.is_latency else _KIND
    like = [CONFIG_NAMES.index(name) for name in names]
    for notice, rank in _running(job_handle, group.rank(), timeout_s):
        theirs = notice.words
        is_like = all(theirs[at] == own[at] for at in like) and (theirs[device] > 0) == is_cuda
        if is_like and notice.home.group_id not in had:  # a joiner takes part in the oldest one
            is_alone = notice.num_hosts == 1
            host = runtime.host_of(job_handle.slots[rank])
            return OnOneHost(notice, rank, host, runtime.member.host) if is_alone else None
    return None


def note_had(job_handle: GroupInView, notice: BufferNotice) -> None:
    """Record that this process has a running buffer, before it publishes a notice of it: the next one is another."""
    with _lock:
        _had.setdefault(job_handle.runtime, set()).add(notice.home.group_id)


def find_running(
    group: dist.ProcessGroup, job_handle: GroupInView, config: BufferConfig, timeout_s: float
) -> BufferNotice | None:
    """Return the running buffer that this process, if it has joined the group, has to take part in, or None. Local.

    In a group over several hosts it is one over hosts, in a group of one host one that has an engine.

    Args:
        group: of the buffer.
        job_handle: its job handle.
        config: of the buffer that is made.
        timeout_s: how long to wait until the notices of all members have arrived.

    Raises:
        MismatchError: `Buffer`: one runs that was made with other arguments.
        CommTimeoutError: the notices of a member have not arrived.
    """
    if not job_handle.is_joiner:
        return None
    had = _had.get(job_handle.runtime, set())
    running = [
        (notice, rank)
        for notice, rank in _running(job_handle, group.rank(), timeout_s)
        if (notice.num_hosts > 1) == job_handle.spans
        and notice.home.group_id not in had
        and _is_of_kind(notice, config)
    ]
    for notice, rank in running:
        if fits(notice.words, rank, config, group.rank()):
            return notice
    return None


def _is_of_kind(notice: BufferNotice, config: BufferConfig) -> bool:
    """Return whether a buffer is of the same kind, on the same kind of device; others do not concern a joiner's."""
    own = config.words()
    return all(notice.words[at] == own[at] for at in map(CONFIG_NAMES.index, ("kind of buffer", "device")))


def awaited_room(group: dist.ProcessGroup, job_handle: GroupInView, config: BufferConfig, timeout_s: float) -> int:
    """Return the memory size of a running buffer that this process, which replaces a lost rank, would join.

    Of those that equal `config` except in their bytes, one with the same, or else the oldest; 0 if there is none.
    Local. Buffers as of `find_running`; raises as that.
    """
    if not job_handle.is_joiner or not config.takes_replacements:
        return 0
    at, own = CONFIG_NAMES.index("room_bytes"), config.words()
    had = _had.get(job_handle.runtime, set())
    found = []
    for notice, _ in _running(job_handle, group.rank(), timeout_s):
        theirs = notice.words
        is_like = theirs[:at] + theirs[at + 1 :] == own[:at] + own[at + 1 :]
        is_fit = (notice.num_hosts > 1) == job_handle.spans
        if is_fit and is_like and theirs[at] and notice.home.group_id not in had:
            found.append(theirs[at])
    return own[at] if own[at] in found else found[0] if found else 0


def _running(job_handle: GroupInView, own_rank: int, timeout_s: float) -> list[tuple[BufferNotice, int]]:
    """Return the running buffers, oldest first, each with a rank that has it."""
    _await_words(job_handle.runtime, own_rank, timeout_s)
    view = job_handle.runtime.view()
    present = present_ranks(job_handle, view)
    told = _told(job_handle)
    since = {member.slot: member.incarnation for member in view.members}
    found: dict[int, tuple[BufferNotice, int]] = {}
    for rank in present:
        for notice in told.get(job_handle.slots[rank], {}).values():
            found.setdefault(notice.home.group_id, (notice, rank))
    running = []
    host_of = {member.slot: member.host for member in view.members}
    for notice, rank in found.values():
        may = [
            p
            for p in present
            if notice.num_hosts > 1 or host_of[job_handle.slots[p]] == host_of[job_handle.slots[rank]]
        ]
        should = [peer for peer in may if peer != own_rank and since[job_handle.slots[peer]] <= notice.epoch]
        if all(notice.home.group_id in told.get(job_handle.slots[peer], {}) for peer in should):
            running.append((notice, rank))
    return sorted(running, key=lambda found: found[0].number)


def _await_words(runtime: Runtime, own_rank: int, timeout_s: float) -> None:
    """Wait until the notices of all members are known here, and their removals before this call.

    A call of the group may overtake the removal of a notice: they take different connections. The answer to a question
    takes that of the notices, so it arrives behind them. A member that does not answer is not waited for for long.
    """
    started = time.monotonic()
    while missing := runtime.unheard():
        elapsed = time.monotonic() - started
        if elapsed > timeout_s:
            raise CommTimeoutError(
                f"{context('Buffer', rank=own_rank, elapsed=elapsed)}: slot(s) {', '.join(map(str, missing))} of the "
                "job have not reported which buffers they have; can their hosts be reached?",
                missing,
            )
        time.sleep(_LOOK_S)
    runtime.catch_up(min(_CATCH_UP_S, timeout_s))


def _told(job_handle: GroupInView) -> Mapping[int, Mapping[int, BufferNotice]]:
    """Return the notices of each slot, by group id of the buffer."""
    found: dict[int, dict[int, BufferNotice]] = {}
    for place in range(MAX_NOTICES):
        for slot, data in job_handle.runtime.told(notice_group_id(job_handle.group_id, place)).items():
            notice = parse_notice(data)
            if notice is not None:
                found.setdefault(slot, {})[notice.home.group_id] = notice
    return found


def present_ranks(job_handle: GroupInView, view: Decision) -> list[int]:
    """Return the ranks with a process that takes part in the group in a view, ascending."""
    members = {member.slot: member for member in view.members}
    parts = parts_of(view, job_handle.group_id)
    found = []
    for rank, slot in enumerate(job_handle.slots):
        member = members.get(slot)
        if member is None or slot not in parts:
            continue
        if job_handle.known.get(slot) == member.incarnation or job_handle.takes_part(member):
            found.append(rank)
    return found
