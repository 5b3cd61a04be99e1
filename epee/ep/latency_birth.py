"""Birth of the memory of latency mode: every rank makes its region and maps everybody's.

Two exchanges through the buffer's own control plane: blobs, then "mapped". A rank that has no memory or descriptors
refuses, so that all others raise at once.
"""

from __future__ import annotations

import os

from ..errors import EpeeError
from ..memory.host import HostRegion
from .config import BufferConfig
from .control import ControlPlane
from .exchange import OP_GATHER
from .latency_wire import Region, region_layout


def meet_regions(config: BufferConfig, rank: int, control: ControlPlane, deadline: float) -> tuple[list[Region], int]:
    """Make this rank's region and map everybody's; returns them and a descriptor for the lock. Collective.

    Raises:
        ResourceError: no memory or descriptors, here.
        MismatchError: another rank could not; the same on all others.
    """
    layout = region_layout(config)
    made: list[Region] = []
    lock_fd = -1
    try:
        try:
            own = HostRegion.create(layout.nbytes, f"latency-{rank}-{os.getpid()}")
            made.append(Region(own, layout))
            for src, blob in enumerate(control.all_gather_bytes(own.blob, deadline)):
                if src != rank:
                    made.append(Region(HostRegion.attach(blob), layout))
            made.insert(rank, made.pop(0))
            lock_fd = made[0].region.open_lock()
        except EpeeError as error:
            control.refuse(OP_GATHER, error, deadline)
            raise
        control.all_gather_bytes(bytes(8), deadline)
    except BaseException:
        for region in made:
            region.close()
        if lock_fd >= 0:
            os.close(lock_fd)
        raise
    return made, lock_fd
