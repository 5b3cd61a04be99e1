"""The creation of a buffer over several hosts: an engine of its own, beside the one of its group.

The ranks compare their arguments (`control/bootstrap.py`, as on one host) and agree on a number. Then they make a group
for the buffer alone, as the backend makes one (`engine/bootstrap/creation.py`), through the store of the given group
and under a prefix with that number: outboxes, mirrors of them on other hosts, links. It is the buffer's own so that
calls of the buffer and collectives of the group may come in any order, from any threads; a group of any backend will
do.

The engine's mode is the buffer's: the engine decides what becomes of a call that loses a rank (`exchange.py`). A
`LatencyBuffer` uses it in `sync` alone, which continues with the remaining ranks.

A process that replaces a lost rank in the group takes part in a running buffer (`notices.py`): it requests admission to
the engine's group, with a memory that is cut as that of the others, and waits until they admit it (`assembly.py`). Each
rank publishes a notice of its buffer to the group as long as it has it.

A rank that fails on the way notifies the others through that store; one that dies is named by them, or awaited until
the timeout. No rank has a part of a buffer then.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from ...engine import Engine, EngineOptions, Place, come_in, create_engine, place_of
from ...engine.limits import MIN_STAGING_BYTES
from ...errors import CommTimeoutError, EpeeError, UnsupportedError, expected
from ...view.group import GroupInView
from ..config import BufferConfig
from ..control.bootstrap import BufferRecord, gather_present, host_id, judge, pack
from ..membership.group_view import job_handle_of
from .latency.region import latency_layout
from .layout import staging_bytes
from .member_sync import LINE_BYTES
from .notices import BufferNotice, tell

_NUMBER = struct.Struct("<Q")
_newest = 0  # number of the last buffer that this process has made


class LacksRanks(Exception):
    """An engine cannot be made without all ranks of the group yet; the buffer is made without one (on trial)."""


def create_over_hosts(group: dist.ProcessGroup, config: BufferConfig, timeout_s: float) -> Engine:
    """Make this rank's part; returns when all ranks have made theirs. Collective.

    Raises:
        MismatchError: the ranks disagree, or another one was refused.
        UnsupportedError: torch does not know the store of the group.
        LacksRanks: on one host: the group has lost a rank; on all ranks alike.
        as `create_engine`.
    """
    global _newest
    store: Any = None
    refusal = None
    try:
        store = _store_of(group)
    except expected(EpeeError) as exc:
        refusal = exc
    told = gather_present(group, pack(config, host_id(), _NUMBER.pack(_newest), refusal))
    records = {rank: BufferRecord(data) for rank, data in told.items()}
    if refusal is not None:
        raise refusal
    judge(records, config.num_hosts)
    if config.num_hosts == 1 and len(records) < config.num_ranks:
        raise LacksRanks
    _newest = 1 + max(_NUMBER.unpack_from(record.blob)[0] for record in records.values())
    place = dist.distributed_c10d.PrefixStore(f"epee/buffers/{_newest}", store)

    def choose() -> EngineOptions:
        """Return the options of the engine."""
        staged = staging_bytes(config) if config.num_hosts > 1 else MIN_STAGING_BYTES  # rows of `sync` alone pass it
        return EngineOptions(staged, mode_of(config), _extra_of(config))

    return create_engine(place, group.rank(), config.num_ranks, timeout_s, choose)


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
        engine = come_in(place, config.num_ranks, timeout_s, mode_of(config), None, _extra_of(config))
    except expected(CommTimeoutError) as error:
        raise CommTimeoutError(
            f"Buffer (rank={rank}): the members of the running buffer have not admitted this process within "
            f"{timeout_s:.1f} s; all of them must call buffer.sync() while this one makes its buffer",
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
        InvalidState: this process has too many buffers of the group.
    """
    return announcement(group, engine, config, running)()


def announcement(
    group: dist.ProcessGroup, engine: Engine, config: BufferConfig, running: BufferNotice | None = None
) -> Callable[[], Callable[[], None]]:
    """Return the function that publishes the notice of a buffer that has just been made; as `tell_of`."""
    job_handle, place = job_handle_of(group, config.num_ranks), place_of(engine, mode_of(config))
    if not job_handle.is_open or place.home.spans != job_handle.spans:
        return lambda: _nothing
    number, epoch = (_newest, engine.members.epoch) if running is None else (running.number, running.epoch)
    return partial(tell, job_handle, BufferNotice(number, config.num_hosts, epoch, place.home, config.words()))


def mode_of(config: BufferConfig) -> str:
    """Return the mode of a buffer's engine."""
    return "mask/error" if config.is_latency else f"{config.fault_mode}/{config.on_stall}"


def _extra_of(config: BufferConfig) -> int:
    if not config.is_latency:
        return 0
    return latency_layout(config).nbytes if config.num_hosts > 1 else LINE_BYTES


def _nothing() -> None:
    """Do nothing: no process joins a group without a view, or on one host."""


def has_store(group: dist.ProcessGroup) -> bool:
    """Return whether torch knows the store through which a group was made; the same on all its ranks. Local."""
    return group in dist.distributed_c10d._world.pg_map


def _store_of(group: dist.ProcessGroup) -> Any:
    """Return the store through which a group was made."""
    found = dist.distributed_c10d._world.pg_map.get(group)
    if found is None:
        raise UnsupportedError(
            "a buffer over several hosts needs the store of its group, which torch knows of groups made by "
            "init_process_group and new_group; give one of these"
        )
    return found[1]
