"""What a rank tells the others where the hosts of a group's device half meet, and what they find in it (`half.py`)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import ProtocolError
from .params import MAX_RANKS

_ROW = struct.Struct("<BBxxi16sqQqqHH512s512s200s200s")  # in the order of `MeetingRow`, the blobs' lengths before them
_MOST_CALLS = 1 << 38


class MeetingRow(NamedTuple):
    """What a rank tells at a meeting.

    Attributes:
        phase: 0 before it has mapped the others' memory, 1 behind that.
        pool: by which others map the rank's pool; empty if it has none.
        no_pools: in phase 1, why this rank reads no pools, though all may have one; empty if it does.
    """

    is_ok: bool
    num_sms: int
    gpu: bytes
    pid: int
    start_time: int
    number: int
    num_ranks: int
    blob: bytes
    reason: str
    phase: int = 0
    pool: bytes = b""
    no_pools: str = ""

    def pack(self) -> bytes:
        """Return it as bytes."""
        head = self.is_ok, self.phase, self.num_sms, self.gpu, self.pid, self.start_time, self.number, self.num_ranks
        sizes = len(self.blob), len(self.pool)
        texts = (text.encode()[:200] for text in (self.reason, self.no_pools))
        return _ROW.pack(*head, *sizes, self.blob, self.pool, *texts)

    @classmethod
    def parse(cls, data: bytes) -> MeetingRow:
        """Read it; nothing is used before it has been checked.

        Raises:
            ProtocolError: a number cannot be right.
        """
        ok, phase, sms, gpu, pid, start, number, num_ranks, length, extent, blob, pool, *texts = _ROW.unpack(data)
        if not (
            length <= 512
            and extent <= 512
            and 0 <= number < _MOST_CALLS
            and 1 <= num_ranks <= MAX_RANKS
            and 0 < sms < 1 << 16
        ):
            raise ProtocolError(f"a rank told of {length} bytes, call {number}, {num_ranks} ranks and {sms} SMs")
        reason, no_pools = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        return cls(
            bool(ok), sms, gpu, pid, start, number, num_ranks, blob[:length], reason, phase, pool[:extent], no_pools
        )


def flaw_in(rows: Mapping[int, MeetingRow]) -> str:
    """Return why host memory is the way, the same on all ranks; empty where it is not."""
    flaws = [row.reason or "no reason" for row in rows.values() if not row.is_ok]
    sizes = {row.num_ranks for row in rows.values()}
    if not flaws and len(sizes) > 1:
        flaws = [f"ranks count {sorted(sizes)} ranks"]
    return flaws[0] if flaws else ""
