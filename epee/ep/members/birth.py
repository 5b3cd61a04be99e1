"""The creation of the engine of a buffer, beside the one of its group.

The ranks compare their arguments (`members/bootstrap.py`) and agree on a number. It is the buffer's own engine so that
calls of the buffer and collectives of the group may come in any order, from any threads; a group of any backend will
do.

    one host        `create_here`: in the job of the group, or in one that the ranks find through a group of another
                    backend. They exchange all that they need through the group: its members make the buffer, also if
                    it has lost ranks, and its store with them (`engine/bootstrap/meeting.py`).

        round 1     version, arguments, number, the id that this rank proposes for the engine's group; or a refusal
        round 2     the newest epoch known, and the blob of this rank's outbox; or why there is none
        round 3     whether this rank has mapped all of them. After it calls may be made

    several hosts   `create_over_hosts`: after round 1 the ranks make a group as the backend makes one
                    (`engine/bootstrap/creation.py`), through the store of the given group and under a prefix with the
                    number: outboxes, mirrors of them on other hosts, links. All ranks of the group must be there.

The engine's mode is the buffer's: the engine decides what becomes of a call that loses a rank (`exchange.py`). A
`LatencyBuffer` and a buffer of GPUs use it beside their calls, above all in `sync`, which continues with the remaining
ranks (`epoch_members.py`).

A process that replaces a lost rank in the group takes part in a running buffer (`notices.py`): it requests admission to
the engine's group, with a memory that is cut as that of the others, and waits until they admit it (`assembly.py`). Each
rank publishes a notice of its buffer to the group as long as it has it.

A rank that fails on the way notifies the others, through the group or that store; one that dies is named by them, or
awaited until the timeout. No rank has a part of a buffer then. In a group of mode "mask" one that dies in round 2 or 3
of one host is a loss of the engine.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from ...engine import BoundedStore, Engine, EngineMeeting, EngineOptions, Place, come_in, create_engine, place_of
from ...errors import CommTimeoutError, UnsupportedError, expected
from ...memory.claim import OwnerEndedError
from ...memory.shared import BLOB_BYTES
from ...view.group import GroupInView
from ...view.transport.wire import GROUP_ID_LIMIT
from ..config import BufferConfig
from ..job import job_handle_of, process_of
from ..latency.hosts.region import latency_layout
from ..making import ended_of, job_found, reported
from ..throughput.hosts.layout import staging_bytes
from .bootstrap import compare, store_of
from .member_sync import extra_bytes
from .notices import BufferNotice, require_slot, tell

_NUMBER = struct.Struct("<Q")
_PROPOSAL = struct.Struct("<QQ")  # number of the last buffer here, id of a group
_PART = struct.Struct(f"<Q{BLOB_BYTES}s")  # epoch, outbox
_newest = 0  # number of the last buffer that this process has made


def create_here(
    group: dist.ProcessGroup, job_handle: GroupInView, config: BufferConfig, timeout_s: float
) -> tuple[Engine, int]:
    """Make this rank's part of an engine on one host; returns when all ranks have made theirs. Collective.

    Args:
        job_handle: of the group; of one in no view `NO_VIEW`.
        timeout_s: how long to wait for a decision of the view; the timeout of calls as well.

    Returns:
        The engine, and the number of the buffer, the same on all ranks.

    Raises:
        MismatchError: the ranks disagree, or another one was refused.
        ResourceError: memory, permission or a descriptor is missing on some rank; the same on all.
        RankFailedError: a rank has died meanwhile, and the group's calls fail by that; the same on all.
    """
    global _newest
    rank = group.rank()
    with contextlib.ExitStack() as held, contextlib.ExitStack() as undo:
        if not job_handle.slots:
            job_handle = held.enter_context(job_found(group, config))
        records = compare(group, config, lambda: _PROPOSAL.pack(_newest, secrets.randbelow(GROUP_ID_LIMIT)))
        proposals = {peer: _PROPOSAL.unpack_from(record.blob) for peer, record in records.items()}
        _newest = 1 + max(newest for newest, _ in proposals.values())
        _, group_id = proposals[min(proposals)]
        rank_of = {slot: peer for peer, slot in enumerate(job_handle.slots) if peer in records}
        members = {rank_of[one.slot]: one for one in job_handle.runtime.view().members if one.slot in rank_of}
        deaths = partial(ended_of, {peer: process_of(member) for peer, member in members.items()})
        mode, num_extra = mode_of(config), _extra_of(config)
        with reported(group, deaths, _PART.size) as step:
            require_slot(job_handle)
            meeting = EngineMeeting(job_handle.job, job_handle.slots, group_id, rank, mode, num_extra)
            undo.callback(meeting.close)
            step.data = _PART.pack(meeting.epoch, meeting.region.blob)
        parts = {peer: _PART.unpack(data) for peer, data in step.found.items()}
        with reported(group, deaths):
            epoch = max(known for known, _ in parts.values())
            meeting.meet(epoch, parts.keys(), timeout_s)
            regions = {}
            for peer in meeting.members.keys() - {rank}:
                try:
                    regions[peer] = region = meeting.attach(peer, parts[peer][1])
                except expected(OwnerEndedError):
                    if config.is_synced or config.fault_mode == "raise":
                        raise
                    continue  # the first call ends without it
                undo.callback(region.close)
            engine = meeting.begin(regions, timeout_s)
            undo.callback(engine.close)
        undo.pop_all()
        return engine, _newest


def create_over_hosts(group: dist.ProcessGroup, config: BufferConfig, timeout_s: float) -> Engine:
    """Make this rank's part; returns when all ranks have made theirs. Collective.

    Raises:
        MismatchError: the ranks disagree, or another one was refused.
        UnsupportedError: torch does not know the store of the group.
        as `create_engine`.
    """
    global _newest
    store: Any = None

    def number() -> bytes:
        """Find the store, and return the number of the last buffer here."""
        nonlocal store
        store = _store_of(group)
        return _NUMBER.pack(_newest)

    records = compare(group, config, number, config.num_hosts)
    _newest = 1 + max(_NUMBER.unpack_from(record.blob)[0] for record in records.values())
    place = dist.distributed_c10d.PrefixStore(f"epee/buffers/{_newest}", store)

    def choose() -> EngineOptions:
        """Return the options of the engine."""
        return EngineOptions(staging_bytes(config), mode_of(config), _extra_of(config))

    with BoundedStore(place, timeout_s, group.rank()) as bounded:
        return create_engine(bounded, group.rank(), config.num_ranks, timeout_s, choose)


def come_into(
    job_handle: GroupInView, rank: int, config: BufferConfig, notice: BufferNotice, timeout_s: float
) -> Engine:
    """Make this rank's part of a running buffer; returns when the members have admitted this process.

    Raises:
        CommTimeoutError: they have not.
        as `engine.come_in`.
    """
    global _newest
    _newest = max(_newest, notice.number)
    place = Place(notice.home, list(job_handle.slots), rank, False)
    try:
        sizes = _extra_of(config), config.num_hosts > 1
        engine = come_in(place, config.num_ranks, timeout_s, mode_of(config), None, *sizes)
    except expected(CommTimeoutError) as error:
        raise CommTimeoutError(
            f"Buffer (rank={rank}): the members of the running buffer have not admitted this process within "
            f"{timeout_s:.1f} s; all of them must call buffer.sync(), or (`Buffer` on CPUs) make a call of the buffer, "
            "while this one makes its own; if they have closed theirs, make a new one on all ranks",
            has_job=True,
        ) from error
    engine.timeout_s = timeout_s
    return engine


def tell_of(
    group: dist.ProcessGroup, engine: Engine, config: BufferConfig, running: BufferNotice | None = None
) -> Callable[[], None]:
    """Publish a notice to the members of the group that this rank has the buffer; return the function that removes it.

    Of a buffer that no process can join none is published.

    Args:
        running: the notice by which this rank has joined it: all publish the same of one buffer.

    Raises:
        ResourceError: this process has too many buffers of the group.
    """
    return announcement(group, engine, config, running)()


def announcement(
    group: dist.ProcessGroup, engine: Engine, config: BufferConfig, running: BufferNotice | None = None
) -> Callable[[], Callable[[], None]]:
    """Return the function that publishes the notice of a buffer that has just been made; as `tell_of`."""
    job_handle, place = job_handle_of(group, config.num_ranks), place_of(engine, mode_of(config))
    if not job_handle.is_open:
        return lambda: _nothing
    number, epoch = (_newest, engine.members.epoch) if running is None else (running.number, running.epoch)
    return partial(tell, job_handle, BufferNotice(number, config.num_hosts, epoch, place.home, config.words()))


def mode_of(config: BufferConfig) -> str:
    """Return the mode of a buffer's engine."""
    if config.is_cuda and config.num_hosts > 1:
        return "raise/error"  # its calls need all ranks, and it has no `sync`
    return "mask/error" if config.is_synced else f"{config.fault_mode}/{config.on_stall}"


def _extra_of(config: BufferConfig) -> int:
    if config.num_hosts == 1:
        return extra_bytes(config)
    return latency_layout(config).nbytes if config.is_latency else 0


def _nothing() -> None:
    """Do nothing: no process joins a group without a view."""


def _store_of(group: dist.ProcessGroup) -> Any:
    """Return the store through which a group was made."""
    found = store_of(group)
    if found is None:
        raise UnsupportedError(
            "a buffer over several hosts needs the store of its group, which torch knows of groups made by "
            "init_process_group and new_group; give one of these"
        )
    return found
