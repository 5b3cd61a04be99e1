"""HybridEP's `HybridEPBuffer`: routing by a map of tokens and experts, rows grouped by expert, static sizes.

Data path: a map becomes top-k ids (`epee.ep.topk_of_map`), `ElasticBuffer` dispatches them in its expanded form, whose
rows are grouped by local expert, in (source rank, token) order, padded to `pad_multiple`; a combine sums a token's rows
in float32, ranks ascending, rounded once. This module adds HybridEP's names and its static sizes: with
`num_permuted_tokens` results have that many rows, rows that do not fit are dropped and the handle's flag reports it.

Protocol. A map has no top-k, and ranks may have different numbers of tokens. All ranks use the most of all ranks and
calls so far, which they agree on by an exchange between their CPUs: in the first call, on CPUs in every one. On GPUs,
where memory stands, a rank whose call is within what was agreed on dispatches at once. A rank whose call is not refuses
it there (`NoRoomError`): the others get that from their dispatch, before a row has moved. Then all exchange, and
dispatch again. Calls with `non_blocking` exchange only the first time; what does not fit is left out.

A rank that dies in the exchange is lost as in any call. A rank that refuses its arguments in a call in which the others
exchange is missed there until the time-out: it cannot know that they do.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from epee.compat.deep_ep.elastic import MAX_EXPERTS, ElasticBuffer, need_of
from epee.compat.deep_ep.ep_handle import EPHandle
from epee.compat.deep_ep.low_latency import unsupported
from epee.compat.deep_ep.shared.rows import (
    described,
    device_of,
    filled_up,
    has_memory,
    int64_routing,
    payload_filled_up,
    values_of,
)
from epee.ep import (
    BufferPool,
    NoRoomError,
    Payload,
    check_map,
    clipped_counts,
    dense_weights,
    group_of,
    is_capturing,
    map_of,
    most_experts,
    num_left_out,
    topk_of_map,
)
from epee.errors import EpeeError, InvalidArgument, InvalidState, expected
from epee.untraced import untraced_methods
from epee.values import is_whole, shown

MAX_ROWS = 1 << 31
NUM_AGREED = 2  # numbers that the ranks agree on: top-k, and the most tokens of a rank


def indices_to_map(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the map `[num_of_tokens, num_of_experts]` bool of top-k ids, and their weights in it, float32. Local."""
    return map_of(topk_idx, topk_weights, num_of_tokens, num_of_experts)


class _Routing(NamedTuple):
    """The routing of a dispatch: a map, or ids, and the weights of either."""

    routing_map: torch.Tensor | None
    probs: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None

    def as_topk(self, num_topk: int) -> _Topk:
        """Return the ids that are sent if a map has at most so many experts of a token."""
        routing_map, probs, topk_idx, topk_weights = self
        counts = None
        if routing_map is not None:
            topk_idx, topk_weights, counts = topk_of_map(routing_map, probs, num_topk)
        assert topk_idx is not None
        if probs is not None and topk_weights is None:
            topk_weights = probs.gather(1, topk_idx.clamp(min=0)).masked_fill(topk_idx < 0, 0)
        return _Topk(topk_idx, None if topk_weights is None else topk_weights.to(torch.float32), counts)


class _Topk(NamedTuple):
    """The ids that a dispatch sends, their weights, and of a map the counts of `topk_of_map`."""

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    counts: torch.Tensor | None


class HybridEPHandle(NamedTuple):
    """The handle that `dispatch_with_permute` returns for its combine, to be passed unchanged.

    Attributes:
        core: V2's handle.
        topk_idx: `[num_tokens, num_topk]` int64.
        num_of_experts: over all ranks.
        num_permuted_tokens: rows of the results.
        overflow_flag: `[1]` int32: 1 if rows were dropped.
    """

    core: EPHandle
    topk_idx: torch.Tensor
    num_of_experts: int
    num_permuted_tokens: int
    overflow_flag: torch.Tensor

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


@untraced_methods
class HybridEPBuffer:
    """HybridEP's buffer, on GPUs of one host or CPU tensors of one host or several.

    Args:
        group: of the ranks, any backend.
        hidden_dim, max_num_of_tokens_per_rank, num_local_experts: of later calls; larger ones are served as well.
            Memory is allocated by the first call.
        num_sms_dispatch_api, num_sms_combine_api: used on GPUs.
        use_fp8, num_sms_preprocessing_api, num_blocks_permute, num_blocks_unpermute, load_cached_kernels,
            use_shared_buffer, enable_custom_allgather, num_of_hybrid_ep_ranks_per_nvlink_domain, use_mnnvl: accepted
            and ignored.

    Attributes:
        group: of the ranks.
        configurer: `configurer.buffer_config` has `hidden_dim`, `max_num_of_tokens_per_rank`,
            `num_of_experts_per_rank`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = True,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
    ) -> None:
        self.group = group_of(group)
        self.rank, self.group_size = self.group.rank(), self.group.size()
        self.configurer = SimpleNamespace(
            buffer_config=SimpleNamespace(
                hidden_dim=hidden_dim,
                max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
                num_of_experts_per_rank=num_local_experts,
            )
        )
        self._sms = (num_sms_dispatch_api or 0, num_sms_combine_api or 0)
        self._core = ElasticBuffer(self.group, 0, num_max_tokens_per_rank=max_num_of_tokens_per_rank)
        self._num_topk = 0  # the last one that the ranks have agreed on
        self._is_gpu: bool | None = None  # where the rows of earlier dispatches were; None before the first

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        pad_multiple: int | None = None,
        num_permuted_tokens: int | None = None,
        non_blocking: bool = False,
        handle: HybridEPHandle | None = None,
        fuse_permute_dispatch: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, HybridEPHandle]:
        """Send each token to its experts; received rows are grouped by local expert. Collective.

        Args:
            hidden: `[num_tokens, hidden_dim]`; float8_e4m3fn (or uint8) beside a `scaling_factor`.
            routing_map: `[num_tokens, num_of_experts]` bool; or `topk_idx` `[num_tokens, num_topk]`, -1 for none.
            probs: `[num_tokens, num_of_experts]` float32; or `topk_weights` `[num_tokens, num_topk]`; or neither.
            num_of_experts_per_rank, num_of_experts: either; the constructor's by default.
            scaling_factor: `[num_tokens, hidden_dim / 128]` float32.
            pad_multiple: each expert's rows are padded with zeros to a multiple of it.
            num_permuted_tokens: rows of the results; rows that do not fit are dropped. None: as many as are received.
            non_blocking: on GPUs the cpu waits for no rank; needs `num_permuted_tokens`. The top-k, and the most tokens
                of a rank, are then those of earlier calls; the first call waits.
            handle: of an earlier dispatch, whose routing is used; no routing may be given.
            use_fp8, fuse_permute_dispatch: ignored.

        Returns:
            Rows `[n, hidden_dim]`, probs `[n]` float32 or None, scaling factors or None, rows per local expert int64
            (on the CPU unless `non_blocking`; None beside a `handle`), handle.
        """
        if handle is not None:
            return self._dispatch_again(hidden, scaling_factor, handle)
        is_gpu = self._pool().is_gpu(device_of(hidden))
        is_blind = non_blocking and is_gpu
        try:
            x = _payload(hidden, scaling_factor)
            num_experts = self._num_experts(num_of_experts, num_of_experts_per_rank)
            given_map = None
            if topk_idx is None:
                given_map = check_map(routing_map, len(hidden), num_experts, hidden.device)
            else:
                topk_idx = int64_routing(topk_idx)
            _check_rows(hidden, topk_idx, topk_weights, probs, num_experts)
            _check_numbers(pad_multiple, num_permuted_tokens, non_blocking)
            if non_blocking and self._is_gpu is not None and self._is_gpu is not is_gpu:
                raise InvalidArgument(
                    f"hidden must be where it was in earlier dispatches if these are non_blocking, got {hidden.device}"
                )
        except expected(Exception) as error:
            is_known = self._is_gpu is None or (has_memory(hidden) and not non_blocking)
            self._refuse(error, is_gpu if is_known else bool(self._is_gpu), non_blocking)
            raise
        self._is_gpu = is_gpu
        alignment = pad_multiple or 1
        if is_capturing() and not (is_blind and self._num_topk):
            raise InvalidState(
                "the ranks agree on the most experts of a token in a first call, which waits: make one before a CUDA "
                "graph is recorded"
            )
        routing, num_topk = _Routing(given_map, probs, topk_idx, topk_weights), self._num_topk
        try:
            sent = routing.as_topk(max(1, num_topk))
        except expected(Exception) as error:
            self._refuse(error, is_gpu, non_blocking)
            raise
        is_at_once = self._agree(sent, x, num_experts, is_blind)
        try:
            sent = sent if num_topk == self._num_topk else routing.as_topk(self._num_topk)
            got = self._dispatch(x, sent, num_experts, alignment, is_blind)
        except NoRoomError:
            if not is_at_once:
                raise
            self._exchange(0, len(hidden))
            sent = routing.as_topk(self._num_topk)
            got = self._dispatch(x, sent, num_experts, alignment, is_blind)
        recv, _, recv_probs, core, _ = got
        num_rows = core.num_rows if num_permuted_tokens is None else int(num_permuted_tokens)
        if non_blocking:
            counts = _counts(core, alignment)
            flag = counts.sum(0, keepdim=True) > num_rows
            if sent.counts is not None and is_blind:
                flag = flag | (num_left_out(sent.counts) > 0)
            flag, counts = flag.to(torch.int32), clipped_counts(counts, num_rows)
        else:
            listed = core.num_recv_tokens_per_expert_list
            is_lost = sum(listed) > num_rows
            flag = torch.full((1,), int(is_lost), dtype=torch.int32, device=hidden.device)
            counts = torch.frombuffer(array("q", listed), dtype=torch.int64)  # a list takes torch ten times as long
            counts = clipped_counts(counts, num_rows) if is_lost else counts
        made = HybridEPHandle(core, sent.topk_idx, num_experts, num_rows, flag)
        if num_rows < core.num_rows:
            recv, recv_probs = _cut(recv, num_rows), None if recv_probs is None else recv_probs[:num_rows]
        rows, scales = _parts(payload_filled_up(recv, num_rows))[::2]
        weights = filled_up(recv_probs, num_rows, 0)
        return rows, weights, scales, counts, made

    def _dispatch(self, x: Payload, sent: _Topk, num_experts: int, alignment: int, is_blind: bool) -> Any:
        """Dispatch with what the ranks have agreed on; return V2's results."""
        return self._core.dispatch(
            x,
            topk_idx=sent.topk_idx,
            topk_weights=sent.topk_weights,
            num_experts=num_experts,
            num_max_tokens_per_rank=self.configurer.buffer_config.max_num_of_tokens_per_rank,
            expert_alignment=alignment,
            num_sms=self._sms[0],
            do_expand=True,
            do_cpu_sync=not is_blind,
        )

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: HybridEPHandle | None = None,
        num_dispatched_tokens_tensor: torch.Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send rows back to their tokens and sum them, unweighted. Collective.

        Args:
            hidden: `[n, hidden_dim]`, a row for each row of the dispatch.
            probs: `[n]` float32, sent back as well; or None.
            handle: of the dispatch.
            num_dispatched_tokens_tensor, num_dispatched_tokens, pad_multiple, fuse_unpermute_combine: ignored, the
                handle has them.

        Returns:
            `[num_tokens, hidden_dim]`; `[num_tokens, num_of_experts]` float32, 0 for experts without a row, or None.
        """
        made = self._checked(handle)
        core, rows = made.core.room.core, made.core.core.num_recv
        try:
            y, weights = _to_combine(hidden, probs, made)
        except expected(EpeeError) as error:
            made.core.room.refuse(error)
            raise
        made.core.room.enter()
        if len(y) != rows:  # rows that were dropped count as zeros
            num_there = min(rows, len(y))
            y = core.combine_input(made.core.core, hidden.dtype)
            y[:num_there].copy_(hidden[:num_there])
            y[num_there:].zero_()
            weights = None if weights is None else filled_up(weights[:num_there], rows, 0)
        got = core.combine(y, made.core.core, topk_weights=weights, num_sms=made.core.room.num_sms(self._sms[1]))
        if got.topk_weights is None:
            return got.x, None
        return got.x, dense_weights(made.topk_idx, got.topk_weights, made.num_of_experts)

    def dispatch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `UnsupportedError`: received rows are always grouped by expert."""
        unsupported(
            "HybridEPBuffer.dispatch", "epee groups rows by expert; use dispatch_with_permute, or ElasticBuffer"
        )

    def combine(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `UnsupportedError`: received rows are always grouped by expert."""
        unsupported(
            "HybridEPBuffer.combine", "epee groups rows by expert; use combine_with_unpermute, or ElasticBuffer"
        )

    def update_template_config(self, **kwargs: Any) -> None:
        """Do nothing: kernels are not compiled for sizes."""

    def destroy(self) -> None:
        """Free all memory. Local; results stay valid, handles do not."""
        self._pool().close()
        self._core.runtime = None

    def _pool(self) -> BufferPool:
        if self._core.runtime is None:
            raise InvalidState("the buffer is destroyed; make a new one")
        return self._core.runtime

    def _num_experts(self, num_of_experts: int | None, num_of_experts_per_rank: int | None) -> int:
        """Return the experts over all ranks; `InvalidArgument` unless each rank has as many."""
        found: Any = num_of_experts
        if found is None:
            each: Any = num_of_experts_per_rank or self.configurer.buffer_config.num_of_experts_per_rank
            found = self.group_size * each if is_whole(each, 1, MAX_EXPERTS) else each
        if not is_whole(found, 1, MAX_EXPERTS) or found % self.group_size:
            raise InvalidArgument(
                f"num_of_experts must be a multiple of {self.group_size} ranks, at most {MAX_EXPERTS}, got "
                f"{shown(found)}"
            )
        return int(found)

    def _dispatch_again(
        self, hidden: torch.Tensor, scaling_factor: torch.Tensor | None, handle: object
    ) -> tuple[torch.Tensor, None, torch.Tensor | None, None, HybridEPHandle]:
        made = self._checked(handle)
        try:
            x = _payload(hidden, scaling_factor)
        except expected(EpeeError) as error:
            made.core.room.refuse(error)
            raise
        got = self._core.dispatch(x, handle=made.core, num_sms=self._sms[0])
        rows, _, scales = _parts(payload_filled_up(_cut(got[0], made.num_permuted_tokens), made.num_permuted_tokens))
        return rows, None, scales, None, made

    def _checked(self, handle: object) -> HybridEPHandle:
        """Return a handle of this class; a refusal is sent to the peers."""
        if isinstance(handle, HybridEPHandle):
            return handle
        error = InvalidArgument(f"handle must be that of a dispatch_with_permute, got {type(handle).__name__}")
        self._pool().refuse(error)
        raise error

    def _refuse(self, error: Exception, is_gpu: bool, non_blocking: bool) -> None:
        """Notify the peers, who exchange their needs or dispatch on the GPU, that this rank's dispatch is refused."""
        pool = self._pool()
        if is_gpu and self._num_topk and pool.stands:
            pool.refuse_standing(error)
        elif is_gpu and self._num_topk and non_blocking:
            pool.refuse(error)
        else:
            pool.refuse_most(NUM_AGREED, error)

    def _agree(self, sent: _Topk, x: Payload, num_experts: int, is_blind: bool) -> bool:
        """Make sure that the ranks have agreed on a top-k, and on the most tokens of a rank, for this call.

        Returns:
            Whether no rank was asked in a call that waits: then its dispatch raises `NoRoomError` if some rank's call
            is not within what was agreed on.
        """
        if is_blind and self._num_topk:
            return False
        values, pool, config = values_of(x), self._pool(), self.configurer.buffer_config
        num_tokens, hidden = values.shape
        width = sent.topk_idx.shape[1]
        num_topk = width if sent.counts is None else most_experts(sent.counts)
        config.hidden_dim = max(config.hidden_dim, hidden)
        if self._num_topk and pool.is_gpu(values.device) and pool.stands:
            if num_topk > self._num_topk or num_tokens > config.max_num_of_tokens_per_rank:
                pool.refuse_standing(NoRoomError("a rank's call needs more than the ranks have agreed on"))
            else:
                most = config.max_num_of_tokens_per_rank
                if pool.standing_room(need_of(pool, values, width, num_experts, most, "expert")) is not None:
                    return True
        self._exchange(num_topk, num_tokens)
        return False

    def _exchange(self, num_topk: int, num_tokens: int) -> None:
        """Let the ranks agree on what suffices for this call of all of them, and for all calls so far."""
        config = self.configurer.buffer_config
        most = max(config.max_num_of_tokens_per_rank, num_tokens)
        self._num_topk, config.max_num_of_tokens_per_rank = self._pool().most(max(self._num_topk, num_topk), most)


def _payload(hidden: torch.Tensor, scaling_factor: torch.Tensor | None) -> Payload:
    """Return the rows to send; `InvalidArgument` unless they are a matrix, of bytes if there are scales."""
    if scaling_factor is None and not isinstance(hidden, (tuple, list)):
        return values_of(hidden)
    if not has_memory(hidden) or hidden.dim() != 2 or hidden.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise InvalidArgument(
            "hidden must be float8_e4m3fn (or uint8) [num_tokens, hidden_dim] beside a scaling_factor, got "
            f"{described(hidden)}"
        )
    return hidden.view(torch.float8_e4m3fn), scaling_factor


def _check_rows(
    hidden: torch.Tensor, topk_idx: torch.Tensor | None, topk_weights: object, probs: object, num_experts: int
) -> None:
    """Raise `InvalidArgument` unless routing and weights have a row for each token, of their widths."""
    num_tokens = len(hidden)
    if topk_idx is not None and (len(topk_idx) != num_tokens or topk_idx.device != hidden.device):
        raise InvalidArgument(
            f"topk_idx must be [{num_tokens}, num_topk] on {hidden.device}, got {list(topk_idx.shape)} on "
            f"{topk_idx.device}"
        )
    num_topk = 0 if topk_idx is None else topk_idx.shape[1]
    for name, value, width in (("topk_weights", topk_weights, num_topk), ("probs", probs, num_experts)):
        if value is None or (topk_idx is None and name == "topk_weights"):
            continue  # of a map the weights are in probs
        is_right = has_memory(value) and value.is_floating_point() and value.device == hidden.device
        if not is_right or value.shape != (num_tokens, width):  # type: ignore[attr-defined]
            raise InvalidArgument(
                f"{name} must be float32 [{num_tokens}, {width}] on {hidden.device}, got {described(value)}"
            )


def _check_numbers(pad_multiple: object, num_permuted_tokens: object, non_blocking: bool) -> None:
    if non_blocking and num_permuted_tokens is None:
        raise InvalidArgument("non_blocking needs num_permuted_tokens, the rows of the results")
    for name, value in (("pad_multiple", pad_multiple), ("num_permuted_tokens", num_permuted_tokens)):
        if value is not None and not is_whole(value, 0, MAX_ROWS):
            raise InvalidArgument(f"{name} must be None or a whole number up to {MAX_ROWS}, got {shown(value)}")


def _to_combine(hidden: object, probs: object, made: HybridEPHandle) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows and probs of a combine; `InvalidArgument` unless there is one for each row of the dispatch."""
    num_rows = made.num_permuted_tokens
    if not has_memory(hidden) or hidden.dim() != 2 or len(hidden) != num_rows:
        raise InvalidArgument(
            f"hidden must have the {num_rows} rows of the dispatch, [n, hidden_dim], got {described(hidden)}"
        )
    if probs is None:
        return hidden, None
    if not has_memory(probs) or not probs.is_floating_point() or probs.shape != (num_rows,):
        raise InvalidArgument(f"probs must be float32 [{num_rows}], one for each row of hidden, got {described(probs)}")
    return hidden, probs.to(torch.float32)


def _parts(x: Payload) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    return (x[0], None, x[1]) if isinstance(x, tuple) else (x, None, None)


def _cut(x: Payload, num_rows: int) -> Payload:
    return (x[0][:num_rows], x[1][:num_rows]) if isinstance(x, tuple) else x[:num_rows]


def _counts(core: EPHandle, alignment: int) -> torch.Tensor:
    """Return the rows of each local expert, padding included, `[num_local_experts]` int64 on the device."""
    counts = core.num_unaligned_recv_tokens_per_expert.to(torch.int64)
    return (counts + (alignment - 1)) // alignment * alignment
