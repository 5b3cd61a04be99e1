"""Counts of a rank's tokens by destination, without a dispatch: one kernel on GPUs, plain torch elsewhere.

A dispatch counts for itself (`csrc/kernels/throughput/layout.cuh`). This module is for callers that need the numbers or
that give the destinations as a mask. It is local: nothing communicates, and the cpu does not wait for the GPU.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, NamedTuple

import torch

from ..errors import InvalidArgument, InvalidState
from ..jit.params import constants_source, struct_source
from ..memory.fresh import Allocate, allocator
from ..memory.layout import align_up
from ..torch_private import current_index
from ..values import shown
from .experts import expert_table
from .platform import CudaPlatform, Platform
from .turns import on_gpu

MAX_TOPK = 32  # lanes of a warp, for slots of a token and for ranks
MAX_EXPERTS = 8192  # as many counters as fit into the shared memory of any kernel
MOST_EXPERTS = 1 << 20  # far above use: larger numbers would only take memory
NUM_BLOCKS = 8  # the largest cluster that every GPU has room for
NUM_THREADS = 1024
_MOST_SIZES = 1024  # number of cached sizes: callers may bring new ones all the time
_INDEX_DTYPES = (torch.int64, torch.int32)


class DispatchLayout(NamedTuple):
    """Result of `count_layout`.

    Attributes:
        num_tokens_per_rank: `[num_ranks]` int32, each token once per rank.
        num_tokens_per_expert: `[num_experts]` int32, (token, k) pairs.
        is_token_in_rank: `[num_tokens, num_ranks]` bool.
    """

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor


class CountParams(ctypes.Structure):
    """Arguments of `layout_count`."""

    _fields_ = (
        ("topk_idx", ctypes.c_uint64),
        ("experts", ctypes.c_uint64),
        ("num_tokens_per_rank", ctypes.c_uint64),
        ("num_tokens_per_expert", ctypes.c_uint64),
        ("is_token_in_rank", ctypes.c_uint64),
        ("num_tokens", ctypes.c_int32),
        ("num_topk", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("num_local_experts", ctypes.c_int32),
        ("lanes_per_token", ctypes.c_int32),
        ("is_i32", ctypes.c_int32),
    )


COUNT_KERNELS = {"kernels/throughput/layout_count.cuh": {"layout_count": CountParams}}


@functools.cache
def count_head() -> str:
    """Return the generated C++ in front of the kernel."""
    return constants_source({"kCountBlocks": NUM_BLOCKS, "kMaxExperts": MAX_EXPERTS}) + struct_source(CountParams)


def count_layout(topk_idx: torch.Tensor, num_ranks: int, num_experts: int) -> DispatchLayout:
    """Count tokens by destination rank and expert.

    Ids below 0, and ids of experts that do not exist (not checked earlier on GPUs), count as none.

    Args:
        topk_idx: `[num_tokens, num_topk]` int64 or int32, -1 for none.
        num_ranks: of the group.
        num_experts: over all ranks.
    Raises:
        InvalidArgument: `topk_idx` is no integer matrix, or the experts do not divide evenly among the ranks.
        InvalidState: a CUDA graph is being recorded, and nothing has been counted on this GPU before.
    """
    is_tensor = isinstance(topk_idx, torch.Tensor) and topk_idx.layout is torch.strided
    if not is_tensor or topk_idx.dim() != 2 or topk_idx.dtype not in _INDEX_DTYPES:
        got = f"{topk_idx.dtype} {list(topk_idx.shape)}" if is_tensor else type(topk_idx).__name__
        raise InvalidArgument(f"topk_idx must be int64 (or int32) [num_tokens, num_topk], got {got}")
    if type(num_experts) is not int or not 0 < num_experts <= MOST_EXPERTS or num_experts % num_ranks:
        raise InvalidArgument(
            f"num_experts must be a multiple of {num_ranks} ranks, at most {MOST_EXPERTS}, got {shown(num_experts)}"
        )
    device = topk_idx.get_device()
    if device < 0 or topk_idx.shape[1] > MAX_TOPK or num_ranks > MAX_TOPK or num_experts > MAX_EXPERTS:
        return count_with_torch(topk_idx, num_ranks, num_experts)
    return _counter(device)(topk_idx, num_ranks, num_experts)


def load_counter() -> None:
    """Load the kernel on the current GPU, if there is one: a first count may then be recorded in a graph."""
    if torch.cuda.is_available():
        _counter(torch.cuda.current_device())


def count_with_torch(topk_idx: torch.Tensor, num_ranks: int, num_experts: int) -> DispatchLayout:
    """Compute the result of `count_layout` with a dozen torch operations, on any device."""
    topk_idx = topk_idx.to(torch.int64).masked_fill((topk_idx < 0) | (topk_idx >= num_experts), -1)
    column = topk_idx.div(num_experts // num_ranks, rounding_mode="floor").add_(1)  # -1 becomes column 0
    member = torch.zeros(len(topk_idx), num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    is_token_in_rank = member.scatter_(1, column, True)[:, 1:].contiguous()
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=topk_idx.device)
    flat = topk_idx.reshape(-1) + 1
    per_expert.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return DispatchLayout(is_token_in_rank.sum(0, dtype=torch.int32), per_expert[1:].clone(), is_token_in_rank)


@functools.cache
def _counter(device: int) -> LayoutCounter:
    if torch.cuda.is_current_stream_capturing():
        raise InvalidState(
            "the kernel that counts the layout is not loaded on this GPU yet, and nothing can be loaded while a CUDA "
            "graph is recorded; count once before"
        )
    with on_gpu(device):
        return LayoutCounter(CudaPlatform(torch.device("cuda", device)))


class LayoutCounter:
    """The kernel on one GPU, loaded; calls may come from any thread and stream.

    Args:
        platform: the GPU.
        num_threads: of a block.
    """

    def __init__(self, platform: Platform, num_threads: int = NUM_THREADS) -> None:
        self._kernel = platform.kernels(COUNT_KERNELS, count_head())["layout_count"]
        self._args = self._kernel.args
        self.experts = expert_table(platform.device, MAX_EXPERTS)
        self._args.experts = self.experts.data_ptr()
        self._platform = platform
        self._num_threads = num_threads
        self._index = platform.device.index
        self._allocators: dict[tuple[int, int, int], tuple[Allocate, Allocate, Allocate]] = {}
        self._allocate: Any = ()
        self._sizes: tuple[int, int, int, int] | None = None  # of the last count, whose arguments are reused
        self._lock = threading.Lock()  # the arguments are shared by all threads

    def __call__(self, topk_idx: torch.Tensor, num_ranks: int, num_experts: int) -> DispatchLayout:
        """Return what `count_layout` returns."""
        topk_idx = topk_idx.contiguous()
        num_tokens, num_topk = topk_idx.shape
        index = self._index
        if index is not None and index != current_index():
            with on_gpu(index):
                return self(topk_idx, num_ranks, num_experts)
        with self._lock:
            sizes = num_tokens, num_topk, num_ranks, num_experts
            if sizes != self._sizes:
                self._set_sizes(*sizes)
            args = self._args
            per_rank, per_expert, flags = self._allocate
            found = DispatchLayout(per_rank(), per_expert(), flags())
            args.is_i32 = topk_idx.dtype is torch.int32
            args.topk_idx = topk_idx.data_ptr()
            args.num_tokens_per_rank = found.num_tokens_per_rank.data_ptr()
            args.num_tokens_per_expert = found.num_tokens_per_expert.data_ptr()
            args.is_token_in_rank = found.is_token_in_rank.data_ptr()
            shared_bytes = align_up(2 * num_experts, 16) + 4 * (num_ranks + num_experts)
            self._kernel(NUM_BLOCKS, self._num_threads, shared_bytes, self._platform.stream())
        return found

    def _set_sizes(self, num_tokens: int, num_topk: int, num_ranks: int, num_experts: int) -> None:
        """Prepare arguments and allocators for counts of these sizes."""
        args = self._args
        args.num_tokens, args.num_topk, args.num_ranks, args.num_experts = num_tokens, num_topk, num_ranks, num_experts
        args.num_local_experts = num_experts // num_ranks
        args.lanes_per_token = 1 << (max(num_topk, num_ranks) - 1).bit_length()
        self._allocate = self._allocators_of(num_tokens, num_ranks, num_experts)
        self._sizes = num_tokens, num_topk, num_ranks, num_experts  # last: an interrupt before it repeats all

    def _allocators_of(self, num_tokens: int, num_ranks: int, num_experts: int) -> tuple[Allocate, Allocate, Allocate]:
        """Return the functions that allocate the results of a count."""
        key = num_tokens, num_ranks, num_experts
        made = self._allocators.get(key)
        if made is None:
            device, flags = self._platform.device, (num_tokens, num_ranks)
            made = (
                allocator((num_ranks,), torch.int32, device),
                allocator((num_experts,), torch.int32, device),
                allocator(flags, torch.bool, device),
            )
            if len(self._allocators) >= _MOST_SIZES:
                self._allocators.clear()
            self._allocators[key] = made
        return made
