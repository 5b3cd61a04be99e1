"""`deep_ep.utils.envs`: seeds, the process group of DeepEP's test scripts, and properties of the machine."""

from __future__ import annotations

import random
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

from epee import env
from epee.compat.deep_ep.domain import get_logical_domain_size, get_physical_domain_size
from epee.compat.deep_ep.sizing import NVLINK_GBS
from epee.errors import InvalidState

__all__ = [
    "check_fast_rdma_atomic_support",
    "check_nvlink_connections",
    "check_torch_deterministic",
    "dist_print",
    "get_global_seed",
    "get_local_seed",
    "get_logical_domain_size",
    "get_nvlink_gbs",
    "get_physical_domain_size",
    "get_rdma_gbs",
    "init_dist",
    "init_seed",
]

_NOMINAL = 0.9  # share of the links' nominal rate in DeepEP's estimate


class _Here(NamedTuple):
    local_rank: int | None = None
    local_seed: int = 0
    global_seed: int = 0


_here = [_Here()]  # of this process; scripts set it once


def init_seed(global_seed: int) -> None:
    """Seed torch and `random` with `global_seed` plus this rank."""
    local_seed = global_seed + dist.get_rank()
    _here[0] = _here[0]._replace(local_seed=local_seed, global_seed=global_seed)
    torch.manual_seed(local_seed)
    random.seed(local_seed)


def get_local_seed() -> int:
    """Return the seed of this rank."""
    return _here[0].local_seed


def get_global_seed() -> int:
    """Return the seed that all ranks share."""
    return _here[0].global_seed


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print a line on all ranks, or on the first of each host, then run a barrier. Collective."""
    if not once_in_node or _here[0].local_rank == 0:
        sys.stdout.write(f"{s}\n")
        sys.stdout.flush()
    dist.barrier()


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Create the default process group as DeepEP's test scripts do, over NCCL, or gloo if there is no GPU.

    The default dtype is bfloat16 afterwards, the default device the GPU of this rank, if there is one. MASTER_ADDR and
    MASTER_PORT are the rendezvous address (127.0.0.1:8361); WORLD_SIZE and RANK count hosts here, 1 and 0 by default.

    Returns:
        Rank, number of ranks, a group of all ranks.
    """
    _here[0] = _here[0]._replace(local_rank=local_rank)
    num_hosts, host = env.get_int("WORLD_SIZE"), env.get_int("RANK")
    where = f"tcp://{env.get('MASTER_ADDR') or '127.0.0.1'}:{env.get('MASTER_PORT') or 8361}"
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        init_method=where,
        world_size=num_hosts * num_local_ranks,
        rank=host * num_local_ranks + local_rank,
        device_id=torch.device("cuda", local_rank) if has_gpu else None,
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda" if has_gpu else "cpu")
    init_seed(seed)
    group = dist.new_group(list(range(num_hosts * num_local_ranks)))
    assert group is not None
    return dist.get_rank(), dist.get_world_size(), group


def check_nvlink_connections(group: dist.ProcessGroup) -> None:
    """Do nothing: the constructor of a buffer checks whether its GPUs reach each other, and raises."""


def check_torch_deterministic() -> None:
    """Raise `InvalidState` if torch fills new memory while algorithms are deterministic, as DeepEP does."""
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        raise InvalidState("set torch.utils.deterministic.fill_uninitialized_memory to False: it fills buffers in use")


def get_nvlink_gbs(factor: float = _NOMINAL) -> float:
    """Return the nominal GB/s of an H100's or H200's links, times `factor`; 0 without a GPU. Nothing is measured."""
    return NVLINK_GBS / _NOMINAL * factor if torch.cuda.is_available() else 0.0


def check_fast_rdma_atomic_support(nic_name: str = "") -> bool:
    """Return False: epee does not use RDMA atomics."""
    return False


def get_rdma_gbs(nic_name: str = "") -> float:
    """Return 0: epee does not use RDMA here."""
    return 0.0
