"""The exchanges of the ranks of a group when they make a buffer, before there is shared memory.

A round over the c10d group is an all_gather of fixed-size records (plain bytes, no pickle), so that all ranks have the
same records and reach the same result. In the first one each sends its version, host and config, or why it cannot make
its buffer (`refuse`): a rank with a bad argument takes part with its refusal. The following rounds belong to the
engine (`members/birth.py`). A rank that dies between two rounds is handled by the group: its own timeout ends
them.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ... import env
from ...errors import (
    EpeeError,
    InvalidArgument,
    MismatchError,
    PeerError,
    ProtocolError,
    UnsupportedError,
    expected,
)
from ...link.address import own_address
from ...link.topology import Topology, one_host, placement
from ...memory.shared import BLOB_BYTES
from ...view.process.machine import KEY_DIGITS, own_host_key
from ..config import CONFIG_NAMES, BufferConfig, describe_word

_log = logging.getLogger(__name__)

PROTOCOL_VERSION = 5
TEXT_BYTES = 400
GROUP_FAILED = "the process group failed"
_RECORD = struct.Struct(f"<II{len(CONFIG_NAMES)}q{KEY_DIGITS}s{BLOB_BYTES}s{TEXT_BYTES}s")


def host_id() -> bytes:
    """Return `KEY_DIGITS` bytes that are equal for two processes exactly when they share a host.

    Raises:
        InvalidArgument, ResourceError: as `own_host_key`.
    """
    return own_host_key().encode()


def topology_of(group: dist.ProcessGroup, num_ranks: int) -> Topology:
    """Return the placement of the ranks of a group.

    Local if the group knows it (the backend "epee"), else collective.
    """
    hosts: Sequence[Sequence[int]] | None = getattr(group, "hosts", None)
    if hosts is not None:
        host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        keys = [str(host_of.get(rank, 0)) for rank in range(num_ranks)]
    else:
        try:
            mine = host_id()
        except expected(EpeeError):  # raised again, and announced, when the arguments are compared
            mine = bytes(KEY_DIGITS)
        told = all_gather_bytes(group, mine)
        if bytes(KEY_DIGITS) in told:
            return one_host(group.rank(), num_ranks)
        keys = [key.hex() for key in told]
    return Topology(group.rank(), keys)


def hosts_of(group: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """Return per host its ranks, ascending; hosts by their lowest rank.

    Local if the group knows it (the backend "epee"), else collective.
    """
    num_ranks = size_of(group)
    return topology_of(group, num_ranks).hosts if num_ranks > 1 else one_host(0, num_ranks).hosts


def on_several_hosts(what: str, hosts: Sequence[Sequence[int]]) -> UnsupportedError:
    """Return the refusal of a buffer that serves ranks of one host only."""
    return UnsupportedError(
        f"{what} lives on one host so far, and the ranks of this group run on {len(hosts)} ({placement(hosts)}); "
        "make it in a group of the ranks of one host (dist.new_group). Containers of one machine are hosts unless they "
        "share a PID namespace (--pid=host)"
    )


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store through which a group was made; None if torch does not know it."""
    found = dist.distributed_c10d._world.pg_map.get(group)
    return None if found is None else found[1]


def link_address(group: dist.ProcessGroup) -> str:
    """Return the address at which ranks of other hosts reach this one; raises as `own_address`."""
    return own_address(store_of(group))


def size_of(group: dist.ProcessGroup) -> int:
    """Return how many ranks a group has; one of the backend "epee" may have grown after torch stored its size."""
    return int(getattr(group, "num_slots", group.size()))


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the seconds that a buffer's calls wait for a silent peer if neither they nor the buffer specify it.

    The program's setting for the group (of the backend "epee"), else EPEE_TIMEOUT_S, else torch's timeout of the group.

    Raises:
        InvalidArgument: EPEE_TIMEOUT_S cannot be right.
    """
    own = float(getattr(group, "own_timeout_s", 0.0))
    return own or env.get_seconds("EPEE_TIMEOUT_S", _torch_timeout_s(group))


def _torch_timeout_s(group: dist.ProcessGroup) -> float:
    seconds = getattr(group, "timeout_s", None)  # a group of the backend "epee"
    if seconds is None:
        kinds = {torch.device(kind).type for kind in getattr(group, "_device_types", [])}
        backend: Any = group._get_backend(torch.device("cpu" if not kinds or "cpu" in kinds else "cuda"))
        seconds = backend.options._timeout.total_seconds()  # torch has no public API for it
    return float(seconds)


@contextlib.contextmanager
def group_failures(op: str) -> Iterator[None]:
    """Raise failures of another backend's group as `PeerError`, cause `GROUP_FAILED`."""
    try:
        yield
    except expected(RuntimeError) as error:
        if isinstance(error, EpeeError):
            raise
        raise PeerError(
            f"{op}: the ranks' exchange over the process group has failed: {str(error).splitlines()[0]}; a rank has "
            "ended or is silent: see the output of all, and make the group again",
            op=op,
            cause=GROUP_FAILED,
        ) from error


def all_gather_bytes(group: dist.ProcessGroup, data: bytes) -> list[bytes]:
    """Gather equally long byte strings from all ranks of `group`, in rank order.

    Raises:
        PeerError: another backend's group could not do it, as a rank has ended or is silent (cause `GROUP_FAILED`).
    """
    device = group_device(group)
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(mine) for _ in range(size_of(group))]
    with group_failures("Buffer"):
        dist.all_gather(parts, mine, group=group)
    return [part.cpu().numpy().tobytes() for part in parts]


def gather_present(group: dist.ProcessGroup, data: bytes) -> dict[int, bytes]:
    """Gather as `all_gather_bytes`, by rank; a group of the backend "epee" may have lost some."""
    parts = all_gather_bytes(group, data)
    contributors = getattr(group, "last_contributors", None)
    return {rank: parts[rank] for rank in (range(len(parts)) if contributors is None else contributors())}


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors the group can gather: the CPU unless only CUDA is served (nccl)."""
    kinds = {torch.device(kind).type for kind in getattr(group, "_device_types", [])}
    if kinds == {"cuda"}:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def refuse(group: dist.ProcessGroup, config: BufferConfig, refusal: EpeeError) -> NoReturn:
    """Notify the other ranks, in the round that compares arguments, that this one cannot make its buffer; raise it."""
    gather_present(group, pack(config, bytes(KEY_DIGITS), b"", refusal))
    raise refusal


def refuse_to_make(group: dist.ProcessGroup, refusal: Exception) -> None:
    """Take part in the peers' creation of a buffer as the rank that cannot make it; they raise the reason. Collective.

    For callers that find an error before they know the arguments of the buffer, and raise it afterwards.
    """
    reason = refusal if isinstance(refusal, EpeeError) else InvalidArgument(f"{type(refusal).__name__}: {refusal}")
    try:
        topology_of(group, size_of(group))
        refuse(group, BufferConfig(size_of(group), 1, 1, 1, 1, torch.bfloat16), reason)
    except expected(EpeeError, RuntimeError) as problem:
        if problem is not reason:
            _log.warning("could not tell the peers about a refused buffer: %s", problem)


def pack(config: BufferConfig, host: bytes, blob: bytes, refusal: EpeeError | None) -> bytes:
    """Return the record of this rank: `blob` is at most `BLOB_BYTES` bytes for the membership."""
    text = "" if refusal is None else f"{type(refusal).__name__}: {refusal}"
    words = config.words() if refusal is None else [0] * len(CONFIG_NAMES)
    status = int(refusal is not None)
    return _RECORD.pack(PROTOCOL_VERSION, status, *words, host, blob, text.encode()[:TEXT_BYTES])


class BufferRecord:
    """A rank's description of itself and its buffer, parsed."""

    def __init__(self, data: bytes) -> None:
        if len(data) != _RECORD.size:
            raise ProtocolError(f"a buffer record has {_RECORD.size} bytes, got {len(data)}")
        self.version, self.refused, *rest = _RECORD.unpack(data)
        self.words: Sequence[int] = rest[: len(CONFIG_NAMES)]
        self.host, self.blob, text = rest[len(CONFIG_NAMES) :]
        self.text = text.rstrip(b"\0").decode("utf-8", "replace")


def compare(
    group: dist.ProcessGroup, config: BufferConfig, make_blob: Callable[[], bytes], num_hosts: int = 1
) -> dict[int, BufferRecord]:
    """Compare the arguments of the ranks: the first round of the creation of a buffer. Collective.

    Args:
        group, config: of the buffer.
        make_blob: returns what else this rank has to say, as of `pack`; what it raises refuses the buffer.
        num_hosts: as of `judge`.

    Returns:
        The records of the ranks that are present.

    Raises:
        MismatchError: the ranks disagree, or another one has refused. ProtocolError: as `judge`.
    """
    host, blob, refusal = bytes(KEY_DIGITS), b"", None
    try:
        host, blob = host_id(), make_blob()
    except expected(EpeeError) as error:
        refusal = error
    parts = gather_present(group, pack(config, host, blob, refusal))
    records = {rank: BufferRecord(data) for rank, data in parts.items()}
    if refusal is not None:
        raise refusal
    judge(records, num_hosts)
    return records


def judge(records: Mapping[int, BufferRecord], num_hosts: int = 1) -> None:
    """Raise unless all ranks can make a buffer together; the same on all of them.

    Args:
        records: by rank.
        num_hosts: on which they have been found before.
    """
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
    hosts: dict[bytes, list[int]] = {}
    for rank in sorted(records):
        hosts.setdefault(records[rank].host, []).append(rank)
    if len(hosts) != num_hosts:
        raise ProtocolError(
            f"the ranks of this group run on {len(hosts)} hosts ({placement(list(hosts.values()))}), it was made on "
            f"{num_hosts}; were processes moved, or started anew?"
        )
    for rank, record in records.items():
        for name, mine, other in zip(CONFIG_NAMES, first.words, record.words, strict=True):
            if mine != other:
                raise MismatchError(
                    f"Buffer: ranks disagree about {name}: rank {lead} has {describe_word(name, mine)}, "
                    f"rank {rank} has {describe_word(name, other)}; give all ranks the same"
                )


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
