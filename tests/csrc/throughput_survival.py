"""Throughput kernels when ranks are left out, die, stand still or come back, on any platform: the right error, no trap,
the reference's bits on the new mask, and nothing of an old view taken for new."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from epee import reference
from epee.ep.throughput.gpu import dispatch as throughput_dispatch
from epee.ep.throughput.gpu.slots import Taken
from epee.ep.throughput.gpu.types import CombineOptions, DispatchOptions, DispatchResult, ThroughputHandle
from epee.ep.throughput.order import CombineOrder
from epee.errors import CommTimeoutError, EpeeError, MismatchError, RankFailedError, ResourceError, StaleHandleError
from epee.gpu.platform import LentRegion
from epee.gpu.shapes import FEW_TOKENS
from epee.memory.shared import process_start_time
from epee.reference.orders import combine_in_order
from epee.view.process.detector import DeathWatch
from tests.csrc.emulated import EmulatedPlatform, all_gather_bytes
from tests.csrc.throughput_cases import (
    Case,
    biases_of,
    device_of,
    expect_equal,
    expert_output,
    inputs_of,
    make_buffer,
    seen_by,
)
from tests.csrc.throughput_end import ThroughputEnd
from tests.csrc.throughput_stress import CONFIGS, MOST_TOKENS, Round, draw_round, play
from tests.harness import run_ranks
from tests.harness.meeting import meet

LONG_S = 60.0  # a test that waits so long fails by its own time-out
SHORT_S = 0.6
PLACE_SEND = 4  # of `common/stall.cuh`: a sender's next token
BASE = CONFIGS[3]


def open_core(rank: int, num_ranks: int, platform: str, base: Case = BASE, num_slots: int = 2) -> ThroughputEnd:
    """A buffer for the rounds of `base`, behind one round of the expert layout, which makes its memory."""
    if platform == "cuda":
        torch.cuda.set_device(device_of(rank))
    case = replace(base, num_tokens=(MOST_TOKENS,) * num_ranks, expert_alignment=8)
    core = make_buffer(case, rank, platform, num_slots=num_slots)
    core.machine._all_gather = Circle(rank, num_ranks)
    play(core, Round(0, replace(case, layout="expert", routing="repeats"), True, "ordinary", False, False), rank)
    return core


class Circle:
    """Gathers bytes among the members of a view, through the store by which the ranks have found each other."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._store = dist.distributed_c10d._get_default_store()
        self.enter(range(num_ranks), 0)

    def enter(self, members: Collection[int], tag: int) -> None:
        """Gather among others from now on."""
        self._members, self._tag, self._count = members, tag, 0

    def __call__(self, data: bytes) -> list[bytes]:
        self._count += 1
        head = f"view {self._tag}, gather {self._count}, rank "
        self._store.set(head + str(self._rank), data)
        return [self._store.get(head + str(src)) if src in self._members else b"" for src in range(self._num_ranks)]


def enter(core: ThroughputEnd, members: Collection[int], tag: int, is_open: bool = True) -> None:
    """Go on in a view of `members`."""
    circle = core.machine._all_gather
    assert isinstance(circle, Circle)
    circle.enter(members, tag)
    core.machine.set_view([rank in members for rank in range(core.config.num_ranks)], tag, is_open=is_open)


def rounds(base: Case, num_ranks: int, seed: int, count: int) -> Iterator[Round]:
    """Rounds at random that fit a core of `open_core`."""
    config, number = CONFIGS.index(base), 0
    while count:
        this = draw_round(seed, number, num_ranks)
        number += 1
        if this.config == config:
            count -= 1
            yield this


def play_all(core: ThroughputEnd, seed: int, count: int, members: Collection[int], base: Case = BASE) -> None:
    """Play some rounds among `members`."""
    rank, num_ranks = core.config.rank, core.config.num_ranks
    for this in rounds(base, num_ranks, seed, count):
        try:
            play(core, this, rank, members)
        except Exception as error:
            raise AssertionError(f"seed {seed}, rank {rank} of {sorted(members)}: {this}") from error
    settle(core)
    core.check()


def settle(core: ThroughputEnd) -> None:
    """Wait for the GPU."""
    core.machine.platform.synchronize()


def error_of(call: Callable[[], Any]) -> EpeeError | None:
    """What `call` raises."""
    try:
        call()
    except EpeeError as error:
        return error
    return None


def gather_int(value: int) -> list[int]:
    """Everybody's number; all ranks must live."""
    return [int.from_bytes(raw, "little") for raw in all_gather_bytes(value.to_bytes(8, "little"))]


def whole(region: LentRegion) -> torch.Tensor:
    """The bytes of a region."""
    return region.lease(0, region.nbytes, None)


def emulated_platform(core: ThroughputEnd) -> EmulatedPlatform:
    """The platform of a core whose kernels can be made to stand still."""
    platform = core.machine.platform
    assert isinstance(platform, EmulatedPlatform)
    return platform


def pause(core: ThroughputEnd, seconds: float) -> None:
    """Let the senders of this process stand still at each token; only emulated ones can."""
    for file in ("few", "dispatch", "expert"):
        emulated_platform(core).pause(file, PLACE_SEND, seconds)


# --- left out from the start ------------------------------------------------------------------------------------------


def masked(rank: int, num_ranks: int, platform: str, members: tuple[int, ...], base_idx: int, count: int) -> bool:
    """Some ranks are out, and their memory stays as it was, but for the control words that they write themselves."""
    base = CONFIGS[base_idx]
    core = open_core(rank, num_ranks, platform, base)
    machine = core.machine
    regions = [machine._control[rank], machine.slots[rank]]
    settle(core)
    all_gather_bytes(b"all have left the first round")
    before = [whole(region).clone() for region in regions]
    all_gather_bytes(b"kept")
    if rank in members:
        enter(core, members, 1000)
        play_all(core, 5, count, members, base)
        core.barrier(LONG_S)
        settle(core)
        core.check()
    all_gather_bytes(b"over")
    if rank in members:
        return True
    return all(
        torch.equal(region.lease(0, region.nbytes, None), old) for region, old in zip(regions, before, strict=True)
    )


def ordered(rank: int, num_ranks: int, platform: str, layout: str, members: tuple[int, ...]) -> None:
    """Every order of addition, with biases, in a view that leaves ranks out."""
    base = replace(BASE, num_local_experts=4, num_topk=8, num_bias=2, with_weights=True)
    case = replace(base, num_tokens=(11, 24, 7, 16)[:num_ranks], layout=layout, expert_alignment=4, seed=3)
    core = open_core(rank, num_ranks, platform)
    case = replace(case, num_local_experts=BASE.num_local_experts)
    if rank not in members:
        all_gather_bytes(b"over")
        return
    enter(core, members, 500)
    seen, inputs = seen_by(case, members)
    want = reference.dispatch(inputs, case.num_experts, layout=layout, expert_alignment=case.expert_alignment)
    ys = [expert_output(there.x, src, case) for src, there in enumerate(want)]  # type: ignore[arg-type]
    biases = [biases_of(seen, src) for src in range(num_ranks)]
    d = send(core, case, rank, DispatchOptions(layout, case.expert_alignment, timeout_s=LONG_S))
    device = d.x.device
    for by in ("rank", "last_k", "k") if layout == "expert" else ("rank", "last_k"):
        for bias_first in (False, True):
            sums = combine_in_order(inputs, want, ys, case.num_experts, by=by, bias_first=bias_first, bias=biases)
            handle = d.handle
            order = CombineOrder(by, bias_first, topk_idx=inputs_of(case, rank).topk_idx.to(device))  # type: ignore[union-attr]
            out, _ = core.combine(
                expert_output(d.x, rank, case), handle, None, [one.to(device) for one in biases[rank]], None,
                CombineOptions(timeout_s=LONG_S, order=order),
            )  # fmt: skip
            settle(core)
            core.check()
            expect_equal(out.cpu(), sums[rank], f"{by}, bias_first={bias_first}")
    all_gather_bytes(b"over")


def send(core: ThroughputEnd, case: Case, rank: int, options: DispatchOptions) -> DispatchResult:
    """Dispatch this rank's tokens of a case."""
    given = inputs_of(case, rank)
    device = core.machine.platform.device
    assert isinstance(given.x, torch.Tensor)
    assert given.topk_idx is not None
    weights = None if given.topk_weights is None else given.topk_weights.to(device)
    return core.dispatch(given.x.to(device), None, given.topk_idx.to(device), weights, None, options)


def send_whole(core: ThroughputEnd, case: Case, rank: int, timeout_s: float) -> None:
    """The same, and raise what became of it."""
    send(core, case, rank, DispatchOptions(timeout_s=timeout_s))
    settle(core)
    core.check()


# --- death ------------------------------------------------------------------------------------------------------------


class DeathTeller:
    """Tells a core of deaths, as `Buffer`'s thread does."""

    def __init__(self, core: ThroughputEnd) -> None:
        rank = core.config.rank
        pids = gather_int(os.getpid())
        self._watch = DeathWatch()
        for peer, pid in enumerate(pids):
            if peer != rank:
                self._watch.watch(peer, pid, process_start_time(pid))
        self._core = core
        self.dead: tuple[int, ...] = ()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.dead = self._watch.dead()
            self._core.machine.device.mark_dead(self.dead)
            self._core.machine.bury(self.dead)
            time.sleep(0.003)


def kill_after(seconds: float) -> None:
    """End this process in the midst of whatever it does then."""
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()


def until_error(work: Callable[[int], None], most: int = 100_000) -> EpeeError:
    """Repeat `work` until it raises."""
    for number in range(most):
        error = error_of(lambda: work(number))  # noqa: B023 - called at once
        if error is not None:
            return error
    raise AssertionError("nobody died")


class Death(NamedTuple):
    """When the last rank dies: after so many seconds of rounds, at a place of a kernel where it stands still before (on
    emulated platforms)."""

    after_s: float
    file: str = ""
    place: int = 0


def killed(rank: int, num_ranks: int, platform: str, layout: str, way: str, death: Death) -> None:
    """The last rank dies in the midst of some round; the others hear of it, agree, and go on. `way`: "few" for the
    one-kernel dispatch, "async" without waiting for counts, "order" for a combine in an order of its own."""
    core = open_core(rank, num_ranks, platform)
    teller = DeathTeller(core)
    case = replace(BASE, num_tokens=(MOST_TOKENS,) * num_ranks, layout=layout, expert_alignment=8, seed=1)
    throughput_dispatch.FEW_TOKENS = FEW_TOKENS if way == "few" else 0
    meet("the rounds begin", rank, num_ranks)  # soon one is dead, also to those who are still in a gather
    if rank == num_ranks - 1:
        if death.file:
            emulated_platform(core).pause(death.file, death.place, LONG_S)
        kill_after(death.after_s)

    old: ThroughputHandle | None = None

    def work(number: int) -> None:
        nonlocal old
        d = send(core, replace(case, seed=number), rank, DispatchOptions(layout, 8, way != "async", timeout_s=LONG_S))
        y = expert_output(d.x, rank, case)
        order = CombineOrder("last_k") if way == "order" else None
        core.combine(y, d.handle, None, (), None, CombineOptions(timeout_s=LONG_S, order=order))
        settle(core)
        core.check()
        old = d.handle

    started = time.monotonic()
    error = until_error(work)
    assert isinstance(error, RankFailedError), error
    assert error.ranks == (num_ranks - 1,)
    assert time.monotonic() - started < LONG_S / 2, "the time-out ended it"
    survivors = range(num_ranks - 1)
    while teller.dead != (num_ranks - 1,):
        time.sleep(0.001)
    enter(core, survivors, 1_000_000)
    play_all(core, 6, 8, survivors)
    if old is not None:
        check_old_handle(core, old)


def check_old_handle(core: ThroughputEnd, old: ThroughputHandle) -> None:
    """A handle of an earlier view is refused on all ranks, by the kernels themselves, and nothing else suffers."""
    x = torch.zeros(old.num_tokens, BASE.hidden, dtype=torch.bfloat16, device=core.machine.platform.device)
    y = torch.zeros(old.num_recv or 0, BASE.hidden, dtype=torch.bfloat16, device=x.device)

    def again() -> None:
        core.dispatch(x, None, None, None, old, DispatchOptions(timeout_s=LONG_S, sync=False))
        settle(core)
        core.check()

    def back() -> None:
        core.combine(y, old, None, (), None, CombineOptions(timeout_s=LONG_S))
        settle(core)
        core.check()

    for call in (again, back):
        error = error_of(call)
        assert isinstance(error, StaleHandleError), error
    play_all(core, 11, 2, [rank for rank in range(core.config.num_ranks) if rank in core.machine.members])


# --- late -------------------------------------------------------------------------------------------------------------


def late(rank: int, num_ranks: int, platform: str) -> list[str]:
    """The last rank is silent, is named and left out; what it does meanwhile harms nobody; then all are in again."""
    core = open_core(rank, num_ranks, platform)
    last, errors = num_ranks - 1, []
    case = replace(BASE, num_tokens=(MOST_TOKENS,) * num_ranks, seed=2)
    all_gather_bytes(b"at about the same time")
    if rank != last:
        error = error_of(lambda: send_whole(core, case, rank, 2 * SHORT_S))
        errors.append(f"{type(error).__name__} {getattr(error, 'ranks', ())}")
        all_gather_bytes(b"left out")
        enter(core, range(last), 1000)
        play_all(core, 7, 10, range(last))
    else:
        all_gather_bytes(b"left out")
        for number in range(4):  # calls of the old view
            error = error_of(lambda: send_whole(core, replace(case, seed=number), rank, 0.3))  # noqa: B023
            errors.append(type(error).__name__)
            core.refuse(0.3)
    tag = max(gather_int(core.machine.tags())) + 8
    enter(core, range(num_ranks), tag)
    play_all(core, 8, 10, range(num_ranks))
    return errors


def late_stores(rank: int, num_ranks: int, platform: str) -> None:
    """The last rank stands still in the midst of its rows and is left out; its late rows harm nobody. Emulated only."""
    core = open_core(rank, num_ranks, platform)
    last = num_ranks - 1
    case = replace(BASE, num_tokens=(2,) * num_ranks, routing="random", seed=2)
    if rank == last:
        pause(core, 0.005)  # for each thread at each of its tokens, of which there are many
        many = replace(case, num_tokens=(2,) * last + (MOST_TOKENS,))
        error = error_of(lambda: send(core, many, rank, DispatchOptions(sync=False, timeout_s=SHORT_S)))
        pause(core, 0)
        core.machine.device.report.words[:] = memoryview(bytes(8 * len(core.machine.device.report.words))).cast("Q")
        all_gather_bytes(b"all have been stored")
        del error
    else:
        d = send(core, case, rank, DispatchOptions(timeout_s=SHORT_S))
        assert isinstance(error_of(core.check), CommTimeoutError)
        del d
        enter(core, range(last), 1000)
        assert core.machine.pool.haunted
        refused = graph_in_haunted_slot(core, case)
        assert isinstance(refused, ResourceError if rank == 0 else MismatchError), refused
        # lies where the late rows would lie if the slot of the failed call had been lent again
        full = replace(case, num_tokens=(MOST_TOKENS,) * num_ranks)
        d = send(core, full, rank, DispatchOptions(timeout_s=LONG_S))
        kept = d.x.clone()
        place = core.combine_input(d.handle, d.x.dtype)
        if place is not None:
            place.copy_(kept)
        all_gather_bytes(b"all have been stored")
        expect_equal(d.x, kept, "a result")
        if place is not None:
            expect_equal(place, kept, "a combine input")
        del d, place
    tag = max(gather_int(core.machine.tags())) + 8
    enter(core, range(num_ranks), tag)
    assert not core.machine.pool.haunted
    play_all(core, 9, 6, range(num_ranks))


def graph_in_haunted_slot(core: ThroughputEnd, case: Case) -> EpeeError | None:
    """A call of rank 0 that grants a haunted slot, as graphs do that were recorded before."""
    machine, rank = core.machine, core.config.rank
    take = machine.take
    slot = min(machine.pool.haunted)
    if rank == 0:
        machine.take = lambda stream, is_granted: Taken(machine.pool, slot, [stream], True)  # type: ignore[method-assign]
    error = error_of(lambda: send_whole(core, case, rank, LONG_S))
    machine.take = take  # type: ignore[method-assign]
    return error


# --- graphs before a view is entered ----------------------------------------------------------------------------------


def replayed_before(rank: int, num_ranks: int, platform: str, first: str) -> str:
    """Rank 0 replays graphs between the two steps into a view; what it did there is nothing to the calls of the view.

    Returns:
        What the first call of the view says, one that fails on all ranks or one that does not.
    """
    core, case = open_core(rank, num_ranks, platform), replace(BASE, num_tokens=(5,) * num_ranks)
    tag = max(gather_int(core.machine.tags())) + 8
    enter(core, range(num_ranks), tag, is_open=False)
    all_gather_bytes(b"all are ready")
    if rank == 0:
        replay_all_kinds(core, case)
    core.machine.open_view()
    all_gather_bytes(b"all are there")
    assert core.machine.tags() == tag
    error = None
    if first == "barrier":
        core.barrier(LONG_S)
    elif first == "refusal" and rank == 1:
        core.refuse(LONG_S)
    elif first != "nothing":
        error = error_of(lambda: send_whole(core, case, rank, LONG_S))
    settle(core)
    error = error or error_of(core.check)
    play_all(core, 11, 12, range(num_ranks))
    return type(error).__name__


def replay_all_kinds(core: ThroughputEnd, case: Case) -> None:
    """Launch what graphs with all kinds of calls launch, which the host does not count; drop what they report."""
    machine, rank = core.machine, core.config.rank
    counted = machine.num_calls
    for layout in ("rank", "expert", "rank"):
        d = send(core, case, rank, DispatchOptions(layout, case.expert_alignment, sync=False, timeout_s=LONG_S))
        with contextlib.suppress(EpeeError):  # the failure of the dispatch, which a graph's combine does not look for
            core.barrier(LONG_S)
        with contextlib.suppress(EpeeError):
            if layout == "rank":  # the other one is told by its recording where its rows are pulled from
                core.combine(torch.zeros_like(d.x), d.handle, None, [], None, CombineOptions(timeout_s=LONG_S))
        settle(core)
        while error_of(core.check) is not None:
            pass
    machine.num_calls = counted


# --- views at random --------------------------------------------------------------------------------------------------


def views(rank: int, num_ranks: int, platform: str, num_views: int, seed: int) -> None:
    """Views at random; who is out makes calls of its own all the time, which nobody may take for new ones."""
    core = open_core(rank, num_ranks, platform, num_slots=8)  # each rank that leaves alive may take some with it
    rng = random.Random(seed)
    case = replace(BASE, num_tokens=(3,) * num_ranks)
    for number in range(num_views):
        tag = max(gather_int(core.machine.tags())) + rng.choice([1, 2, 3, 8, 100])
        members = sorted(rng.sample(range(num_ranks), rng.randrange(1, num_ranks + 1)))
        if rank in members:
            enter(core, members, tag)
            play_all(core, 100 * seed + number, rng.choice([1, 2, 3]), members)
            if random.Random(number).random() < 0.3:
                send(core, replace(case, seed=number), rank, DispatchOptions(timeout_s=LONG_S, sync=False))
        else:
            rng.choice([1, 2, 3])
            for _ in range(random.Random(f"{seed} {number} {rank}").randrange(5)):
                error = error_of(lambda: core.refuse(0.05))
                error = error or error_of(lambda: send(core, case, rank, DispatchOptions(timeout_s=0.05)))
                assert error is None or isinstance(error, (CommTimeoutError, MismatchError)), error


# --- checks -----------------------------------------------------------------------------------------------------------


def expect_only_dead(function: Callable[..., Any], num_ranks: int, *args: Any) -> None:
    """Run a case whose last rank kills itself: nobody else may fail."""
    run_ranks(function, num_ranks, *args, timeout_s=200, dead={num_ranks - 1})


def check_masked_ranks_are_neither_written_nor_awaited_nor_counted(platform: str) -> None:
    """Ranks that are left out are neither written, nor awaited, nor counted; bits are the reference's."""
    for idx, base in enumerate(CONFIGS):
        members = [(0, 2), (1, 2), (2,), (0, 1), (0,)][idx]
        assert base.num_topk
        assert run_ranks(masked, 3, platform, members, idx, 12, timeout_s=200) == [True] * 3


def check_every_order_leaves_masked_ranks_out(platform: str) -> None:
    """Every order of addition leaves masked ranks out."""
    for layout in ("rank", "expert"):
        run_ranks(ordered, 3, platform, layout, (0, 2), timeout_s=200)


def check_survivors_of_a_kill_are_told_and_go_on(platform: str) -> None:
    """Survivors of a SIGKILL get its name, and go on without it."""
    ways = (("rank", "few"), ("expert", ""), ("rank", "async"), ("rank", "order"))
    for number, (layout, way) in enumerate(ways):
        expect_only_dead(killed, 3, platform, layout, way, Death(0.2 + 0.13 * number))


def check_late_rank_is_named_left_out_and_comes_back(platform: str) -> None:
    """A late rank is named and left out; its calls meanwhile harm nobody; it comes back."""
    *others, last = run_ranks(late, 3, platform, timeout_s=200)
    for errors in others:
        assert errors == ["CommTimeoutError (2,)"]
    assert set(last) <= {"CommTimeoutError", "MismatchError"}, last


def check_nothing_of_an_old_view_passes_for_new(platform: str) -> None:
    """Views at random, with calls of those who are out: every bit is the reference's."""
    run_ranks(views, 4, platform, 14, 1, timeout_s=200)
    run_ranks(views, 2, platform, 14, 2, timeout_s=200)


CHECKS = {
    check.__name__.removeprefix("check_").replace("_", " "): check
    for check in (
        check_masked_ranks_are_neither_written_nor_awaited_nor_counted,
        check_every_order_leaves_masked_ranks_out,
        check_survivors_of_a_kill_are_told_and_go_on,
        check_late_rank_is_named_left_out_and_comes_back,
        check_nothing_of_an_old_view_passes_for_new,
    )
}
