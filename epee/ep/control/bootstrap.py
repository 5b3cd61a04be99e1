"""Birth of a buffer: the ranks compare what they were given and map each other's inboxes.

Two rounds over the c10d group, each an all_gather of fixed-size records (plain bytes, no pickle), so that every rank
sees what every rank sees and all reach the same verdict:

1. (version, host, config, refusal or the inbox's blob). A rank with a bad argument takes part with its refusal.
2. (mapped all inboxes, or why not).

The group is not used again. A rank that dies between the rounds is the group's problem: its own time-out ends them.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ...errors import (
    EpeeError,
    InvalidArgument,
    MismatchError,
    ProtocolError,
    RankFailedError,
    ResourceError,
    UnsupportedError,
)
from ...memory.host import BLOB_BYTES, HostRegion
from ...view.process.detector import DeathWatch
from ..config import CONFIG_NAMES, BufferConfig, describe_word
from .inbox import inbox_layout

PROTOCOL_VERSION = 2
TEXT_BYTES = 400
_HOST_BYTES = 16
_RECORD = struct.Struct(f"<II{len(CONFIG_NAMES)}q{_HOST_BYTES}s{BLOB_BYTES}s{TEXT_BYTES}s")


def host_id() -> bytes:
    """Return 16 bytes that are equal for two processes exactly when they run under the same kernel.

    Raises:
        ResourceError: /proc cannot be read, or no descriptor is left.
    """
    path = Path("/proc/sys/kernel/random/boot_id")
    try:
        return uuid.UUID(path.read_text().strip()).bytes
    except (OSError, ValueError) as exc:
        raise ResourceError(f"cannot tell this host from others: {path}: {exc}") from exc


def size_of(group: dist.ProcessGroup) -> int:
    """Return how many ranks a group has; one of the backend "epee" may have grown since torch was told its size."""
    return int(getattr(group, "num_slots", group.size()))


def all_gather_bytes(group: dist.ProcessGroup, data: bytes) -> list[bytes]:
    """Gather equally long byte strings from all ranks of `group`, in rank order."""
    device = _group_device(group)
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(mine) for _ in range(size_of(group))]
    dist.all_gather(parts, mine, group=group)
    return [part.cpu().numpy().tobytes() for part in parts]


def gather_present(group: dist.ProcessGroup, data: bytes) -> dict[int, bytes]:
    """Gather as `all_gather_bytes`, by rank; a group of the backend "epee" may have lost some."""
    parts = all_gather_bytes(group, data)
    contributors = getattr(group, "last_contributors", None)
    return {rank: parts[rank] for rank in (range(len(parts)) if contributors is None else contributors())}


def _group_device(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors the group can gather: the CPU unless only CUDA is served (nccl)."""
    kinds = {torch.device(kind).type for kind in getattr(group, "_device_types", [])}
    if kinds == {"cuda"}:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Born:
    """What the ranks agreed on: everybody's inbox, mapped, and a watch on everybody's process."""

    def __init__(self, inboxes: list[HostRegion], watch: DeathWatch) -> None:
        self.inboxes = inboxes
        self.watch = watch

    def close(self) -> None:
        """Unmap and stop watching; idempotent."""
        for inbox in self.inboxes:
            inbox.close()
        self.watch.close()


def meet(group: dist.ProcessGroup, config: BufferConfig, refusal: EpeeError | None) -> Born:
    """Run both rounds.

    Args:
        group: used only here.
        config: checked, unless `refusal` says why it could not be.
        refusal: error of this rank's arguments; it is raised here after the peers have learnt of it.

    Raises:
        MismatchError: the ranks disagree, or another rank was refused; the same on all of them.
        UnsupportedError: the ranks run on several hosts.
        ResourceError: memory or permission is missing on some rank.
    """
    inbox: HostRegion | None = None
    host = bytes(_HOST_BYTES)
    if refusal is None:
        try:
            host = host_id()
            inbox = HostRegion.create(inbox_layout(config).nbytes, f"inbox-{group.rank()}")
        except EpeeError as exc:
            refusal = exc
    try:
        blob = inbox.blob if inbox is not None else bytes(BLOB_BYTES)
        parts = gather_present(group, pack(config, host, blob, refusal))
        records = {rank: Record(data) for rank, data in parts.items()}
        if refusal is not None:
            raise refusal
        judge(records)
        if len(records) < size_of(group):
            lost = sorted(set(range(size_of(group))) - set(records))
            raise RankFailedError(
                f"Buffer: rank(s) {', '.join(map(str, lost))} of the group are lost, and a buffer of this device "
                "needs all; make a group of the others (new_group) for it",
                lost,
                "Buffer",
            )
        return _attach_all(group, inbox, [record.blob for record in records.values()])
    except BaseException:
        if inbox is not None:
            inbox.close()
        raise


def pack(config: BufferConfig, host: bytes, blob: bytes, refusal: EpeeError | None) -> bytes:
    """Return the record of this rank: `blob` is at most `BLOB_BYTES` bytes for whoever maps its memory."""
    text = "" if refusal is None else f"{type(refusal).__name__}: {refusal}"
    words = config.words() if refusal is None else [0] * len(CONFIG_NAMES)
    status = int(refusal is not None)
    return _RECORD.pack(PROTOCOL_VERSION, status, *words, host, blob, text.encode()[:TEXT_BYTES])


class Record:
    """What a rank tells of itself, parsed."""

    def __init__(self, data: bytes) -> None:
        if len(data) != _RECORD.size:
            raise ProtocolError(f"a buffer record has {_RECORD.size} bytes, got {len(data)}")
        self.version, self.refused, *rest = _RECORD.unpack(data)
        self.words: Sequence[int] = rest[: len(CONFIG_NAMES)]
        self.host, self.blob, text = rest[len(CONFIG_NAMES) :]
        self.text = text.rstrip(b"\0").decode("utf-8", "replace")


def judge(records: Mapping[int, Record]) -> None:
    """Raise unless all ranks can make a buffer together; the same on all of them."""
    lead = min(records)
    first = records[lead]
    for rank, record in records.items():
        if record.version != first.version:
            raise ProtocolError(
                f"rank {lead} speaks version {first.version} of epee's protocol, rank {rank} version {record.version}; "
                "install the same epee on all ranks"
            )
    for rank, record in records.items():
        if record.refused:
            raise MismatchError(f"Buffer: rank {rank} refused its arguments, so no buffer was made: {record.text}")
    for rank, record in records.items():
        if record.host != first.host:
            raise UnsupportedError(f"rank {lead} and rank {rank} run on different hosts; epee serves one host so far")
    for rank, record in records.items():
        for name, mine, other in zip(CONFIG_NAMES, first.words, record.words, strict=True):
            if mine != other:
                raise MismatchError(
                    f"Buffer: ranks disagree about {name}: rank {lead} has {describe_word(name, mine)}, "
                    f"rank {rank} has {describe_word(name, other)}; give all ranks the same"
                )


def _attach_all(group: dist.ProcessGroup, inbox: HostRegion | None, blobs: list[bytes]) -> Born:
    assert inbox is not None
    born = Born([], DeathWatch())
    problem = ""
    try:
        for rank, blob in enumerate(blobs):
            region = inbox if rank == group.rank() else HostRegion.attach(blob)
            born.inboxes.append(region)
            born.watch.watch(rank, region.owner_pid, region.owner_start_time)
    except EpeeError as exc:
        problem = f"{type(exc).__name__}: {exc}"
    try:
        texts = all_gather_bytes(group, problem.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"))
        for rank, data in enumerate(texts):
            text = data.rstrip(b"\0").decode("utf-8", "replace")
            if text:
                raise ResourceError(f"Buffer: rank {rank} could not map its peers' memory: {text}")
    except BaseException:
        born.close()
        raise
    return born


def group_of(group: object) -> dist.ProcessGroup:
    """Return `group` or the default group.

    Raises:
        InvalidArgument: it is no process group, this process is not in it, or there is no default group.
    """
    if group is None:
        if not dist.is_initialized():
            raise InvalidArgument("group is None and there is no default group; call dist.init_process_group first")
        return dist.distributed_c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(f"group must be a process group this rank belongs to, got {type(group).__name__}")
    return group
