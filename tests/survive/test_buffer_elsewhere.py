"""Buffers of CPU tensors on groups of other backends: the job that they share, what it leaves, who may close when."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.engine import EngineMeeting
from epee.engine.outbox import OutboxOwner
from epee.errors import InvalidArgument, PeerError, ProtocolError, ResourceError
from epee.view import founding
from epee.view.job import hold_jobs, jobs
from tests.ep.moments import Known
from tests.harness import DEAD, run_mortal, run_ranks

from . import stages
from .buffer_rounds import make_buffer, make_step, start

SIZES = {"num_experts": 8, "hidden": 128, "num_topk": 3, "max_tokens_per_rank": 16, "dtype": torch.float32}


def buffer_on(group: Any = None, **changes: Any) -> epee.Buffer:
    """Make a buffer of 2 experts for each of 4 ranks, or 4 for each of 2."""
    options = {**SIZES, "timeout": 20.0, **changes}
    return epee.Buffer(group, **options)


def held() -> tuple[int, int, list[str]]:
    gc.collect()
    links = []
    for entry in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{entry}"):
            links.append(os.readlink(f"/proc/self/fd/{entry}").split(":[")[0])
    return threading.active_count(), len(jobs()), sorted(links)


# ---- one job


def shares(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Buffers of the group, of a part of it, and of a group of the backend "epee"."""
    first = buffer_on()
    first_held = held()
    second = buffer_on()
    pair = dist.new_group([0, 1])
    part = buffer_on(pair) if rank < 2 else None
    again = held()
    ours = dist.new_group(backend="epee")
    on_ours = buffer_on(ours)
    found = {"first": first_held, "again": again, "jobs": len(jobs())}
    found["threads with our group"] = threading.active_count()
    late = dist.new_group()  # all its ranks share two jobs by now
    later = buffer_on(late)
    found["jobs at last"] = len(jobs())
    for step, buffer in enumerate((first, second, on_ours, later)):
        make_step(buffer, step, "rank")
    if part is not None:
        part.dispatch(torch.ones(2, 128), torch.tensor([[0, 4, 5]] * 2))
    stages.meet(folder, "used", rank, range(num_ranks))
    for buffer in (first, second, part, on_ours, later):
        if buffer is not None:
            buffer.close()
    return found


def test_further_buffers_add_no_thread_and_no_job(tmp_path: Path) -> None:
    for found in run_ranks(shares, 4, str(tmp_path)):
        threads, num_jobs, links = found["first"]
        assert num_jobs == 1
        assert found["again"][:2] == (threads, 1)
        more = set(found["again"][2]) - set(links)
        assert not [link for link in more if "socket" in link or "pidfd" in link], more
        assert found["jobs"] == found["jobs at last"] == 2  # who joins the other group must find a home there


def lives(rank: int, num_ranks: int, times: int) -> tuple[Any, Any]:
    before = None
    for number in range(times):
        buffer_on().close()
        if number == 2:
            before = held()
    return before, held()


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_many_lives_leave_nothing(times: int) -> None:
    for before, after in run_ranks(lives, 2, times):
        more = Counter(after[2]) - Counter(before[2])
        assert not [link for link in more if "epee" in link or "pidfd" in link or "anon_inode" in link], more
        assert more["socket"] <= 2, more  # gloo's own come and go
        assert after[:2] == (before[0], 0)


# ---- closing is no failure


def leaves_early(rank: int, num_ranks: int, folder: str) -> tuple[str, str]:
    """Rank 0 closes, and leaves the job with it, while rank 1 still reads what their last call has brought."""
    buffer = buffer_on()
    x, idx = torch.full((4, 128), rank + 1.0), torch.tensor([[0, 4, 5]] * 4)
    d = buffer.dispatch(x, idx)
    if rank == 0:
        buffer.combine(d.x, d.handle)
        buffer.close()
        stages.reach(folder, "left")
        stages.wait_for(folder, "through")
        return "left", ""
    path, known = buffer._path, Known(buffer)
    pull = path._pull  # type: ignore[union-attr]

    def late(*args: Any) -> Any:
        stages.wait_for(folder, "left")
        until = time.monotonic() + 20.0
        while 0 in known.ranks:
            assert time.monotonic() < until
            time.sleep(0.01)
        return pull(*args)

    path._pull = late  # type: ignore[union-attr, method-assign]
    y = buffer.combine(d.x, d.handle).x
    assert torch.equal(y, 2 * x)  # each token has gone to both ranks and came back from both
    try:
        buffer.dispatch(x, idx)
        said = "nothing"
    except PeerError as error:
        said = str(error)
    stages.reach(folder, "through")
    return "got it", said


def test_a_call_that_the_leaver_has_finished_ends_well(tmp_path: Path) -> None:
    _, (end, said) = run_ranks(leaves_early, 2, str(tmp_path))
    assert end == "got it"
    assert "rank 0: has left the group" in said, said


# ---- what is refused


def policies(rank: int, num_ranks: int, ours: bool, changes: dict[str, str]) -> str:
    group = dist.new_group(backend="epee") if ours else None
    try:
        buffer_on(group, **changes).close()
    except epee.EpeeError as error:
        return f"{type(error).__name__}: {error}"
    return "made"


@pytest.mark.parametrize(
    ("ours", "changes", "said"),
    [
        (False, {"fault_mode": "mask"}, "made"),
        (False, {"fault_mode": "hope"}, "InvalidArgument: fault_mode must be one of"),
        (False, {"on_stall": "hope"}, "InvalidArgument: on_stall must be one of"),
        (True, {"fault_mode": "raise", "on_stall": "error"}, "made"),
        (True, {"fault_mode": "mask"}, "InvalidArgument: fault_mode must be the group's, 'raise', got 'mask'"),
    ],
)
def test_what_a_loss_is_can_be_said_where_no_group_says_it(ours: bool, changes: dict[str, Any], said: str) -> None:
    for answer in run_ranks(policies, 2, ours, changes):
        assert answer.startswith(said), answer


def disagree(rank: int, num_ranks: int) -> str:
    try:
        buffer_on(fault_mode=("raise", "mask")[rank])
    except epee.MismatchError as error:
        return str(error)
    return "made"


def test_ranks_that_disagree_about_it_are_told() -> None:
    told = run_ranks(disagree, 2)
    assert told[0] == told[1]
    assert "ranks disagree about fault_mode: rank 0 has raise, rank 1 has mask" in told[0]


def poor(rank: int, num_ranks: int, who: int) -> tuple[str, int]:
    """One rank cannot make its part of the job; a moment later it can."""
    real = founding.JobDirectory.open if who else founding.new_folder

    def fails(*args: Any) -> Any:
        raise ResourceError("no folder today")

    if rank == who:
        target, name = (founding.JobDirectory, "open") if who else (founding, "new_folder")
        setattr(target, name, fails)
    with pytest.raises(ResourceError) as caught:
        buffer_on()
    num_jobs = len(jobs())
    if rank == who:
        setattr(target, name, real)
    with buffer_on() as buffer:
        buffer.dispatch(torch.ones(2, 128), torch.tensor([[0, 4, 5]] * 2))
    return str(caught.value), num_jobs


@pytest.mark.parametrize("who", [0, 1])
def test_all_hear_who_could_not_make_its_part_of_the_job(who: int) -> None:
    for said, num_jobs in run_ranks(poor, 2, who):
        assert said == f"Buffer: rank {who} could not make its part of the job: no folder today"
        assert num_jobs == 0


def fails_later(rank: int, num_ranks: int, where: str, ours: bool, policy: dict[str, str]) -> list[Any]:
    """The last rank cannot make its part of a second buffer; the first one goes on as if nothing had been."""
    group = dist.new_group(backend="epee", pg_options=epee.BackendOptions(**policy)) if ours else None
    given = {} if ours else policy
    first = buffer_on(group, **given)
    make_step(first, 0, "rank")
    job = Known(first).job
    before = job.num_groups
    patch = pytest.MonkeyPatch()

    def fails(*_: Any) -> Any:
        raise ResourceError("nothing left today")

    if rank == num_ranks - 1:
        kind = EngineMeeting
        names = {"line": (kind, "__init__"), "inbox": (OutboxOwner, "sign"), "mapping": (kind, "attach")}
        owner, name = names[where]
        patch.setattr(owner, name, fails)
    with pytest.raises(ResourceError) as caught:
        buffer_on(group, **given, timeout=600.0)  # nobody waits for it
    patch.undo()
    assert job.num_groups == before
    make_step(first, 1, "rank")
    with buffer_on(group, **given) as again:
        make_step(again, 2, "rank")
    make_step(first, 3, "rank")
    return [str(caught.value), job.runtime.error is None]


@pytest.mark.parametrize(
    ("where", "ours", "policy"),
    [
        ("line", False, {}),
        ("inbox", False, {"fault_mode": "mask", "on_stall": "evict"}),
        ("inbox", True, {"fault_mode": "mask", "on_stall": "evict"}),
        ("mapping", False, {"on_stall": "wait"}),
    ],
)
def test_a_buffer_that_cannot_be_made_harms_no_other(where: str, ours: bool, policy: dict[str, str]) -> None:
    for said, is_well in run_ranks(fails_later, 4, where, ours, policy):
        assert said == "Buffer: rank 3 could not make its part: ResourceError: nothing left today"
        assert is_well


def asleep(rank: int, num_ranks: int, folder: str) -> list[int]:
    """Rank 1 is voted out while it sleeps, and does not know it when all make a new buffer."""
    pids: list[Any] = [None] * num_ranks
    dist.all_gather_object(pids, os.getpid())
    old = buffer_on(timeout=3.0, fault_mode="mask", on_stall="evict")  # one that is well may be late on a busy machine
    make_step(old, 0, "rank")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        make_step(old, 1, "rank")
        stages.meet(folder, "voted", rank, (0, 2, 3))
        if rank == 0:
            stages.await_stop(pids[1])
            os.kill(pids[1], signal.SIGCONT)
    with buffer_on() as new:
        d = new.dispatch(torch.ones(2, 128), torch.tensor([[0, 4, 5]] * 2))
        return d.got.tolist()  # type: ignore[no-any-return]


def test_who_was_voted_out_of_one_job_is_in_the_next(tmp_path: Path) -> None:
    assert run_ranks(asleep, 4, str(tmp_path)) == [[1] * 4] * 4


def test_a_job_is_shared_if_its_newest_view_has_all_ranks() -> None:
    def presence(slot: int, epoch: int, members: dict[int, int]) -> founding.Presence:
        return founding.Presence({"job": founding.Standing(slot, 1, epoch, members)}, 1)

    both, alone, replaced = {0: 1, 1: 1}, {0: 1}, {0: 1, 1: 2}
    assert founding._is_shared("job", [presence(0, 1, both), presence(1, 1, both)])
    assert not founding._is_shared("job", [presence(0, 2, alone), presence(1, 1, both)])
    assert not founding._is_shared("job", [presence(0, 3, replaced), presence(1, 1, both)])
    assert founding._is_shared("job", [presence(0, 2, both), presence(1, 1, alone)])


def dies_on_the_way(rank: int, num_ranks: int, folder: str) -> list[int]:
    """Rank 3 dies while the buffer is made, with its inbox lent: some may have mapped it, some not."""
    group = start(rank, num_ranks, folder, "mask", on_stall="evict")
    meet = EngineMeeting.meet
    patch = pytest.MonkeyPatch()

    def late(self: Any, *args: Any) -> Any:
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            while self._membership.runtime.view().epoch == args[0]:
                time.sleep(0.001)
        return meet(self, *args)

    patch.setattr(EngineMeeting, "meet", late)
    with make_buffer(group) as buffer:
        patch.undo()
        return list(make_step(buffer, 0, "rank")[2])


def test_a_death_while_the_buffer_is_made() -> None:
    *left, last = run_mortal(dies_on_the_way, 4, dead={3}, timeout_s=60)
    assert left == [[1, 1, 1, 0]] * 3
    assert last == DEAD


def child(rank: int, num_ranks: int) -> tuple[int, str]:
    """A forked child has no part in its parent's jobs."""
    with buffer_on() as buffer:
        make_step(buffer, 0, "rank")
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(writer, b"%d" % len([*jobs(), *hold_jobs()]))
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(pid, 0)
        told = os.read(reader, 9).decode()
        make_step(buffer, 1, "rank")
        return len(jobs()), told


def test_a_forked_child_has_no_part_in_its_parents_jobs() -> None:
    assert run_ranks(child, 4) == [(1, "0")] * 4


# ---- what peers tell is checked


def told(*answers: bytes) -> founding.Gather:
    """Return an all_gather of two ranks in which rank 1 tells `answers`, one per round."""
    rounds = iter(answers)

    def gather(mine: bytes) -> Sequence[bytes]:
        return [mine, next(rounds)]

    return gather


@pytest.mark.parametrize(
    "words",
    [
        b"\xff" * 64,
        b"[" * 4000,
        b"[1, 2]",
        b'{"jobs": {}, "group_id": 1, "namespace": ""}',
        b'{"jobs": [], "group_id": 1}',
        b'{"jobs": {}, "group_id": true}',
        b'{"jobs": {}, "group_id": -3}',
        b'{"jobs": {"a": 3}, "group_id": 1}',
        b'{"jobs": {"a": [0, 1, 1]}, "group_id": 1}',
        b'{"jobs": {"a": [64, 1, 1, []]}, "group_id": 1}',
        b'{"jobs": {"a": [0, 0, 1, []]}, "group_id": 1}',
        b'{"jobs": {"a": ["0", 1, 1, []]}, "group_id": 1}',
        b'{"jobs": {"a": [0, 1, 1, [[0]]]}, "group_id": 1}',
        b'{"jobs": {"a": [0, 1, 1, [[0, 1], [64, 1]]]}, "group_id": 1}',
        b'{"jobs": {"a": [0, 1, -1, [[0, 1]]]}, "group_id": 1}',
    ],
)
def test_what_cannot_be_right_is_refused(words: bytes) -> None:
    with pytest.raises(ProtocolError, match="rank 1"):
        founding.find_place(0, 2, told(words))
    assert jobs() == []


def test_a_member_that_cannot_be_right_is_refused() -> None:
    with pytest.raises(ProtocolError, match="rank 1's record names a member that cannot be right"):
        founding.find_place(
            0,
            2,
            told(
                b'{"jobs": {}, "group_id": 1}',
                b'{"folder": ""}',
                b'{"member": "[0, 1, 2]"}',
            ),
        )
    assert jobs() == []


def test_more_ranks_than_a_job_has_room_for_are_refused() -> None:
    config = epee.ep.config.BufferConfig(65, 65, 8, 1, 1, torch.float32)
    with pytest.raises(InvalidArgument, match="a buffer serves at most 64 ranks, got 65"):
        config.check()
