"""A process takes a dead rank's place in a running latency buffer: masks show it again, results are a fresh job's.

Processes beyond the ranks are replacements; each waits for its turn in a file. Everything is compared with the oracle,
bit for bit, on memory that is poisoned. `make_buffer` may be another class's: the tests of the emulated GPU use it all.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.engine.membership.group_membership import GroupMembership
from epee.ep.latency.one_host.members import EpochMembers
from epee.ep.members.gpu_members import GpuMembers
from epee.ep.members.member_sync import MemberSync
from epee.errors import CommTimeoutError, EvictedError, PeerError, ResourceError, StaleHandleError
from epee.reference import latency as oracle
from tests.ep.latency_cases import Shape, bits, check_dispatched, check_round, combine, dispatch, expert_outputs, inputs
from tests.harness import DEAD, run_mortal
from tests.survive import stages

SHAPE = Shape(num_experts=12, hidden=512, num_topk=2, max_tokens=6)
NUM_TOKENS = (6, 3, 4, 5)
TIMEOUT_S = 30.0
MANY_S = 150.0


def start(rank: int, num_ranks: int, folder: str, joins: bool = False, mode: str = "mask", **options: Any) -> Any:
    """Make or join the group."""
    os.environ["EPEE_POISON"] = "1"
    store = dist.FileStore(f"{folder}/store", num_ranks)
    given = {"fault_mode": mode, "op_timeout": TIMEOUT_S, "is_extension": joins, **options}
    dist.init_process_group(
        "epee", store=store, rank=rank, world_size=num_ranks, pg_options=epee.BackendOptions(**given)
    )
    if joins:
        dist.all_reduce(torch.ones(1))  # see `lose`
    return dist.group.WORLD


def make_buffer(group: Any, timeout: float = TIMEOUT_S, **changes: Any) -> epee.LatencyBuffer:
    """Make the buffer of the tests."""
    arguments: dict[str, Any] = {
        "num_experts": SHAPE.num_experts,
        "hidden": SHAPE.hidden,
        "num_topk": SHAPE.num_topk,
        "max_tokens_per_rank": SHAPE.max_tokens,
        "timeout": timeout,
        **changes,
    }
    return epee.LatencyBuffer(group, **arguments)


def masked_round(
    buffer: epee.LatencyBuffer, mask: torch.Tensor, seed: int, alive: list[bool], payload: str = "fp8"
) -> None:
    """A dispatch and a combine among `alive`, compared with the oracle."""
    rank, num_ranks = buffer.rank, buffer.num_ranks
    given = inputs(SHAPE, NUM_TOKENS[:num_ranks], seed)
    got = [alive] * num_ranks
    use_fp8 = payload == "fp8"
    want = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens, use_fp8=use_fp8, got=got)
    there = dispatch(buffer, given[rank], active_ranks=mask, use_fp8=use_fp8)
    check_dispatched(there, want[rank])
    outputs = expert_outputs(want, seed)
    back = combine(buffer, outputs[rank], there, active_ranks=mask)
    assert torch.equal(bits(back.x), bits(oracle.combine(given, want, outputs, got=got)[rank]))
    assert back.got.tolist() == alive
    assert mask[:num_ranks].tolist() == [int(is_in) for is_in in alive]


def rounds(buffer: epee.LatencyBuffer, first: int, last: int, **options: Any) -> None:
    """Whole rounds, bit for bit; the payloads take turns."""
    for seed in range(first, last):
        check_round(
            buffer,
            SHAPE,
            NUM_TOKENS[: buffer.num_ranks],
            seed,
            payload=("bfloat16", "fp8", "fp8 packed")[seed % 3],
            use_hook=seed % 2 == 0,
            **options,
        )


def die() -> None:
    """End this process like the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def lose(group: Any, folder: str, rank: int, name: str, *more: int) -> None:
    """Make calls until the group has noticed that ranks are gone; then let their replacements come, and take them in.

    A replacement makes a call of the group first, or the others would not see it there.
    """
    ranks = [rank, *more]
    while any(int(group.active_ranks()[lost]) for lost in ranks):
        dist.all_reduce(torch.ones(1))
    stages.reach(folder, name)
    group.recover_ranks(ranks, TIMEOUT_S)
    dist.all_reduce(torch.ones(1))


def end(buffer: epee.LatencyBuffer, folder: str) -> None:
    """Close when all ranks are through: who ends earlier is dead to those who wait for what it has sent."""
    stages.meet(folder, "end", buffer.rank, range(buffer.num_ranks))
    buffer.close()


def without(num_ranks: int, *lost: int) -> list[bool]:
    """Everybody but some."""
    return [rank not in lost for rank in range(num_ranks)]


# ---- one after the other


def replaced(slot: int, num_processes: int, folder: str, victims: tuple[int, ...]) -> Any:
    """Processes 0, 1, 2 are the ranks; process 3 takes the place of the first victim, 4 of the second, and so on."""
    num_ranks = 3
    rank = slot if slot < num_ranks else victims[slot - num_ranks]
    turn = slot - num_ranks + 1  # a replacement's first
    if turn > 0:
        stages.wait_for(folder, f"lost {turn}", 150)
    group = start(rank, num_ranks, folder, joins=turn > 0)
    buffer = make_buffer(group)
    mask = torch.ones(num_ranks + 1, dtype=torch.int32)
    epochs = [buffer.epoch]
    for life in range(max(0, turn), len(victims) + 1):
        if life and life != turn:
            agreed = buffer.sync(mask)
            assert agreed.tolist() == [1] * num_ranks
            epochs.append(buffer.epoch)
        rounds(buffer, 10 * life, 10 * life + 4, active_ranks=mask)
        assert mask[:num_ranks].all()
        buffer.all_gather_bytes(bytes([rank]))
        rounds(buffer, 10 * life + 4, 10 * life + 6)  # without a mask: everybody is needed
        if life == len(victims):
            break
        victim = victims[life]
        if rank == victim:
            dispatch(buffer, inputs(SHAPE, NUM_TOKENS[:3], 1)[rank], active_ranks=mask, return_hook=life % 2 == 0)
            die()
        dispatch(buffer, inputs(SHAPE, NUM_TOKENS[:3], 1)[rank], active_ranks=mask)
        while mask[victim]:  # what it had sent counts
            dispatch(buffer, inputs(SHAPE, NUM_TOKENS[:3], 1)[rank], active_ranks=mask)
        if life % 2 == 0:
            assert buffer.sync(mask).tolist() == [int(is_in) for is_in in without(num_ranks, victim)]
        for seed in range(3):
            masked_round(buffer, mask, 100 + seed, without(num_ranks, victim))
        lose(group, folder, victim, f"lost {life + 1}")
    gathered = buffer.all_gather_bytes(bytes([rank, slot]))
    end(buffer, folder)
    return epochs, gathered


def check_replaced(function: Any, victims: tuple[int, ...], timeout_s: float = MANY_S) -> None:
    """Run `replaced`."""
    places = list(range(3))
    dead = set()
    for turn, victim in enumerate(victims):
        dead.add(places[victim])
        places[victim] = 3 + turn
    results = run_mortal(function, 3 + len(victims), victims, dead=dead, timeout_s=timeout_s)
    for slot in places:
        epochs, gathered = results[slot]
        assert gathered == [bytes([rank, places[rank]]) for rank in range(3)]
        assert epochs == sorted(epochs)
        assert epochs[-1] == results[places[0]][0][-1]
    for slot in dead:
        assert results[slot] == DEAD


@pytest.mark.parametrize("victims", [(1,), (0,), (2, 2), (0, 0, 1)], ids=str)
def test_after_a_replacement_the_results_are_those_of_a_fresh_job(victims: tuple[int, ...]) -> None:
    check_replaced(replaced, victims)


# ---- crashes on the way

POINTS = ("before its line", "its line", "first look", "hello", "decided", "offered")

# Before it asks to join the engine's group, and behind that; before it sees who has come, before the call that ends the
# sync, behind that, and once the epoch is known. True: die behind that.
STEPS: dict[str, list[tuple[Any, str, bool]]] = {
    "before its line": [(GroupMembership, "ask", False)],
    "its line": [(GroupMembership, "ask", True)],
    "first look": [(MemberSync, "_read", False)],
    "hello": [(MemberSync, "_there", False)],
    "decided": [(EpochMembers, "_enter", False), (GpuMembers, "_enter", False)],
    "offered": [(EpochMembers, "_note", True), (GpuMembers, "_note", True)],
}


def die_at(point: str) -> None:
    """Let this process die at a step of its constructor, or of its next `sync`."""

    def dies(*args: Any, **options: Any) -> Any:
        die()

    def dies_after(function: Any) -> Any:
        return lambda *args: (function(*args), die())

    for owner, name, comes_after in STEPS[point]:
        setattr(owner, name, dies_after(getattr(owner, name)) if comes_after else dies)


def dies_halfway(slot: int, num_processes: int, folder: str, victim: int, point: str) -> Any:
    """Process 3 takes the victim's place and dies on the way; then process 4 comes."""
    num_ranks = 3
    rank = slot if slot < num_ranks else victim
    if slot >= num_ranks:
        stages.wait_for(folder, f"lost {slot - 2}", 150)
    group = start(rank, num_ranks, folder, joins=slot >= num_ranks)
    if slot == 3:
        die_at(point)
    buffer = make_buffer(group)
    mask = torch.ones(num_ranks, dtype=torch.int32)
    seen: list[int] = []
    if slot < num_ranks:
        rounds(buffer, 0, 3, active_ranks=mask)
        if slot == victim:
            die()
        alive = without(num_ranks, victim)
        masked_round(buffer, mask, 5, alive)
        lose(group, folder, victim, "lost 1")
        agreed = buffer.sync(mask).tolist()
        outside, inside = [int(is_in) for is_in in alive], [1, 1, 1]
        possible = {"decided": (inside,), "offered": (inside,), "hello": (inside, outside)}
        assert agreed in possible.get(point, (outside,)), agreed
        seen = agreed
        for seed in range(6, 9):
            masked_round(buffer, mask, seed, alive)
        lose(group, folder, victim, "lost 2")
        assert buffer.sync(mask).tolist() == [1, 1, 1]
    rounds(buffer, 20, 26, active_ranks=mask)
    end(buffer, folder)
    return mask.tolist(), seen


def check_dies_halfway(function: Any, point: str, timeout_s: float = MANY_S) -> None:
    """Run `dies_halfway`."""
    victim = POINTS.index(point) % 3
    results = run_mortal(function, 5, victim, point, dead={victim, 3}, timeout_s=timeout_s)
    first, second = {0, 1, 2} - {victim}
    assert results[first] == results[second]
    assert results[first][0] == results[4][0] == [1, 1, 1]


@pytest.mark.parametrize("point", POINTS)
def test_a_newcomer_that_dies_on_the_way_disturbs_nobody_and_the_next_one_comes_in(point: str) -> None:
    check_dies_halfway(dies_halfway, point)


def a_member_dies_meanwhile(slot: int, num_processes: int, folder: str, point: str) -> Any:
    """Of four ranks, 1 dies. While process 4 takes its place, rank 3 dies in its `sync`; process 5 takes that place."""
    num_ranks = 4
    rank = {4: 1, 5: 3}.get(slot, slot)
    if slot >= num_ranks:
        stages.wait_for(folder, f"lost {slot - 3}", 150)
    group = start(rank, num_ranks, folder, joins=slot >= num_ranks)
    if slot == 5:
        buffer = make_buffer(group)
    else:
        mask = torch.ones(num_ranks, dtype=torch.int32)
        if slot != 4:
            buffer = make_buffer(group)
            rounds(buffer, 0, 2, active_ranks=mask)
            if slot == 1:
                die()
            masked_round(buffer, mask, 3, without(num_ranks, 1))
            lose(group, folder, 1, "lost 1")
            if slot == 3:
                die_at(point)
            buffer.sync(mask)
        else:
            buffer = make_buffer(group)  # that is its sync
        for seed in range(4, 8):
            masked_round(buffer, mask, seed, without(num_ranks, 3))
        lose(group, folder, 3, "lost 2")
        assert buffer.sync(mask).tolist() == [1] * num_ranks
    rounds(buffer, 20, 26)
    end(buffer, folder)
    return "ok"


@pytest.mark.parametrize("point", ["first look", "hello", "decided", "offered"])
def test_a_member_that_dies_while_a_newcomer_comes_in(point: str) -> None:
    results = run_mortal(a_member_dies_meanwhile, 6, point, dead={1, 3}, timeout_s=MANY_S)
    assert results == ["ok", DEAD, "ok", DEAD, "ok", "ok"]


def two_at_once(
    slot: int, num_processes: int, folder: str, victims: tuple[int, int], wait_s: tuple[float, float]
) -> Any:
    """Two of four ranks die together, two processes take their places, one or both of them late with their buffers."""
    num_ranks = 4
    rank = slot if slot < num_ranks else victims[slot - num_ranks]
    if slot >= num_ranks:
        stages.wait_for(folder, "lost")
    group = start(rank, num_ranks, folder, joins=slot >= num_ranks)
    if slot >= num_ranks:
        time.sleep(wait_s[slot - num_ranks])  # the others wait in their sync
    buffer = make_buffer(group)
    mask = torch.ones(num_ranks, dtype=torch.int32)
    if slot < num_ranks:
        rounds(buffer, 0, 2, active_ranks=mask)
        if slot in victims:
            die()
        masked_round(buffer, mask, 3, without(num_ranks, *victims))
        lose(group, folder, victims[0], "lost", victims[1])
        assert buffer.sync(mask).tolist() == [1] * num_ranks
    rounds(buffer, 20, 25)
    end(buffer, folder)
    return buffer.epoch


@pytest.mark.parametrize(
    ("victims", "wait_s"), [((1, 2), (0.0, 0.0)), ((0, 3), (0.5, 0.0)), ((0, 1), (0.0, 1.0))], ids=str
)
def test_two_newcomers_at_once(victims: tuple[int, int], wait_s: tuple[float, float]) -> None:
    results = run_mortal(two_at_once, 6, victims, wait_s, dead=set(victims), timeout_s=MANY_S)
    epochs = {epoch for slot, epoch in enumerate(results) if slot not in victims}
    assert len(epochs) == 1
    assert epochs.pop() > 1


def nobody_asks(slot: int, num_processes: int, folder: str) -> Any:
    """The members do not call sync: the constructor ends in time; they work on, and the next attempt succeeds."""
    rank = 1 if slot == 3 else slot
    if slot == 3:
        stages.wait_for(folder, "lost")
    group = start(rank, 3, folder, joins=slot == 3)
    if slot == 3:
        with pytest.raises(CommTimeoutError, match="have not admitted this process"):
            make_buffer(group, timeout=0.5)
        stages.reach(folder, "gave up")
    buffer = make_buffer(group)
    mask = torch.ones(3, dtype=torch.int32)
    if slot != 3:
        rounds(buffer, 0, 2, active_ranks=mask)
        old = dispatch(buffer, inputs(SHAPE, NUM_TOKENS[:3], 1)[rank])
        if slot == 1:
            die()
        masked_round(buffer, mask, 3, without(3, 1))
        lose(group, folder, 1, "lost")
        for seed in range(4):
            masked_round(buffer, mask, seed, without(3, 1))
        stages.wait_for(folder, "gave up")
        assert buffer.sync(mask).tolist() == [1, 1, 1]
        with pytest.raises(StaleHandleError):
            buffer.combine_input(old.handle)
    rounds(buffer, 20, 24)
    end(buffer, folder)
    return buffer.takes_replacements


def test_a_newcomer_that_nobody_asks_in_gives_up_and_may_try_again() -> None:
    results = run_mortal(nobody_asks, 4, dead={1}, timeout_s=MANY_S)
    assert results == [True, DEAD, True, True]


def blind(slot: int, num_processes: int, folder: str) -> Any:
    """The newcomer cannot map the members' memory: they go on without it at once; its next attempt succeeds."""
    rank = 1 if slot == 3 else slot
    if slot == 3:
        stages.wait_for(folder, "lost")
    group = start(rank, 3, folder, joins=slot == 3)
    if slot == 3:
        attach = EpochMembers._attach

        def fails(*args: Any) -> Any:
            raise ResourceError("out of reach")

        EpochMembers._attach = fails  # type: ignore[method-assign]
        with pytest.raises(ResourceError, match="out of reach"):
            make_buffer(group)
        EpochMembers._attach = attach  # type: ignore[method-assign]
        stages.wait_for(folder, "went on")
    buffer = make_buffer(group)
    mask = torch.ones(3, dtype=torch.int32)
    if slot != 3:
        rounds(buffer, 0, 2, active_ranks=mask)
        if slot == 1:
            die()
        masked_round(buffer, mask, 3, without(3, 1))
        lose(group, folder, 1, "lost")
        assert buffer.sync(mask).tolist() == [1, 1, 1]
        masked_round(buffer, mask, 4, without(3, 1))  # it has closed what it could not make
        with pytest.raises(PeerError, match=r"has closed the buffer|is not in this epoch"):
            dispatch(buffer, inputs(SHAPE, NUM_TOKENS[:3], 1)[rank])
        stages.reach(folder, "went on")
        mask.fill_(1)  # so it is waited for
        assert buffer.sync(mask).tolist() == [1, 1, 1]
    rounds(buffer, 20, 24)
    end(buffer, folder)
    return mask.tolist()


def test_a_newcomer_that_cannot_map_the_members_keeps_none_of_them_out() -> None:
    assert run_mortal(blind, 4, dead={1}, timeout_s=MANY_S) == [[1, 1, 1], DEAD, [1, 1, 1], [1, 1, 1]]


def far_ahead(slot: int, num_processes: int, folder: str) -> str:
    """Rank 2 counts the others out, makes many calls alone, so that its words of later calls lie there, and dies."""
    rank = 2 if slot == 3 else slot
    if slot == 3:
        stages.wait_for(folder, "lost", 150)
    group = start(rank, 3, folder, joins=slot == 3)
    buffer = make_buffer(group)
    mask = torch.ones(3, dtype=torch.int32)
    given = inputs(SHAPE, NUM_TOKENS[:3], 1)[rank]
    if slot != 3:
        rounds(buffer, 0, 2, active_ranks=mask)
        if slot == 2:
            alone = torch.tensor([0, 0, 1], dtype=torch.int32)
            for _ in range(27):
                dispatch(buffer, given, active_ranks=alone)
            stages.reach(folder, "alone")
            die()
        stages.wait_for(folder, "alone")
        while mask[2]:
            dispatch(buffer, given, active_ranks=mask)
        masked_round(buffer, mask, 3, without(3, 2))
        lose(group, folder, 2, "lost")
        assert buffer.sync(mask).tolist() == [1, 1, 1]
    rounds(buffer, 20, 36, active_ranks=mask)
    assert mask.all()
    end(buffer, folder)
    return "ok"


def test_words_that_the_dead_wrote_of_later_calls_are_not_believed() -> None:
    assert run_mortal(far_ahead, 4, dead={2}, timeout_s=MANY_S) == ["ok", "ok", DEAD, "ok"]


# ---- several buffers


def several(slot: int, num_processes: int, folder: str) -> Any:
    """Two `LatencyBuffer`s and a `Buffer` on a group; the newcomer makes them in another order."""
    rank = 1 if slot == 3 else slot
    if slot == 3:
        stages.wait_for(folder, "lost")
    group = start(rank, 3, folder, joins=slot == 3)

    def plain() -> epee.Buffer:
        return epee.Buffer(group, num_experts=6, hidden=128, num_topk=2, max_tokens_per_rank=8, timeout=TIMEOUT_S)

    if slot == 3:
        small = make_buffer(group, max_tokens_per_rank=7)
        large = make_buffer(group)
        throughput = plain()
    else:
        closed = make_buffer(group)
        large, throughput, small = make_buffer(group), plain(), make_buffer(group, max_tokens_per_rank=7)
        closed.close()
        rounds(large, 0, 2)
        if slot == 1:
            die()
        mask = torch.ones(3, dtype=torch.int32)
        masked_round(large, mask, 3, without(3, 1))
        lose(group, folder, 1, "lost")
        assert small.sync().tolist() == [1, 1, 1]
        assert large.sync(mask).tolist() == [1, 1, 1]
    rounds(large, 20, 23)
    x = torch.full((2, 128), 1.0 + rank, dtype=torch.bfloat16)
    d = throughput.dispatch(x, torch.tensor([[0, -1], [5, -1]]))
    gathered = [buffer.all_gather_bytes(bytes([rank])) for buffer in (small, large, throughput)]
    for buffer in (small, large, throughput):
        buffer.close()
    return d.got.tolist(), gathered


def test_several_buffers_take_the_newcomer_in() -> None:
    results = run_mortal(several, 4, dead={1}, timeout_s=MANY_S)
    want = ([1, 1, 1], [[b"\0", b"\1", b"\2"]] * 3)
    assert [results[slot] for slot in (0, 2, 3)] == [want] * 3


# ---- a process that was stopped and voted out


def zombie(slot: int, num_processes: int, folder: str, when: str) -> Any:
    """Rank 1 stops in the midst of a call, is voted out and replaced; then it wakes up and goes on."""
    rank = 1 if slot == 3 else slot
    if slot == 3:
        stages.wait_for(folder, "lost")
    group = start(rank, 3, folder, joins=slot == 3, on_stall="evict", op_timeout=3.0)
    buffer = make_buffer(group)
    mask = torch.ones(3, dtype=torch.int32)
    given = inputs(SHAPE, NUM_TOKENS[:3], 1)[rank]
    if slot == 1:
        rounds(buffer, 0, 2, active_ranks=mask)
        (Path(folder) / "pid").write_text(str(os.getpid()))
        return wake_up(buffer, given, mask, when, folder)
    if slot != 3:
        rounds(buffer, 0, 2, active_ranks=mask)
        while mask[1]:
            dispatch(buffer, given, active_ranks=mask, timeout_us=1_000_000)
        lose(group, folder, 1, "lost")
        assert buffer.sync(mask).tolist() == [1, 1, 1]
    rounds(buffer, 20, 23)
    if slot == 0:
        sleeper = int((Path(folder) / "pid").read_text())
        stages.await_stop(sleeper)  # on a busy machine it may have been too slow to get there before
        os.kill(sleeper, signal.SIGCONT)
    for seed in range(30):
        rounds(buffer, seed, seed + 1)
    stages.wait_for(folder, "learned")
    rounds(buffer, 30, 33, active_ranks=mask)
    assert mask.all()
    end(buffer, folder)
    return "ok"


def wake_up(buffer: epee.LatencyBuffer, given: Any, mask: torch.Tensor, when: str, folder: str) -> str:
    """Stop in the midst of writing, or between two calls; when woken go on until it is told that it is out."""
    if when == "writing":
        wire = buffer._path.wire  # type: ignore[union-attr]
        write = wire.write_rows

        def stops(*args: Any) -> None:
            wire.write_rows = write  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGSTOP)
            for _ in range(200):
                write(*args)

        wire.write_rows = stops  # type: ignore[method-assign,assign]
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
    for _ in range(10_000):
        try:
            dispatch(buffer, given, active_ranks=mask, timeout_us=20_000)
        except EvictedError:
            break
    else:
        return "a zombie was never told"
    with pytest.raises(EvictedError):
        buffer.sync(mask, timeout=5)
    stages.reach(folder, "learned")
    return "evicted"


@pytest.mark.parametrize("when", ["writing", "between calls"])
def test_a_stopped_rank_that_was_replaced_wakes_up_and_disturbs_nobody(when: str) -> None:
    assert run_mortal(zombie, 4, when, dead=set(), timeout_s=MANY_S) == ["ok", "evicted", "ok", "ok"]


# ---- the second buffer of a newcomer


def late(slot: int, num_processes: int, folder: str) -> Any:
    """A newcomer makes the younger of two buffers first, and takes its time: it has not closed the older one."""
    rank = 1 if slot == 3 else slot
    if slot == 3:
        stages.wait_for(folder, "lost")
    group = start(rank, 3, folder, joins=slot == 3)
    mask = torch.ones(3, dtype=torch.int32)
    if slot == 3:
        young = make_buffer(group, max_tokens_per_rank=7)
        time.sleep(0.5)  # ten times as long as one is waited for that has closed its buffer
        old = make_buffer(group)
    else:
        old, young = make_buffer(group), make_buffer(group, max_tokens_per_rank=7)
        rounds(old, 0, 2)
        if slot == 1:
            die()
        masked_round(old, mask, 3, without(3, 1))
        lose(group, folder, 1, "lost")
        assert young.sync().tolist() == [1, 1, 1]
        mask.fill_(1)
        assert old.sync(mask).tolist() == [1, 1, 1]
    rounds(old, 20, 23)
    gathered = young.all_gather_bytes(bytes([rank]))
    stages.meet(folder, "end", rank, range(3))
    old.close()
    young.close()
    return gathered


def test_a_newcomer_that_has_not_made_an_older_buffer_yet_has_not_closed_it() -> None:
    results = run_mortal(late, 4, dead={1}, timeout_s=MANY_S)
    assert [results[slot] for slot in (0, 2, 3)] == [[b"\0", b"\1", b"\2"]] * 3
