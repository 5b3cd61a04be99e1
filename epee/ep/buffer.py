"""`Buffer`: dispatch tokens to the ranks that own their experts, combine the results back.

This file is the public face: it checks arguments, keeps one call at a time, and hands the work to the path of the
buffer's device (`cpu.py`). A call whose arguments are refused still takes part in the exchange, as a refusal, so that
the peers raise at once instead of waiting, and everybody's call numbers stay in step.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist

from .. import env
from ..errors import (
    AbortedError,
    CommTimeoutError,
    EpeeError,
    ForkError,
    InvalidArgument,
    InvalidState,
    PeerError,
    UnsupportedError,
)
from .bootstrap import Born, group_of, meet
from .checks import (
    check_combine,
    check_dispatch,
    check_handle,
    check_payload,
    check_timeout,
)
from .config import PAYLOAD_DTYPES, BufferConfig
from .cpu import CpuPath
from .exchange import OP_COMBINE, OP_DISPATCH, OP_GATHER, Exchange
from .handle import Combined, Dispatched, Handle, Payload
from .order import CombineOrder

_log = logging.getLogger(__name__)
_buffer_ids = itertools.count(1)


class Buffer:
    """Shared memory of the ranks of a group, through which tokens travel to experts and back.

    Construction is collective: all ranks of `group` make their buffer together, with equal arguments.

    Args:
        group: any c10d process group of the ranks (gloo, nccl ...), None for the default group. Used now, never in
            a call.
        num_experts: over all ranks, a multiple of the number of ranks. Rank r owns `num_experts / num_ranks`
            experts, starting at r times that.
        hidden: elements of a row, a multiple of 8 (of 128 for FP8 pairs).
        num_topk: columns of `topk_idx`, 1 ... 32.
        max_tokens_per_rank: most tokens that one rank dispatches in a call.
        dtype: widest payload: bfloat16, float16, float32 or float64. Narrower ones and FP8 pairs fit as well.
        device: None or the CPU.
        num_slots: results, and combine inputs, of each layout that may live in the arena at once.
        max_recv_rows: rows that a call can receive; None for `num_ranks * max_tokens_per_rank` in the rank layout
            (the worst case) and `1.5 * max_tokens_per_rank * num_topk` in the expert layout. Padding of the expert
            layout, `num_local_experts * (expert_alignment - 1)` rows, is always added.
        timeout: seconds that a call waits for a silent peer by default; None for EPEE_TIMEOUT_S.

    Memory: each layout gets an arena at its first use, `2 * num_slots + 2` slots of `rows` rows; docs/buffer.md has the
    formula. That is address space: pages are taken when they are first written, and slots are reused lowest first.

    After an error the buffer works, except after `RankFailedError`: a dead rank cannot come back into this buffer.

    Raises:
        InvalidArgument: a rule above is broken (the peers raise `MismatchError`).
        MismatchError: the ranks disagree; the same text on all of them.
        UnsupportedError: several hosts, not Linux on x86-64, or a device that is not served yet.
        ResourceError: no memory, descriptors or permission.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_experts: int,
        hidden: int,
        num_topk: int,
        max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        num_slots: int = 2,
        max_recv_rows: int | None = None,
        timeout: float | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._closing = _Closing()
        self._closed = True  # until everything is made
        self._pid = os.getpid()
        self._id = next(_buffer_ids)
        members = group_of(group)
        self.rank = members.rank()
        self.num_ranks = members.size()
        self.config = BufferConfig(
            self.num_ranks, num_experts, hidden, num_topk, max_tokens_per_rank, dtype, num_slots, max_recv_rows or 0
        )
        refusal: EpeeError | None = None
        self._timeout, poison = 0.0, False
        try:
            self._timeout, poison = _settings(self.config, device, max_recv_rows, timeout)
        except Exception as error:  # noqa: BLE001 - raised by `meet`, after the peers have heard of it
            refusal = error if isinstance(error, EpeeError) else InvalidArgument(f"{type(error).__name__}: {error}")
        born = meet(members, self.config, refusal)
        self._exchange = Exchange(self.config, self.rank, born.inboxes, born.watch, self._closing.check)
        self._path = CpuPath(self.config, self.rank, self._exchange, self._id, poison)
        self._inbox_bytes = born.inboxes[self.rank].mapped_bytes
        # a buffer that is dropped without close() returns its memory as well
        self._finalizer = weakref.finalize(self, _return_all, self._path, born, self._exchange)
        self._finalizer.atexit = False
        self._closed = False

    def dispatch(
        self,
        x: Payload,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        is_token_in_rank: torch.Tensor | None = None,
        handle: Handle | None = None,
        layout: str = "rank",
        expert_alignment: int = 1,
        timeout: float | None = None,
    ) -> Dispatched:
        """Send each token to the ranks that own its experts. Collective.

        Args:
            x: `[num_tokens, hidden]` bfloat16, float16, float32 or float64, no wider than the buffer's dtype; or a
                pair (float8_e4m3fn `[num_tokens, hidden]`, scales `[num_tokens, hidden / 128]` float32 or
                `[num_tokens, hidden / 512]` packed int32), any strides. Not modified; may be reused on return.
            topk_idx: `[num_tokens, num_topk]` int64 expert ids, -1 for none. An expert that stands twice in a row
                counts twice.
            topk_weights: `[num_tokens, num_topk]` float32 (or float64 beside a float64 x).
            is_token_in_rank: `[num_tokens, num_ranks]` bool, routing without experts (rank layout only).
            handle: of an earlier dispatch: the same rows travel again, no counts are exchanged; give no routing.
                Layout and alignment are the handle's.
            layout: "rank": one row per (source rank, token), in this order. "expert": one row per (local expert,
                source rank, token, k), each expert's block padded with zero rows to `expert_alignment`.
            expert_alignment: 1 ... 4096 rows.
            timeout: seconds to wait for a silent peer.

        Returns:
            `Dispatched`. Its `x` lives as long as the tensor does; with `num_slots` of them alive, further results
            are ordinary copies.

        Raises:
            InvalidArgument: an argument is wrong (the peers raise `MismatchError`), or the routing needs more rows
                than there is room for (on every rank, before any row moves).
            MismatchError: the ranks made different calls, or a peer's call was refused. Same text on all ranks.
            StaleHandleError: the handle is of another buffer or epoch.
            CommTimeoutError: a peer did not come in time.
            RankFailedError: a peer's process has ended; the buffer cannot be used any more.
            InvalidState, ForkError, AbortedError: closed, re-entered, forked, or closed by another thread meanwhile.
        """
        with self._call(OP_DISPATCH, timeout) as deadline:
            known = None if handle is None else check_handle(handle, self._id, self._exchange.epoch)
            call = check_dispatch(
                self.config,
                check_payload(x, self.config),
                topk_idx,
                topk_weights,
                is_token_in_rank,
                known,
                layout,
                expert_alignment,
            )
            return self._path.dispatch(call, deadline)

    def combine(
        self,
        y: torch.Tensor,
        handle: Handle,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
        order: CombineOrder | None = None,
        timeout: float | None = None,
    ) -> Combined:
        """Bring expert outputs back to the tokens' ranks and sum them. Collective.

        Args:
            y: `[num_recv, hidden]`, a row for each row of the dispatch. Rank layout: the caller has weighted and
                summed its local experts. Expert layout: plain expert outputs; epee multiplies by the weights of the
                dispatch (one if it had none). Memory from `combine_input` is not copied.
            handle: of the dispatch.
            topk_weights: to be sent back: `[num_recv, num_topk]` (rank layout), `[num_recv]` (expert layout).
            bias: one or two `[num_tokens, hidden]`, of y's dtype or float32, added before the rounding.
            out: `[num_tokens, hidden]` of y's dtype, written instead of new memory; may be a bias, must not share
                memory with y.
            order: of the additions; None for epee's own, which is the fastest.
            timeout: seconds to wait for a silent peer.

        Returns:
            `Combined`: for each token the sum over the ranks, ascending, in float32 (float64 for float64), rounded
            once; exact zeros for tokens without expert.

        Raises:
            As `dispatch`; `out` is not written when an error is raised.
        """
        with self._call(OP_COMBINE, timeout) as deadline:
            known = check_handle(handle, self._id, self._exchange.epoch)
            call = check_combine(self.config, y, known, topk_weights, bias, out, order)
            return self._path.combine(call, deadline)

    def all_gather_bytes(self, data: bytes, timeout: float | None = None) -> list[bytes]:
        """Give every rank the bytes of all ranks. Collective; also a barrier of the ranks' host threads.

        For what callers of this buffer must agree on between two calls, without the process group.

        Args:
            data: equally long on all ranks.
            timeout: seconds to wait for a silent peer.

        Returns:
            One byte string per rank, in rank order.

        Raises:
            As `dispatch`.
        """
        with self._call(OP_GATHER, timeout) as deadline:
            if not isinstance(data, bytes):
                raise InvalidArgument(f"data must be bytes, got {type(data).__name__}")
            return self._path.all_gather_bytes(data, deadline)

    def refuse(self, error: Exception, timeout: float | None = None) -> None:
        """Take part in the peers' next call only to tell them that this rank cannot make it; they raise at once.

        For callers of this buffer that find something wrong with their own arguments, before they raise `error`.

        Args:
            error: its text becomes part of the peers' `MismatchError`.
            timeout: seconds to wait for peers that are still in an earlier call.
        """
        with self._exclusive():
            self._refuse(OP_GATHER, error, time.monotonic() + check_timeout(timeout, self._timeout))

    def combine_input(self, handle: Handle, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory for `y` that `combine` need not copy. Local.

        Args:
            handle: of the dispatch whose outputs will be written.
            dtype: of y, the buffer's by default.

        Returns:
            `[num_recv, hidden]`, uninitialised. Do not write into it after the combine: peers may still read it.
            Ordinary memory when all slots are in use.
        """
        with self._exclusive():
            kind = self.config.dtype if dtype is None else dtype
            if kind not in PAYLOAD_DTYPES or kind.itemsize > self.config.dtype.itemsize:
                raise InvalidArgument(f"dtype must be a payload no wider than {self.config.dtype}, got {kind}")
            return self._path.combine_input(check_handle(handle, self._id, self._exchange.epoch), kind)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that this rank maps for others: its inbox and the arenas made so far."""
        if self._closed:
            return 0
        return self._inbox_bytes + self._path.nbytes

    @property
    def num_copied_results(self) -> int:
        """Dispatches whose result had to be copied because `num_slots` results were still alive."""
        return self._path.num_copied

    def close(self) -> None:
        """Return all memory, mappings and descriptors. Local, idempotent, never waits for peers.

        A call in progress in another thread ends with `AbortedError`. Tensors that the user still holds stay valid;
        handles do not.
        """
        self._closing.asked = True
        if self._pid != os.getpid():
            return  # a forked child: the mappings are the parent's business
        if self._owner == threading.get_ident():
            return  # called from a signal handler inside a call: that call ends and closes on its way out
        with self._lock:
            if not self._closed:
                self._closed = True
                self._finalizer()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _call(self, op: int, timeout: float | None) -> Iterator[float]:
        """Run one collective call; yields its deadline.

        An error before the call was announced to the peers (a bad argument, no memory) is announced to them here.
        """
        with self._exclusive():
            last_seq = self._exchange.seq
            deadline = time.monotonic() + self._timeout
            try:
                deadline = time.monotonic() + check_timeout(timeout, self._timeout)
                yield deadline
            except (CommTimeoutError, PeerError, AbortedError):
                raise  # the peers are the cause
            except Exception as error:
                if self._exchange.seq == last_seq:
                    self._refuse(op, error, deadline)
                raise

    def _refuse(self, op: int, error: Exception, deadline: float) -> None:
        """Tell the peers that this call was refused; when even that fails, the refusal is still what is raised."""
        try:
            self._path.refuse(op, error, deadline)
        except EpeeError as problem:
            _log.warning("could not tell the peers about a refused call: %s", problem)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Let one call in at a time; threads queue, a call from within a call is refused."""
        if os.getpid() != self._pid:
            raise ForkError(f"this buffer was made by process {self._pid} before a fork; make a new one in the child")
        me = threading.get_ident()
        if self._owner == me:
            raise InvalidState("a call on this buffer is in progress in this thread (signal handler or callback?)")
        try:
            with self._lock:
                if self._closed or self._closing.asked:
                    raise InvalidState("the buffer is closed; make a new one")
                self._owner = me
                try:
                    yield
                finally:
                    self._owner = None
        finally:
            if self._closing.asked:
                self.close()


class _Closing:
    """Whether somebody asked to close; apart from the buffer, so that nothing keeps a dropped buffer alive."""

    asked = False

    def check(self) -> None:
        """End a waiting call once the buffer is to be closed."""
        if self.asked:
            raise AbortedError("the buffer was closed while this call was waiting")


def _return_all(path: CpuPath, born: Born, exchange: Exchange) -> None:
    path.close()
    born.close()
    exchange.release()


def _settings(
    config: BufferConfig, device: torch.device | str | None, max_recv_rows: int | None, timeout: float | None
) -> tuple[float, bool]:
    """Check this rank's arguments and environment; return (default time-out in seconds, whether to poison)."""
    if max_recv_rows == 0:
        raise InvalidArgument("max_recv_rows must be None or an int of at least 1, got 0")
    config.check()
    if device is not None and torch.device(device).type != "cpu":
        raise UnsupportedError(f"device must be the CPU, got {device}; GPUs are not served yet")
    return check_timeout(timeout, env.get_float("EPEE_TIMEOUT_S")), env.get_bool("EPEE_POISON")
