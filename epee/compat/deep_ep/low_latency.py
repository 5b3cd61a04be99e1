"""DeepEP V1's low-latency calls on `epee.LatencyBuffer`, and parts of a V1 `Buffer` that epee does not support.

Data path: `epee.compat.padded` finds or creates an `epee.LatencyBuffer` and converts arguments and results; this module
adds DeepEP's names, its mask (`enable_shrink`) and its statistics. Without `enable_shrink` a rank that does not arrive
is an error. Some formats and signals of forks do not exist: their arguments raise `UnsupportedError` with one sentence
that names the unsupported part and the alternative.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from epee.compat.deep_ep.event import EventOverlap
from epee.compat.deep_ep.shared.advice import LOW_LATENCY, add_advice
from epee.compat.deep_ep.shared.rows import check_counters, device_of
from epee.compat.padded import CallOptions, Hook, PaddedCalls, PaddedHandle, size_hint
from epee.ep import BufferPool, LatencyCombined, LatencyDispatched, Payload
from epee.errors import EpeeError, InvalidArgument, InvalidState, UnsupportedError, expected


def unsupported(name: str, why: str) -> NoReturn:
    """Raise `UnsupportedError` for `name`."""
    raise UnsupportedError(f"{name} is not supported: {why}")


class LowLatency:
    """The low-latency calls of DeepEP's `Buffer`, beside its normal ones.

    A base class, as programs read these methods and their signatures from `Buffer` itself: methods there that pass
    everything on to a part would repeat all of them, and cost a call.

    Attributes:
        enable_shrink: a rank that does not arrive is masked instead of being an error.
        group_size: number of ranks.
    """

    enable_shrink: bool
    group_size: int
    rank: int
    _padded: PaddedCalls

    def _init_low_latency(self, pool: BufferPool) -> None:
        self._padded = PaddedCalls(pool)
        self._active: dict[torch.device, torch.Tensor] = {}
        if self.enable_shrink and torch.cuda.is_available():
            self._active_on(torch.device("cuda", torch.cuda.current_device()))  # it cannot be made in a graph

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the bytes of a buffer for calls of this size."""
        return size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing: normal and low-latency calls share no memory, and no call leaves anything to clean."""

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        x_global_scale: torch.Tensor | None = None,
        use_nvfp4: bool = False,
    ) -> tuple[Payload, torch.Tensor, PaddedHandle, EventOverlap, Hook]:
        """Send each token to its experts, padded. Collective.

        Args:
            x: `[num_tokens, hidden]` bfloat16.
            topk_idx: `[num_tokens, num_topk]` int64, -1 for none.
            num_max_dispatch_tokens_per_rank: most tokens of a rank, equal on all.
            num_experts: over all ranks.
            cumulative_local_expert_recv_stats: `[num_local_experts]` int32, the counts are added.
            dispatch_wait_recv_cost_stats: `[num_ranks]` int64, the microseconds waited for each rank are added.
            use_fp8, round_scale, use_ue8m0: quantise before sending.
            async_finish: return an event.
            return_recv_hook: only send; the hook receives.
            x_global_scale: of NVFP4 rows, which are not supported; ignored.
            use_nvfp4: must be False.

        Returns:
            `recv_x [num_local_experts, num_ranks * max, hidden]` or (values, scales), counts `[num_local_experts]`
            int32, handle, event, hook (None unless requested).

        Raises:
            UnsupportedError: `use_nvfp4`.
        """
        if use_nvfp4:
            unsupported("use_nvfp4", "epee casts rows to FP8 or sends bfloat16; leave it out and cast what arrives")
        sizes, count = (num_max_dispatch_tokens_per_rank, num_experts), None
        cost = dispatch_wait_recv_cost_stats
        how = use_fp8, use_fp8 and round_scale, use_fp8 and use_ue8m0
        if cumulative_local_expert_recv_stats is not None or cost is not None:
            num_local = num_experts // self.group_size if isinstance(num_experts, int) else None
            self._check_counters(x, "cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats, num_local)
            self._check_counters(x, "dispatch_wait_recv_cost_stats", cost, self.group_size)

            def count(got: LatencyDispatched) -> None:
                """Add the received counts and the times of waiting to the caller's statistics."""
                if cumulative_local_expert_recv_stats is not None:
                    cumulative_local_expert_recv_stats.add_(got.num_tokens_per_expert)
                _add_cost(cost, got)

        try:
            ways = self._ways(x, async_finish, return_recv_hook)
            return self._padded.dispatch(x, topk_idx, sizes, how, ways, count)
        except EpeeError as error:
            add_advice(error, LOW_LATENCY)
            raise

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        overlap: bool = False,
        src_signals: torch.Tensor | None = None,
        src_signal_expect_value: int = 0,
        packed_recv_count: torch.Tensor | None = None,
        comp_signal: torch.Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 3,
    ) -> tuple[torch.Tensor, EventOverlap, Hook]:
        """Send expert outputs back and sum them, weighted. Collective.

        Args:
            x: `[num_local_experts, num_ranks * max, hidden]` bfloat16.
            topk_idx: that of the dispatch.
            topk_weights: `[num_tokens, num_topk]` float32.
            handle: of the dispatch.
            use_logfmt: rows may cross in a format of 10 bits; here they cross as bfloat16 all the same.
            zero_copy: use the contents of `get_next_low_latency_combine_buffer(handle)` instead of x.
            async_finish, return_recv_hook: as in the dispatch.
            out: `[num_tokens, hidden]` bfloat16, written instead of new memory.
            combine_wait_recv_cost_stats: as in the dispatch.
            overlap: must be False: rows are read when the call is made.
            src_signals, src_signal_expect_value, packed_recv_count, comp_signal, block_m, threshold, num_sms: arguments
                of forks that overlap it with the GEMM before; without `overlap` they have no meaning, and are ignored.

        Returns:
            `combined_x [num_tokens, hidden]` bfloat16, event, hook.

        Raises:
            UnsupportedError: `overlap`.
        """
        if overlap:
            unsupported(
                "overlap", "epee's combine waits for no signal of a GEMM; call it behind the GEMM (return_recv_hook)"
            )
        count = None
        given = topk_weights if zero_copy else x  # on the call's device; x is not read then
        if combine_wait_recv_cost_stats is not None:
            self._check_counters(given, "combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, self.group_size)

            def count(got: LatencyCombined) -> None:
                """Add the times of waiting to the caller's statistics."""
                _add_cost(combine_wait_recv_cost_stats, got)

        if use_logfmt and zero_copy:
            error = InvalidArgument("use_logfmt and zero_copy exclude each other; drop one")
            self._padded.refuse(error, given)
            raise error
        try:
            ways = self._ways(x, async_finish, return_recv_hook, zero_copy)
            return self._padded.combine(x, topk_idx, topk_weights, handle, out, ways, count)
        except EpeeError as error:
            add_advice(error, LOW_LATENCY)
            raise

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Exclude a rank from low-latency calls (`mask`), or include it. Local.

        Raises:
            InvalidState: the buffer was not made with `enable_shrink=True`.
        """
        self._require_shrink()
        if not 0 <= rank_to_mask < self.group_size:
            raise InvalidArgument(f"rank_to_mask must lie in 0 ... {self.group_size - 1}, got {rank_to_mask}")
        for active in self._masks():
            active[rank_to_mask] = int(not mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for each excluded rank, 0 for the others, into `mask_status [num_ranks]` int32. Local.

        Raises:
            InvalidState: the buffer was not made with `enable_shrink=True`.
        """
        self._require_shrink()
        mask_status.copy_(1 - self._active_on(mask_status.device))

    def low_latency_clean_mask_buffer(self) -> None:
        """Include all ranks. Local.

        Raises:
            InvalidState: the buffer was not made with `enable_shrink=True`.
        """
        self._require_shrink()
        for active in self._masks():
            active.fill_(1)

    def get_next_low_latency_combine_buffer(self, handle: object) -> torch.Tensor:
        """Return `[num_local_experts, num_ranks * max, hidden]` bfloat16 for a combine with `zero_copy`. Local."""
        return self._padded.next_combine_buffer(handle)

    def _check_counters(self, x: object, name: str, value: object, count: int | None) -> None:
        """Check that a call can add its numbers to a tensor; a refusal is sent to the peers."""
        try:
            check_counters(name, value, count, device_of(x))
        except expected(InvalidArgument) as error:
            self._padded.refuse(error, x)
            raise

    def _ways(self, x: object, async_finish: bool, return_recv_hook: bool, zero_copy: bool = False) -> CallOptions:
        active = self._active_for(x) if self.enable_shrink else None
        return CallOptions(active, None, async_finish, return_recv_hook, zero_copy)

    def _active_for(self, x: object) -> torch.Tensor | None:
        return self._active_on(x.device) if isinstance(x, torch.Tensor) else None

    def _require_shrink(self) -> None:
        if not self.enable_shrink:
            raise InvalidState("this buffer has no mask; make it with enable_shrink=True")

    def _masks(self) -> list[torch.Tensor]:
        """Return the masks of all devices, at least the CPU's."""
        self._active_on(torch.device("cpu"))
        return list(self._active.values())

    def _active_on(self, device: torch.device) -> torch.Tensor:
        """Return the mask of a device; one that is created later starts with the values of the CPU's."""
        active = self._active.get(device)
        if active is None:
            first = self._active.get(torch.device("cpu"), torch.ones(self.group_size, dtype=torch.int32, device="cpu"))
            active = self._active[device] = first.to(device)
        return active


def _add_cost(stats: torch.Tensor | None, got: LatencyDispatched | LatencyCombined) -> None:
    if stats is not None and got.wait_us is not None:
        stats.add_(got.wait_us)


def scratch(dtype: torch.dtype, num_bytes: int, size: torch.Size | None, offset: int) -> torch.Tensor:
    """Return memory that programs may clear as if it were a buffer of `num_bytes`; see `Buffer`."""
    count = num_bytes // dtype.itemsize - offset
    wanted = count if size is None else size.numel()
    if offset < 0 or not 0 <= wanted <= count:
        raise InvalidArgument(
            f"offset and size must lie in the buffer's {num_bytes // dtype.itemsize} elements of {dtype}, got offset "
            f"{offset} and size {None if size is None else list(size)}"
        )
    place = torch.empty(wanted, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
    return place if size is None else place.view(size)
