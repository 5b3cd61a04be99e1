"""Fill the kernel cache ahead of time, for images and for machines that must not compile. Needs NVRTC, but no GPU."""

from __future__ import annotations

from collections.abc import Sequence

from ..ep.latency.gpu import params as latency_kernels
from ..errors import InvalidArgument
from ..gpu.layout import COUNT_KERNELS, count_head
from ..gpu.params import KERNELS, kernel_head
from ..gpu.ranks import MAX_LOCAL
from ..gpu.routing_map import MAP_KERNELS, map_head
from ..gpu.shapes import Limits
from ..jit.kernel import cubins_of

ARCHITECTURES = ("sm_90a", "sm_100a")


def warm_up(num_ranks: Sequence[int], architectures: Sequence[str] = ARCHITECTURES) -> int:
    """Compile every kernel that buffers of these sizes will load, unless it is cached already.

    Args:
        num_ranks: sizes of groups.
        architectures: such as `sm_90a`.
    Returns:
        The number of cubins in the cache.
    Raises:
        CompileError: a kernel does not compile for one of the architectures.
    """
    for size in num_ranks:
        if not 1 <= size <= MAX_LOCAL:
            raise InvalidArgument(f"num_ranks must be 1 ... {MAX_LOCAL}, got {size}")
    wanted = [(path, kernel_head(size, Limits.max_warps)) for path in KERNELS for size in num_ranks]
    wanted += [(path, latency_kernels.kernel_head(size)) for path in latency_kernels.KERNELS for size in num_ranks]
    wanted += [(path, count_head()) for path in COUNT_KERNELS]
    wanted += [(path, map_head()) for path in MAP_KERNELS]
    for path, head in wanted:
        for target in architectures:
            cubins_of([path], head, target)
    return len(wanted) * len(architectures)
