"""`mooncake.ep`: re-exports `pg`, as Mooncake does, and has its `Buffer`: calls with a mask and a timeout.

Data path: `epee.compat.padded` finds or creates an `epee.LatencyBuffer` and converts arguments and results; this module
adds Mooncake's names. Tensors lie on CPUs or GPUs. Methods that only make sense with an RDMA network card raise
`UnsupportedError`. `MAX_QP_COUNT` is the number of queue pairs of a buffer in Mooncake's sources; it is here for
programs that read it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from epee.compat.deep_ep.event import EventHandle, EventOverlap
from epee.compat.padded import CallOptions, Hook, PaddedCalls, PaddedHandle, size_hint
from epee.ep import BufferPool, Payload, group_of, timeout_of

from ...errors import InvalidArgument, UnsupportedError
from ...untraced import untraced_methods
from ...values import MAX_US, is_whole, shown
from . import pg
from .mask import GroupMask
from .pg import *  # noqa: F403

__all__ = [*pg.__all__, "MAX_QP_COUNT", "Buffer", "EventHandle", "EventOverlap", "get_ep_buffer_size_hint"]

# The queue pairs that Mooncake's RDMA transport splits over the ranks of a buffer, and so the most ranks of one there:
# the constant of this name in its sources (`mooncake-ep`), which its HEAD offers to programs as `ep.MAX_QP_COUNT`.
# Nothing here has queue pairs, and no call reads it.
MAX_QP_COUNT = 256


def get_ep_buffer_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """Return the bytes of a `Buffer` for calls of this size."""
    return size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)


class MooncakeBackendOptions(pg.MooncakeBackendOptions):  # type: ignore[no-redef]
    """As that of `pg`, but a joiner joins in `init_process_group`, which returns when a member has admitted it.

    This was so when these names were in `mooncake.ep` alone; `join_group` has nothing to do then.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.joins_later = False


_NATIVE = {"rank", "num_ranks", "buffer_size", "device_name"}


@untraced_methods
class Buffer:
    """Mooncake's buffer for expert-parallel calls: GPUs of one host, or CPU tensors of one host or several.

    Args:
        group: of the ranks, any backend; with Mooncake's or epee's, its mask is the default of `active_ranks`.
        num_ep_buffer_bytes: of memory, which all ranks allocate now, on the current GPU (on CPUs address space): calls
            of all sizes that fit are made there, others allocate more. 0: the first call allocates it. If a peer calls
            `update_ep_member` meanwhile, a rank that has a buffer on the group continues in its memory.
        disable_p2p: must be False: ranks reach each other's memory, or not at all.

    Raises:
        UnsupportedError: the native form `(rank, num_ranks, buffer_size, device_name)`, or `disable_p2p`.
    """

    def __new__(cls, group: Any = None, *args: Any, **kwargs: Any) -> Buffer:
        """Refuse the native form, whose arguments differ from those of the Python class."""
        if isinstance(group, int) or _NATIVE & kwargs.keys():
            raise UnsupportedError(
                "Buffer(rank, num_ranks, buffer_size, device_name) needs an RDMA device; give a process group: "
                "Buffer(group, num_ep_buffer_bytes)"
            )
        return super().__new__(cls)

    def __init__(
        self, group: dist.ProcessGroup | None, num_ep_buffer_bytes: int = 0, disable_p2p: bool = False
    ) -> None:
        if disable_p2p:
            raise UnsupportedError("disable_p2p=True leaves only RDMA, which does not exist here; leave it out")
        self.group = group_of(group)
        self.rank = self.group.rank()
        self.group_size = self.group.size()
        self.num_ep_buffer_bytes = num_ep_buffer_bytes
        timeout_s = timeout_of(self.group)
        self._pool = BufferPool(self.group, timeout_s, latency_bytes=num_ep_buffer_bytes, meets=True)
        self._padded = PaddedCalls(self._pool)
        self._mask = GroupMask(self.group, self.group_size, is_early=num_ep_buffer_bytes > 0)

    @staticmethod
    def get_ep_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the bytes of a buffer for calls of this size."""
        return size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        active_ranks: torch.Tensor | None,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        timeout_us: int,
        use_fp8: bool | None = None,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Payload, torch.Tensor, PaddedHandle, EventOverlap, Hook]:
        """Send each token to its experts, padded. Collective.

        Args:
            x: `[num_tokens, hidden]` bfloat16.
            topk_idx: `[num_tokens, num_topk]` int64, -1 for none.
            active_ranks: `[num_ranks or more]` int32, 1 = active; a rank that does not arrive is set to 0. None: the
                mask of the group, or all, less the ranks that calls of this buffer have lost (`mask.py`).
            num_max_dispatch_tokens_per_rank: most tokens of a rank, equal on all.
            num_experts: over all ranks.
            timeout_us: microseconds to wait for a silent rank; -1 for the group's timeout.
            use_fp8: quantise before sending; None means True.
            async_finish: return an event.
            return_recv_hook: only send; the hook receives.

        Returns:
            `recv_x [num_local_experts, num_ranks * max, hidden]` or (values, scales), counts `[num_local_experts]`
            int32, handle, event, hook (None unless requested).
        """
        return self._padded.dispatch(
            x,
            topk_idx,
            (num_max_dispatch_tokens_per_rank, num_experts),
            (use_fp8 is None or use_fp8, False, False),
            self._ways(x, active_ranks, timeout_us, async_finish, return_recv_hook),
        )

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        active_ranks: torch.Tensor | None,
        timeout_us: int,
        handle: tuple[Any, ...],
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook]:
        """Send expert outputs back and sum them, weighted. Collective.

        Args:
            x: `[num_local_experts, num_ranks * max, hidden]` bfloat16.
            topk_idx: that of the dispatch.
            topk_weights: `[num_tokens, num_topk]` float32.
            active_ranks, timeout_us, async_finish, return_recv_hook: as in `dispatch`.
            handle: of the dispatch.
            zero_copy: use the contents of `get_next_combine_buffer(handle)` instead of x.
            out: `[num_tokens, hidden]` bfloat16, written instead of new memory.

        Returns:
            `combined_x [num_tokens, hidden]` bfloat16, event, hook.
        """
        ways = self._ways(x, active_ranks, timeout_us, async_finish, return_recv_hook, zero_copy)
        return self._padded.combine(x, topk_idx, topk_weights, handle, out, ways)

    def get_next_combine_buffer(self, handle: object) -> torch.Tensor:
        """Return `[num_local_experts, num_ranks * max, hidden]` bfloat16 for a combine with `zero_copy`. Local."""
        return self._padded.next_combine_buffer(handle)

    def connect(self) -> None:
        """Do nothing: ranks are connected when the buffer is created, or by the call that allocates memory."""

    def update_ep_member(self) -> None:
        """Reconnect after the group has recovered ranks: the next call connects all of its members. All ranks call it,
        or create another buffer on the group instead.

        Joiners have nothing to connect yet: their first call of each shape does it. Handles of earlier dispatches end
        when a rank has joined.
        """
        self._mask.reset()
        self._pool.meet_again()

    def ibgda_disabled(self) -> bool:
        """Return True: there is no RDMA."""
        return True

    def p2p_enabled(self) -> bool:
        """Return True: ranks reach each other's memory."""
        return True

    def use_fast_path(self) -> bool:
        """Return True: there is no fallback over collectives."""
        return True

    def is_roce(self) -> bool:
        """Return False: there is no RDMA."""
        return False

    def sync_ib(self, *args: Any) -> NoReturn:
        """Raise `UnsupportedError`: there is no RDMA."""
        _needs_rdma("sync_ib")

    def sync_roce(self, *args: Any) -> NoReturn:
        """Raise `UnsupportedError`: there is no RDMA."""
        _needs_rdma("sync_roce")

    def sync_ibgda_peers(self, *args: Any) -> NoReturn:
        """Raise `UnsupportedError`: there is no RDMA."""
        _needs_rdma("sync_ibgda_peers")

    def sync_nvlink_ipc_handles(self, *args: Any) -> NoReturn:
        """Raise `UnsupportedError`: there is no RDMA."""
        _needs_rdma("sync_nvlink_ipc_handles")

    def get_ipc_handle(self) -> NoReturn:
        """Raise `UnsupportedError`: there is no RDMA."""
        _needs_rdma("get_ipc_handle")

    def get_mr_info(self) -> NoReturn:
        """Raise `UnsupportedError`: there is no RDMA."""
        _needs_rdma("get_mr_info")

    def get_gid(self) -> NoReturn:
        """Raise `UnsupportedError`: there is no RDMA."""
        _needs_rdma("get_gid")

    def get_local_qpns(self) -> NoReturn:
        """Raise `UnsupportedError`: there is no RDMA."""
        _needs_rdma("get_local_qpns")

    def get_local_lids(self) -> NoReturn:
        """Raise `UnsupportedError`: there is no RDMA."""
        _needs_rdma("get_local_lids")

    def update_local_qpns(self, *args: Any) -> NoReturn:
        """Raise `UnsupportedError`: there is no RDMA."""
        _needs_rdma("update_local_qpns")

    def _ways(
        self,
        x: object,
        active_ranks: torch.Tensor | None,
        timeout_us: int,
        async_finish: bool,
        return_recv_hook: bool,
        zero_copy: bool = False,
    ) -> CallOptions:
        if timeout_us != -1 and not is_whole(timeout_us, 1, MAX_US):
            error = InvalidArgument(
                f"timeout_us must be above 0, or -1 for the group's time-out, and at most {MAX_US}, got "
                f"{shown(timeout_us)}"
            )
            self._padded.refuse(error, x)
            raise error
        if active_ranks is None:
            active_ranks = self._mask.on(x.device if isinstance(x, torch.Tensor) else torch.device("cpu"))
        limit_us = None if timeout_us == -1 else timeout_us
        return CallOptions(active_ranks, limit_us, async_finish, return_recv_hook, zero_copy)


def _needs_rdma(name: str) -> NoReturn:
    raise UnsupportedError(f"{name} is not supported: epee's ranks meet by themselves, through the process group")
