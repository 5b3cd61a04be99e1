"""Many deaths in one run of a group's collectives on the device: two ranks live through all of it, the third dies.

It is killed at a random moment of a random call, again and again, and each time another process takes its place
(`tests/csrc/latency_deaths.py` says how, and what is measured). The ranks make calls one behind the other, small,
middle and large ones, and compare every value, once the GPU has ended the call and the group finds nothing wrong with
it. The call that meets the death is an error that names the victim, on both; their next calls run without it, until
they take its successor in. Groups are in mode "raise".

With `POOLED` most tensors lie in memory pools, which all ask for again when a newcomer has come; some lie elsewhere, on
one rank or more, and until then the newcomer has none.

In mode "mask" (`MASKED`) messages go between all ranks as well: those of the survivors are right, whoever dies. No
collective is an error: each is compared with the rows of those who were in it, as its kernel
says, and the first one without the victim has the same number on both survivors.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from typing import Any

import torch
import torch.distributed as dist

import epee
from epee.backend.cuda.params import DIRECT_KERNELS, KERNELS, MASKED_KERNELS, kernel_head
from epee.backend.cuda.plan import CollectivePlan
from epee.errors import PeerError, RankFailedError
from epee.gpu.platform import CudaPlatform
from tests.csrc.latency_deaths import NUM_RANKS, TIMEOUT_S, VICTIM, Call, Play, Sign, device_of, is_last, take_in
from tests.harness import tell

ALL, SURVIVORS = tuple(range(NUM_RANKS)), tuple(range(NUM_RANKS - 1))
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
COUNTS = {"cuda": (3, 20_000, 100_000, 300_000), "emulated": (3, 4_000, 30_000)}  # elements of a row


class Lost(Exception):
    """A call has told that the victim is dead."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.call = call


def row_of(rank: int, count: int, number: int) -> torch.Tensor:
    """What a rank brings: whole numbers, so that sums are exact in any order."""
    return (torch.arange(count) * (rank + 3) + number) % 101 + 1.0


class Player:
    """One rank's end of the group."""

    sign: Any = contextlib.nullcontext()

    def __init__(self, rank: int, platform: str, fault_mode: str = "raise") -> None:
        self.rank, self.platform, self.is_masked = rank, platform, fault_mode == "mask"
        self.own = random.Random(os.getpid())  # how long this rank dawdles
        if platform == "emulated":
            from tests.collectives.cases import give_half, on_gpu

            self.half = give_half(rank, TIMEOUT_S)
            self.place = self.elsewhere = on_gpu
            return
        self.half = dist.group.WORLD._on_device  # type: ignore[union-attr]
        self.place = self.elsewhere = lambda x: x.to(device_of(rank))

    def take_pool(self) -> None:
        """Have most tensors in a pool from now on; all ranks do."""
        from tests.collectives.pool_cases import POOL_BYTES, in_pool

        pool = dist.group.WORLD.memory_pool(4 * POOL_BYTES)  # type: ignore[union-attr]
        self.place = lambda x: self.elsewhere(x) if self.own.random() < 0.05 else in_pool(pool, x)

    def round(self, number: int, members: tuple[int, ...], dawdle_s: float = 0.0) -> Call:
        """A call among `members`, compared; in mode "mask" among those who were in it, as far as they are members."""
        rng = random.Random(number)
        op, count, root = rng.choice(OPS), rng.choice(COUNTS[self.platform]), rng.choice(members)
        rows = [row_of(rank, count * NUM_RANKS, number) for rank in ALL]
        mine, n = slice(count * self.rank, count * (self.rank + 1)), count
        x, wide = self.place(rows[self.rank][:n]), self.place(rows[self.rank])
        out, many = self.place(torch.full((n,), -1.0)), self.place(torch.full((n * NUM_RANKS,), -1.0))
        if self.own.random() < 0.5:
            time.sleep(self.own.random() * dawdle_s)
        root = SURVIVORS[number % 2] if self.is_masked else root  # a lost root is an error there, too
        nothing = torch.full((n,), -1.0)
        gather = dist.all_gather_into_tensor if op == "all_gather" else dist.all_to_all_single
        calls = {
            "all_reduce": lambda: dist.all_reduce(x),
            "broadcast": lambda: dist.broadcast(x, root),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, wide),
            "all_gather": lambda: gather(many, x),
            "all_to_all": lambda: gather(many, wide),
        }
        if self.is_masked:
            self.exchange(number, members)
        made = self.call(op, calls[op])
        if self.is_masked:
            there = dist.group.WORLD.last_contributors()  # type: ignore[union-attr]
            assert set(SURVIVORS) <= set(there) <= set(members), (number, there, members)
            place = many.cpu().as_subclass(torch.Tensor)[n * VICTIM :]
            if VICTIM not in there and not bool(place.any()):
                nothing = torch.zeros(n)  # the call that loses a rank fills its place
            members = there
        if op == "all_reduce":
            got, want = x, sum(rows[rank][:n] for rank in members)
        elif op == "broadcast":
            got, want = x, rows[root][:n]
        elif op == "reduce_scatter":
            got, want = out, sum(rows[rank][mine] for rank in members)
        else:
            came = [rows[rank][:n] if op == "all_gather" else rows[rank][mine] for rank in ALL]
            got, want = many, torch.cat([came[rank] if rank in members else nothing for rank in ALL])
        plain = got.cpu().as_subclass(torch.Tensor)
        assert torch.equal(plain, want), f"rank {self.rank}, call {number} of {members}: {op} of {count}"  # type: ignore[arg-type]
        return made._replace(came=VICTIM in members)

    def exchange(self, number: int, members: tuple[int, ...]) -> None:
        """A message each way between each two members: single ones, or a batch for each pair, in turns."""
        kind = number % 3
        for peer in [rank for rank in members if rank != self.rank]:
            count = COUNTS[self.platform][(number + peer + self.rank) % 2]
            x, got = self.place(row_of(self.rank, count, number)), self.place(torch.zeros(count))
            if kind:
                ends = [lambda x=x, p=peer: dist.isend(x, p), lambda got=got, p=peer: dist.irecv(got, p)]
                if self.rank > peer and self.platform == "emulated":
                    ends.reverse()  # calls block there
                works = [self.post(end, peer) for end in ends]
            else:
                ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, got, peer)]
                works = self.post(lambda ops=ops: dist.batch_isend_irecv(ops), peer) or [None]
            for work in works:
                if work is not None:
                    self.post(work.wait, peer)
            if self.platform == "cuda":
                torch.cuda.synchronize()
            is_right = torch.equal(got.cpu().as_subclass(torch.Tensor), row_of(peer, count, number))
            is_told = None in works or not all(work.is_success() for work in works)
            assert is_right or (is_told and peer == VICTIM), (number, peer, works)
            if peer != VICTIM and self.rank != VICTIM:
                assert not is_told, (number, peer, works)

    def post(self, make: Any, peer: int) -> Any:
        """Make a message, or wait for one; None where it is told that its other end, the victim, is lost.

        A loss that is told by a message of the survivors is that of another one; what raised has not been made.
        """
        for _ in range(4):
            try:
                return make()
            except PeerError as error:
                if VICTIM not in error.ranks:
                    raise
                if peer == VICTIM:
                    return None
        raise AssertionError("told again and again")

    def call(self, op: str, make: Any) -> Call:
        """Make one call to its end; raises what has become of it, with the times."""
        started = time.monotonic_ns()
        try:
            with self.sign:
                make()
                if self.platform == "cuda":
                    torch.cuda.synchronize()
            self.half.check()
        except RankFailedError as error:
            if self.is_masked or error.ranks != (VICTIM,):
                raise
            raise Lost(Call(op, started, time.monotonic_ns(), False)) from error
        assert not self.half._off, self.half._off
        return Call(op, started, time.monotonic_ns(), True)


def warm(platform: str, rank: int) -> None:
    """Do what takes a process long: a CUDA context, kernels."""
    if platform == "cuda":
        torch.cuda.set_device(device_of(rank))
        gpu = CudaPlatform(device_of(rank))
        for kind in ((None, "sum"), (torch.float32, "sum")):
            files = {**KERNELS, **DIRECT_KERNELS, **MASKED_KERNELS}
            gpu.kernels(files, kernel_head(NUM_RANKS, *kind, CollectivePlan().pipeline))
        torch.ones(4, device=gpu.device).cpu()


def live(
    rank: int,
    platform: str,
    folder: str,
    first_life: int,
    num_kills: int,
    fault_mode: str = "raise",
    has_pool: bool = False,
) -> list[str]:
    """Be a rank from a life on: of the survivors to the end, of a victim until it is killed."""
    if platform == "cuda":
        torch.cuda.set_device(device_of(rank))
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    options = epee.BackendOptions(fault_mode=fault_mode, op_timeout=TIMEOUT_S, is_extension=first_life > 0)
    dist.init_process_group("epee", store=store, rank=rank, world_size=NUM_RANKS, pg_options=options)
    if first_life:
        dist.all_reduce(torch.ones(1))
    player = Player(rank, platform, fault_mode)
    player.sign = Sign(folder, rank, first_life)
    for life in range(first_life, num_kills + 1):
        if has_pool:
            player.round(10_000 * life + 4000, ALL)
            player.take_pool()
        for number in range(3):
            player.round(10_000 * life + number, ALL)
        tell(("ready", life))
        if is_last(folder, life, num_kills):
            break
        lost, number = until_lost(player, life)
        tell(("lost", life, *lost))
        if player.is_masked:
            low, high = (torch.tensor([number]) for _ in range(2))
            dist.all_reduce(low, op=dist.ReduceOp.MIN)
            dist.all_reduce(high, op=dist.ReduceOp.MAX)
            assert int(low) == int(high) == number, f"life {life}: lost in calls {int(low)} and {int(high)}"
        for number in range(3):
            player.round(10_000 * life + 5000 + number, SURVIVORS)
        take_in(dist.group.WORLD)
    dist.barrier()  # who ends first is dead to those who still look
    player.half.close(False)
    dist.destroy_process_group()
    return ["ok"]


def until_lost(player: Player, life: int) -> tuple[Call, int]:
    """Make calls until one tells that the victim is dead; returns it, with its number in this life."""
    number = 3
    while True:
        try:
            made = player.round(10_000 * life + number, ALL, 0.004 if player.rank == VICTIM else 0.001)
        except Lost as lost:
            return lost.call, number
        if not made.came:
            return made, number
        number += 1


def live_masked(rank: int, platform: str, folder: str, first_life: int, num_kills: int) -> list[str]:
    """As `live`, in mode "mask"."""
    return live(rank, platform, folder, first_life, num_kills, "mask")


def live_pooled(rank: int, platform: str, folder: str, first_life: int, num_kills: int) -> list[str]:
    """As `live`, with tensors in pools."""
    return live(rank, platform, folder, first_life, num_kills, has_pool=True)


COLLECTIVES = Play(warm, live)
POOLED = Play(warm, live_pooled)
MASKED = Play(warm, live_masked)
