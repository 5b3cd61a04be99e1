"""V2's calls beside dispatch and combine: messages between pipeline stages (PP) and sessions of all-gathers (AGRS).

Both are `torch.distributed`'s calls on the buffer's group, wait by that group's time-out and use none of the buffer's
memory. Bytes travel, so any dtype does. A message is a header (`_HEADER`) and a payload: a receive that does not fit
takes the payload away and raises, and the next one fits again. Before an all-gather the ranks compare shapes and
dtypes, so a refusal on one rank is an error on all. Engram (remote storage) raises `UnsupportedError`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from epee.compat.deep_ep.low_latency import unsupported
from epee.compat.deep_ep.shared.layout import align_up
from epee.compat.deep_ep.shared.owner import PoolOwner
from epee.ep import group_device, group_failures, group_of, is_capturing
from epee.errors import InvalidArgument, InvalidState, MismatchError, ProtocolError, UnsupportedError, expected
from epee.untraced import untraced_methods
from epee.values import is_whole, shown

_ENGRAM = "epee has no remote storage; keep the table on each rank"
_LINE, _PAGE, _MAX = 32, 2 << 20, 1 << 62  # DeepEP's alignments of tensors and of buffers; the largest number given
_HEADER = struct.Struct("<q24s8s")  # bytes of the payload, dtype, kind of the device whose messages carry it
_TAG = 0x5050  # of these messages; the program's own have others


_Sent: TypeAlias = tuple[Any, torch.Tensor]  # a call under way, and the tensor that it reads


@dataclass
class _Pipeline:
    """The configuration of PP, and messages to each rank that may be under way.

    Attributes:
        largest: of this and earlier configurations, whose messages may be under way.
    """

    num_max_bytes: int
    num_max_inflight: int
    sent: dict[int, deque[list[_Sent]]]
    largest: int


@dataclass
class _Session:
    """An AGRS session: what it has gathered, and in-place tensors that are not gathered yet, by address."""

    num_bytes: int = 0
    num_calls: int = 0
    works: list[_Sent] = field(default_factory=list)
    inplace: dict[int, torch.Tensor] = field(default_factory=dict)


@untraced_methods
class Experimental(PoolOwner):
    """Those methods, for `ElasticBuffer`, with DeepEP's signatures."""

    group: dist.ProcessGroup
    rank_idx: int
    num_ranks: int
    _pipeline: _Pipeline | None = None
    _limits: tuple[int, int] | None = None  # bytes and calls of a session
    _session: _Session | None = None

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[int, int]:
        """Raise `UnsupportedError`: there is no remote storage."""
        unsupported("get_engram_storage_size_hint", _ENGRAM)

    def engram_write(self, storage: torch.Tensor, sf: torch.Tensor | None = None) -> None:
        """Raise `UnsupportedError`: there is no remote storage."""
        unsupported("engram_write", _ENGRAM)

    def engram_fetch(
        self, indices: torch.Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], Any]:
        """Raise `UnsupportedError`: there is no remote storage."""
        unsupported("engram_fetch", _ENGRAM)

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Return DeepEP's bytes for such messages; epee's use none of the buffer's memory."""
        _check_sizes(num_max_tensor_bytes=num_max_tensor_bytes, num_max_inflight_tensors=num_max_inflight_tensors)
        return align_up(align_up(num_max_tensor_bytes, _LINE) * num_max_inflight_tensors * 4, _PAGE)

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Allow messages. Collective, with equal numbers on all ranks.

        Args:
            num_max_tensor_bytes: of one tensor.
            num_max_inflight_tensors: sends to a rank that may be without their receives; the next one waits.

        Raises:
            UnsupportedError: the group serves CUDA tensors alone, and headers are on CPUs.
        """
        if group_device(self.group).type != "cpu":
            raise UnsupportedError(
                "pp_set_config needs a group that serves CPU tensors, too, for headers of messages; make it with the "
                "backend 'epee' or 'cpu:gloo,cuda:nccl'"
            )
        sizes = {"num_max_tensor_bytes": num_max_tensor_bytes, "num_max_inflight_tensors": num_max_inflight_tensors}
        self._agree("pp_set_config", sizes, functools.partial(_check_sizes, **sizes))
        before = self._pipeline
        sent, largest = ({}, 0) if before is None else (before.sent, before.largest)
        largest = max(largest, num_max_tensor_bytes)
        self._pipeline = _Pipeline(num_max_tensor_bytes, num_max_inflight_tensors, sent, largest)

    def pp_send(self, t: torch.Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Send a copy of `t` to the rank before or behind this one; returns before it is received.

        Keep the buffer until then, or `destroy` it, which waits.

        Args:
            t: contiguous, of at most `num_max_tensor_bytes`.
            dst_rank_idx: rank - 1 or rank + 1, modulo the number of ranks.
            num_sms: ignored.
        """
        pipeline = self._check_message("pp_send", t, "dst_rank_idx", dst_rank_idx)
        sent = pipeline.sent.setdefault(dst_rank_idx, deque())
        carrier = self._carrier(t.device)
        header = _HEADER.pack(t.nbytes, str(t.dtype).encode(), carrier.type.encode())
        parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8), _bytes_of(t).to(carrier, copy=True)]
        while sent and (len(sent) >= pipeline.num_max_inflight or all(work.is_completed() for work, _ in sent[0])):
            _wait_for("pp_send", sent.popleft())
        with group_failures("pp_send"):
            made = [
                (dist.isend(part, group=self.group, group_dst=dst_rank_idx, tag=_TAG), part)
                for part in parts
                if part.numel()
            ]
        sent.append(made)

    def pp_recv(self, t: torch.Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Receive the next tensor of the rank before or behind this one into `t`. The CPU waits for its header.

        Args:
            t: contiguous, of the sent tensor's dtype and bytes.
            src_rank_idx: rank - 1 or rank + 1, modulo the number of ranks.
            num_sms: ignored.

        Raises:
            MismatchError: another dtype or size was sent; that tensor is lost, the next one can be received.
            ProtocolError: the header that came is none of `pp_send`.
        """
        pipeline = self._check_message("pp_recv", t, "src_rank_idx", src_rank_idx)
        recv = functools.partial(dist.recv, group=self.group, group_src=src_rank_idx, tag=_TAG)
        header = torch.empty(_HEADER.size, dtype=torch.uint8, device="cpu")
        with group_failures("pp_recv"):
            recv(header)
            nbytes, *names = _HEADER.unpack(header.numpy().tobytes())
            dtype, kind = (name.rstrip(b"\0").decode("ascii", "replace") for name in names)
            if not 0 <= nbytes <= pipeline.largest or kind not in ("cpu", "cuda"):
                raise ProtocolError(
                    f"pp_recv: a header of rank {src_rank_idx} must say 0 to {pipeline.largest} bytes on cpu or cuda, "
                    f"got {nbytes} on {kind!r}; only pp_send may send with tag {_TAG:#x}"
                )
            fits = (nbytes, dtype) == (t.nbytes, str(t.dtype))
            place = own = _bytes_of(t)
            if not fits or kind != t.device.type:
                place = torch.empty(nbytes, dtype=torch.uint8, device=kind)
            if nbytes:
                recv(place)
        if not fits:
            raise MismatchError(
                f"pp_recv: t must be what rank {src_rank_idx} sent, {nbytes} bytes of {dtype}, got {t.nbytes} bytes of "
                f"{t.dtype}; that tensor is lost, give one of its size and dtype for the next"
            )
        if place is not own:
            own.copy_(place)

    def destroy(self) -> None:
        """Free all memory, and wait until all sends are received. Results stay valid, handles do not.

        Raises:
            InvalidState: the buffer was not made with `explicitly_destroy=True`, or is destroyed already.
        """
        super().destroy()
        for sent in () if self._pipeline is None else self._pipeline.sent.values():
            _wait_for("destroy", [part for parts in sent for part in parts])

    @staticmethod
    def get_agrs_num_max_session_bytes(group: dist.ProcessGroup, shapes: Sequence[Any], dtype: torch.dtype) -> int:
        """Return the bytes of a session that gathers such tensors: each result's, rounded up to 32."""
        num_ranks = group_of(group).size()
        return sum(
            align_up(num_ranks * math.prod(shape) * dtype.itemsize, _LINE) for shape in _shapes(shapes, dtype)[0]
        )

    @staticmethod
    def get_agrs_buffer_size_hint(group: dist.ProcessGroup, num_max_session_bytes: int) -> int:
        """Return DeepEP's bytes for such sessions; epee's use none of the buffer's memory."""
        _check_sizes(num_max_session_bytes=num_max_session_bytes)
        return align_up(num_max_session_bytes, _PAGE)

    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Limit sessions to a number of bytes, those of results, and of calls of `all_gather`.

        Collective, with equal numbers on all ranks, outside of sessions.
        """
        sizes = {
            "num_max_session_bytes": num_max_session_bytes,
            "num_max_all_gathers_per_session": num_max_all_gathers_per_session,
        }
        if self._session is not None:
            raise InvalidState("agrs_set_config must not be called in a session; call destroy_agrs_session first")
        self._agree("agrs_set_config", sizes, functools.partial(_check_sizes, **sizes))
        self._limits = align_up(num_max_session_bytes, _LINE), num_max_all_gathers_per_session

    def create_agrs_session(self) -> None:
        """Begin a session. Local."""
        self._pool()
        if self._session is not None:
            raise InvalidState("create_agrs_session: a session is open; call destroy_agrs_session first")
        self._session = _Session()

    def destroy_agrs_session(self) -> None:
        """End the session after all its gathers. Results stay valid, in-place tensors and handles do not."""
        session, self._session = self._session, None
        if session is None:
            raise InvalidState("destroy_agrs_session: no session is open; call create_agrs_session first")
        _wait_for("destroy_agrs_session", session.works)

    @contextlib.contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """Begin a session and end it with the block; do nothing unless `enabled`."""
        if not enabled:
            yield
            return
        self.create_agrs_session()
        try:
            yield
        finally:
            self.destroy_agrs_session()

    def agrs_get_inplace_tensor(self, shapes: Sequence[Any], dtype: torch.dtype) -> Any:
        """Return this rank's row of a result to come, to be filled and given to `all_gather`, which then copies less.

        It is on the current GPU; without one, in CPU memory.

        Args:
            shapes: of one tensor, or a sequence of shapes.
            dtype: of all.

        Returns:
            A tensor, or a tuple of one for each shape.
        """
        session = self._in_session("agrs_get_inplace_tensor")
        found, is_batch = _shapes(shapes, dtype)
        self._check_room(session, [math.prod(shape) * dtype.itemsize for shape in found])
        device = "cuda" if torch.cuda.is_available() else "cpu"
        results = [torch.empty(self.num_ranks, *shape, dtype=dtype, device=device) for shape in found]
        rows = tuple(result[self.rank_idx] for result in results)
        session.inplace.update(
            (row.data_ptr(), result) for row, result in zip(rows, results, strict=True) if row.numel()
        )
        return rows if is_batch else rows[0]

    def all_gather(self, t: torch.Tensor | Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Gather the tensors of all ranks. Collective, in a session; the CPU waits until all ranks have called.

        Args:
            t: one contiguous tensor or several, of equal shapes and dtypes on all ranks; unchanged until the handle
                has been called.

        Returns:
            `[num_ranks, *t.shape]` for each, which a call of the handle behind them makes valid on the current stream.

        Raises:
            MismatchError: shapes or dtypes differ, or a rank has refused its own; the session goes on.
        """
        session = self._in_session("all_gather")
        tensors: list[Any] = list(t) if isinstance(t, (list, tuple)) else [t]
        given = [
            (tuple(each.shape), str(each.dtype), each.device.type) for each in tensors if isinstance(each, torch.Tensor)
        ]
        self._agree("all_gather", given, functools.partial(self._check_gathered, session, tensors))
        session.num_calls += 1
        results, works = [], []
        with group_failures("all_gather"):
            for each in tensors:
                session.num_bytes += align_up(each.nbytes * self.num_ranks, _LINE)
                result = session.inplace.pop(each.data_ptr(), None) if each.numel() else None
                if result is None or result[0].nbytes != each.nbytes:
                    result = torch.empty(self.num_ranks, each.numel(), dtype=each.dtype, device=each.device)
                result = result.view(-1).view(each.dtype).view(self.num_ranks, *each.shape)
                results.append(result)
                if each.numel():
                    rows = [_bytes_of(row) for row in result.unbind()]
                    works.append((dist.all_gather(rows, _bytes_of(each), self.group, async_op=True), each))
        session.works += works

        def handle() -> None:
            """Make the current stream wait for the results; without a GPU the CPU waits."""
            if self._session is not session:
                raise InvalidState("handle of all_gather: its session has ended; call it before destroy_agrs_session")
            _wait_for("all_gather", works)

        return *results, handle

    def _agree(self, op: str, given: object, check: Callable[[], None]) -> None:
        """Check arguments and compare them with all ranks'. Collective."""
        pool = self._pool()
        _check_not_recorded(op)
        mine, error = bytes(16), None
        try:
            check()
            mine = hashlib.blake2b(repr((op, given)).encode(), digest_size=16).digest()
        except expected(InvalidArgument) as exc:
            error = exc
        others = [rank for rank, theirs in enumerate(pool.share(mine)) if theirs != mine]
        if error is not None:
            raise error
        if others:
            raise MismatchError(
                f"{op}: arguments must be equal on all ranks, got {shown(given)} here and others, or refused ones, on "
                f"ranks {others}; give the same on all"
            )

    def _in_session(self, op: str) -> _Session:
        self._pool()
        if self._session is None or self._limits is None:
            raise InvalidState(f"{op} needs agrs_set_config, and then a session; call create_agrs_session first")
        return self._session

    def _check_gathered(self, session: _Session, tensors: list[Any]) -> None:
        if not tensors:
            raise InvalidArgument("t must be a tensor or a sequence of at least one, got none")
        for t in tensors:
            _check_tensor(t)
            if t.device.type == "cpu" != group_device(self.group).type:
                raise InvalidArgument("t must be a CUDA tensor, the group serves no others, got a CPU tensor")
        self._check_room(session, [t.nbytes for t in tensors])

    def _check_room(self, session: _Session, sizes: list[int]) -> None:
        """Check that a session has room for one more call, on tensors of these bytes."""
        assert self._limits is not None
        max_bytes, max_calls = self._limits
        num_bytes = session.num_bytes + sum(align_up(size * self.num_ranks, _LINE) for size in sizes)
        if num_bytes > max_bytes or session.num_calls >= max_calls:
            raise InvalidArgument(
                f"t must fit into the session of num_max_session_bytes={max_bytes} and "
                f"num_max_all_gathers_per_session={max_calls}, got {num_bytes} bytes in {session.num_calls + 1} calls; "
                "raise them in agrs_set_config, or begin another session"
            )

    def _check_message(self, op: str, t: Any, name: str, peer: object) -> _Pipeline:
        """Return the configuration for a message of `t` with `peer`."""
        self._pool()
        if self._pipeline is None:
            raise InvalidState(f"{op} needs a configuration; call pp_set_config on all ranks first")
        _check_not_recorded(op)
        neighbours = sorted({(self.rank_idx + step) % self.num_ranks for step in (-1, 1)} - {self.rank_idx})
        if not is_whole(peer, 0, _MAX) or peer not in neighbours:
            raise InvalidArgument(f"{name} must be a neighbour in the ring, one of {neighbours}, got {shown(peer)}")
        limit = self._pipeline.num_max_bytes
        _check_tensor(t)
        if t.nbytes > limit:
            raise InvalidArgument(
                f"t must have at most num_max_tensor_bytes={limit} bytes, got {t.nbytes}; raise it in pp_set_config"
            )
        return self._pipeline

    def _carrier(self, device: torch.device) -> torch.device:
        """Return the device whose messages carry tensors of `device`: NCCL's sends would wait for their receives."""
        return device if hasattr(self.group, "own_timeout_s") else torch.device("cpu")


def _wait_for(op: str, works: list[_Sent]) -> None:
    with group_failures(op):
        for work, _ in works:
            work.wait()


def _bytes_of(t: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, as bytes."""
    return t.detach().reshape(-1).view(torch.uint8)


def _check_sizes(**sizes: object) -> None:
    for name, value in sizes.items():
        if not is_whole(value, 1, _MAX):
            raise InvalidArgument(f"{name} must be a whole number of at least 1, got {shown(value)}")


def _check_not_recorded(op: str) -> None:
    if is_capturing():
        raise InvalidState(f"{op} must not be called while a CUDA graph is recorded: the CPU waits; call it outside")


def _check_tensor(t: object) -> None:
    if not isinstance(t, torch.Tensor):
        raise InvalidArgument(f"t must be a tensor, got {type(t).__name__}")
    if t.layout is not torch.strided or not t.is_contiguous() or t.is_conj() or t.is_neg():
        what = f"strides {t.stride()}, is_conj {t.is_conj()}" if t.layout is torch.strided else str(t.layout)
        raise InvalidArgument(
            f"t must be contiguous, its memory its values, got {what}; call .contiguous(), .resolve_conj(), to_dense()"
        )


def _shapes(shapes: Sequence[Any], dtype: object) -> tuple[list[torch.Size], bool]:
    """Return a list of shapes, and whether a sequence of them was given."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"dtype must be a torch.dtype, got {shown(dtype)}")
    try:
        is_batch = len(shapes) > 0 and not isinstance(shapes[0], int)
        found = [torch.Size(shape) for shape in (shapes if is_batch else [shapes])]
    except expected(TypeError):
        found = [torch.Size([-1])]
    if any(size < 0 for shape in found for size in shape):
        raise InvalidArgument(f"shapes must be a tuple of sizes from 0 on, or a sequence of such, got {shown(shapes)}")
    return found, is_batch
