"""The `nixl` engine: the frames of a link, written by NIXL into memory that the receiver has made for this peer.

    sender      Outstream -> staging -> NIXL's write ->      ring -> Instream -> FrameSink      receiver
                counts posted, done ----> the connection of the meeting ----> counts freed

Writers and readers: the receiver makes the ring, for one peer and one connection; NIXL stores into it the bytes that
the peer posts; only the receiver reads. Ordering: the sender sends `done` when NIXL reports that the bytes are there,
so nothing is read before; it refills only what the receiver has reported as `freed`. The ring holds a stream of bytes
and nothing more: MACs, numbers, bounds and trailers are checked as for bytes from a socket (`stream.py`).

A crash between two steps leaves bytes in a ring that are never announced, so they are never read. Deaths, cuts and the
end are detected through the connection, as for `tcp`; bytes announced as done before are read first. A write that fails
stops the sending; the peer's end of the connection is awaited for `GRACE_S`, because data that it has sent before
counts.

The fence: `close` stops reading, then leaves the ring to the agent (`agent.py`), which keeps it from any other use.

Progress: `pump` moves the bytes, like that of `tcp`. While data is under way in either direction the link reports that
it is stuck, so its writable connection wakes the thread that polls it, repeatedly.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque

from ...errors import EpeeError, expected
from ..frames import NO_WORD, FrameOpener, FrameSealer
from ..meeting import Connected
from ..seam import LinkLoss
from ..stream import SEND_BYTES, FrameSink
from ..tcp import MAX_READS, TcpLink
from .agent import NixlAgent, Transfer
from .control import ControlSink, Introduction, RingCounts, check, pack_introduction, parse_introduction
from .ring import InRing, OutRing

RING_BYTES = 4 << 20  # as much as `tcp` asks of the kernel for a socket
POST_BYTES = 512 << 10  # of one write
MAX_POSTS = 4
CREDIT_BYTES = RING_BYTES // 4  # so much is freed before it is reported to the peer
GRACE_S = 2.0
_CONTROL = b"nixl control"


class NixlLink(TcpLink):
    """A link over an agent of NIXL and a socket; see `seam.Link` and, for the rest, `TcpLink`.

    Args:
        peer: rank of the other process.
        met: the connection, past its handshake, and its keys.
        covers_payloads: payloads have trailers.
        sink: the target of the peer's frames.
        agent: of this group.

    Raises:
        ResourceError: no memory can be registered.
    """

    def __init__(self, peer: int, met: Connected, covers_payloads: bool, sink: FrameSink, agent: NixlAgent) -> None:
        connection, out_key, in_key = met
        sealer, opener = FrameSealer(out_key, covers_payloads), FrameOpener(in_key, covers_payloads)
        super().__init__(peer, connection, sealer, opener, sink)
        self._region = region = agent.lend(RING_BYTES)
        self._theirs = ControlSink()
        keys = [hashlib.blake2b(_CONTROL, key=key, digest_size=32).digest() for key in (out_key, in_key)]
        self._control = TcpLink(peer, connection, FrameSealer(keys[0], True), FrameOpener(keys[1], True), self._theirs)
        self._staging = OutRing(region.staging, self._out)
        self._ring = InRing(region.ring, self._in)
        self._staging_address = region.address + RING_BYTES
        self._remote: Introduction | None = None
        self._posts: deque[Transfer] = deque()
        self._done = 0
        self._told = RingCounts()
        self._until = 0.0  # time until which the peer's end is awaited
        self._agent: NixlAgent | None = agent
        told = Introduction(agent.name, region.address, RING_BYTES, agent.metadata(region.address, RING_BYTES))
        self._control.write(0, pack_introduction(told), NO_WORD, 0, 0)
        self._control.flush()

    @property
    def is_flushed(self) -> bool:
        """True when all written data is in the peer's memory, and was announced."""
        return not self._out and self._told.done == self._out.position and self._control.is_flushed

    @property
    def is_in_hand(self) -> bool:
        """True until all written data is in the peer's memory, and was announced."""
        return self.lost is None and self._agent is not None and not self.is_flushed

    # ---- sending

    def flush(self) -> bool:
        """Stage the data for which there is room, `SEND_BYTES` or so, and have it written. False: there was no room."""
        has_room = False
        if self.lost is None and self._mute is None and self._agent is not None:
            with contextlib.suppress(BlockingIOError):
                self._out.send(self._staging.sendmsg, SEND_BYTES)
                has_room = True
            try:
                self._post()
            except expected(OSError) as exc:
                self._go_mute(exc)
            self._tell()
        self._note_stuck()
        return has_room

    def _post(self) -> bool:
        """Let NIXL write the staged data; return whether any has arrived since the last call."""
        agent, remote, posts, before = self._agent, self._remote, self._posts, self._done
        if agent is None or remote is None:
            return False
        for transfer in posts:
            self._push(agent, remote, transfer)  # one that was interrupted
        while posts and agent.is_done(posts[0]):
            self._done = posts[0].end
            agent.free(posts[0])
            posts.popleft()
        while len(posts) < MAX_POSTS and self._posted < self._out.position:
            start = self._posted
            posts.append(Transfer(start, self._staging.piece(start, POST_BYTES)[1]))
            self._push(agent, remote, posts[-1])
        return self._done > before

    def _push(self, agent: NixlAgent, remote: Introduction, transfer: Transfer) -> None:
        if not transfer.states:
            at = transfer.start % RING_BYTES
            agent.push(transfer, self._staging_address + at, remote.address + at, remote.name)

    @property
    def _posted(self) -> int:
        return self._posts[-1].end if self._posts else self._done

    def _tell(self) -> None:
        """Report the progress of this end to the peer, where that makes a difference to it."""
        if self.is_finished:  # the connection takes nothing more; all received data was reported
            return
        told, now = self._told, RingCounts(self._posted, self._done, self._in.position)
        is_idle = told.posted == told.done  # the peer is not pumping for this transfer
        if now.done > told.done or (is_idle and now.posted > told.posted) or now.freed - told.freed >= CREDIT_BYTES:
            self._control.write(now.posted, b"", NO_WORD, now.done, now.freed)
            self._told = now

    def _go_mute(self, exc: OSError) -> None:
        if self._mute is None:
            self._until = time.monotonic() + GRACE_S
            self._mute = type(exc)(*exc.args)  # one without a stack, which would refer to this link

    def _note_stuck(self) -> None:
        theirs = self._theirs.counts
        self.is_stuck = self.lost is None and bool(
            self._posts
            or theirs.posted > theirs.done
            or self._ring.done > self._in.position
            or self._control.is_stuck
            or self._mute is not None
            or (self._out and self._out.position < self._staging.freed + RING_BYTES)
        )

    # ---- both ways

    def pump(self) -> bool:
        """As `Link.pump`."""
        if self.lost is not None or self._agent is None:
            return False
        has_moved = self._control.pump()
        try:
            try:
                self._hear(self._agent)
                if self.is_stuck or has_moved:
                    self._agent.progress()
                has_moved |= self._post()
            except expected(OSError) as exc:
                self._go_mute(exc)
            has_moved |= self._drain()
            if self._out:
                self.flush()
            self._tell()
            self._look_for_the_end()
        except expected(EpeeError) as exc:
            self._lose(LinkLoss.DAMAGED, exc)
        self._note_stuck()
        return has_moved

    def _hear(self, agent: NixlAgent) -> None:
        """Use the counts from the peer, after checks."""
        theirs = check(self._theirs.counts, self._told, RING_BYTES)
        if self._remote is None and self._theirs.introduction and self._mute is None:
            remote = parse_introduction(self._theirs.introduction, RING_BYTES)
            agent.meet(remote.name, remote.metadata, self._region)
            self._remote = remote
        self._staging.freed, self._ring.done = theirs.freed, theirs.done

    def _drain(self) -> bool:
        """Apply the data in the ring, a bounded amount of it."""
        came = 0
        with contextlib.suppress(BlockingIOError):
            while came < MAX_READS:
                self._in.receive(self._ring.recv_into)
                came += 1
        return came > 0

    def _look_for_the_end(self) -> None:
        """End the link when no more data can come and all received data is applied."""
        loss = self._control.lost
        if loss is None and self._mute is not None and time.monotonic() > self._until:
            loss = LinkLoss.RESET
        if loss is not None and self._ring.done == self._in.position:
            self._lose(loss, self._mute)

    # ---- the end

    def finish(self) -> None:
        """As `TcpLink.finish`."""
        self.is_finished = True
        self._control.finish()

    def close(self) -> None:
        """End the connection and leave the agent; idempotent."""
        self.fd = -1
        self._control.close()
        agent = self._agent
        if agent is not None:
            for transfer in self._posts:
                agent.free(transfer)
            if self._remote is not None:
                agent.part(self._remote.name, self._region)
            agent.leave(self._region)
            self._agent = None

    def forget(self) -> None:
        """As `TcpLink.forget`; the memory does not exist in a child."""
        self.fd = -1
        self.lost, self._agent = LinkLoss.RESET, None
        self._control.forget()
