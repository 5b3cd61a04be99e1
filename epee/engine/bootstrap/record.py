"""The record of each rank before there is a group: one entry in the group's store, checked before use.

Records are JSON of a fixed set of fields; nothing is unpickled. Each proves its writer (`proof.py`).
"""

from __future__ import annotations

import ipaddress
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, get_type_hints

from ... import env
from ...errors import MismatchError, ProtocolError, expected, shortage
from ...link.engine import chosen_engine
from ...memory.shared import BLOB_BYTES, SharedRegion, process_start_time
from ...view.transport.auth import Token
from ...view.transport.wire import NONCE_BYTES
from ..limits import MODES
from .attempt import BootstrapAttempt, read_fields
from .proof import prove, proved

PROTOCOL = 3


@dataclass(frozen=True)
class RankRecord:
    """The fields that a rank publishes about itself."""

    protocol: int
    num_ranks: int
    staging_bytes: int
    host: str
    boot_id: str
    namespace: str
    pid: int
    start_time: int
    blob: str  # hexadecimal
    mode: str
    nonce: str  # of the process, hexadecimal
    member: str  # of a job that this group creates, else ""
    epoch: int  # that this rank knows, in a job that runs already
    address: str  # where its links are made, in a group over several hosts, else ""
    port: int
    link_mac: bool  # EPEE_LINK_MAC
    link: str  # EPEE_LINK: the engine of its links


_KINDS = get_type_hints(RankRecord)  # some 0.2 ms each time


def own_record(
    num_ranks: int,
    staging_bytes: int,
    region: SharedRegion,
    mode: str = MODES[0],
    nonce: bytes = bytes(NONCE_BYTES),
    member: str = "",
    epoch: int = 1,
) -> RankRecord:
    """Return this rank's record; the last three are the fields of a process that is in a job, or makes one."""
    pid = os.getpid()
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except expected(OSError) as exc:
        raise shortage("cannot see which machine this is", exc) from exc
    return RankRecord(
        PROTOCOL,
        num_ranks,
        staging_bytes,
        os.uname().nodename,
        boot_id,
        namespace,
        pid,
        process_start_time(pid),
        region.blob.hex(),
        mode,
        nonce.hex(),
        member,
        epoch,
        "",
        0,
        env.get_bool("EPEE_LINK_MAC"),
        chosen_engine(),
    )


class Proof(NamedTuple):
    """The inputs of the proof of an attempt's records: the job's token, and the transcript before."""

    token: Token
    told: bytes

    def purpose(self, rank: int) -> bytes:
        """Return the purpose of `rank`'s record."""
        return self.told + rank.to_bytes(4, "little")


def exchange(this: BootstrapAttempt, mine: RankRecord, proof: Proof, deadline: float) -> list[RankRecord]:
    """Put this rank's record into the store and return all ranks' records, proved and checked."""
    own = json.dumps(asdict(mine))
    this.store.set(this.key(this.rank), prove(proof.token, own, proof.purpose(this.rank)))
    records = []
    for peer in range(this.num_ranks):
        fields = read_fields(this.read(peer, "", deadline), peer)
        text = proved(proof.token, fields, proof.purpose(peer), f"rank {peer}'s")
        this.others_know = True  # every rank compares the same records
        records.append(parse(text.encode(), peer, mine))
        this.others_know = False
    return records


def parse(raw: bytes, peer: int, mine: RankRecord) -> RankRecord:
    """Turn a peer's record into a checked `RankRecord`."""
    fields = read_fields(raw, peer)
    try:
        record = RankRecord(**fields)
        for name, kind in _KINDS.items():
            if type(fields[name]) is not kind:
                raise TypeError(f"{name} is {fields[name]!r}")
        if len(bytes.fromhex(record.blob)) != BLOB_BYTES:
            raise ValueError("blob has another size")
        if len(bytes.fromhex(record.nonce)) != NONCE_BYTES:
            raise ValueError("nonce has another size")
        if not 0 < record.pid < 1 << 31 or not 0 <= record.port < 1 << 16:
            raise ValueError(f"pid is {record.pid}, port {record.port}")
        if record.address:
            ipaddress.ip_address(record.address)
    except expected(ValueError, TypeError, KeyError) as exc:
        raise ProtocolError(
            f"rank {peer}'s record in the store cannot be read ({exc}); does another job use this store?"
        ) from exc
    if record.protocol != PROTOCOL:
        raise ProtocolError(
            f"rank {peer} speaks version {record.protocol} of the backend's protocol, this rank {PROTOCOL}; "
            "install one version of epee everywhere"
        )
    for name in ("num_ranks", "staging_bytes", "mode", "link_mac"):
        here, there = getattr(mine, name), getattr(record, name)
        if here != there:
            raise ProtocolError(f"{name} must be equal on all ranks: {here} here, {there} on rank {peer}")
    if record.link != mine.link:
        raise MismatchError(f"EPEE_LINK must be equal on all ranks: {mine.link} here, {record.link} on rank {peer}")
    return record
