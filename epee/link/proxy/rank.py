"""A rank's side of its proxy: shared memory, the start of its processes, the connection with partners, death and end.

    rank        makes page and staging, starts the processes, watches them (one thread, asleep), ends them
    processes   `process.py`; each with a socket for requests and an eventfd that wakes it

A process that ends without having been asked to is noticed by the thread through its pidfd: it sets ABORT, which
kernels and the other processes poll, records the cause for `check`, and kills the rest of the proxy. A rank that dies
leaves processes that end by themselves. Page and staging live as long as somebody maps them: kernels of a rank may go
on storing into them when its proxy is dead; nobody reads it.

The partners follow from `islands` alone, lists of the ranks whose GPUs map each other: a rank exchanges chunks with the
rank of equal position on every other island (`link/topology.py`).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ... import env
from ...descriptors import Descriptor
from ...errors import (
    CommTimeoutError,
    ForkError,
    InvalidArgument,
    ProtocolError,
    ResourceError,
    UnsupportedError,
    expected,
    ignored,
    shortage,
)
from ...memory.shared import HEADER_BYTES, SharedRegion
from ...memory.signals import fence, usable_cores
from ...threads import BackgroundThread
from ...view.process.detector import is_readable
from ...view.transport.auth import Token
from ..address import own_address, preferred_device
from ..nixl.devices import cpus_of_node, numa_node_near
from ..nixl.library import why_missing
from .process import CLOSE_S, FLUSH_S
from .setup import ProxyEndpoint, ProxySetup, parse_endpoint, receive_message, send_message
from .tcp import ENGINES
from .words import ABORT, ASLEEP, BY_RANK, LOST, PROCESS_ENDED, REASONS, SERVING, ProxyShape, island_topology

START_S = 30.0
_END_S = 2 * FLUSH_S + CLOSE_S + 2.0
_SLICE_S = 0.1
_FAIL_S = 10.0  # for the thread to notice a process whose socket has closed
_PROGRAM = Path(__file__).with_name("__main__.py")


def cpus_for(worker: int, location: str) -> tuple[int, ...]:
    """Return the CPUs of one process of the proxies of a machine; empty: those of the rank.

    Args:
        worker: number of the process among those of the proxies of the island.
        location: of the data, "cuda:N" or "cpu:N" (a NUMA node); "" for none.

    Raises:
        InvalidArgument: EPEE_PROXY_CPUS is no list of CPUs.
    """
    named = env.get("EPEE_PROXY_CPUS")
    if isinstance(named, tuple):
        return (named[worker % len(named)],)
    cpus = cpus_of_node(numa_node_near(location, preferred_device(location))) if location else ""
    return tuple(sorted(usable_cores().intersection(env.cpu_list(cpus)))) if cpus else ()


class _Helper:
    """One process of a proxy, with what the rank has of it."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, wake: Descriptor) -> None:
        self.process, self.control, self.wake = process, control, wake
        self.pidfd = Descriptor(os.pidfd_open(process.pid))
        self.text = ""  # the reason that it has sent before its end

    def close(self) -> None:
        """End the process, if it runs, and close its descriptors; idempotent."""
        self.process.kill()
        self.process.wait()
        self.control.close()
        self.wake.close()
        self.pidfd.close()


class Proxy:
    """The proxy of a rank.

    Args:
        rank: of the job.
        islands: all ranks, as `words.island_topology` takes them.
        island: (pid, start time in clock ticks since boot) of the ranks of this one's island, ascending by rank.
        shape: its sizes; the counts of partners and readers must fit the islands (`shape_for`).
        location: of the data, "cuda:N" or "cpu:N" (a NUMA node): the processes run on CPUs near it, or near its NIC.
        address: to listen at; by default `own_address()`.
        engine: tcp or nixl, equal on all ranks; by default that of EPEE_LINK. Over NIXL a proxy meets once.

    Attributes:
        shape: as the argument.
        partners: ranks, ascending; their indices are those of the words and areas.
        page, staging: the shared memory. It stays mapped after `close` while something refers to it.
        words: of the page.

    Raises:
        InvalidArgument: an argument breaks its rule, or EPEE_PROXY_CPUS names a CPU that this machine does not have.
        ResourceError: the system has no memory, descriptor or process left, or a process does not start.
    """

    def __init__(
        self,
        rank: int,
        islands: Sequence[Sequence[int]],
        island: Sequence[tuple[int, int]],
        shape: ProxyShape,
        location: str = "",
        address: str = "",
        engine: str = "",
    ) -> None:
        topology = island_topology(rank, islands)
        self.rank, self.shape, self.partners = rank, shape, topology.partners()
        if (shape.num_partners, shape.num_readers) != (len(self.partners), len(topology.here)):
            raise InvalidArgument(
                f"the shape of a proxy must have {len(self.partners)} partners and {len(topology.here)} readers, as "
                f"the islands have, got {shape.num_partners} and {shape.num_readers}; make it with shape_for"
            )
        own = topology.here.index(rank)
        if len(island) != len(topology.here) or island[own][0] != os.getpid():
            raise InvalidArgument(
                f"island must name the processes of ranks {topology.here}, this one as rank {rank}, got {list(island)}"
            )
        engine = engine or str(env.get("EPEE_LINK"))
        if engine not in ENGINES:
            raise InvalidArgument(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
        if engine == "nixl" and (why := why_missing()):
            raise UnsupportedError(f"a proxy over NIXL: {why}; install the extra nixl, or use EPEE_LINK=tcp")
        self._pid = os.getpid()
        self._failure = ""
        self._is_closing = False
        self._number = 0  # of the last request
        self._helpers: list[_Helper] = []
        self._failed = threading.Event()
        with contextlib.ExitStack() as undo:
            self.page = SharedRegion.create(8 * shape.num_words, f"proxy-{rank}-page")
            undo.callback(self.page.close)
            self.staging = SharedRegion.create(shape.staging_bytes, f"proxy-{rank}-staging")
            undo.callback(self.staging.close)
            self.words = self.page.words(0, shape.num_words)
            for process in range(shape.num_processes):
                setup = ProxySetup(
                    rank=rank,
                    process=process,
                    own=own,
                    island=tuple(island),
                    partners=self.partners,
                    address=address or own_address(),
                    engine=engine,
                    covers_payloads=env.get_bool("EPEE_LINK_MAC"),
                    cpus=cpus_for(own * shape.num_processes + process, location),
                    page=_file(self.page),
                    staging=_file(self.staging),
                    wake=-1,
                    shape=asdict(shape),
                )
                self._helpers.append(_start(setup))
                undo.callback(self._helpers[-1].close)
            self._await_start(time.monotonic() + START_S)
            self._stop = Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            undo.callback(self._stop.close)
            self._thread = BackgroundThread(self._watch, "epee-proxy")
            self._thread.begin("the watch of a proxy")
            undo.pop_all()

    # ---- what kernels and calls use

    def wake(self) -> None:
        """End the sleep of the processes; to be called after a word was stored, or before a kernel is launched."""
        fence()
        for process, helper in enumerate(self._helpers):
            if self.words[self.shape.process_words(process) + ASLEEP] and not helper.wake.is_kept:
                with ignored(OSError):  # enough wake-ups are queued
                    os.eventfd_write(helper.wake, 1)

    @property
    def lost(self) -> tuple[int, ...]:
        """The partners with which a connection has ended in this epoch, ascending."""
        bits = 0
        for process in range(self.shape.num_processes):
            bits |= self.words[self.shape.process_words(process) + LOST]
        return tuple(rank for i, rank in enumerate(self.partners) if bits >> i & 1)

    @property
    def epoch(self) -> int:
        """The epoch in which all processes serve all partners; -1: none."""
        epochs = {self.words[self.shape.process_words(i) + SERVING] - 1 for i in range(self.shape.num_processes)}
        return epochs.pop() if len(epochs) == 1 else -1

    def check(self) -> None:
        """Raise `ResourceError` if the proxy has failed or has been ended; the message says how."""
        if self._failure or self.words[ABORT]:
            self._failed.wait(_FAIL_S)  # the thread finds out which process it was, and why
            cause = self._failure or REASONS[min(self.words[ABORT], len(REASONS) - 1)]
            raise ResourceError(
                f"rank {self.rank} has no proxy any more, without which its GPU reaches no other host: {cause}; make "
                "a new buffer, or let the rank leave"
            )

    def abort(self) -> None:
        """End the proxy at once: kernels see ABORT, the processes exit, partners find the connections ended.

        Raises:
            ForkError: this process is a forked child.
        """
        self._require_own()
        self.words[ABORT] = self.words[ABORT] or BY_RANK
        self._note_failure(REASONS[BY_RANK])
        self.wake()

    # ---- connections

    def offer(self, timeout_s: float = START_S) -> tuple[ProxyEndpoint, ...]:
        """Listen for partners; return an endpoint per process, for the partners' `meet`.

        Raises:
            ResourceError: an address cannot be listened at, or the proxy has failed.
        """
        answers = self._request({"do": "offer"}, timeout_s, lambda: None)
        return tuple(parse_endpoint(answer.get("endpoint")) for answer in answers)

    def meet(
        self,
        epoch: int,
        first: int,
        endpoints: Mapping[int, Sequence[ProxyEndpoint]],
        token: Token,
        job_id: bytes,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect with partners after an `offer`, and serve them from now on; connections of before end first.

        Kernels of the rank must not run meanwhile, and those of the island must not use its page.

        Args:
            epoch: of the view.
            first: number of the first chunk and row in every stream, equal on all ranks, above those of all epochs
            before.
            endpoints: of the partners to meet, by rank; as their `offer` returned them.
            token, job_id: of the group, equal on all ranks.
            timeout_s: for all of it.
            check: called now and then; raises to end the wait.

        Raises:
            InvalidArgument: the endpoints are not one per process, or of a rank that is no partner.
            CommTimeoutError: a partner did not come in time. ProtocolError: a partner has other sizes.
            UnsupportedError: the second time over NIXL.
            ResourceError: the proxy has failed, or the system is short of something.
        """
        count = len(self._helpers)
        wrong = [rank for rank, each in endpoints.items() if rank not in self.partners or len(each) != count]
        if wrong:
            raise InvalidArgument(
                f"endpoints must be those of partners {self.partners}, {count} each, as many as processes; those of "
                f"rank(s) {wrong} are not"
            )
        common = {"do": "meet", "epoch": epoch, "first": first, "timeout_s": timeout_s, "job": job_id.hex()}
        common["token"] = token.reveal().hex()
        self._request(common, timeout_s + _FAIL_S, check, endpoints)

    def close(self) -> None:
        """End the proxy in order: partners learn that nothing more comes; idempotent. Bounded by some ten seconds."""
        if os.getpid() != self._pid or not self._helpers:  # the processes of a forked child are the parent's
            return
        self._is_closing = True
        for helper in self._helpers:
            with ignored(OSError):
                send_message(helper.control, {"do": "end", "number": -1})
        deadline = time.monotonic() + _END_S
        for helper in self._helpers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                helper.process.wait(max(0.0, deadline - time.monotonic()))
        os.eventfd_write(self._stop, 1)
        self._thread.join(_FAIL_S)
        helpers, self._helpers = self._helpers, []  # `wake` of another thread finds none that is closed
        for helper in helpers:
            helper.close()
        self._stop.close()
        self._note_failure("it has been closed")
        self.page.hide()
        self.staging.hide()

    # ---- processes

    def _await_start(self, deadline: float) -> None:
        for helper in self._helpers:
            answer = self._answer(helper, deadline, lambda: None)
            if answer is None or "ready" not in answer:
                raise _failure(answer or {}, f"process {helper.process.pid} of a proxy {_how(helper)}")

    def _request(
        self,
        message: Mapping[str, Any],
        timeout_s: float,
        check: Callable[[], None],
        endpoints: Mapping[int, Sequence[ProxyEndpoint]] | None = None,
    ) -> list[dict[str, Any]]:
        """Send a request to all processes and return their answers."""
        self._require_own()
        self.check()
        self._number += 1
        for process, helper in enumerate(self._helpers):
            own = {} if endpoints is None else {"partners": [[r, e[process].fields()] for r, e in endpoints.items()]}
            with ignored(OSError):  # it has ended: seen below
                send_message(helper.control, {**message, **own, "number": self._number})
        deadline, answers = time.monotonic() + timeout_s, []
        for helper in self._helpers:
            answer = self._answer(helper, deadline, check, self._number)
            if answer is None:
                self._failed.wait(_FAIL_S)
                self.check()
                raise ResourceError(f"process {helper.process.pid} of the proxy of rank {self.rank} has ended")
            answers.append(answer)
        for answer in answers:
            if "error" in answer:
                raise _failure(answer, f"the proxy of rank {self.rank}")
        return answers

    def _answer(
        self, helper: _Helper, deadline: float, check: Callable[[], None], number: int | None = None
    ) -> dict[str, Any] | None:
        """Return the answer to a request; None: the process has ended."""
        while True:
            check()
            if not is_readable_within(helper.control, _SLICE_S):
                if time.monotonic() > deadline:
                    name = f"process {helper.process.pid} of the proxy of rank {self.rank}"
                    raise CommTimeoutError(f"{name} does not answer; is it stopped?", has_job=False)
                if self._failed.is_set():  # a forked child may hold the socket open
                    return None
                continue
            try:
                answer = receive_message(helper.control)
            except expected(EOFError, ConnectionError):
                return None
            if "failed" in answer:
                helper.text = str(answer["failed"])
                return answer if number is None else None
            if number is None or answer.get("number") == number:
                return answer

    def _require_own(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError(f"the proxy of rank {self.rank} belongs to process {self._pid}; its children have none")

    def _watch(self) -> None:
        """Wait for the end of a process that was not asked for."""
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        helpers: dict[int, _Helper] = {helper.pidfd: helper for helper in self._helpers}
        for fd in helpers:
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._stop:
                    return
                poll.unregister(fd)
                if not self._is_closing:
                    self._note_end(helpers[fd])

    def _note_end(self, first: _Helper) -> None:
        """End the proxy, one process of which has ended, and record which of them has failed, and why."""
        self.words[ABORT] = self.words[ABORT] or PROCESS_ENDED
        for helper in self._helpers:
            _drain(helper)
        failed = next((helper for helper in self._helpers if helper.text), first)
        text = f"process {failed.process.pid} {_how(failed)}"
        for helper in self._helpers:
            helper.process.kill()
        self._note_failure(text)

    def _note_failure(self, text: str) -> None:
        self._failure = self._failure or text
        self._failed.set()


def shape_for(
    rank: int, islands: Sequence[Sequence[int]], num_slots: int, slot_bytes: int, row_bytes: int, num_processes: int = 1
) -> ProxyShape:
    """Return the shape of a rank's proxy; all but the first two arguments are equal on all ranks (`ProxyShape`)."""
    topology = island_topology(rank, islands)
    return ProxyShape(len(topology.partners()), len(topology.here), num_slots, slot_bytes, row_bytes, num_processes)


def is_readable_within(connection: socket.socket, wait_s: float) -> bool:
    """Return whether a socket has something to read, or has ended, within some time."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(wait_s * 1e3))


def _file(region: SharedRegion) -> tuple[int, int, int]:
    return region.descriptor, region.mapped_bytes, HEADER_BYTES


def _start(setup: ProxySetup) -> _Helper:
    """Start one process and send its setup."""
    what = f"a process of the proxy of rank {setup.rank}"
    with contextlib.ExitStack() as undo:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(ours.close)
            with theirs:
                wake = Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
                undo.callback(wake.close)
                process = subprocess.Popen(
                    [sys.executable, str(_PROGRAM), str(theirs.fileno())],
                    pass_fds=(theirs.fileno(), setup.page[0], setup.staging[0], wake),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # libraries log there
                )
            undo.callback(process.wait)
            undo.callback(process.kill)
            helper = _Helper(process, ours, wake)
            ours.settimeout(_FAIL_S)  # a stopped process reads no requests
            message = {**setup.message(), "wake": int(wake)}
            send_message(ours, message)
        except expected(OSError) as exc:
            raise shortage(f"cannot start {what}", exc) from exc
        undo.pop_all()
    return helper


def _drain(helper: _Helper) -> None:
    """Take what a process has sent before its end: the reason, perhaps. One that has not ended is given a moment."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        helper.process.wait(_SLICE_S)
    with contextlib.suppress(OSError, EOFError, ProtocolError):
        while not helper.text and is_readable(helper.control.fileno()):
            helper.text = str(receive_message(helper.control).get("failed", ""))


def _how(helper: _Helper) -> str:
    """Return in words how a process has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        helper.process.wait(1.0)
    code = helper.process.returncode
    if code is None:
        return "has not ended"
    how = f"was killed by signal {-code}" if code < 0 else f"has exited with {code}"
    return f"{how} ({helper.text})" if helper.text else how


def _failure(answer: Mapping[str, Any], who: str) -> Exception:
    """Return the error that a process reports."""
    text = f"{who}: {answer.get('text') or answer.get('failed') or 'no reason is given'}"
    ranks = answer.get("ranks")
    kinds: dict[object, type[Exception]] = {
        each.__name__: each for each in (InvalidArgument, ProtocolError, UnsupportedError)
    }
    if answer.get("error") == "CommTimeoutError" and isinstance(ranks, list):
        return CommTimeoutError(text, [int(rank) for rank in ranks], has_job=False)
    return kinds.get(answer.get("error"), ResourceError)(text)
