"""A process takes a lost rank's place in a throughput buffer on GPUs, run on any platform, on poisoned memory.

Every function runs in one process, with `epee.Buffer` on the emulated GPU or a real one. Processes beyond the ranks are
replacements; each waits for its turn in a file. Every round is compared with the reference, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.engine.membership.group_membership import GroupMembership
from epee.ep.members.membership import Agreed
from epee.ep.throughput.gpu import epochs as epochs_of_gpus
from epee.ep.throughput.gpu.dispatch import plan_of
from epee.ep.throughput.gpu.epochs import Epochs
from epee.ep.throughput.gpu.types import DispatchOptions
from epee.ep.throughput.gpu_path import CudaPath
from epee.errors import (
    EpeeError,
    EvictedError,
    MismatchError,
    NoQuorumError,
    PeerError,
    ResourceError,
    StaleHandleError,
    UnsupportedError,
)
from epee.gpu.platform import LentRegion
from tests.csrc import survival_buffer_cases as cases
from tests.csrc.survival_buffer_cases import CASE, FP8, case_for, check_round, send, until_lost
from tests.csrc.throughput_cases import Case, inputs_of
from tests.ep.test_latency_rejoin import die_at, lose, start
from tests.harness import run_mortal
from tests.survive import stages

WAIT_S = 150.0  # for a turn; kernels may be built meanwhile


def make(num_ranks: int, **changes: Any) -> epee.Buffer:
    """The buffer of the tests; who waits so long fails the test by its own time-out."""
    return cases.make(num_ranks, **{"timeout": 100.0, **changes})


def die() -> None:
    """End this process like the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def machine_of(buffer: epee.Buffer) -> Any:
    """What the buffer is made of."""
    path = buffer._path
    assert isinstance(path, CudaPath)
    return path.machine


def addresses(buffer: epee.Buffer) -> list[list[int]]:
    """Where the memory of all ranks lies here: what graphs have recorded."""
    machine = machine_of(buffer)
    regions = [machine._control, machine.slots]
    if machine._places._place is not None:
        regions.append(machine._places._place.regions)
    return [[region.address for region in lent] for lent in regions]


def rounds(buffer: epee.Buffer, members: Collection[int], seed: int = 0, layouts: Any = ("rank", "expert")) -> Any:
    """Rounds of both layouts among `members`; returns a handle."""
    for base in (CASE, FP8):
        for layout in layouts:
            check_round(buffer, case_for(buffer.num_ranks, base, layout, seed), members)
    return check_round(buffer, case_for(buffer.num_ranks, CASE, layouts[0], seed + 1), members)


def step(buffer: epee.Buffer, case: Case) -> None:
    """A dispatch and a combine that may fail; raises what has become of them before anybody looks at a result."""
    d = send(buffer, case)
    buffer.combine(torch.zeros_like(d.x), d.handle)
    if buffer.config.device.type == "cuda":
        torch.cuda.synchronize()
    buffer.check()


def begin(slot: int, num_ranks: int, folder: str, victims: Sequence[int], **options: Any) -> tuple[Any, int]:
    """Make or join the group; return it, and this process's rank.

    Processes beyond the ranks join, each when its turn is reached, in the place of the next victim, or of the last one.
    """
    turn = slot - num_ranks
    rank = slot if turn < 0 else victims[min(turn, len(victims) - 1)]
    if turn >= 0:
        stages.wait_for(folder, f"lost {turn + 1}", WAIT_S)
    return start(rank, num_ranks, folder, joins=turn >= 0, **options), rank


def until_some_die(buffer: epee.Buffer, folder: str, *victims: int) -> None:
    """Make rounds among all ranks; then the victims end, and the others hear of one."""
    num_ranks = buffer.num_ranks
    rounds(buffer, range(num_ranks))
    stages.meet(folder, "made", buffer.rank, range(num_ranks))
    if buffer.rank in victims:
        die()
    until_lost(lambda: step(buffer, case_for(num_ranks, CASE, "rank", 0)))


def end(buffer: epee.Buffer, folder: str, seed: int | None = None) -> str:
    """Make rounds among all ranks, if a seed is given, and close when all are through: who ends earlier is dead to
    those who still look."""
    if seed is not None:
        rounds(buffer, range(buffer.num_ranks), seed)
    stages.meet(folder, "end", buffer.rank, range(buffer.num_ranks))
    buffer.close()
    return "ok"


def forever(call: Callable[[], object]) -> None:
    """Repeat a call until it raises; that it does not is for the test's time-out."""
    while True:
        call()
        time.sleep(0.01)


def without(num_ranks: int, *lost: int) -> list[int]:
    """Everybody but some."""
    return [rank for rank in range(num_ranks) if rank not in lost]


def mask_of(num_ranks: int, members: Collection[int]) -> list[int]:
    """As `sync` returns it."""
    return [int(rank in members) for rank in range(num_ranks)]


# ---- one after the other


def replaced(slot: int, num_processes: int, folder: str, victims: tuple[int, ...]) -> list[int]:
    """Processes 0, 1, 2 are the ranks; process 3 takes the place of the first victim, 4 of the second, and so on."""
    num_ranks = 3
    (group, rank), turn = begin(slot, num_ranks, folder, victims), max(0, slot - num_ranks + 1)
    buffer = make(num_ranks)
    everybody, epochs, seen = range(num_ranks), [buffer.epoch], None
    for life in range(turn, len(victims) + 1):
        if life > turn:
            assert buffer.takes_replacements
            before = addresses(buffer)
            assert buffer.sync().tolist() == [1] * num_ranks
            epochs.append(buffer.epoch)
            assert seen is not None
            with pytest.raises(StaleHandleError):
                buffer.combine_input(seen)
        seen = rounds(buffer, everybody, 10 * life)
        if life > turn:
            assert addresses(buffer) == before
        assert buffer.all_gather_bytes(bytes([rank])) == [bytes([peer]) for peer in everybody]
        if life == len(victims):
            break
        victim = victims[life]
        stages.meet(folder, f"life {life}", rank, everybody)
        if rank == victim:
            if life % 2:
                send(buffer, case_for(num_ranks, CASE, "rank", 10 * life))
            die()
        case = case_for(num_ranks, CASE, "rank", 10 * life)
        assert until_lost(lambda: step(buffer, case)).ranks == (victim,)  # noqa: B023
        if life % 2 == 0:
            survivors = without(num_ranks, victim)
            assert buffer.sync().tolist() == mask_of(num_ranks, survivors)
            seen = rounds(buffer, survivors, 10 * life + 5)
        lose(group, folder, victim, f"lost {life + 1}")
    end(buffer, folder)
    return epochs


# ---- crashes and failures on the way


def dies_halfway(slot: int, num_processes: int, folder: str, point: str) -> str:
    """Process 3 takes the place of rank 1 and dies on the way; then process 4 comes."""
    num_ranks, victim = 3, 1
    group, _ = begin(slot, num_ranks, folder, [victim])
    if slot == 3 and point == "mapped":
        move = Epochs.move
        Epochs.move = lambda *args: (move(*args), die())  # type: ignore[method-assign, assign, func-returns-value]
    elif slot == 3:
        die_at(point)
    buffer = make(num_ranks)
    if slot < num_ranks:
        survivors = without(num_ranks, victim)
        until_some_die(buffer, folder, victim)
        lose(group, folder, victim, "lost 1")
        if buffer.sync().tolist() == [1] * num_ranks:
            assert until_lost(lambda: step(buffer, case_for(num_ranks, CASE, "rank", 0))).ranks == (victim,)
            assert buffer.sync().tolist() == mask_of(num_ranks, survivors)
        rounds(buffer, survivors, 3)
        lose(group, folder, victim, "lost 2")
        assert buffer.sync().tolist() == [1] * num_ranks
    return end(buffer, folder, 20)


def attaches_late(slot: int, num_processes: int, folder: str, which: int) -> str:
    """Rank 0 cannot map one of the newcomer's regions the first time: its sync says so, its next call does it."""
    num_ranks, victim = 3, 1
    group, _ = begin(slot, num_ranks, folder, [victim])
    buffer = make(num_ranks)
    if slot < num_ranks:
        until_some_die(buffer, folder, victim)
        before = addresses(buffer)
        lose(group, folder, victim, "lost 1")
        if slot == 0:
            refuse_to_map(machine_of(buffer), victim, which)
            with pytest.raises(ResourceError, match="no descriptors"):
                buffer.sync()
        else:
            assert buffer.sync().tolist() == [1] * num_ranks
    rounds(buffer, range(num_ranks), 5)
    if slot < num_ranks:
        assert addresses(buffer) == before
    return end(buffer, folder)


def attaches_at_the_third_attempt(slot: int, num_processes: int, folder: str) -> str:
    """Rank 0 cannot map the newcomer's memory in its sync, nor in its next call: nobody else hears of that.

    A graph that it replays meanwhile reaches nobody, fails, and counts for nothing.
    """
    num_ranks, victim = 3, 1
    group, _ = begin(slot, num_ranks, folder, [victim])
    buffer = make(num_ranks)
    if slot < num_ranks:
        until_some_die(buffer, folder, victim)
        lose(group, folder, victim, "lost 1")
        if slot == 0:
            machine, epoch = machine_of(buffer), buffer.epoch
            refuse_to_map(machine, victim, 0, times=3)
            with pytest.raises(ResourceError, match="no descriptors"):
                buffer.sync()
            assert buffer.epoch == epoch
            for layout in ("rank", "expert"):
                replay_shut(buffer, case_for(num_ranks, CASE, layout, 1))
            for call in (lambda: buffer.refuse(ResourceError("mine")), buffer.barrier):
                with contextlib.suppress(ResourceError):
                    call()
            assert buffer.epoch == epoch
        else:
            assert buffer.sync().tolist() == [1] * num_ranks
    return end(buffer, folder, 5)


def replay_shut(buffer: epee.Buffer, case: Case) -> None:
    """Launch what a graph with a dispatch launches, which the host does not count, in a view that is not entered."""
    path, machine = buffer._path, machine_of(buffer)
    assert isinstance(path, CudaPath)
    given, counted = inputs_of(case, buffer.rank), machine.num_calls
    options = DispatchOptions(case.layout, case.expert_alignment, sync=False, timeout_s=60.0)
    x = given.x[0] if isinstance(given.x, tuple) else given.x
    payload, stream = (x, None, None), machine.begin()
    plan_of(path.shape, None, payload, given.topk_idx, options, None).start(
        payload, given.topk_idx, None, options.timeout_s, stream
    )
    machine.num_calls = counted
    machine.platform.synchronize()
    with pytest.raises(ResourceError, match="had entered the view"):
        machine.check()


def refuse_to_map(machine: Any, rank: int, which: int, times: int = 1) -> None:
    """Let the first attempts to map a region of a rank fail: 0 is the control block, 1 are the slots."""
    region: LentRegion = (machine._control, machine.slots)[which][rank]
    kind = type(region)
    works, left = kind.replace, [None] * times

    def fails(self: LentRegion, blob: bytes) -> None:
        if self is region and left:
            left.pop()
            raise ResourceError("no descriptors")
        works(self, blob)

    kind.replace = fails  # type: ignore[method-assign]


def zombie(slot: int, num_processes: int, folder: str) -> str:
    """Rank 1 stands still, is voted out and replaced. What it was granted last is not lent before it has ended."""
    num_ranks, victim = 3, 1
    group, rank = begin(slot, num_ranks, folder, [victim], on_stall="evict", op_timeout=3.0)
    buffer = make(num_ranks, num_slots=4)
    case = case_for(num_ranks, CASE, "rank", 1)
    if slot == victim:
        Path(folder, "pid").write_text(str(os.getpid()))
    if slot < num_ranks:
        rounds(buffer, range(num_ranks))
        send(buffer, case)
        stages.meet(folder, "made", rank, range(num_ranks))
    if slot == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(EvictedError):
            forever(buffer.check)  # its agent hears of it a moment after it has woken up
        stages.reach(folder, "woken")
        stages.wait_for(folder, "may end", WAIT_S)
        die()
    pid = int(Path(folder, "pid").read_text())
    pool = machine_of(buffer).pool
    if slot < num_ranks:
        stages.await_stop(pid)
        lose(group, folder, victim, "lost 1")
        assert buffer.sync().tolist() == [1] * num_ranks
        assert pool.haunted
    rounds(buffer, range(num_ranks), 5)
    if slot == 0:
        os.kill(pid, signal.SIGCONT)
    stages.wait_for(folder, "woken", WAIT_S)
    rounds(buffer, range(num_ranks), 10)
    if slot < num_ranks:
        assert pool.haunted
    stages.meet(folder, "zombie's end", rank, range(num_ranks))
    stages.reach(folder, "may end")
    while pool.haunted:
        buffer.check()
        time.sleep(0.01)
    return end(buffer, folder, 15)


def zombie_of_two_slots(slot: int, num_processes: int, folder: str) -> str:
    """Rank 1 stands still between two dispatches and is voted out: it may still write the slots of both."""
    num_ranks, victim, rank = 3, 1, slot
    group = start(rank, num_ranks, folder, on_stall="evict", op_timeout=3.0)
    buffer = make(num_ranks, num_slots=4, timeout=5.0)
    case = case_for(num_ranks, CASE, "rank", 1)
    if slot == victim:
        Path(folder, "pid").write_text(str(os.getpid()))
    rounds(buffer, range(num_ranks))
    kept = send(buffer, case)
    stages.meet(folder, "made", rank, range(num_ranks))
    if slot == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
        raise AssertionError("it was woken up")
    pid = int(Path(folder, "pid").read_text())
    stages.await_stop(pid)
    with pytest.raises(EpeeError):
        send(buffer, case)
    while int(group.active_ranks()[victim]):
        dist.all_reduce(torch.ones(1))
    pool = machine_of(buffer).pool
    granted, exchanged = list(pool._granted), pool._exchanged[0]
    assert buffer.sync().tolist() == mask_of(num_ranks, without(num_ranks, victim))
    may_be_written = {place for place, call in enumerate(granted) if call and call >= exchanged}
    assert len(may_be_written) > 1
    assert pool.haunted == may_be_written
    del kept
    stages.meet(folder, "looked", rank, without(num_ranks, victim))
    if slot == 0:
        os.kill(pid, signal.SIGKILL)
    return "ok"


def zombies_successor_dies(slot: int, num_processes: int, folder: str) -> str:
    """Rank 1 stands still, is voted out and replaced; who replaces it dies before the survivors prepare."""
    num_ranks, victim = 3, 1
    group, rank = begin(slot, num_ranks, folder, [victim], on_stall="evict", op_timeout=3.0)
    prepare = Epochs.prepare
    if slot >= num_ranks:
        Epochs.prepare = lambda *args: die()  # type: ignore[method-assign]
    buffer = make(num_ranks, num_slots=4)
    case = case_for(num_ranks, CASE, "rank", 1)
    if slot == victim:
        Path(folder, "pid").write_text(str(os.getpid()))
    rounds(buffer, range(num_ranks))
    send(buffer, case)
    stages.meet(folder, "made", rank, range(num_ranks))
    if slot == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
        raise AssertionError("it was woken up")
    pid = int(Path(folder, "pid").read_text())
    stages.await_stop(pid)
    lose(group, folder, victim, "lost 1")

    def late(self: Epochs, agreed: Agreed, fresh: Collection[int]) -> None:
        while victim not in self._watch.dead():
            time.sleep(0.001)
        self.dead()  # as a call would that fails for another reason
        prepare(self, agreed, fresh)

    Epochs.prepare = late  # type: ignore[method-assign]
    pool = machine_of(buffer).pool
    buffer.sync()
    assert pool.haunted
    stages.meet(folder, "looked", rank, without(num_ranks, victim))
    if slot == 0:
        os.kill(pid, signal.SIGKILL)
    while pool.haunted:
        with contextlib.suppress(EpeeError):
            buffer.check()
        time.sleep(0.01)
    stages.meet(folder, "released", rank, without(num_ranks, victim))
    buffer.close()
    return "ok"


def fails_and_comes_again(slot: int, num_processes: int, folder: str, point: str) -> str:
    """The newcomer's constructor fails behind the decision; its process lives and makes the buffer again.

    It fails when it maps (`move`): rank 0 maps its memory when that has gone, rank 2 before. Or before it is ready
    (`prepare`): the others are when it asks to join again.
    """
    num_ranks, victim = 3, 1
    group, rank = begin(slot, num_ranks, folder, [victim])
    works = {name: getattr(Epochs, name) for name in ("prepare", "move")}
    if slot == 3:
        setattr(Epochs, point, fails_when(folder, "moved-2" if point == "move" else ""))
        with pytest.raises(ResourceError, match="nothing left"):
            make(num_ranks)
        setattr(Epochs, point, works[point])
        stages.reach(folder, "failed")
        asks = GroupMembership.ask

        def ask(*args: Any) -> Any:
            stages.reach(folder, "again")
            return asks(*args)

        GroupMembership.ask = ask  # type: ignore[method-assign]
    buffer = make(num_ranks)
    if slot < num_ranks:
        until_some_die(buffer, folder, victim)
        lose(group, folder, victim, "lost 1")
        if point == "move":
            Epochs.move = held(folder, "failed" if rank == 0 else "", "move", f"moved-{rank}")  # type: ignore
        else:
            Epochs.prepare = held(folder, "again", "prepare", f"prepared-{rank}")  # type: ignore[method-assign]
        assert buffer.sync().tolist() == [1] * num_ranks
        for name, method in works.items():
            setattr(Epochs, name, method)
        stages.wait_for(folder, "failed", WAIT_S)
        with pytest.raises(PeerError, match=r"buffer.sync\(\)"):
            step(buffer, case_for(num_ranks, CASE, "rank", 0))
        assert buffer.sync().tolist() == [1] * num_ranks
    return end(buffer, folder, 20)


def fails_when(folder: str, stage: str) -> Callable[..., None]:
    """A step of the path that fails, behind a stage of the others if one is named."""

    def fails(*args: Any) -> None:
        if stage:
            stages.wait_for(folder, stage, WAIT_S)
        raise ResourceError("nothing left")

    return fails


def held(folder: str, stage: str, name: str, done: str) -> Callable[..., None]:
    """A step of the path behind a stage of the others, if one is named; tells when it is done."""
    works = getattr(Epochs, name)

    def waits(*args: Any) -> None:
        if stage:
            stages.wait_for(folder, stage, WAIT_S)
        works(*args)
        stages.reach(folder, done)

    return waits


def replaced_far_on(slot: int, num_processes: int, folder: str, jump: int) -> str:
    """A replacement as far on as after so many calls; rank 1 comes a while after the others to the first calls."""
    epochs_of_gpus.TAG_JUMP = jump  # type: ignore[attr-defined]
    num_ranks, victim = 3, 1
    group, rank = begin(slot, num_ranks, folder, [victim])
    buffer = make(num_ranks)
    if slot < num_ranks:
        until_some_die(buffer, folder, victim)
        lose(group, folder, victim, "lost 1")
        assert buffer.sync().tolist() == [1] * num_ranks
    for turn, late in enumerate((victim, 0)):
        stages.meet(folder, f"turn {turn}", rank, range(num_ranks))
        if rank == late:
            time.sleep(0.5)
        rounds(buffer, range(num_ranks), 10 * turn)
    return end(buffer, folder)


# ---- several ranks


def two_after_each_other(slot: int, num_processes: int, folder: str) -> str:
    """Ranks 1 and 3 of four die; process 4 takes the place of 1 while nobody has that of 3, process 5 then has."""
    num_ranks, victims = 4, (1, 3)
    group, _ = begin(slot, num_ranks, folder, victims)
    buffer = make(num_ranks)
    some = without(num_ranks, 3)
    if slot < num_ranks:
        until_some_die(buffer, folder, *victims)
        while int(group.active_ranks()[3]):
            dist.all_reduce(torch.ones(1))
        lose(group, folder, 1, "lost 1")
        assert buffer.sync().tolist() == mask_of(num_ranks, some)
    if slot != 5:
        rounds(buffer, some, 5)
        lose(group, folder, 3, "lost 2")
        before = addresses(buffer)
        assert buffer.sync().tolist() == [1] * num_ranks
    rounds(buffer, range(num_ranks), 20)
    if slot != 5:
        assert addresses(buffer) == before
    return end(buffer, folder)


def away_meanwhile(slot: int, num_processes: int, folder: str) -> str:
    """Rank 3 is put out while process 4 takes the place of rank 1, and maps its memory when it comes back."""
    num_ranks, victim, away = 4, 1, 3
    group, rank = begin(slot, num_ranks, folder, [victim])
    buffer = make(num_ranks)
    mask = torch.ones(num_ranks, dtype=torch.int32, device=buffer.config.device)
    if slot < num_ranks:
        until_some_die(buffer, folder, victim)
        lose(group, folder, victim, "lost 1")
        if slot != away:
            mask[away] = 0
            # the newcomer does not know whom the others count out, so they wait for the time to be over
            assert buffer.sync(mask, timeout=5.0).tolist() == mask_of(num_ranks, without(num_ranks, away))
    if slot != away:
        rounds(buffer, without(num_ranks, away), 5)
        stages.meet(folder, "synced", rank, without(num_ranks, away))
    else:
        for other in without(num_ranks, away):
            stages.wait_for(folder, f"synced-{other}", WAIT_S)
    for _ in range(1000):  # nobody waits for one who is no member: it may come to a sync that the others have ended
        try:
            if buffer.sync(timeout=20.0).tolist() == [1] * num_ranks:
                break
        except NoQuorumError:
            assert slot == away  # its time was over before the others came
        time.sleep(0.01)
    else:
        raise AssertionError("it did not come back")
    return end(buffer, folder, 20)


# ---- who cannot take part


def refused(slot: int, num_processes: int, folder: str, share: Callable[[bool], None], theirs: bool) -> str:
    """Memory is lent by cudaIpc on the members: the newcomer is refused at once, nobody waits, all make a new buffer.

    `share(True)` makes this process lend by descriptors, `share(False)` by cudaIpc; `theirs` is the newcomer's way.
    """
    num_ranks, victim = 3, 1
    group, rank = begin(slot, num_ranks, folder, [victim])
    survivors = without(num_ranks, victim)
    share(theirs and slot == 3)
    if slot == 3:
        kind, told = (MismatchError, "EPEE_CUDA_SHARE") if theirs else (UnsupportedError, "lent by cudaIpc")
        with pytest.raises(kind, match=told):
            make(num_ranks)
        share(False)
        stages.reach(folder, "refused")
        stages.wait_for(folder, "closed-0", WAIT_S)
        stages.wait_for(folder, "closed-2", WAIT_S)
    else:
        buffer = make(num_ranks)
        until_some_die(buffer, folder, victim)
        lose(group, folder, victim, "lost 1")
        assert not buffer.takes_replacements
        stages.wait_for(folder, "refused", WAIT_S)
        assert buffer.sync().tolist() == mask_of(num_ranks, survivors)
        rounds(buffer, survivors, 5)
        buffer.close()
        stages.meet(folder, "closed", rank, survivors)
    buffer = make(num_ranks)
    return end(buffer, folder, 20)


def check_replaced(run: Callable[..., Any], victims: tuple[int, ...], timeout_s: float) -> None:
    """Run `replaced`, by a function that is given its name; epochs rise, and are the same one in the end."""
    places, dead = list(range(3)), set()
    for turn, victim in enumerate(victims):
        dead.add(places[victim])
        places[victim] = 3 + turn
    results = run_mortal(run, 3 + len(victims), "replaced", victims, dead=dead, timeout_s=timeout_s)
    living = [epochs for epochs in results if isinstance(epochs, list)]
    assert len(living) == 3
    assert len({epochs[-1] for epochs in living}) == 1
    for epochs in living:
        assert epochs == sorted(set(epochs))
        assert len(epochs) <= 1 + len(victims)


# ---- two places


def places_apart(rank: int, num_ranks: int) -> str:
    """A rank that names memory of an earlier time in a combine is told apart, as a graph of then would be."""
    buffer = make(num_ranks, timeout=30.0)
    case = replace(case_for(num_ranks, CASE, "expert", 1), expert_alignment=1)
    check_round(buffer, case, range(num_ranks))
    machine = machine_of(buffer)
    first = machine._places._place
    check_round(buffer, replace(case, expert_alignment=8), range(num_ranks))
    second = machine._places._place
    assert second is not first
    if rank == 0:
        machine._places._place = first
    d = send(buffer, case)
    with pytest.raises(MismatchError, match="memory that expert-layout rows are pulled from"):
        buffer.combine(torch.zeros_like(d.x), d.handle)  # an emulated one ends before it returns
    machine._places._place = second
    check_round(buffer, case, range(num_ranks))
    dist.barrier()  # who ends first is dead to those who still look
    buffer.close()
    return "ok"
