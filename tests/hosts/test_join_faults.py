"""What goes wrong while a process comes into a group over hosts: it dies at any step, or the store does."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from epee.engine.membership.group_membership import GroupMembership
from epee.engine.replication import joining_over_hosts
from epee.errors import AuthError, CommTimeoutError, EpeeError, InvalidState, MismatchError
from epee.view.runtime import Runtime
from tests.harness import DEAD, run_ranks
from tests.hosts.joins import full, hear, joiner, lose, member, say, sums
from tests.loopback import settle
from tests.survive import kill_points

TWO_BY_TWO = (0, 0, 1, 1)
STEPS = ("asked", "decided", "linked", "attached", "in", "mid_send")


def arm(step: str) -> None:
    """Die at a step of coming in."""

    def dying(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3 if step == "asked" else 0.0)
        kill_points.die()

    places = {
        "asked": (Runtime, "await_decision"),
        "decided": (GroupMembership, "join"),
        "linked": (GroupMembership, "use"),
        "attached": (joining_over_hosts.Entrance, "is_here"),
    }
    if step in places:
        setattr(*places[step], dying)


def dies_coming(rank: int, num_processes: int, folder: str, step: str, host: int, mode: str) -> Any:
    """Process 4 takes rank 3's place and dies at a step, process 5 comes then."""
    if rank >= 4:
        settle(host if rank == 4 else 2)
        hear(folder, "lost" if rank == 4 else "lost again")
        if rank == 4:
            arm(step)
        group = joiner(3, 4, folder, mode)
        if rank == 4:
            if step == "mid_send":
                kill_points.arm("mid_send", group._engine.seq + 1)
                dist.all_reduce(full(1, 1))
            kill_points.die()
        rank = 3
    else:
        settle(TWO_BY_TWO[rank])
        group = member(rank, 4, folder, mode)
        sums(group, range(4))
        if rank == 3:
            kill_points.die()
        lose(group, {3})
        say(folder, "lost")
        if step == "asked":
            time.sleep(1.5)
        else:
            group.recover_ranks([3])
            x = full(1, 1)
            try:
                dist.all_reduce(x)
                assert x.item() == 3
            except EpeeError:
                assert mode == "raise"
            lose(group, {3})
        say(folder, "lost again")
        group.recover_ranks([3])
    sums(group, range(4))
    hosts = group.hosts
    dist.destroy_process_group()
    return hosts


@pytest.mark.parametrize(("host", "mode"), [(1, "mask"), (2, "mask"), (0, "raise")])
@pytest.mark.parametrize("step", STEPS)
def test_a_joiner_that_dies_disturbs_nobody(tmp_path: Path, step: str, host: int, mode: str) -> None:
    results = run_ranks(dies_coming, 6, str(tmp_path), step, host, mode, backend=None, timeout_s=80, dead={3, 4})
    assert [result for result in results if result != DEAD] == [((0, 1), (2,), (3,))] * 4


def without_a_store(rank: int, num_processes: int, folder: str, host: int) -> Any:
    """The store is removed after the group was made; a process that comes then is told, or finds the folder."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", EPEE_RUNTIME_DIR=folder + "/run")
    if rank == 4:
        settle(host)
        hear(folder, "lost")
        began = time.monotonic()
        if host == 2:
            with pytest.raises(InvalidState, match="names no running job"):
                joiner(3, 4, folder)
            say(folder, "done")
            return time.monotonic() - began < 15
        group, rank = joiner(3, 4, folder), 3
    else:
        settle(TWO_BY_TWO[rank])
        group = member(rank, 4, folder)
        sums(group, range(4))
        if rank == 3:
            kill_points.die()
        lose(group, {3})
        if rank == 0:
            os.unlink(f"{folder}/store")
            say(folder, "lost")
        if host == 2:
            hear(folder, "done")
            sums(group, range(3))
            dist.destroy_process_group()
            return True
        group.recover_ranks([3])
    sums(group, range(4))
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("host", [0, 1, 2])
def test_when_the_store_has_died_who_comes_finds_the_folder_or_is_told(tmp_path: Path, host: int) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    results = run_ranks(without_a_store, 5, str(tmp_path), host, backend=None, timeout_s=60, dead={3})
    assert results.pop(3) == DEAD
    assert results == [True] * 4


def dies_while_it_waits(rank: int, num_processes: int, folder: str) -> Any:
    """The store goes when a process has asked to come in; it comes in all the same."""
    if rank == 4:
        settle(2)
        hear(folder, "lost")
        waits = Runtime.join

        def join(self: Runtime, *args: Any, **kwargs: Any) -> Any:
            os.unlink(f"{folder}/store")
            say(folder, "gone")
            return waits(self, *args, **kwargs)

        Runtime.join = join  # type: ignore[method-assign]
        group, rank = joiner(3, 4, folder), 3
    else:
        settle(TWO_BY_TWO[rank])
        group = member(rank, 4, folder)
        if rank == 3:
            kill_points.die()
        dist.all_reduce(full(1, 1))
        lose(group, {3})
        say(folder, "lost")
        hear(folder, "gone")
        group.recover_ranks([3])
    sums(group, range(4))
    dist.destroy_process_group()
    return True


def test_a_store_that_dies_when_the_join_has_begun_is_not_missed(tmp_path: Path) -> None:
    results = run_ranks(dies_while_it_waits, 5, str(tmp_path), backend=None, timeout_s=60, dead={3})
    assert results.pop(3) == DEAD
    assert results == [True] * 4


def nobody_admits(rank: int, num_processes: int, folder: str, what: str) -> str:
    """A process comes that is not let in, or differs."""
    settle((0, 1, 2)[rank])
    if rank == 2:
        hear(folder, "ready")
        kinds = {"mac": MismatchError, "file": AuthError, "late": CommTimeoutError}
        if what == "mac":
            os.environ["EPEE_LINK_MAC"] = "1"
        if what == "file":
            secret = Path(folder) / "token"
            secret.write_bytes(bytes(32))
            secret.chmod(0o400)
            os.environ["EPEE_TOKEN_FILE"] = str(secret)
        timeouts = {"timeout_s": 3.0} if what == "late" else {}
        with pytest.raises(kinds[what]) as caught:
            joiner(2, 3, folder, **timeouts)
        say(folder, "done")
        return str(caught.value)
    group = member(rank, 2, folder)
    dist.all_reduce(full(1, 1))
    say(folder, "ready")
    hear(folder, "done")
    sums(group, range(2))
    dist.destroy_process_group()
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [("mac", "EPEE_LINK_MAC must be those"), ("file", "on all hosts or on none"), ("late", "no member has called")],
)
def test_who_does_not_fit_is_told_why(tmp_path: Path, what: str, words: str) -> None:
    results = run_ranks(nobody_admits, 3, str(tmp_path), what, backend=None, timeout_s=60)
    assert words in results[2]


def amid_losses(rank: int, num_processes: int, folder: str, hosts: tuple[int, int], killer: int) -> Any:
    """Ranks 1 and 4 are replaced at once, while rank `killer` dies as the newcomers come in."""
    if rank >= 6:
        settle(hosts[rank - 6])
        hear(folder, "lost")
        group, rank = joiner((1, 4)[rank - 6], 6, folder), (1, 4)[rank - 6]
    else:
        settle((0, 0, 0, 1, 1, 1)[rank])
        group = member(rank, 6, folder)
        sums(group, range(6))
        if rank in (1, 4):
            kill_points.die()
        lose(group, {1, 4})
        say(folder, "lost")
        if rank == killer:
            epoch = group._engine.membership.runtime.view().epoch
            while group._engine.membership.runtime.view().epoch == epoch:
                time.sleep(0.0005)
            kill_points.die()
        if rank == 0:
            group.recover_ranks([1, 4])
    left = tuple(peer for peer in range(6) if peer != killer)
    deadline = time.monotonic() + 40
    while group.last_contributors() != left:
        assert time.monotonic() < deadline, group.last_contributors()
        x = full(3, rank + 1)
        dist.all_reduce(x)
        assert x[0].item() == sum(peer + 1 for peer in group.last_contributors())
    sums(group, left)
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("killer", [2, 3, 5])
@pytest.mark.parametrize("hosts", [(0, 1), (1, 0), (2, 2)])
def test_ranks_die_while_others_come_in(tmp_path: Path, hosts: tuple[int, int], killer: int) -> None:
    args = hosts, killer
    results = run_ranks(amid_losses, 8, str(tmp_path), *args, backend=None, timeout_s=90, dead={1, 4, killer})
    assert [result for result in results if result != DEAD] == [True] * 5
