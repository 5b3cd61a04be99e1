"""Birth, end, abort, fork, exit, death of a peer: what remains, who is told, how fast."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import signal
import threading
import time
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.engine.bootstrap import record
from epee.errors import AbortedError, CommTimeoutError, ForkError, PeerError, ProtocolError, RankFailedError
from tests.forked import Program
from tests.harness import DEAD, run_ranks
from tests.survive import stages

from . import cases


def resources() -> tuple[int, int, int]:
    """Return the numbers of descriptors, threads and mappings of outboxes."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        sum("epee-outbox" in line for line in maps),
    )


def rounds(rank: int, num_ranks: int, folder: str) -> list[tuple[int, int, int]]:
    seen = []
    gc.freeze()  # torch's own objects: looking through them 50 times would be most of the time
    for i in range(50):
        store = dist.FileStore(f"{folder}/store{i}", num_ranks)
        dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks)
        x = torch.ones(1000)
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        sub = dist.new_group([0, 1], backend="epee")
        dist.barrier(group=sub)
        if rank == 0:
            dist.isend(x, 1)  # never waited for
        else:
            dist.recv(x, 0)
        work.wait()
        dist.barrier()
        dist.destroy_process_group()
        del work, sub, store
        gc.collect()
        seen.append(resources())
    return seen


def test_fifty_rounds_of_init_and_destroy_leave_nothing(tmp_path: Path) -> None:
    for seen in run_ranks(rounds, 2, str(tmp_path), backend=None, timeout_s=55):
        assert seen[-1] == seen[5], seen
        assert seen[-1][2] == 0, "outboxes stay mapped"


def same_store(rank: int, num_ranks: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", num_ranks)
    for i in range(3):
        dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks)
        x = torch.full((2,), float(i))
        dist.all_reduce(x)
        assert x[0].item() == i * num_ranks
        dist.destroy_process_group()


def test_a_group_can_be_made_again_with_the_same_store(tmp_path: Path) -> None:
    run_ranks(same_store, 2, str(tmp_path), backend=None)


def ended_by_another_thread(rank: int, num_ranks: int, how: str) -> list[float]:
    group: Any = dist.group.WORLD
    delays = []
    waits = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(2)),
        "large all_reduce": lambda: dist.all_reduce(torch.ones(500_000)),
        "recv": lambda: dist.recv(torch.ones(2), 1),
        "recv from any": lambda: dist.recv(torch.ones(2)),
        "send": lambda: dist.send(torch.ones(2), 1),
        "async": lambda: dist.all_reduce(torch.ones(2), async_op=True).wait(),
    }
    for call in waits.values():
        group = dist.new_group([0, 1], backend="epee")
        if rank == 0:
            caught: list[tuple[type, float]] = []

            def waiter(call: Any = call, group: Any = group, caught: Any = caught) -> None:
                try:
                    dist.distributed_c10d._world.default_pg, kept = group, dist.distributed_c10d._world.default_pg
                    try:
                        call()
                    finally:
                        dist.distributed_c10d._world.default_pg = kept
                except BaseException as exc:  # noqa: BLE001 - its type is what is tested
                    caught.append((type(exc), time.monotonic()))

            thread = threading.Thread(target=waiter)
            thread.start()
            assert thread.ident is not None
            asleep = threading.Event()
            cases.when_asleep(group._engine, asleep.set, thread.ident)
            assert asleep.wait(20), "the waiter does not wait"
            begin = time.monotonic()
            getattr(group, how)()
            thread.join(10)
            assert caught, "the waiter did not come back"
            assert caught[0][0] is AbortedError, caught
            delays.append(caught[0][1] - begin)
        dist.barrier()
    return delays


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_ending_a_group_wakes_its_waiters_within_100_ms(how: str) -> None:
    seen: list[list[float]] = []
    while not seen or (max(seen[-1]) >= 0.1 and len(seen) < 5):  # a busy machine is slow now and then, not each time
        seen.append(run_ranks(ended_by_another_thread, 2, how, backend="epee")[0])
        assert len(seen[-1]) == 6
    assert max(seen[-1]) < 0.1, seen


def peer_leaves(rank: int, num_ranks: int) -> float:
    sub = dist.new_group([0, 1], backend="epee")
    begin = time.monotonic()
    elapsed = 0.0
    if rank == 0:
        time.sleep(0.3)
        sub.abort()
    else:
        x = torch.full((3,), 4.0)
        with pytest.raises(PeerError, match="left the group") as caught:
            dist.all_reduce(x, group=sub)
        elapsed = time.monotonic() - begin - 0.3
        assert caught.value.ranks == (0,)
        assert x.tolist() == [4.0] * 3
        with pytest.raises(PeerError, match="left the group"):
            dist.recv(x, 0, group=sub)
    dist.barrier()
    return elapsed


def test_a_peer_that_leaves_is_an_error_at_once_not_a_timeout() -> None:
    assert run_ranks(peer_leaves, 2, backend="epee")[1] < 15.0  # the time-out is far higher


def victim(rank: int, num_ranks: int, folder: str, kind: str) -> Any:
    cases.init(rank, num_ranks, folder)
    dist.all_reduce(torch.ones(2))
    if rank == num_ranks - 1:
        if kind == "published":
            dist.all_reduce(torch.ones(3), async_op=True)
            for other in range(rank):
                stages.wait_for(folder, f"took it {other}")
        else:
            time.sleep(0.3)  # the others wait by then, or come later
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.full((400_000 if kind == "large" else 3,), 2.0)
    begin = time.monotonic()
    if kind == "published":
        dist.all_reduce(x)  # it put its part before it died: that counts
        assert x[0].item() == 2.0 * (num_ranks - 1) + 1.0
        stages.reach(folder, f"took it {rank}")
    call = (lambda: dist.recv(x, num_ranks - 1)) if kind == "recv" else (lambda: dist.all_reduce(x))
    with pytest.raises(RankFailedError) as caught:
        call()
    elapsed = time.monotonic() - begin
    error = caught.value
    assert error.ranks == (num_ranks - 1,)
    assert error.op == ("recv" if kind == "recv" else "all_reduce")
    # a recv that waits is told in its own epoch; one that comes when the view has changed, in the new one
    assert error.epoch in ((1, 2) if kind == "recv" else (2,))
    assert "process has ended" in str(error)
    if kind != "published":
        assert x.unique().tolist() == [2.0]
    if kind != "recv":  # the next call works without the victim
        dist.all_reduce(x.fill_(1.0))
        assert x.unique().tolist() == [num_ranks - 1]
    stages.meet(folder, "over", rank, range(num_ranks - 1))
    return elapsed


@pytest.mark.parametrize("kind", ["small", "large", "recv", "published"])
def test_a_killed_peer_is_named_promptly_by_every_survivor(tmp_path: Path, kind: str) -> None:
    *elapsed, dead = run_ranks(victim, 3, str(tmp_path), kind, backend=None, dead={2})
    assert dead == DEAD
    assert max(elapsed) < 15.0  # far below the time-out of 30 s


def forked(rank: int, num_ranks: int) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told = "nothing"
        try:
            dist.all_reduce(torch.ones(1))
        except ForkError as exc:
            told = str(exc)
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    told = os.read(reader, 1000).decode()
    os.waitpid(child, 0)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x[0].item() == num_ranks
    return told


def test_a_forked_child_is_told_and_the_parent_is_not_disturbed() -> None:
    for told in run_ranks(forked, 2, backend="epee"):
        assert "fork" in told


EXIT = """
import sys, torch, torch.distributed as dist, epee, threading
rank, folder, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("epee", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
x = torch.ones(300_000)
dist.all_reduce(x)
work = dist.all_reduce(x, async_op=True)
if how == "busy":
    work.get_future().wait()
    dist.irecv(x, 1 - rank, tag=3)
    dist.isend(torch.ones(9_000_000), 1 - rank, tag=4)
    for _ in range(20):
        dist.all_reduce(torch.ones(500_000, dtype=torch.bfloat16), async_op=True)
    threading.Thread(target=dist.recv, args=(torch.ones(1), 1 - rank), daemon=True).start()
store = dist.distributed_c10d._get_default_store()
store.set(f"through {rank}", "")
store.wait([f"through {1 - rank}"])  # calls to one that has ended would be refused
print(f"end {x.sum().item() > 0}")
"""


@pytest.mark.parametrize("how", ["idle", "busy"])
def test_an_exit_without_destroy_has_exit_code_0(tmp_path: Path, how: str) -> None:
    with contextlib.ExitStack() as ends:
        ranks = [ends.enter_context(Program(EXIT, str(rank), str(tmp_path), how)) for rank in range(2)]
        for process in ranks:
            out, _ = process.communicate(timeout=50)
            assert process.returncode == 0, out
            assert "end True" in out


def collected(rank: int, num_ranks: int) -> int:
    import weakref

    sub = dist.new_group([0, 1], backend="epee")
    dist.all_reduce(torch.ones(1), group=sub, async_op=True).wait()
    engine = weakref.ref(sub._engine)
    dist.destroy_process_group(sub)
    del sub
    gc.collect()
    dist.barrier()
    return engine() is None


def test_a_destroyed_group_is_collected() -> None:
    assert run_ranks(collected, 2, backend="epee") == [True, True]


def released(rank: int, num_ranks: int) -> list[int]:
    """Messages whose works are waited for in both orders, polled, or dropped; nothing refers to their tensors then."""
    other, kept = 1 - rank, []
    for how in range(8):
        x, y = torch.ones(1000), torch.zeros(1000)
        works: list[Any] = [dist.isend(x, other), dist.irecv(y, other)]
        if how % 4 == 0:
            works.reverse()
        if how % 4 < 2:
            for work in works:
                work.wait()
        while how % 4 == 2 and not all(work.is_completed() for work in works):
            time.sleep(0.001)
        ends = [weakref.ref(x), weakref.ref(y)]
        del x, y, works
        work = None
        until = time.monotonic() + 20
        while any(end() is not None for end in ends) and time.monotonic() < until:
            time.sleep(0.01)  # the background thread ends what nobody waits for
        kept += [how for end in ends if end() is not None]
    dist.barrier()
    return kept


def test_messages_that_have_ended_release_their_tensors_without_a_further_call() -> None:
    assert run_ranks(released, 2, backend="epee") == [[], []]


def given_up(rank: int, num_ranks: int, folder: str) -> bool:
    """Rank 0 gives a blocking call up; its tensors are free when the error is, with no collection of garbage."""
    gc.disable()
    dist.barrier()
    is_free = True
    if rank == 0:
        x = torch.ones(100)
        given = weakref.ref(x)
        options = dist.AllreduceOptions()
        options.timeout, options.asyncOp = datetime.timedelta(seconds=0.3), False
        group: Any = dist.distributed_c10d._get_default_group()
        told = ""
        try:
            group.allreduce([x], options)
        except CommTimeoutError as error:
            told = str(error)
        assert "all_reduce" in told, "the call was not given up"
        del x, options
        is_free = given() is None
        stages.reach(folder, "given up")
    else:
        stages.wait_for(folder, "given up")
        with pytest.raises(CommTimeoutError):  # the call of this number has failed on all ranks
            dist.all_reduce(torch.ones(100))
    dist.barrier()
    gc.enable()
    return is_free


def test_a_call_that_was_given_up_releases_its_tensors(tmp_path: Path) -> None:
    assert run_ranks(given_up, 2, str(tmp_path), backend="epee") == [True, True]


def idle(rank: int, num_ranks: int) -> float:
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    dist.isend(torch.ones(1), 1).wait() if rank == 0 else dist.recv(torch.ones(1), 0)
    time.sleep(0.3)  # the background thread lingers for a moment
    shares = []
    for _ in range(3):
        before = time.process_time()
        time.sleep(0.5)
        shares.append((time.process_time() - before) / 0.5)
    dist.barrier()  # a rank that ends wakes the other
    return min(shares)


def test_an_idle_group_uses_no_cpu() -> None:
    for share in run_ranks(idle, 2, backend="epee"):
        assert share < 0.005, f"{100 * share:.2f} % of a core"


def waiting_message(rank: int, num_ranks: int, any_source: bool) -> float:
    work = dist.irecv(torch.ones(1), None if any_source else 1 - rank)
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1.5)
    share = (time.process_time() - before) / 1.5
    dist.barrier()
    dist.isend(torch.ones(1), 1 - rank).wait()
    work.wait()
    return share


@pytest.mark.parametrize("any_source", [False, True])
def test_an_open_receive_does_not_spin(any_source: bool) -> None:
    for share in run_ranks(waiting_message, 2, any_source, backend="epee"):
        assert share < 0.15, f"{100 * share:.1f} % of a core"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol", 99),
        ("num_ranks", 3),
        ("staging_bytes", 4096),
        ("blob", "00"),
        ("pid", "7"),
        ("blob", 5),
        ("port", 1 << 16),
        ("address", "here"),
    ],
)
def test_a_record_that_does_not_fit_is_a_protocol_error(field: str, value: object) -> None:
    import json

    from epee.memory.shared import SharedRegion

    region = SharedRegion.create(4096, "test")
    mine = record.own_record(2, 65536, region)
    good = json.dumps(asdict(mine)).encode()
    assert record.parse(good, 1, mine) == mine
    with pytest.raises(ProtocolError, match="rank 1"):
        record.parse(json.dumps({**asdict(mine), field: value}).encode(), 1, mine)
    region.close()


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe", b"[]", b"{}", b"[1" * 3000, b'{"a": 1}', b"null"])
def test_a_damaged_record_is_a_protocol_error(raw: bytes) -> None:
    from epee.memory.shared import SharedRegion

    region = SharedRegion.create(4096, "test")
    with pytest.raises(ProtocolError):
        record.parse(raw, 1, record.own_record(2, 65536, region))
    region.close()


def missing_rank(rank: int, num_ranks: int, folder: str) -> str:
    begin = time.monotonic()
    with pytest.raises(epee.CommTimeoutError) as caught:
        cases.init(0, 2, folder, timeout_s=1)
    assert time.monotonic() - begin < 10
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    assert "rank 1" in run_ranks(missing_rank, 1, str(tmp_path), backend=None)[0]


def hostile(rank: int, num_ranks: int) -> list[str]:
    """A peer whose outbox holds nonsense: an error, never a crash."""
    from epee.engine.outbox import CELL_WORDS, NUM_CELLS, OFFSET

    told = []
    peer_regions = dist.group.WORLD._engine.members
    for offset in (1 << 60, peer_regions.payload_bytes - 64, 7):
        dist.barrier()
        x = torch.ones(3000)
        if rank == 1:
            seq = dist.group.WORLD._engine.seq + 1
            real = peer_regions.own
            cell = peer_regions.first_cell + seq % NUM_CELLS * CELL_WORDS

            class Liar:
                def __setitem__(self, index: int, value: int, cell: int = cell, offset: int = offset) -> None:
                    real[index] = offset if index == cell + OFFSET else value  # noqa: B023

                def __getitem__(self, index: int) -> int:
                    return real[index]  # noqa: B023

            peer_regions.own = Liar()
        try:
            dist.all_reduce(x)
        except ProtocolError as exc:
            told.append(str(exc))
            assert x.tolist() == [1.0] * 3000
        finally:
            if rank == 1:
                peer_regions.own = real
    dist.barrier()
    return told


def test_a_damaged_header_of_a_peer_is_a_protocol_error() -> None:
    first, second = run_ranks(hostile, 2, backend="epee")
    assert len(first) == 3
    assert all("offset" in text for text in first)
    assert not second
