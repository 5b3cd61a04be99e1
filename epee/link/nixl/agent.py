"""One agent of NIXL: the memory it has registered, the peers it knows, the writes it has under way.

An agent serves links of one group; the last one that leaves it drops it, and after a number of links have left it, it
gets no new ones (`engine.py`), so the memory that links leave behind is bounded however often they are made again. That
is the fence. A peer that has its metadata can write for as long as the agent exists, also into memory that has been
deregistered (measured over UCX's TCP, 6 of 6, decision 69). Memory that was lent once is therefore never used for
anything else: a link that ends leaves it to the agent, still mapped, and it is freed with the agent.

An exception of a signal handler may come between any two lines. Each step of a `Transfer` is one call in C that records
its own result, so an interrupted step is done or not done, and `push` continues from there.

Nothing here makes a thread, and UCX moves bytes only when it is called (`progress`). The caller holds the lock of its
links. NIXL does not survive a fork: a child may neither use nor end its parent's agents, and makes none of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass, field
from typing import Any

from ... import env
from ...errors import ForkError, ProtocolError, ResourceError, expected, ignored
from ..address import allowed_devices
from .library import load

logger = logging.getLogger("epee")

BACKEND = "UCX"


class RingMemory:
    """Memory that an agent has registered: `nbytes` that a peer may write, and as many to send from.

    Attributes:
        address: of the first part; the second one follows.
        ring, staging: the two parts.
        memory: both.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, 2 * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_DONTFORK)  # a NIC knows the pages, not their owner after a fork
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.ring = memoryview(self.memory)[:nbytes]
        self.staging = memoryview(self.memory)[nbytes:]

    def close(self) -> None:
        """Unmap the memory; idempotent."""
        self.ring.release()
        self.staging.release()
        self.memory.close()


class Transfer:
    """A write that is under way, up to byte `end` of a stream."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.handles: list[int] = []
        self.states: list[Any] = []
        self.freed: list[Any] = []


class NixlAgent:
    """An agent of NIXL (see the module).

    Attributes:
        num_made: of this process, its parents' included.
        num_left: links that have left it, each of which leaves a ring behind as long as the agent exists.

    Raises:
        UnsupportedError: NIXL is not installed.
        ForkError: a parent of this process has made one.
        ResourceError: NIXL cannot make one here.
    """

    num_made = 0

    def __init__(self) -> None:
        if _made.was_forked:
            raise ForkError(
                "this process was forked after its parent had made links of NIXL; start it by spawn or exec"
            )
        self._api = api = load()
        self._errors = tuple(
            each for each in vars(api).values() if isinstance(each, type) and issubclass(each, Exception)
        )
        self.name = secrets.token_hex(16)
        self.num_left = 0
        self._users: set[object] = set()
        self._regions: list[RingMemory] = []
        self._peers: dict[str, set[object]] = {}  # name of a peer's agent -> its users
        config = api.nixlAgentConfig()
        config.useProgThread = config.useListenThread = False
        config.syncMode = api.NIXL_THREAD_SYNC_STRICT
        devices = ",".join(allowed_devices())
        # the backend's own parameters for devices name one at most, or have no effect (seen in 1.5.1)
        restricted = env.having(UCX_NET_DEVICES=devices) if devices else contextlib.nullcontext()
        NixlAgent.num_made += 1
        try:
            with restricted:
                self._agent = api.nixlAgent(self.name, config)
                self._backends = [self._agent.createBackend(BACKEND, {})]
        except expected(*self._errors) as exc:
            where = f" on {devices}" if devices else ""
            raise ResourceError(
                f"NIXL cannot make an agent with {BACKEND}{where}: {exc}; do UCX_TLS and UCX_NET_DEVICES, or "
                "set_device_filter, name what is here? EPEE_LINK=tcp works everywhere"
            ) from exc
        _made.agents.add(self)

    def join(self, user: object) -> None:
        """Register a user of the agent."""
        self._users.add(user)

    def leave(self, user: object) -> None:
        """Unregister a user; without any the agent is dropped, then its memory."""
        self.num_left += user in self._users
        self._users.discard(user)
        if not self._users:
            self._agent = None
            for region in self._regions:
                region.close()
            self._regions.clear()

    # ---- memory and peers

    def lend(self, nbytes: int) -> RingMemory:
        """Return new registered memory; the agent keeps it as long as itself, and is needed until `leave(region)`.

        Raises:
            ResourceError: the system does not provide or pin that much.
        """
        try:
            region = RingMemory(nbytes)
        except expected(OSError) as exc:
            raise ResourceError(f"no {2 * nbytes} bytes of memory for a link of NIXL: {exc}") from exc
        self._regions.append(region)
        self.register(region.address, region.address + nbytes, nbytes=nbytes)
        self.join(region)
        return region

    def register(self, *addresses: int, nbytes: int) -> None:
        """Register memory that stays mapped as long as the agent exists, `nbytes` at each address.

        Raises:
            ResourceError: the system does not pin that much.
        """
        try:
            self._agent.registerMem(self._listed(*addresses, nbytes=nbytes), self._backends)
        except expected(*self._errors) as exc:
            total = nbytes * len(addresses)
            raise ResourceError(f"NIXL cannot register {total} bytes ({exc}); raise ulimit -l") from exc

    def metadata(self, address: int, nbytes: int) -> bytes:
        """Return what a peer needs to reach this agent, and to write registered memory."""
        listed = self._listed(address, nbytes=nbytes)
        return bytes(self._agent.getLocalPartialMD(listed, True, self._backends))

    def _listed(self, *addresses: int, nbytes: int) -> Any:
        return self._api.nixlRegDList(self._api.DRAM_SEG, [(address, nbytes, 0, b"") for address in addresses])

    def meet(self, name: str, metadata: bytes, user: object) -> None:
        """Load a peer's metadata, repeatedly if need be.

        Raises:
            ProtocolError: it is not the metadata of the agent of this name.
            ConnectionError: the peer is not reached.
        """
        try:
            told = self._agent.loadRemoteMD(metadata)
        except expected(self._api.nixlMismatchError, self._api.nixlInvalidParamError) as exc:
            raise ProtocolError(f"NIXL cannot read a peer's metadata: {exc}; do all hosts have one version?") from exc
        except expected(*self._errors) as exc:
            raise ConnectionError(f"NIXL cannot connect: {exc}") from exc
        if told != name.encode():
            raise ProtocolError(f"a peer says that its agent is {name}, its metadata that it is {told!r}")
        self._peers.setdefault(name, set()).add(user)

    def part(self, name: str, user: object) -> None:
        """Drop a peer that was met, unless it has another user."""
        users = self._peers.get(name, set())
        users.discard(user)
        if not users and self._peers.pop(name, None) is not None:
            with ignored(*self._errors):  # its connection has failed, so NIXL has dropped it
                self._agent.invalidateRemoteMD(name)

    # ---- writes

    def push(self, transfer: Transfer, local: int, remote: int, name: str) -> None:
        """Begin a write of `transfer`'s bytes from address `local` here to `remote` there, if that is not done yet.

        Raises:
            ConnectionError: the peer is not reached any more.
        """
        api, agent, nbytes = self._api, self._agent, transfer.end - transfer.start
        try:
            if not transfer.handles:
                ours = api.nixlXferDList(api.DRAM_SEG, [(local, nbytes, 0)])
                theirs = api.nixlXferDList(api.DRAM_SEG, [(remote, nbytes, 0)])
                args = ((each,) for each in (api.NIXL_WRITE, ours, theirs, name, "", self._backends))
                transfer.handles.extend(map(agent.createXferReq, *args))
            if not transfer.states:
                transfer.states.extend(map(agent.postXferReq, transfer.handles))
        except expected(*self._errors) as exc:
            raise ConnectionError(f"NIXL: {exc}") from exc

    def is_done(self, transfer: Transfer) -> bool:
        """Return whether a write that has begun is in the peer's memory; raises as `push`."""
        if transfer.freed:
            return True
        try:
            if transfer.states[-1] == self._api.NIXL_IN_PROG:
                transfer.states[:] = (self._agent.getXferStatus(transfer.handles[0]),)
        except expected(*self._errors) as exc:
            raise ConnectionError(f"NIXL: {exc}") from exc
        state = transfer.states[-1]
        if state not in (self._api.NIXL_IN_PROG, self._api.NIXL_SUCCESS):
            raise ConnectionError(f"NIXL: a write has ended with {state}")
        return bool(state == self._api.NIXL_SUCCESS)

    def free(self, transfer: Transfer) -> None:
        """Release a write, whether or not it is done; its source memory is left to the agent."""
        if transfer.handles and not transfer.freed:
            try:
                transfer.freed.extend(map(self._agent.releaseXferReq, transfer.handles))
            except expected(*self._errors) as exc:  # it was under way
                transfer.freed.append(exc)
                logger.info("NIXL has kept a write that was given up: %s", exc)

    def progress(self) -> None:
        """Let UCX move the data that can be moved; raises as `push`."""
        try:
            self._agent.getNotifs({}, self._backends)
        except expected(*self._errors) as exc:
            raise ConnectionError(f"NIXL: {exc}") from exc

    def forget(self) -> None:
        """Never end the agent in this process, a forked child: its connections are the parent's.

        Memory that was not inherited is not unmapped either: something else may lie at its address.
        """
        for each in (self._agent, *(region.memory for region in self._regions)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


@dataclass
class _Made:
    """The agents that this process has made, or its parent had before the fork."""

    agents: weakref.WeakSet[NixlAgent] = field(default_factory=weakref.WeakSet)
    was_forked: bool = False


_made = _Made()


def _forget_all() -> None:
    _made.was_forked |= NixlAgent.num_made > 0
    for agent in _made.agents:
        agent.forget()


os.register_at_fork(after_in_child=_forget_all)
