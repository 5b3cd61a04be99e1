"""Memory and links for a `LatencyBuffer` over invented hosts: a mirror of each rank for each host, written by the rank.

Between hosts a frame takes a source's bytes to a gateway, which stores them; here the source stores them itself, so a
dead gateway is one by what the path makes of the view alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

from epee.engine.outbox import PeerRegions
from epee.ep import base
from epee.ep.latency.hosts.region import latency_layout
from epee.link.frames import NO_WORD
from epee.link.topology import Topology
from epee.memory.shared import SharedRegion
from epee.memory.signals import fence, futex_wake

from .stand_in import invent_hosts


class StandInEngine:
    """The engine of the buffer, with other memory for what it does not move."""

    def __init__(self, engine: Any, regions: list[list[SharedRegion]], topology: Topology) -> None:
        self._engine = engine
        self._regions = regions  # by source and host
        mine = [of_source[topology.host] for of_source in regions]
        exports = SimpleNamespace(links=StandInLinks(regions[topology.rank], topology), new_looks=self._new_looks)
        extra = engine.peer_regions.extra
        self.peer_regions = SimpleNamespace(regions=mine, exports=exports, extra=extra)
        self._host_of = topology.host_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _new_looks(self, first: int) -> Any:
        def at(peer: int, indices: Sequence[int], about: object) -> dict[int, int]:
            fence()
            words = self._regions[peer][self._host_of[peer]].words(0, max(indices) + 1)
            return {index: words[index] for index in indices}

        return SimpleNamespace(at=at)

    def close(self, failed: bool = False) -> None:
        self._engine.close(failed=failed)


class StandInLinks:
    """Stores at once what a link would carry."""

    def __init__(self, mirrors: list[SharedRegion], topology: Topology) -> None:
        self._host_of = topology.host_of
        self._bytes = [region.array(np.dtype(np.uint8), region.nbytes) for region in mirrors]
        self._words = [region.words(0, region.nbytes // 8) for region in mirrors]
        self._addresses = [region.address for region in mirrors]

    def write(self, gateway: int, offset: int, data: Any, word: int, value: int, note: int) -> None:
        host = self._host_of[gateway]
        given = np.frombuffer(data, dtype=np.uint8)
        self._bytes[host][offset : offset + len(given)] = given
        if word != NO_WORD:
            self._words[host][word] = value
            futex_wake(self._addresses[host] + 8 * word)

    def newest(self, gateway: int) -> int:
        return 0

    def is_out(self, gateway: int, number: int) -> bool:
        return True

    def pump(self) -> bool:
        return False

    def rest(self) -> None:
        pass


def invent_hosts_for_latency(placement: Sequence[int]) -> None:
    """As `invent_hosts`, for a `LatencyBuffer`; collective when the buffer is made."""
    invent_hosts(placement)
    made = base._exchange_over_hosts

    def make(group: Any, config: Any, *args: Any) -> Any:
        exchange = made(group, config, *args)
        topology = Topology(exchange.rank, [str(host) for host in placement])
        peer_regions: PeerRegions = exchange.engine.peer_regions
        nbytes = peer_regions.extra + latency_layout(config).nbytes
        own = [SharedRegion.create(nbytes, f"stand-in-{os.getpid()}-{host}") for host in range(topology.num_hosts)]
        blobs: list[Any] = [None] * config.num_ranks
        dist.all_gather_object(blobs, [region.blob for region in own], group=group)
        regions = [
            own if rank == exchange.rank else [SharedRegion.attach(blob) for blob in theirs]
            for rank, theirs in enumerate(blobs)
        ]
        exchange.engine = StandInEngine(exchange.engine, regions, topology)
        dist.barrier(group)
        return exchange

    base._exchange_over_hosts = make  # type: ignore[assignment]
