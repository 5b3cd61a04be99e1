"""How a buffer over several hosts comes into being: an engine of its own, beside the one of its group.

The ranks compare their arguments (`control/bootstrap.py`, as on one host) and agree on a number. Then they make a group
for the buffer alone, as the backend makes one (`backend/bootstrap/birth.py`), through the store of the given group and
under a prefix with that number: outboxes, mirrors of them on other hosts, links. It is the buffer's own so that calls
of the buffer and collectives of the group may come in any order, from any threads; a group of any backend will do.

The engine's mode is the buffer's: what becomes of a call that loses a rank is the engine's affair (`step.py`). A
`LatencyBuffer` asks it in `sync` alone, which goes on with who is left.

A rank that fails on the way tells the others through that store; one that dies is named by them, or missed until the
time-out. Nobody has a part of a buffer then.
"""

from __future__ import annotations

import struct
from typing import Any

import torch.distributed as dist

from ...backend.bootstrap.attempt import attempt
from ...backend.bootstrap.birth import create_engine
from ...backend.engine.engine import Engine
from ...errors import EpeeError, UnsupportedError
from ..config import BufferConfig
from ..control.bootstrap import BufferRecord, gather_present, host_id, judge, pack
from .latency.region import latency_layout
from .layout import staging_bytes

_NUMBER = struct.Struct("<Q")
_newest = 0  # number of the last buffer that this process has made


def create_over_hosts(group: dist.ProcessGroup, config: BufferConfig, timeout_s: float) -> Engine:
    """Make this rank's part; returns when all ranks have made theirs. Collective.

    Raises:
        MismatchError: the ranks disagree, or another one was refused.
        UnsupportedError: torch does not know the store of the group.
        as `create_engine`.
    """
    global _newest
    store: Any = None
    refusal = None
    try:
        store = _store_of(group)
    except EpeeError as exc:
        refusal = exc
    told = gather_present(group, pack(config, host_id(), _NUMBER.pack(_newest), refusal))
    records = {rank: BufferRecord(data) for rank, data in told.items()}
    if refusal is not None:
        raise refusal
    judge(records, config.num_hosts)
    _newest = 1 + max(_NUMBER.unpack_from(record.blob)[0] for record in records.values())
    place = dist.distributed_c10d.PrefixStore(f"epee/buffers/{_newest}", store)
    with attempt(place, group.rank(), config.num_ranks) as this:
        extra = latency_layout(config).nbytes if config.is_latency else 0
        mode = "mask/error" if config.is_latency else f"{config.fault_mode}/{config.on_stall}"
        return create_engine(this, timeout_s, staging_bytes(config), mode, extra)


def _store_of(group: dist.ProcessGroup) -> Any:
    """Return the store through which a group was made."""
    found = dist.distributed_c10d._world.pg_map.get(group)
    if found is None:
        raise UnsupportedError(
            "a buffer over several hosts needs the store of its group, which torch knows of groups made by "
            "init_process_group and new_group; give one of these"
        )
    return found[1]
