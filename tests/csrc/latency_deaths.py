"""Many deaths in one run of a latency buffer, on GPUs or emulated: two ranks live through all of it, the third dies.

It is killed at a random moment of a random call, again and again, and each time another process takes its place.

The ranks make rounds (a dispatch and a combine, some with their halves apart) one behind the other; whoever is killed,
is killed from outside, at a random time. The survivors compare every result bit for bit: with the victim, as long as it
comes whole, and without it afterwards. When both have lost it they make two rounds on the new mask, look for errors
that stay on the GPU, take the replacement in and compare the first rounds with it.

Replacements are processes that wait with torch, a CUDA context and loaded kernels. The owner measures how long each
survivor's first call without the victim took to end: from the kill, or from its own begin where that was later, for
what the program did before the call (it compares results, and meets the other one) is not the call's. Nine of ten kills
are aimed: the owner waits until the victim is inside a call. What the victim's `Sign` says when it is dead is counted.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import epee
from epee.ep.latency.gpu.params import KERNELS, kernel_head
from epee.gpu.platform import CudaPlatform
from tests.csrc.latency_cases import Plan, Round, expected, expected_sums, expert_output, same
from tests.harness import Pool, RankFailure, Worker, take_until, tell

NUM_RANKS, VICTIM = 3, 2
TIMEOUT_S = 40.0  # of whatever should not happen
NUM_SPECS = 6
STOP_EVERY = 5  # each fifth victim is stopped first
AIMED = 0.9  # of the kills: the victim is inside a call
PLAN = Plan((Round((0, 0, 0)),), num_local_experts=4, num_topk=3, hidden=512, max_tokens=12)


def spec_of(number: int) -> Round:
    """What the ranks do in a round: tokens, payload, weights."""
    rng = random.Random(number)
    return Round(
        tuple(rng.choice([1, 5, 12]) for _ in range(NUM_RANKS)),
        use_fp8=number % 2 == 0,
        weights="combine" if number % 3 == 0 else "dispatch",
        is_wide=number % 4 == 1,
        seed=number,
    )


@functools.cache
def wanted(number: int, came: bool) -> Any:
    """Inputs and what each rank's dispatch brings, with the victim or without."""
    return expected(PLAN, spec_of(number), [[True, True, came]] * NUM_RANKS)


@functools.cache
def wanted_sums(number: int, heard: bool) -> list[torch.Tensor]:
    """What each rank's combine brings."""
    inputs, packed = wanted(number, True)
    return expected_sums(PLAN, spec_of(number), inputs, packed, [[True, True, heard]] * NUM_RANKS)


class Sign:
    """Whether a process is inside a call: a byte that it shares with the owner, which outlives it."""

    def __init__(self, folder: str, rank: int, life: int) -> None:
        fd = os.open(f"{folder}/sign-{rank}-{life}", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, 1)
        self._byte = mmap.mmap(fd, 1)
        os.close(fd)

    def __enter__(self) -> None:
        self._byte[0] = 1

    def __exit__(self, *_: object) -> None:
        self._byte[0] = 0

    @property
    def is_set(self) -> bool:
        """Whether it is."""
        return self._byte[0] == 1


class Call(NamedTuple):
    """A call that has ended: when it began and ended (`time.monotonic_ns`), and whether the victim counted."""

    op: str
    started_ns: int
    ended_ns: int
    came: bool


class Player:
    """One rank's end of the buffer."""

    sign: Any = contextlib.nullcontext()

    def __init__(self, rank: int, platform: str, group: Any) -> None:
        self.rank = rank
        self.is_gpu = platform == "cuda"
        self.device = device_of(rank) if self.is_gpu else torch.device("cpu")
        os.environ["EPEE_POISON"] = "1"
        self.buffer = make_buffer(platform, group, self.device)
        self.mask = torch.ones(NUM_RANKS, dtype=torch.int32, device=self.device)
        self.own = random.Random(os.getpid())  # how long this rank dawdles

    def finish(self) -> None:
        """Wait for the GPU; raises what stays wrong with it."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def round(self, number: int, is_split: bool, dawdle_s: float) -> list[Call]:
        """A dispatch and a combine, compared with the reference."""
        this, rank = spec_of(number), self.rank
        given = wanted(number, True)[0][rank]
        x, idx, weights = (part.to(self.device) for part in (given.x, given.topk_idx, given.topk_weights))
        early = None if this.weights == "combine" else weights
        ways = {"active_ranks": self.mask, "timeout_us": int(TIMEOUT_S * 1e6), "return_hook": is_split}
        self.dawdle(dawdle_s)
        d, first = self.call(
            "dispatch", dawdle_s, lambda: self.buffer.dispatch(x, idx, early, use_fp8=this.use_fp8, **ways)
        )
        packed = wanted(number, first.came)[1][rank]
        self.compare(d, packed, number)
        y = expert_output(PLAN, packed, rank).to(self.device)
        late = weights if this.weights == "combine" else None
        kind = torch.float32 if this.is_wide else torch.bfloat16
        self.dawdle(dawdle_s)
        c, second = self.call(
            "combine",
            dawdle_s,
            lambda: self.buffer.combine(y, d.handle, topk_weights=late, partial_dtype=kind, **ways),
        )
        assert c.got.tolist()[:2] == [True, True], (number, c.got)
        same(c.x.cpu(), wanted_sums(number, second.came)[rank], f"rank {rank}, round {number}: combine")
        self.buffer.check()
        return [first, second]

    def call(self, op: str, dawdle_s: float, make: Any) -> tuple[Any, Call]:
        """Make one call to its end; takes the times."""
        started = time.monotonic_ns()
        with self.sign:
            result = make()
            if result.hook is not None:
                self.dawdle(dawdle_s)
                result.hook()
            self.finish()
        return result, Call(op, started, time.monotonic_ns(), bool(result.got[VICTIM]))

    def dawdle(self, most_s: float) -> None:
        """Be a little late now and then, so that the others wait in their kernels."""
        if most_s and self.own.random() < 0.5:
            time.sleep(self.own.random() * most_s)

    def compare(self, d: Any, want: Any, number: int) -> None:
        """Every bit of a dispatch."""
        who = f"rank {self.rank}, round {number}"
        same(d.got.cpu(), want.got, f"{who}: got")
        same(d.num_tokens_per_expert.cpu(), want.num_tokens_per_expert, f"{who}: counts")
        same(d.handle.layout_range.cpu(), want.layout_range, f"{who}: layout_range")
        parts = zip(*(x if isinstance(x, tuple) else (x,) for x in (d.x, want.x)), strict=True)
        for have, there in parts:
            rows = have.cpu()
            for expert, count in enumerate(want.num_tokens_per_expert.tolist()):
                same(rows[expert, :count], there[expert, :count], f"{who}: rows of expert {expert}")


def device_of(rank: int) -> torch.device:
    """The GPU of a rank; ranks share them."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def make_buffer(platform: str, group: Any, device: torch.device) -> epee.LatencyBuffer:
    """The buffer of the run."""
    kind: type[epee.LatencyBuffer] = epee.LatencyBuffer
    if platform == "emulated":
        from tests.csrc.test_latency_buffer_emulated import EmulatedLatencyBuffer as kind
    return kind(
        group, num_experts=NUM_RANKS * PLAN.num_local_experts, hidden=PLAN.hidden, num_topk=PLAN.num_topk,
        max_tokens_per_rank=PLAN.max_tokens, device=device, timeout=TIMEOUT_S,
    )  # fmt: skip


def warm(platform: str, rank: int) -> None:
    """Do what takes a process long: a CUDA context, kernels, the reference's results."""
    if platform == "cuda":
        torch.cuda.set_device(device_of(rank))
        gpu = CudaPlatform(device_of(rank))
        head = kernel_head(NUM_RANKS, gpu.limits.stall_one_in)
        gpu.kernels(KERNELS, head)
        torch.ones(4, device=gpu.device).to(torch.bfloat16).cpu()
    for number in range(NUM_SPECS):
        for is_in in (True, False):
            wanted(number, is_in)
            wanted_sums(number, is_in)


def join(rank: int, folder: str, first_life: int) -> Any:
    """Make the group, or join it in a later life."""
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    options = epee.BackendOptions(fault_mode="mask", op_timeout=TIMEOUT_S, is_extension=first_life > 0)
    dist.init_process_group("epee", store=store, rank=rank, world_size=NUM_RANKS, pg_options=options)
    if first_life:
        dist.all_reduce(torch.ones(1))
    return dist.group.WORLD


def is_last(folder: str, life: int, num_kills: int) -> bool:
    """Whether nobody dies in a life, for which all are ready."""
    return life == num_kills or Path(folder, f"last-{life}").exists()


def take_in(group: Any) -> None:
    """Wait until the group has lost the victim, and take the next process into its place."""
    while int(group.active_ranks()[VICTIM]):
        dist.all_reduce(torch.ones(1))
    group.recover_ranks([VICTIM], TIMEOUT_S)
    dist.all_reduce(torch.ones(1))


def live(rank: int, platform: str, folder: str, first_life: int, num_kills: int) -> list[str]:
    """Be a rank from a life on: of the survivors to the end, of a victim until it is killed."""
    if platform == "cuda":
        torch.cuda.set_device(device_of(rank))
    group = join(rank, folder, first_life)
    player = Player(rank, platform, group)
    player.sign = Sign(folder, rank, first_life)
    for life in range(first_life, num_kills + 1):
        if life > first_life:
            assert player.buffer.sync(player.mask).tolist() == [1] * NUM_RANKS, f"life {life}: not taken in"
        for number in range(2):
            calls = player.round((life + number) % NUM_SPECS, (life + number) % 3 == 0, 0.0)
            assert all(call.came for call in calls), f"life {life}: the newcomer was lost"
        tell(("ready", life))
        if is_last(folder, life, num_kills):
            break
        tell(("lost", life, *until_lost(player, life)))
        for number in range(2):
            calls = player.round((life + number) % NUM_SPECS, number == 1, 0.0)
            assert not any(call.came for call in calls)
            assert player.mask.tolist() == [1, 1, 0]
        player.finish()
        player.buffer.check()
        take_in(group)
    player.buffer.close()
    player.finish()
    dist.destroy_process_group()
    return ["ok"]


def until_lost(player: Player, life: int) -> Call:
    """Make rounds until both survivors have lost the victim; returns the first call without it."""
    lost: Call | None = None
    number = 0
    while True:
        rng = random.Random(1000 * life + number)
        is_split = rng.random() < 0.4
        calls = player.round(rng.randrange(NUM_SPECS), is_split, 0.004 if player.rank == VICTIM else 0.001)
        number += 1
        lost = lost or next((call for call in calls if not call.came), None)
        seen = torch.tensor([int(lost is not None)])
        dist.all_reduce(seen)
        if int(seen) == 2:
            assert lost is not None
            return lost


class Deaths(NamedTuple):
    """What a run has measured, in milliseconds to the end of a call, by survivor.

    Attributes:
        in_flight: of the calls that had begun before the kill, from the kill.
        later: of those that began afterwards, from their begin.
        later_in_all: the same, from the kill.
        inside: for each victim, whether it was killed inside a call.
        wall_s: of the whole run.
    """

    in_flight: dict[int, list[float]]
    later: dict[int, list[float]]
    later_in_all: dict[int, list[float]]
    inside: list[bool]
    wall_s: float

    def __str__(self) -> str:
        lines = [f"{sum(map(len, self.in_flight.values())) + sum(map(len, self.later.values()))} ends of calls"]
        for name, found in (
            ("begun before the kill, from the kill", self.in_flight),
            ("begun after it, from their begin", self.later),
            ("begun after it, from the kill", self.later_in_all),
        ):
            for rank, times in found.items():
                lines.append(f"  rank {rank}, {name}: {spread(times)}")
        inside = f"  {sum(self.inside)} of {len(self.inside)} victims were killed inside a call"
        return "\n".join([*lines, inside, f"  {self.wall_s:.1f} s in all"])


def spread(times: list[float]) -> str:
    """A distribution in words."""
    if not times:
        return "none"
    ordered = sorted(times)
    at = [ordered[min(len(ordered) - 1, int(part * len(ordered)))] for part in (0.5, 0.99)]
    return f"n={len(ordered)} p50 {at[0]:.2f} ms, p99 {at[1]:.2f} ms, max {ordered[-1]:.2f} ms"


class Play(NamedTuple):
    """What the processes of a run do: each its `warm(platform, rank)`, then `live(rank, platform, folder, first_life,
    num_kills)`, which tells the owner ("ready", life) and ("lost", life, *call)."""

    warm: Callable[[str, int], None]
    live: Callable[[int, str, str, int, int], list[str]]


LATENCY = Play(warm, live)


def run_deaths(
    platform: str,
    num_kills: int,
    seed: int,
    num_spares: int,
    timeout_s: float,
    play: Play = LATENCY,
    enough_s: float = math.inf,
) -> Deaths:
    """Run it; raises `RankFailure` with what the processes said when anything goes wrong.

    When it has killed for `enough_s` nobody is killed any more.
    """
    warm, live = play
    rng = random.Random(seed)
    started = time.monotonic()
    deadline = started + timeout_s
    with Pool() as pool, pool.folder() as folder:
        survivors = pool.hire(2)
        for rank, worker in enumerate(survivors):
            worker.start(warm, platform, rank, timeout_s=timeout_s)
        spares = deque(pool.hire(1 + num_spares))
        for worker in spares:
            worker.start(warm, platform, VICTIM, timeout_s=timeout_s)
        for worker in survivors:
            _await(worker, [worker], deadline)
        result = Deaths({0: [], 1: []}, {0: [], 1: []}, {0: [], 1: []}, [], 0.0)
        begun = time.monotonic()
        for life in range(num_kills + 1):
            victim = spares.popleft()
            if time.monotonic() - begun > enough_s:
                Path(folder, f"last-{life}").touch()  # before the victim, without whom nobody is ready
            _await(victim, [victim, *survivors], deadline)
            victim.start(live, VICTIM, platform, folder, life, num_kills, timeout_s=timeout_s)
            if life == 0:
                for rank, worker in enumerate(survivors):
                    worker.start(live, rank, platform, folder, 0, num_kills, timeout_s=timeout_s)
            team = [*survivors, victim]
            _until(team, lambda team=team, life=life: all(("ready", life) in worker.told for worker in team), deadline)
            if is_last(folder, life, num_kills):
                break
            sign = Sign(folder, VICTIM, life)
            killed_ns = _kill(victim, rng, life, sign)
            _until(survivors, lambda life=life: all(_loss(worker, life) for worker in survivors), deadline)
            for rank, worker in enumerate(survivors):
                _, _, _, call_ns, ended_ns, _ = _loss(worker, life)
                if call_ns <= killed_ns:
                    result.in_flight[rank].append((ended_ns - killed_ns) / 1e6)
                else:
                    result.later[rank].append((ended_ns - call_ns) / 1e6)
                    result.later_in_all[rank].append((ended_ns - killed_ns) / 1e6)
            pool.release([victim])
            result.inside.append(sign.is_set)
            if life + 1 + len(spares) <= num_kills:
                spares.append(pool.hire(1)[0])
                spares[-1].start(warm, platform, VICTIM, timeout_s=timeout_s)
        _until([*survivors, victim], lambda: all(w.result is not None for w in [*survivors, victim]), deadline)
        return result._replace(wall_s=time.monotonic() - started)


def _loss(worker: Worker, life: int) -> Any:
    return next((told for told in worker.told if told[:2] == ("lost", life)), None)


def _kill(victim: Worker, rng: random.Random, life: int, sign: Sign) -> int:
    """Kill it at a random moment, as a rule of a call, each fifth one stopped before; returns when."""
    time.sleep(rng.random() * 0.06)
    if rng.random() < AIMED:
        until, later_s = time.monotonic() + 1.0, rng.random() * 2e-4
        while not sign.is_set and time.monotonic() < until:
            pass
        until = time.monotonic() + later_s
        while time.monotonic() < until:
            pass
    if life % STOP_EVERY == STOP_EVERY - 1:
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(rng.random() * 0.03)
    killed_ns = time.monotonic_ns()
    os.kill(victim.pid, signal.SIGKILL)
    return killed_ns


def _await(worker: Worker, watched: list[Worker], deadline: float) -> None:
    """Until a worker has done its task."""
    _until(watched, lambda: worker.result is not None, deadline)


def _until(workers: list[Worker], until: Any, deadline: float) -> None:
    """Take what workers send until `until()`; nobody may fail meanwhile."""

    def has_failed() -> bool:
        return any(worker.result is not None and worker.result[0] in ("error", "ended") for worker in workers)

    is_done = take_until(workers, lambda: until() or has_failed(), max(0.0, deadline - time.monotonic()))
    if has_failed() or not (is_done or until()):
        take_until(workers, lambda: False, 3.0)
        told = [
            f"--- worker {n}: {worker.result or 'silent'}; told {worker.told[-3:]}" for n, worker in enumerate(workers)
        ]
        text = "\n".join(told)
        raise RankFailure(text.replace("\\n", "\n"))
