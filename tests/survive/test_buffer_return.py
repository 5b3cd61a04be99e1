"""A Buffer whose ranks are stopped, voted out, replaced, or leave: zombies, time-outs, newcomers, stale handles."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee import nn
from epee.errors import CommTimeoutError, EvictedError, MismatchError, RankFailedError, StaleHandleError
from tests.ep import moments
from tests.harness import DEAD, run_mortal

from . import stages
from .buffer_rounds import (
    HIDDEN,
    LOCAL,
    TIMEOUT_S,
    arm,
    die,
    go_on,
    make_buffer,
    make_step,
    refused,
    routing,
    rows,
    start,
)

STALL_S = 3.0  # a busy machine may keep a rank that is well from its core for a second or two


def stop_once() -> Callable[[], None]:
    """Return what stops this process, as a debugger would, the first time that it is called."""
    times = iter([True])

    def stop() -> None:
        if next(times, False):
            os.kill(os.getpid(), signal.SIGSTOP)

    return stop


def live_memory(buffer: epee.Buffer) -> str:
    """Return a digest of all memory of this rank that peers may write to now."""
    arenas: Any = buffer._path
    regions = [arena.region for arena in arenas.arenas._own.values()]  # an outbox is written by its owner alone
    digest = hashlib.sha256()
    for region in regions:
        digest.update(region.mapping[:])
    return digest.hexdigest()


# ---- zombies


def hear_late(buffer: epee.Buffer) -> None:
    """Let the calls of this process ask for news only half a second after they first want to, as on a busy machine."""
    exchange: Any = buffer._exchange
    membership = exchange.engine.membership
    take_news = membership.take_news

    def take_late() -> None:
        membership.take_news = take_news
        time.sleep(0.5)
        take_news()

    membership.take_news = take_late


def zombie(rank: int, num_ranks: int, folder: str, mode: str, point: str, backend: str) -> Any:
    group = start(rank, num_ranks, folder, mode, backend=backend, on_stall="evict")
    buffer = make_buffer(group, timeout=STALL_S)
    (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
    go_on(buffer, 2, {})
    if rank == 1:
        arm(buffer, point.removesuffix(", hears late"), stop_once())
        if point.endswith("hears late"):
            hear_late(buffer)
        seen = [refused(lambda: go_on_once(buffer, 2)) for _ in range(3)]
        stages.reach(folder, "told")
        return seen
    done, errors = go_on(buffer, 6, {}, first=2)
    kept = buffer.dispatch(rows(rank, 50), routing(rank, num_ranks, 50)[0])
    want = kept.x.clone()
    buffer.sync()
    stages.meet(folder, "quiet", rank, (0, 2, 3))
    before = live_memory(buffer)  # nobody but the zombie writes any more
    stages.meet(folder, "looked", rank, (0, 2, 3))
    if rank == 0:
        sleeper = int((Path(folder) / "pid1").read_text())
        stages.await_stop(sleeper)  # on a busy machine it may have been too slow to get there before
        os.kill(sleeper, signal.SIGCONT)
    stages.wait_for(folder, "told")
    assert live_memory(buffer) == before, "the zombie has written into live memory"
    stages.meet(folder, "checked", rank, (0, 2, 3))
    assert torch.equal(kept.x, want)
    more, errors_after = go_on(buffer, 9, {}, first=6)
    assert errors_after == []
    return done + more, errors


def go_on_once(buffer: epee.Buffer, step: int) -> None:
    """Make a step in the zombie: its results, if any, do not matter."""
    make_step(buffer, step, "rank")
    raise EvictedError("it came to an end before it heard")


@pytest.mark.parametrize(
    ("mode", "point", "backend"),
    [
        ("mask", "dispatch: first row", "epee"),
        ("mask", "dispatch: first data", "epee"),
        ("mask", "combine: rows", "epee"),
        ("mask", "combine: rows, hears late", "epee"),
        ("mask", "dispatch: rows", "gloo"),
        ("raise", "dispatch: rows", "epee"),
        ("raise", "combine: first row", "epee"),
        ("raise", "combine: rows", "gloo"),
        ("raise", "combine: rows, hears late", "gloo"),
    ],
)
def test_a_stopped_rank_is_voted_out_and_writes_into_no_live_memory(mode: str, point: str, backend: str) -> None:
    results = run_mortal(zombie, 4, mode, point, backend, dead=set(), timeout_s=60)
    assert results[1] == ["EvictedError"] * 3
    left = [results[0], results[2], results[3]]
    for done, errors in left:
        assert done == left[0][0]
        assert done[-1][2] == (1, 0, 1, 1)
        assert set(errors) <= ({"RankFailedError"} if mode == "raise" else {"StaleHandleError"})


# ---- time-outs


def gives_up(rank: int, num_ranks: int, folder: str, is_slow: bool) -> Any:
    """Rank 0 gives up a call for which rank 1 goes on waiting; then rank 2, which never came, dies.

    A slow rank 1 looks at nothing before the view has changed: its call has moved then, and it finds it given up there.
    """
    group = start(rank, num_ranks, folder, "mask", on_stall="error")
    buffer = make_buffer(group)
    go_on(buffer, 2, {})
    x, (idx, weights) = rows(rank, 2), routing(rank, num_ranks, 2)
    seen = ""

    def waits() -> None:
        nonlocal is_slow
        stages.reach(folder, "waits")
        if is_slow:
            exchange: Any = buffer._exchange
            moments.sleep_until_the_view_changes(exchange.engine)
        is_slow = False  # further dispatches come here as well

    if rank == 0:
        with pytest.raises(CommTimeoutError):
            buffer.dispatch(x, idx, weights, timeout=0.3)
        stages.reach(folder, "gave up")
    elif rank == 1:
        arm(buffer, "dispatch: rows", waits)
        seen = refused(lambda: buffer.dispatch(x, idx, weights))
        stages.reach(folder, "waits")  # or it was told at once
    else:
        stages.wait_for(folder, "gave up")
        stages.wait_for(folder, "waits")
        die()
    done, errors = go_on(buffer, 5, {}, first=3)
    return seen, done, errors


@pytest.mark.parametrize("is_slow", [False, True], ids=["at-once", "after-the-death"])
def test_a_call_given_up_before_a_death_keeps_the_ranks_in_step(is_slow: bool) -> None:
    first, second, dead = run_mortal(gives_up, 3, is_slow, dead={2}, timeout_s=60)
    assert dead == DEAD
    assert second[0] == "CommTimeoutError"
    assert first[1] == second[1]
    assert first[2] == second[2] == []


def patient(rank: int, num_ranks: int, folder: str) -> Any:
    group = start(rank, num_ranks, folder, "raise", on_stall="wait")
    buffer = make_buffer(group, timeout=0.2)
    go_on(buffer, 1, {})
    if rank == 1:
        end = time.monotonic() + 1.0  # five time-outs
        while time.monotonic() < end:
            time.sleep(0.05)
    return go_on(buffer, 3, {}, first=1)


def test_with_on_stall_wait_a_slow_rank_is_waited_for() -> None:
    first, second = run_mortal(patient, 2, dead=set(), timeout_s=60)
    assert first == second
    assert first[1] == []


# ---- newcomers


def digest(d: epee.Dispatched, c: epee.Combined) -> str:
    """Return a digest of all that a step gave."""
    made = hashlib.sha256()
    assert isinstance(d.x, torch.Tensor)
    for tensor in (d.x, d.topk_idx, d.topk_weights, c.x, d.got, c.got):
        if tensor is not None:
            made.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def whole_step(buffer: epee.Buffer, step: int, layout: str) -> str:
    """Make a step and return the digest of its results."""
    idx, weights = routing(buffer.rank, buffer.num_ranks, step)
    d = buffer.dispatch(rows(buffer.rank, step), idx, weights, layout=layout)
    return digest(d, buffer.combine(d.x, d.handle))


def fresh(rank: int, num_ranks: int, folder: str, step: int) -> list[str]:
    buffer = make_buffer(start(rank, num_ranks, folder, "raise"))
    return [whole_step(buffer, step, layout) for layout in ("rank", "expert")]


def replaced(slot: int, num_processes: int, folder: str, mode: str) -> Any:
    """Processes 0, 1, 2 are the ranks; 3 takes the place of rank 1 and 4 that of rank 0, each when it is lost."""
    rank = {3: 1, 4: 0}.get(slot, slot)
    if slot > 2:
        stages.wait_for(folder, f"lost {rank}")
    group = start(rank, 3, folder, mode, joins=slot > 2)
    buffer = make_buffer(group)
    spare = None
    if slot < 3:
        spare = make_buffer(group)  # a second buffer that goes through all of it without being used
        go_on(buffer, 4, {1: (2, "dispatch: first data")})
        stages.reach(folder, "lost 1")
        group.recover_ranks([1], TIMEOUT_S)
    digests = []
    if slot < 4:
        digests = [whole_step(buffer, 7, layout) for layout in ("rank", "expert")]
        go_on(buffer, 12, {0: (9, "combine: first row")}, first=8)
        stages.reach(folder, "lost 0")
        group.recover_ranks([0], TIMEOUT_S)
    last, errors = go_on(buffer, 16, {}, first=12)
    assert errors == []
    if spare is None:  # the newcomer takes part in it, too, in the order in which they were made
        spare = make_buffer(group)
    elif mode == "raise":
        assert refused(spare.sync) == "RankFailedError"  # each buffer tells a loss once
    again = [whole_step(spare, 7, layout) for layout in ("rank", "expert")]
    mask = buffer.sync().tolist()
    while refused(dist.barrier) != "nothing":
        pass  # in mode "raise" the group tells its losses, too, before it makes other calls
    extra = make_buffer(group)  # and one that all make together
    more = make_step(extra, 20, "expert")
    return digests, again, last, mask, more


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_after_a_replacement_the_results_are_those_of_a_fresh_job(mode: str) -> None:
    want = run_mortal(fresh, 3, 7, dead=set(), timeout_s=60)
    results = run_mortal(replaced, 5, mode, dead={0, 1}, timeout_s=60)
    assert results[0] == results[1] == DEAD
    assert [results[slot][0] for slot in (3, 2)] == [want[1], want[2]], "the first dispatch after it came in"
    by_rank = {0: results[4], 1: results[3], 2: results[2]}
    for rank, (_, again, last, mask, more) in by_rank.items():
        assert again == want[rank]
        assert last == results[2][2]
        assert mask == [1, 1, 1]
        assert more == results[2][4]
    assert results[2][2][-1][2] == (1, 1, 1)


def closed_before(slot: int, num_processes: int, folder: str) -> Any:
    """Survivors that close their buffer before they take the newcomer in make a new one with it."""
    rank = 1 if slot == 2 else slot
    if slot == 2:
        stages.wait_for(folder, "lost")
    group = start(rank, 2, folder, "mask", joins=slot == 2)
    if slot == 2:
        return make_step(make_buffer(group), 3, "rank")
    buffer = make_buffer(group)
    go_on(buffer, 2, {1: (1, "between")})
    buffer.close()
    stages.reach(folder, "lost")
    group.recover_ranks([1], TIMEOUT_S)
    return make_step(make_buffer(group), 3, "rank")


def test_a_new_buffer_may_be_made_with_a_replacement() -> None:
    results = run_mortal(closed_before, 3, dead={1}, timeout_s=60)
    assert results[0] == results[2]
    assert results[0][2] == (1, 1)


def other_arguments(slot: int, num_processes: int, folder: str) -> str:
    rank = 1 if slot == 2 else slot
    if slot == 2:
        stages.wait_for(folder, "lost")
    group = start(rank, 2, folder, "mask", joins=slot == 2)
    if slot == 2:
        with pytest.raises(MismatchError) as caught:
            epee.Buffer(group, num_experts=LOCAL * 2, hidden=HIDDEN, num_topk=1, max_tokens_per_rank=16)
        stages.reach(folder, "refused")
        make_step(make_buffer(group), 3, "rank")
        return str(caught.value)
    buffer = make_buffer(group)
    go_on(buffer, 2, {1: (1, "between")})
    stages.reach(folder, "lost")
    group.recover_ranks([1], TIMEOUT_S)
    stages.wait_for(folder, "refused")
    make_step(buffer, 3, "rank")
    return ""


def test_a_replacement_with_other_arguments_is_refused_and_may_try_again() -> None:
    told = run_mortal(other_arguments, 3, dead={1}, timeout_s=60)[2]
    assert "num_topk" in told
    assert "rank 0 has 3" in told


# ---- handles, groups, ends


def stale(rank: int, num_ranks: int, folder: str, mode: str) -> Any:
    group = start(rank, num_ranks, folder, mode)
    buffer = make_buffer(group)
    idx, weights = routing(rank, num_ranks, 0)
    x = rows(rank, 0)
    old = buffer.dispatch(x, idx, weights)
    kept, value = old.x, old.x.clone()
    go_on(buffer, 3, {1: (1, "before dispatch")})
    seen = [
        refused(lambda: buffer.dispatch(x, handle=old.handle)),
        refused(lambda: buffer.combine(old.x, old.handle)),
        refused(lambda: buffer.combine_input(old.handle)),
    ]
    if rank == 0:
        seen.append(refused(lambda: buffer.dispatch(x, handle=old.handle)))
    else:
        seen.append(refused(lambda: buffer.dispatch(x, idx, weights)))
    done, errors = go_on(buffer, 5, {}, first=3)
    d = buffer.dispatch(x, idx, weights)
    again = buffer.dispatch(x, handle=d.handle)  # handles of the new epoch serve as ever
    assert torch.equal(again.x, d.x)
    buffer.combine(again.x, again.handle)
    assert torch.equal(kept, value), "what was received before stays as it was"
    return seen, done[-1], errors


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_handles_of_an_old_epoch_are_refused(mode: str) -> None:
    first, dead, last = run_mortal(stale, 3, mode, dead={1}, timeout_s=60)
    assert dead == DEAD
    assert first[0] == ["StaleHandleError"] * 4
    assert last[0] == ["StaleHandleError"] * 3 + ["MismatchError"]
    assert first[1:] == last[1:]


def edges(rank: int, num_ranks: int, folder: str) -> Any:
    """Under a reduced view: nothing to send, one expert only, all lost, no expert; sizes that go down and up."""
    buffer = make_buffer(start(rank, num_ranks, folder, "mask"))
    go_on(buffer, 2, {2: (1, "before dispatch")})
    lost = 2 * LOCAL  # an expert of the dead rank
    for layout in ("rank", "expert"):
        for num_tokens in (16, 1, 0, 16):
            x = torch.full((num_tokens, HIDDEN), 1.0 + rank)
            for experts in ([0, -1, -1], [lost, lost + 1, -1], [-1, -1, -1], [0, lost, 0]):
                idx = torch.tensor([experts] * num_tokens, dtype=torch.int64).reshape(num_tokens, 3)
                weights = torch.full((num_tokens, 3), 0.5)
                d = buffer.dispatch(x, idx, weights, layout=layout)
                num_rows = experts.count(0) if layout == "expert" else int(0 in experts)
                assert d.handle.num_recv == (2 * num_tokens * num_rows if rank == 0 else 0)
                assert not bool(torch.isnan(d.x).any())
                c = buffer.combine(d.x, d.handle)
                factor = 0.5 * num_rows if layout == "expert" else float(num_rows)
                assert torch.equal(c.x, x * factor)
                assert torch.equal(c.lost_weight, torch.full((num_tokens,), 0.5 * sum(e >= lost for e in experts)))
        some = rows(rank, 1)[:2] if rank == 0 else rows(rank, 1)[:0]  # a rank without tokens
        idx = torch.zeros(len(some), 3, dtype=torch.int64)
        d = buffer.dispatch(some, idx, layout=layout)
        assert d.handle.num_recv == ((2 if layout == "rank" else 6) if rank == 0 else 0)
        assert buffer.combine(d.x, d.handle).x.shape == some.shape
    member = torch.tensor([[True, False, True]] * 4)
    d = buffer.dispatch(rows(rank, 1)[:4], is_token_in_rank=member)
    c = buffer.combine(d.x, d.handle)
    assert torch.equal(c.x, rows(rank, 1)[:4])
    assert c.lost_weight.tolist() == [1.0] * 4
    return buffer.all_gather_bytes(bytes([rank]) * 600)


def test_edge_cases_under_a_reduced_view() -> None:
    results = run_mortal(edges, 3, dead={2}, timeout_s=60)
    assert results[0] == results[1] == [bytes(600), b"\1" * 600, b""]


def backward(rank: int, num_ranks: int, folder: str) -> Any:
    group = start(rank, num_ranks, folder, "raise")
    buffer = make_buffer(group)
    x = rows(rank, 0).requires_grad_()
    idx, weights = routing(rank, num_ranks, 0)
    d = nn.dispatch(buffer, x, idx, weights)
    y = nn.combine(buffer, d.x * 2.0, d)
    if rank == 1:
        die()
    with pytest.raises(RankFailedError, match="rank 1"):
        y.sum().backward()
    with pytest.raises(StaleHandleError):
        buffer.combine(d.x.detach(), d.handle)
    x.grad = None
    d = nn.dispatch(buffer, x, idx, weights)
    nn.combine(buffer, d.x * 2.0, d).sum().backward()
    there = idx // LOCAL != 1
    assert x.grad is not None
    want = 2.0 * torch.where(there, weights, 0.0).sum(1)
    torch.testing.assert_close(x.grad, want[:, None].expand(-1, HIDDEN))
    return "ok"


def test_a_backward_after_a_loss_raises_and_the_next_step_trains() -> None:
    assert run_mortal(backward, 3, dead={1}, timeout_s=60) == ["ok", DEAD, "ok"]


def leaves(rank: int, num_ranks: int, folder: str) -> str:
    """Many short lives: whoever is through goes at once; the others' last call is not disturbed."""
    for life in range(6):
        group = start(rank, num_ranks, f"{folder}/{life}", "raise")
        with make_buffer(group) as buffer:
            for step in range(3):
                make_step(buffer, step, "rank")
        dist.destroy_process_group()
        del group
    return "ok"


def test_an_orderly_end_disturbs_nobody(tmp_path: Path) -> None:
    assert run_mortal(in_folder, 4, str(tmp_path), dead=set(), timeout_s=60) == ["ok"] * 4


def in_folder(rank: int, num_ranks: int, folder: str, place: str) -> str:
    for life in range(6):
        (Path(place) / str(life)).mkdir(exist_ok=True)
    return leaves(rank, num_ranks, place)


def on_what_is_left(rank: int, num_ranks: int, folder: str, mode: str) -> Any:
    """A buffer that is made after a loss, and one of a sub-group."""
    group = start(rank, num_ranks, folder, mode)
    pair = dist.new_group([0, 2], backend="epee")
    buffer = make_buffer(group)
    go_on(buffer, 2, {1: (1, "dispatch: data")})
    while int(group.active_ranks().sum()) > 2:
        refused(lambda: dist.barrier())
    later = make_buffer(group)
    done = [make_step(later, 5, "expert"), make_step(buffer, 6, "rank")]
    small = make_buffer(pair)
    assert small.num_ranks == 2
    done.append(make_step(small, 7, "rank"))
    later.close()
    done.append(make_step(buffer, 8, "expert"))
    return done


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_buffers_made_after_a_loss(mode: str) -> None:
    first, _, last = run_mortal(on_what_is_left, 3, mode, dead={1}, timeout_s=60)
    assert first == last
    assert [got for _, _, got in first] == [(1, 0, 1), (1, 0, 1), (1, 1), (1, 0, 1)]
