"""Out of descriptors while a group is made: all ranks are told, nobody is taken for dead, nothing is left.

One of two ranks gets 0, 1, 2 ... descriptors for `init_process_group`, so each place that needs one is short once.
"""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from epee.errors import PeerError, ResourceError
from tests import shortage
from tests.harness import run_ranks

NUM_ATTEMPTS = 24
WRONG = ("died", "has ended", "changed while", "PID namespace", "is not in the view", "witness", "refused its options")


def resources() -> tuple[int, int]:
    """Return how many descriptors and mappings of epee this process has."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("memfd:epee" in line for line in maps)


def attempt(rank: int, num_free: int, store: dist.Store) -> str:
    """Return "" when a group was made and works, else the error."""
    group = {"store": store, "rank": rank, "world_size": 2, "timeout": timedelta(seconds=20)}
    try:
        if rank == 0:
            with shortage.descriptors(num_free):
                dist.init_process_group("epee", **group)
        else:
            dist.init_process_group("epee", **group)
    except (ResourceError, PeerError) as exc:
        return f"{type(exc).__name__}: {exc}"
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.all_reduce(x)
    assert x.item() == 4.0
    dist.destroy_process_group()
    return ""


def attempts(rank: int, num_ranks: int, port: int) -> tuple[list[str], list[tuple[int, int]]]:
    gc.freeze()  # torch's own objects: looking through them 25 times would be most of the time
    store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0)
    told, seen = [], []
    for num_free in range(-1, NUM_ATTEMPTS):  # the first one, not short of anything, makes what a process keeps
        told.append(attempt(rank, 100 if num_free < 0 else num_free, dist.PrefixStore(f"attempt{num_free}", store)))
        store.set(f"done{num_free}/{rank}", "1")
        store.wait([f"done{num_free}/{other}" for other in range(num_ranks)])
        seen.append(resources())
    store.set(f"left/{rank}", "1")
    if rank == 0:  # the store ends with this process
        store.wait([f"left/{other}" for other in range(num_ranks)])
    return told, seen


def test_out_of_descriptors_at_birth_is_said_on_all_ranks_and_leaves_nothing() -> None:
    listener = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = listener.port
    del listener
    (short, short_seen), (other, other_seen) = run_ranks(attempts, 2, port, backend=None, timeout_s=55)
    assert short[0] == other[0] == short[-1] == other[-1] == "", "with enough of them all is well"
    assert sum(text != "" for text in short) >= 8
    for mine, theirs in zip(short, other, strict=True):
        assert (mine == "") == (theirs == ""), (mine, theirs)
        if mine:
            assert mine.startswith("ResourceError"), mine
            assert "Too many open files" in mine
            assert theirs.startswith("PeerError"), theirs
            assert "rank 0 could not make its part" in theirs
            assert "Too many open files" in theirs
        assert not any(word in mine + theirs for word in WRONG), (mine, theirs)
    for seen in (short_seen, other_seen):
        for kind in zip(
            *seen, strict=True
        ):  # descriptors, threads: the store's own connections may be fewer for a moment
            assert max(kind) == kind[0], seen
