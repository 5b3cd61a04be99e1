"""The part of the CPUs in reaching other hosts from a GPU: the proxies of its island, their memory, and losses.

An *island* is a set of ranks whose GPUs map each other; the islands are passed in. Each rank has a proxy
(`link/proxy/rank.py`), whose page and staging the ranks of its island map, and their GPUs as well: their kernels read
what arrives there, and store what they have taken (`link/proxy/words.py` has the words and their order).

Construction, collective over all islands. Between two steps a rank has only what it made itself, so a crash leaves
nothing; the others are told by the gathering, or wait for its proxy until the time-out.

    1  process and number of processes that the proxy may have   all take the least number
    2  the proxy is started, and listens
    3  blobs of page and staging; where the proxy listens        the island maps the first, partners use the other
    4  the proxies meet their partners; each proves that it has the token of the group
    5  all have mapped and met: kernels may run

What a peer tells is checked: sizes of its memory against its shape, endpoints when they are parsed.

A loss is seen in words: ABORT of a page (its proxy has ended), LOST (a partner of that page is gone). They stay set:
a connection is made once.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .. import env
from ..errors import ProtocolError, expected
from ..link.proxy.rank import Proxy, shape_for
from ..link.proxy.setup import ProxyEndpoint, parse_endpoint
from ..link.proxy.words import ABORT, LOST, REASONS, ProxyShape, island_topology
from ..memory.claim import process_start_time
from ..memory.shared import SharedRegion
from ..memory.signals import usable_cores
from ..view.transport.auth import Token
from .hosts import PageAddresses, make_routes
from .lent import AllGather
from .platform import Platform

MOST_PROCESSES = 4  # of a proxy: more gain nothing
CORES_PER_PROCESS = 4
_PROCESS = struct.Struct("<QQQ")  # pid, start time, processes that its proxy may have
_OFFER_BYTES = 4096


class StreamSizes(NamedTuple):
    """The sizes of all streams: slots, bytes of one, and bytes of a row of counts."""

    num_slots: int
    slot_bytes: int
    row_bytes: int


class Secret(NamedTuple):
    """The proof that a proxy belongs to the group: the token of its job, and the job's id."""

    token: Token
    job_id: bytes


class _Page(NamedTuple):
    """The memory of a neighbour's proxy, or of the own one, and its words."""

    rank: int
    shape: ProxyShape
    page: SharedRegion
    staging: SharedRegion
    words: memoryview
    partners: tuple[int, ...]

    def lost(self) -> list[int]:
        """Return the partners of this page that are lost."""
        firsts = [self.shape.process_words(process) for process in range(self.shape.num_processes)]
        bits = [self.words[first + LOST] for first in firsts]
        return [rank for i, rank in enumerate(self.partners) if any(each >> i & 1 for each in bits)]


class Island:
    """The proxies of the ranks of one island, and the routes of this rank. Construction is collective.

    Args:
        platform: the GPU.
        rank: of the job.
        islands: the ranks of each, ascending.
        sizes: of the streams, equal on all ranks.
        secret: of the group.
        address: at which other hosts reach this rank.
        all_gather: returns the bytes of all ranks.
        timeout_s: for the meeting of the proxies.
        interrupt: called while waiting; raises to end the wait.

    Attributes:
        topology: of the ranks.
        processes: (pid, start time) of the ranks of this island, by rank.
        routes: of `HostRoutes`, in the GPU's memory.
    """

    def __init__(
        self,
        platform: Platform,
        rank: int,
        islands: Sequence[Sequence[int]],
        sizes: StreamSizes,
        secret: Secret,
        address: str,
        all_gather: AllGather,
        timeout_s: float,
        interrupt: Callable[[], None],
    ) -> None:
        self._platform = platform
        self.topology = here = island_topology(rank, islands)
        pid = os.getpid()
        mine = _PROCESS.pack(pid, process_start_time(pid), _num_processes(len(here.here), sizes.num_slots))
        told = [_PROCESS.unpack(each) for each in all_gather(mine)]
        self.processes = {peer: (told[peer][0], told[peer][1]) for peer in here.here}
        count = min(each for _, _, each in told)
        shapes = {peer: shape_for(peer, islands, *sizes, count) for peer in here.here}
        with contextlib.ExitStack() as undo:
            device = platform.device
            location = f"cuda:{device.index}" if device.type == "cuda" else ""
            processes = [self.processes[peer] for peer in here.here]
            self.proxy = proxy = Proxy(rank, islands, processes, shapes[rank], location, address)
            undo.callback(proxy.close)
            offers = [_parse_offer(each) for each in all_gather(_offer(proxy))]
            self._pages = []
            for peer in here.here:
                page, staging = proxy.page, proxy.staging
                if peer != rank:
                    page, staging = _attached(*offers[peer][:2], shapes[peer])
                    undo.callback(page.close)
                    undo.callback(staging.close)
                partners = island_topology(peer, islands).partners()
                words = page.words(0, shapes[peer].num_words)
                self._pages.append(_Page(peer, shapes[peer], page, staging, words, partners))
            addresses = []
            for each in self._pages:
                reached = []
                for region in (each.page, each.staging):
                    reached.append(platform.reach(region))
                    undo.callback(platform.leave, region)
                addresses.append(PageAddresses(each.shape, *reached))
            routes = make_routes(rank, islands, addresses, 0)
            self.routes = torch.frombuffer(bytearray(routes), dtype=torch.uint8).to(device)
            endpoints = {peer: offers[peer][2] for peer in proxy.partners}
            all_gather(b"made")  # a rank that has failed until here says so; in `meet` it would only be silent
            proxy.meet(1, 0, endpoints, secret.token, secret.job_id, timeout_s, interrupt)
            all_gather(b"met")
            self._undo: contextlib.ExitStack | None = undo.pop_all()

    def wake(self) -> None:
        """End the sleep of the proxy, before kernels are launched that post chunks."""
        self.proxy.wake()

    def lost(self) -> tuple[int, ...]:
        """Return the ranks of other hosts that are lost for this island, ascending."""
        return tuple(sorted({rank for page in self._pages for rank in page.lost()}))

    def ended(self) -> dict[int, str]:
        """Return the ranks of this island whose proxies have ended, and why."""
        reasons = {page.rank: page.words[ABORT] for page in self._pages if page.words[ABORT]}
        return {rank: REASONS[min(reason, len(REASONS) - 1)] for rank, reason in reasons.items()}

    def close(self) -> None:
        """End the proxy in order and let go of all memory; no kernel of this rank may run. Idempotent."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()
            self._pages = []  # their words keep the memory mapped, and so do those of the proxy
            del self.proxy


def _num_processes(num_local: int, num_slots: int) -> int:
    """Return how many processes the proxy of a rank may have: a divisor of the slots of a stream."""
    if env.get("EPEE_LINK") != "tcp":
        return 1
    wanted = max(1, min(MOST_PROCESSES, len(usable_cores()) // (CORES_PER_PROCESS * num_local)))
    return max(count for count in (1, 2, 4) if count <= wanted and num_slots % count == 0)


def _offer(proxy: Proxy) -> bytes:
    """Return the message in which a rank offers its proxy to the others."""
    text = json.dumps([proxy.page.blob.hex(), proxy.staging.blob.hex(), [each.fields() for each in proxy.offer()]])
    assert len(text) <= _OFFER_BYTES
    return text.encode().ljust(_OFFER_BYTES)


def _parse_offer(data: bytes) -> tuple[bytes, bytes, tuple[ProxyEndpoint, ...]]:
    """Return blobs and endpoints of a rank's proxy; `ProtocolError` if they cannot be such."""
    try:
        page, staging, endpoints = json.loads(data)
        return bytes.fromhex(page), bytes.fromhex(staging), tuple(map(parse_endpoint, endpoints))
    except expected(TypeError, ValueError) as exc:
        raise ProtocolError(f"what a rank tells of its proxy is damaged: {exc}") from exc


def _attached(page: bytes, staging: bytes, shape: ProxyShape) -> tuple[SharedRegion, SharedRegion]:
    """Map the memory of a neighbour's proxy."""
    with contextlib.ExitStack() as undo:
        regions = []
        for blob, nbytes in ((page, 8 * shape.num_words), (staging, shape.staging_bytes)):
            regions.append(region := SharedRegion.attach(blob))
            undo.callback(region.close)
            if region.nbytes < nbytes:
                raise ProtocolError(f"the memory of a neighbour's proxy has {region.nbytes} bytes, not {nbytes}")
        undo.pop_all()
        return regions[0], regions[1]
