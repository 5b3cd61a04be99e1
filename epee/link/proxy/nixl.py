"""Chunks that NIXL writes into the partner's staging; words, credit and the end go over a link of TCP.

    sender      slot -> NIXL's write -> the same slot of the partner's area; when NIXL reports that it is there, the
                chunk word over the link (`tcp.py`), and `freed`
    receiver    the word: `arrived`

Order: the word is sent after NIXL has reported the write as done, as the counts of a ring are (`link/nixl/link.py`), so
nothing is announced before it is there. The word is authenticated and checked as over TCP; the bytes are not, and NIXL
asks nobody before it stores them. A partner gets keys to its own area alone, so it can damage only what it sends.

The fence: memory that was lent to a partner may be written by it for longer than the agent lives (over cma and
cuda_ipc: measured). A proxy over NIXL therefore serves one epoch; the next one has another proxy, with memory of its
own. The processes call NIXL in each turn: it moves nothing by itself.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ...errors import expected
from ..nixl.agent import NixlAgent, Transfer
from ..nixl.control import Introduction, pack_introduction, parse_introduction
from ..tcp import TcpLink
from .chunks import ChunkRun
from .tcp import INTRODUCTION, ChunkIntroduction, TcpTransport
from .words import KINDS, SIZE_BITS, ProxyShape


class _Post(NamedTuple):
    """A write of one piece of memory, None: of no bytes; and the chunks in it: offset of the first, word, number."""

    transfer: Transfer | None
    offset: int
    word: int
    num_chunks: int


class NixlTransport(TcpTransport):
    """A `ChunkTransport` over an agent and a link.

    Args:
        link, memory, shape: as of `TcpTransport`.
        agent: of this process and epoch.
        out_address: of the area from which the partner is sent to.
        in_address: of the area in which its chunks arrive.

    Raises:
        ResourceError: the memory cannot be registered.
    """

    def __init__(
        self,
        link: TcpLink,
        memory: memoryview,
        shape: ProxyShape,
        agent: NixlAgent,
        out_address: int,
        in_address: int,
    ) -> None:
        super().__init__(link, memory, shape)
        self._agent, self._out_address, self._in_address = agent, out_address, in_address
        self._posts: dict[int, deque[_Post]] = {kind: deque() for kind in KINDS}
        self._remote: Introduction | None = None
        agent.register(out_address, in_address, nbytes=shape.area_bytes)

    def introduce(self, introduction: ChunkIntroduction) -> None:
        """As `TcpTransport.introduce`."""
        nbytes = self._shape.area_bytes
        metadata = self._agent.metadata(self._in_address, nbytes)
        details = pack_introduction(Introduction(self._agent.name, self._in_address, nbytes, metadata))
        self._link.write_pieces([(0, introduction.pack()), (0, details)], INTRODUCTION, 0, 0)

    def meet(self, details: bytes) -> None:
        """As `TcpTransport.meet`.

        Raises:
            ProtocolError: the details are invalid. ConnectionError: NIXL does not reach the partner.
        """
        remote = parse_introduction(details, self._shape.area_bytes)
        self._agent.meet(remote.name, remote.metadata, self)
        self._remote = remote

    def send(self, kind: int, run: ChunkRun) -> None:
        """As `ChunkTransport.send`; full slots that lie side by side are one write."""
        self.is_refused |= self._link.lost is not None
        size = self._shape.size(kind)
        offset = self._shape.base(kind) + run.slot * size
        whole = run.num_chunks if run.nbytes == size else 1
        for i in range(0, run.num_chunks, whole):
            start = offset + i * size
            transfer = Transfer(start, start + whole * run.nbytes) if run.nbytes else None
            self._posts[kind].append(_Post(transfer, start, run.word + (i << SIZE_BITS), whole))
            if transfer is not None and not self.is_refused:
                self._push(transfer)

    def num_read(self, kind: int) -> int:
        """As `ChunkTransport.num_read`; announces the chunks that are there."""
        posts, count, size = self._posts[kind], 0, self._shape.size(kind)
        while posts and not self.is_refused and self._is_done(posts[0].transfer):
            post = posts.popleft()
            for i in range(post.num_chunks):
                self._link.write(post.offset + i * size, b"", kind, post.word + (i << SIZE_BITS), 0)
            count += post.num_chunks
        return count

    @property
    def is_flushed(self) -> bool:
        """As `TcpTransport.is_flushed`."""
        return not any(self._posts.values()) and super().is_flushed

    def close(self) -> None:
        """As `TcpTransport.close`: release the writes, and leave the partner's agent."""
        for posts in self._posts.values():
            for post in posts:
                if post.transfer is not None:
                    self._agent.free(post.transfer)
            posts.clear()
        if self._remote is not None:
            self._agent.part(self._remote.name, self)
            self._remote = None

    def _push(self, transfer: Transfer) -> None:
        if self._remote is None:
            self.is_refused = True
            return
        local, remote = self._out_address + transfer.start, self._remote.address + transfer.start
        try:
            self._agent.push(transfer, local, remote, self._remote.name)
        except expected(ConnectionError):
            self.is_refused = True

    def _is_done(self, transfer: Transfer | None) -> bool:
        if transfer is None:
            return True
        try:
            is_done = self._agent.is_done(transfer)
        except expected(ConnectionError):
            self.is_refused = True
            return False
        if is_done:
            self._agent.free(transfer)
        return is_done
