"""What goes wrong while a process comes into a running buffer over hosts: it dies at any step, others die meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.engine.membership.admission import Admission
from epee.engine.membership.group_membership import GroupMembership
from epee.ep.members import birth
from epee.ep.members.assembly import Assembly
from epee.errors import CommTimeoutError, MismatchError, StaleHandleError
from tests.ep.latency_cases import Shape, check_round, make
from tests.harness import DEAD, run_ranks
from tests.hosts.joins import hear, joiner, lose, member, say, sums
from tests.hosts.rejoins import begin, check_all, end
from tests.hosts.survival_steps import check_bits
from tests.loopback import settle
from tests.survive.buffer_rounds import die, routing, rows

TWO_BY_TWO = (0, 0, 1, 1)
STEPS = ("found", "asked", "decided", "linked", "attached", "meeting", "in")
KINDS = ("Buffer", "LatencyBuffer")


def arm(step: str, act: Callable[[], None]) -> None:
    """Act at a step of coming into a buffer; the group's own steps are over."""

    def acting(*args: Any, **kwargs: Any) -> Any:
        act()

    places: dict[str, Any] = {
        "found": (birth, "come_in"),
        "decided": (GroupMembership, "span"),
        "linked": (GroupMembership, "use"),
        "attached": (GroupMembership, "attach"),
        "meeting": (Assembly, "meet"),
    }
    if step == "asked":
        ask = GroupMembership.ask

        def asks(self: GroupMembership, *args: Any) -> Any:
            self.runtime.await_decision = acting  # type: ignore[method-assign]
            return ask(self, *args)

        GroupMembership.ask = asks  # type: ignore[method-assign]
    elif step in places:
        setattr(*places[step], acting)


def make_one(kind: str, group: Any, timeout: float = 20.0) -> Any:
    return begin(group, timeout) if kind == "Buffer" else make(Shape(), timeout=timeout)


def look(kind: str, buffer: Any, where: tuple[int, ...], step: int) -> None:
    """Make calls with everybody, and compare them bit for bit."""
    if kind == "Buffer":
        check_all(buffer, where, step)
    else:
        for seed in (step, step + 1):
            check_round(buffer, Shape(), (6, 3, 4, 5), seed, use_hook=seed % 2 == 0, hosts=where)


def meet(buffer: Any) -> list[int]:
    mask = torch.ones(buffer.num_ranks, dtype=torch.int32)
    agreed = buffer.sync(mask).tolist()
    assert mask.tolist() == agreed
    return agreed


def dies_coming(index: int, num_processes: int, folder: str, kind: str, mode: str, step: str, host: int) -> Any:
    """Process 4 takes rank 3's place on `host` and dies at a step, process 5 comes then."""
    torch.set_num_threads(1)
    rank, where = min(index, 3), (0, 0, 1, 2)
    settle({4: host, 5: 2}.get(index, TWO_BY_TWO[rank]))
    if index >= 4:
        hear(folder, f"lost{index}")
        group = joiner(3, 4, folder, mode)
        sums(group, range(4))
        if index == 4:
            arm(step, die)
    else:
        group = member(rank, 4, folder, mode)
    with make_one(kind, group) as buffer:
        if index == 4:
            die()
        if index < 4:
            look(kind, buffer, TWO_BY_TWO, 10)
            if rank == 3:
                die()
            lose(group, {3})
            say(folder, "lost4")
            group.recover_ranks([3])
            sums(group, range(4))
            first = meet(buffer)
            assert first[:3] == [1, 1, 1]
            lose(group, {3})
            assert meet(buffer) == [1, 1, 1, 0]
            say(folder, "lost5")
            group.recover_ranks([3])
            sums(group, range(4))
            assert meet(buffer) == [1, 1, 1, 1]
        look(kind, buffer, where, 20)
        end(folder, rank, range(4))
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("kind", "mode"), [("Buffer", "mask"), ("Buffer", "raise"), ("LatencyBuffer", "mask")])
def test_a_newcomer_that_dies_disturbs_nobody(tmp_path: Path, kind: str, mode: str, step: str) -> None:
    host = (STEPS.index(step) + len(mode)) % 3
    told = run_ranks(dies_coming, 6, str(tmp_path), kind, mode, step, host, backend=None, timeout_s=80, dead={3, 4})
    assert [answer for answer in told if answer != DEAD] == [True] * 4


def host_comes_back(index: int, num_processes: int, folder: str, mode: str, dies: bool) -> Any:
    """A host is lost as a whole and comes back with both ranks; `dies`: one more rank dies while they come."""
    torch.set_num_threads(1)
    placement = (0, 0, 1, 1, 2)
    rank = {5: 2, 6: 3}.get(index, index)
    settle(placement[rank])
    if index > 4:
        hear(folder, "lost")
        group = joiner(rank, 5, folder, mode)
        sums(group, range(5))
    else:
        group = member(rank, 5, folder, mode)
    with begin(group) as buffer:
        if index < 5:
            check_all(buffer, placement, 10)
            if rank in (2, 3):
                die()
            lose(group, {2, 3})
            if rank == 0:
                say(folder, "lost")
            group.recover_ranks([2, 3])
            sums(group, range(5))
            if dies and rank == 1:
                Admission.take_in = lambda *_: die()  # type: ignore[method-assign]
            agreed = meet(buffer)
            assert agreed == [1, int(not dies), 1, 1, 1], agreed
        if dies:
            lose(group, {1})
        there = [rank for rank, is_there in enumerate(meet(buffer)) if is_there]
        assert there == ([0, 2, 3, 4] if dies else [0, 1, 2, 3, 4])
        assert check_bits(buffer, placement, wide=False) == [int(rank in there) for rank in range(5)]
        end(folder, rank, there)
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("mode", ["mask", "raise"])
def test_a_host_comes_back_with_both_ranks(tmp_path: Path, mode: str, dies: bool) -> None:
    dead = {1, 2, 3} if dies else {2, 3}
    told = run_ranks(host_comes_back, 7, str(tmp_path), mode, dies, backend=None, timeout_s=80, dead=dead)
    assert [answer for answer in told if answer != DEAD] == [True] * (7 - len(dead))


def comes_late(index: int, num_processes: int, folder: str, mode: str) -> Any:
    """A newcomer is refused, waits in vain, and comes in at last; say what the others see of it."""
    torch.set_num_threads(1)
    rank = min(index, 3)
    settle(TWO_BY_TWO[rank])
    if index == 4:
        hear(folder, "lost")
        group = joiner(3, 4, folder, mode)
        sums(group, range(4))
        with pytest.raises(MismatchError, match="max_tokens_per_rank"):
            epee.Buffer(group, num_experts=8, hidden=128, num_topk=3, max_tokens_per_rank=17, dtype=torch.float32)
        with pytest.raises(CommTimeoutError, match=r"all of them must call buffer\.sync"):
            begin(group, 1.0)
        say(folder, "waited")
        hear(folder, "synced")
        buffer = begin(group)
    else:
        group = member(rank, 4, folder, mode)
        buffer = begin(group)
        old = buffer.dispatch(rows(rank, 0), routing(rank, 4, 0)[0])
        if rank == 3:
            die()
        lose(group, {3})
        say(folder, "lost")
        group.recover_ranks([3])
        sums(group, range(4))
        hear(folder, "waited")
        mask = torch.ones(4, dtype=torch.int32)
        assert buffer.sync(mask, timeout=1.0).tolist() == [1, 1, 1, 0]  # its time is over, and nobody is in error
        say(folder, "synced")
        assert meet(buffer) == [1] * 4
        with pytest.raises(StaleHandleError):
            buffer.combine(old.x, old.handle)
    if index == 4:
        with pytest.raises(MismatchError):  # as the others' combine
            buffer.barrier()
    check_all(buffer, TWO_BY_TWO, 10)
    end(folder, rank, range(4))
    buffer.close()
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("mode", ["mask", "raise"])
def test_a_newcomer_is_waited_for_and_can_try_again(tmp_path: Path, mode: str) -> None:
    told = run_ranks(comes_late, 5, str(tmp_path), mode, backend=None, timeout_s=80, dead={3})
    assert [answer for answer in told if answer != DEAD] == [True] * 4


def closed_before(index: int, num_processes: int, folder: str) -> Any:
    """The buffer is closed before a process comes, another one runs, and a third is made with it."""
    torch.set_num_threads(1)
    rank, where = min(index, 3), (0, 0, 1, 2)
    settle(2 if index == 4 else TWO_BY_TWO[rank])
    if index == 4:
        hear(folder, "lost")
        group = joiner(3, 4, folder)
        sums(group, range(4))
        small = make(Shape())
    else:
        group = member(rank, 4, folder)
        buffer, small = begin(group), make(Shape())
        check_all(buffer, TWO_BY_TWO, 10)
        if rank == 3:
            die()
        lose(group, {3})
        buffer.close()
        if rank == 0:
            time.sleep(0.5)
            say(folder, "lost")
        group.recover_ranks([3])
        sums(group, range(4))
        assert meet(small) == [1] * 4
    with begin(group) as other, small:
        check_all(other, where, 20)
        check_round(small, Shape(), (6, 3, 4, 5), 30, hosts=where)
        check_all(other, where, 30)
        end(folder, rank, range(4))
    dist.destroy_process_group()
    return True


def test_a_buffer_that_was_closed_is_made_anew_by_all(tmp_path: Path) -> None:
    told = run_ranks(closed_before, 5, str(tmp_path), backend=None, timeout_s=80, dead={3})
    assert [answer for answer in told if answer != DEAD] == [True] * 4
