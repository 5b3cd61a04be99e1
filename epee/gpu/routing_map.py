"""Maps of tokens and experts on a GPU, as top-k ids and back: one kernel each, where torch needs a dozen.

Local: nothing communicates, and the cpu does not wait. `ep/pool/maps.py` has the same on CPUs, and the meaning.
"""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

from ..errors import InvalidState
from ..jit.params import struct_source
from ..torch_private import is_capturing
from .platform import CudaPlatform, Platform
from .turns import on_gpu

NUM_BLOCKS = 32
NUM_THREADS = 256


class MapParams(ctypes.Structure):
    """Arguments of `layout_topk_of_map`; `probs` and `topk_weights` are 0 without weights, `counts` two of a block."""

    _fields_ = (
        ("routing_map", ctypes.c_uint64),
        ("probs", ctypes.c_uint64),
        ("topk_idx", ctypes.c_uint64),
        ("topk_weights", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("num_tokens", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("num_topk", ctypes.c_int32),
    )


class DenseParams(ctypes.Structure):
    """Arguments of `layout_map_of_topk`."""

    _fields_ = (
        ("topk_idx", ctypes.c_uint64),
        ("topk_weights", ctypes.c_uint64),
        ("dense", ctypes.c_uint64),
        ("num_tokens", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("num_topk", ctypes.c_int32),
    )


MAP_KERNELS = {
    "kernels/throughput/routing_map.cuh": {"layout_topk_of_map": MapParams, "layout_map_of_topk": DenseParams}
}


@functools.cache
def map_head() -> str:
    """Return the generated C++ in front of the kernels."""
    return struct_source(MapParams) + struct_source(DenseParams)


@functools.cache
def map_kernels(device: int) -> MapKernels:
    """Return the kernels on a GPU.

    Raises:
        InvalidState: a CUDA graph is being recorded, and they have not been used on this GPU before.
    """
    if is_capturing():
        raise InvalidState(
            "the kernels of routing maps are not loaded on this GPU yet, and nothing can be loaded while a CUDA graph "
            "is recorded; make one call before"
        )
    with on_gpu(device):
        return MapKernels(CudaPlatform(torch.device("cuda", device)))


class MapKernels:
    """The kernels on one GPU, loaded; calls may come from any thread and stream.

    Args:
        platform: the GPU.
        num_blocks, num_threads: of a launch, and of a block.
    """

    def __init__(self, platform: Platform, num_blocks: int = NUM_BLOCKS, num_threads: int = NUM_THREADS) -> None:
        found = platform.kernels(MAP_KERNELS, map_head())
        self._to_topk, self._to_map = found["layout_topk_of_map"], found["layout_map_of_topk"]
        self._platform = platform
        self._num_blocks, self._num_threads = num_blocks, num_threads
        self._lock = threading.Lock()  # the arguments are shared by all threads

    def topk(
        self, routing_map: torch.Tensor, probs: torch.Tensor | None, num_topk: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return what `maps.topk_of_map` returns; arguments of those dtypes, on this GPU."""
        num_tokens, num_experts = routing_map.shape
        routing_map, device = routing_map.contiguous(), routing_map.device
        with on_gpu(device.index):
            ids = torch.empty(num_tokens, num_topk, dtype=torch.int64, device=device)
            counts = torch.empty(self._num_blocks, 2, dtype=torch.int32, device=device)
            weights = None
            if probs is not None:
                probs = probs.to(torch.float32).contiguous()
                weights = torch.empty(num_tokens, num_topk, dtype=torch.float32, device=device)
            with self._lock:
                args = self._to_topk.args
                args.routing_map, args.topk_idx, args.counts = (each.data_ptr() for each in (routing_map, ids, counts))
                args.probs = 0 if probs is None else probs.data_ptr()
                args.topk_weights = 0 if weights is None else weights.data_ptr()
                args.num_tokens, args.num_experts, args.num_topk = num_tokens, num_experts, num_topk
                shared_bytes = 8 * (self._num_threads // 32)
                self._to_topk(self._num_blocks, self._num_threads, shared_bytes, self._platform.stream())
        return ids, weights, counts

    def dense(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int) -> torch.Tensor:
        """Return what `maps.dense_weights` returns; arguments on this GPU."""
        (num_tokens, num_topk), device = topk_idx.shape, topk_idx.device
        topk_idx, topk_weights = topk_idx.to(torch.int64).contiguous(), topk_weights.to(torch.float32).contiguous()
        with on_gpu(device.index):
            dense = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=device)
            with self._lock:
                args = self._to_map.args
                args.topk_idx, args.topk_weights = topk_idx.data_ptr(), topk_weights.data_ptr()
                args.dense = dense.data_ptr()
                args.num_tokens, args.num_experts, args.num_topk = num_tokens, num_experts, num_topk
                self._to_map(self._num_blocks, self._num_threads, 0, self._platform.stream())
        return dense
