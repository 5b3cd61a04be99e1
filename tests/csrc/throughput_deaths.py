"""Many deaths in one run of a throughput buffer, on GPUs or emulated: two ranks live through all of it, the third dies.

It is killed at a random moment of a random call, again and again, and each time another process takes its place
(`latency_deaths.py` says how). The ranks make rounds (a dispatch and a combine, in both layouts, with and without
waiting for the counts) one behind the other and compare every result bit for bit, once the GPU has ended the call and
the buffer finds nothing wrong with it. A call that meets the death is an error; then the survivors agree: every second
time at first without the victim, and they make rounds alone, else with its successor at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import epee
from epee import reference
from epee.errors import RankFailedError
from epee.gpu.params import KERNELS, kernel_head
from epee.gpu.platform import CudaPlatform
from tests.csrc.latency_deaths import NUM_RANKS, TIMEOUT_S, VICTIM, Call, Play, Sign, device_of, is_last, join, take_in
from tests.csrc.survival_buffer_cases import CASE, FP8, case_for, send
from tests.csrc.throughput_cases import Case, biases_of, expect_equal, expert_output, seen_by
from tests.harness import tell

ALL, SURVIVORS = tuple(range(NUM_RANKS)), tuple(range(NUM_RANKS - 1))
NUM_SPECS = 6


def spec_of(number: int) -> Case:
    """What the ranks send in a round."""
    base = FP8 if number % 3 == 2 else replace(CASE, num_bias=number % 2)
    return case_for(NUM_RANKS, base, "expert" if number % 2 else "rank", number)


@functools.cache
def wanted(number: int, members: tuple[int, ...]) -> tuple[list[Any], list[torch.Tensor], list[torch.Tensor]]:
    """What each rank's dispatch and combine bring among `members`, and what its experts make of the rows."""
    case = spec_of(number)
    seen, inputs = seen_by(case, members)
    ways: dict[str, Any] = {"layout": case.layout, "expert_alignment": case.expert_alignment}
    got = reference.dispatch(inputs, case.num_experts, **ways)
    outputs = [expert_output(_values(there.x), src, case) for src, there in enumerate(got)]
    biases = [biases_of(seen, src) for src in ALL]
    return got, outputs, reference.combine(inputs, got, outputs, bias=biases)


def _values(x: Any) -> torch.Tensor:
    return x[0] if isinstance(x, tuple) else x


class Player:
    """One rank's end of the buffer."""

    sign: Any = contextlib.nullcontext()

    def __init__(self, rank: int, platform: str, group: Any) -> None:
        self.rank = rank
        self.device = device_of(rank) if platform == "cuda" else torch.device("cpu")
        os.environ["EPEE_POISON"] = "1"
        kind: type[epee.Buffer] = epee.Buffer
        if platform == "emulated":
            from tests.csrc.emulated_buffer import EmulatedBuffer as kind
        self.buffer = kind(
            group, num_experts=NUM_RANKS * CASE.num_local_experts, hidden=CASE.hidden, num_topk=CASE.num_topk,
            max_tokens_per_rank=max(CASE.num_tokens), max_recv_rows=max(CASE.num_tokens) * NUM_RANKS * CASE.num_topk,
            device=self.device, timeout=TIMEOUT_S,
        )  # fmt: skip
        self.own = random.Random(os.getpid())  # how long this rank dawdles

    def round(self, number: int, members: Collection[int], is_blind: bool = False, dawdle_s: float = 0.0) -> None:
        """A dispatch and a combine among `members`, compared with the reference."""
        case, who = spec_of(number), f"rank {self.rank}, round {number} of {members}"
        got, outputs, sums = wanted(number, tuple(members))
        here, y = got[self.rank], outputs[self.rank]
        self.dawdle(dawdle_s)
        d = self.call("dispatch", lambda: send(self.buffer, case, sync=not is_blind))
        num_rows = len(y)
        assert d.got.tolist() == [int(src in members) for src in ALL], who
        for have, want in zip(_parts(d.x), _parts(here.x), strict=True):
            expect_equal(have[:num_rows].cpu(), want, f"{who}: dispatch")
        self.dawdle(dawdle_s)
        rows = torch.zeros(len(_values(d.x)), CASE.hidden, dtype=y.dtype)
        rows[:num_rows] = y
        bias = tuple(one.to(self.device) for one in biases_of(case, self.rank)) or None
        c = self.call("combine", lambda: self.buffer.combine(rows.to(self.device), d.handle, bias=bias))
        expect_equal(c.x.cpu(), sums[self.rank], f"{who}: combine")

    def call(self, op: str, make: Callable[[], Any]) -> Any:
        """Make one call to its end; raises what has become of it, with the times."""
        started = time.monotonic_ns()
        try:
            with self.sign:
                result = make()
                self.finish()
            self.buffer.check()
            return result
        except RankFailedError as error:
            if error.ranks != (VICTIM,):
                raise
            raise Lost(Call(op, started, time.monotonic_ns(), False)) from error

    def finish(self) -> None:
        """Wait for the GPU; raises what stays wrong with it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def dawdle(self, most_s: float) -> None:
        """Be a little late now and then, so that the others wait in their kernels."""
        if most_s and self.own.random() < 0.5:
            time.sleep(self.own.random() * most_s)


class Lost(Exception):
    """A call has told that the victim is dead."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.call = call


def _parts(x: Any) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def warm(platform: str, rank: int) -> None:
    """Do what takes a process long: a CUDA context, kernels, the reference's results."""
    if platform == "cuda":
        torch.cuda.set_device(device_of(rank))
        gpu = CudaPlatform(device_of(rank))
        head = kernel_head(NUM_RANKS, gpu.limits.max_warps, gpu.limits.stall_one_in)
        gpu.kernels(KERNELS, head)
        torch.ones(4, device=gpu.device).to(torch.bfloat16).cpu()
    for number in range(NUM_SPECS):
        wanted(number, ALL)
        wanted(number, SURVIVORS)


def live(rank: int, platform: str, folder: str, first_life: int, num_kills: int) -> list[str]:
    """Be a rank from a life on: of the survivors to the end, of a victim until it is killed."""
    if platform == "cuda":
        torch.cuda.set_device(device_of(rank))
    group = join(rank, folder, first_life)
    player = Player(rank, platform, group)
    player.sign = Sign(folder, rank, first_life)
    for life in range(first_life, num_kills + 1):
        if life > first_life:
            assert player.buffer.sync().tolist() == [1] * NUM_RANKS, f"life {life}: not taken in"
        for number in range(2):  # of each layout one: the first of an epoch maps what combines read
            player.round((2 * life + number) % NUM_SPECS, ALL)
        tell(("ready", life))
        if is_last(folder, life, num_kills):
            break
        tell(("lost", life, *until_lost(player, life)))
        if life % 2 == 0:
            assert player.buffer.sync().tolist() == [1] * VICTIM + [0]
            for number in range(2):
                player.round((2 * life + number) % NUM_SPECS, SURVIVORS)
        take_in(group)
    dist.barrier()  # who ends first is dead to those who still look
    player.buffer.close()
    player.finish()
    dist.destroy_process_group()
    return ["ok"]


def until_lost(player: Player, life: int) -> Call:
    """Make rounds until a call tells that the victim is dead."""
    number = 0
    while True:
        rng = random.Random(1000 * life + number)
        try:
            dawdle_s = 0.004 if player.rank == VICTIM else 0.001
            player.round(rng.randrange(NUM_SPECS), ALL, rng.random() < 0.4, dawdle_s)
        except Lost as lost:
            return lost.call
        number += 1


THROUGHPUT = Play(warm, live)
