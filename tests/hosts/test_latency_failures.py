"""`LatencyBuffer` over several hosts when a rank stays away, is late, is killed, or its host is cut off.

Ranks report what they got; the test works out from all reports what each must have got: whatever a rank had sent
before, a source is in a result as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.engine.outbox import has_left
from epee.ep.latency.hosts.path import LatencyHostsPath
from epee.ep.latency.hosts.wire import HostsWire
from epee.errors import EpeeError
from epee.link.topology import Topology
from epee.reference import latency as oracle
from epee.reference import latency_hosts
from tests.ep.latency_cases import Shape, bits, check_dispatched, check_round, combine, dispatch, inputs, make
from tests.harness import DEAD, collect, take_until, tell
from tests.survive import stages

from . import Hosts, run_on_hosts, run_on_loopbacks, started_on_hosts

SHAPE = Shape()
PLACEMENT = (0, 0, 1, 1)
NUM_TOKENS = (6, 3, 4, 5)
US = 1_000_000
Report = dict[str, Any]


def masked_round(
    buffer: epee.LatencyBuffer,
    seed: int,
    mask: torch.Tensor,
    timeout_us: int,
    between: Callable[[], Any] | None = None,
    receive: Callable[[Any], Any] | None = None,
) -> Report:
    """Do a dispatch and a combine with a mask, and report what came of them; `receive` runs the dispatch's hook."""
    given = inputs(SHAPE, NUM_TOKENS, seed, "everywhere" if seed % 2 else "random")[buffer.rank]
    got = dispatch(buffer, given, active_ranks=mask, timeout_us=timeout_us, return_hook=receive is not None)
    if receive is not None:
        receive(got.hook)
    assert isinstance(got.x, torch.Tensor)
    counts = got.num_tokens_per_expert.clone()
    if between is not None:
        between()
    y = outputs(got.x.shape, counts, seed, buffer.rank)
    back = combine(buffer, y, got, active_ranks=mask, timeout_us=timeout_us)
    return {
        "seed": seed,
        "got": got.got.tolist(),
        "counts": counts,
        "x": got.x.clone(),
        "back": back.x.clone(),
        "summed": back.got.tolist(),
        "lost": back.lost_weight.clone(),
        "mask": mask.tolist(),
    }


def outputs(shape: Sequence[int], counts: torch.Tensor, seed: int, rank: int) -> torch.Tensor:
    """Make the outputs of a rank's experts, NaN behind the rows that are there."""
    generator = torch.Generator().manual_seed(7000 * seed + rank)
    y = torch.randn(tuple(shape), generator=generator).to(torch.bfloat16)
    for expert, count in enumerate(counts.tolist()):
        y[expert, count:] = float("nan")
    return y


def verify(reports: Sequence[Report | Any], hosts: Sequence[int]) -> None:
    """Compare the reports of a round with the oracle, told who got whom; a rank that reports nothing had no part."""
    there = [rank for rank, report in enumerate(reports) if isinstance(report, dict)]
    seed = reports[there[0]]["seed"]
    num_ranks = len(hosts)
    given = inputs(SHAPE, NUM_TOKENS[:num_ranks], seed, "everywhere" if seed % 2 else "random")
    alone = [[peer == rank for peer in range(num_ranks)] for rank in range(num_ranks)]
    got = [reports[rank]["got"] if rank in there else alone[rank] for rank in range(num_ranks)]
    summed = [reports[rank]["summed"] if rank in there else alone[rank] for rank in range(num_ranks)]
    packed = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens, got=got)
    made = []
    for rank, each in enumerate(packed):
        assert isinstance(each.x, torch.Tensor)
        made.append(outputs(each.x.shape, each.num_tokens_per_expert, seed, rank))
    sums = latency_hosts.combine(given, packed, made, hosts, got=summed)
    for rank in there:
        report, want = reports[rank], packed[rank]
        assert isinstance(want.x, torch.Tensor)
        assert torch.equal(report["counts"], want.num_tokens_per_expert), rank
        for expert, count in enumerate(want.num_tokens_per_expert.tolist()):
            assert torch.equal(bits(report["x"][expert, :count]), bits(want.x[expert, :count])), (rank, expert)
        assert all(packed[peer].got[rank] for peer, counts in enumerate(report["summed"]) if counts), (rank, "had")
        assert torch.equal(bits(report["back"]), bits(sums[rank])), rank
        num_local = SHAPE.num_experts // num_ranks
        assert torch.equal(report["lost"], oracle.lost_weight(given[rank], num_local, report["summed"])), rank


# ---- a rank stays away, and comes back


def _silent(rank: int, num_ranks: int, hosts: Sequence[int], silent: int) -> list[Report]:
    torch.set_num_threads(1)
    reports = []
    mask = torch.ones(num_ranks, dtype=torch.int32, device="cpu")
    with make(SHAPE) as buffer:
        check_round(buffer, SHAPE, NUM_TOKENS, 1, hosts=hosts, active_ranks=mask)
        for seed in (2, 3, 4):
            if rank != silent:
                reports.append(masked_round(buffer, seed, mask, 2 * US if seed == 2 else 40 * US))
        dist.barrier()
        assert buffer.sync().tolist() == [1] * num_ranks
        mask.fill_(1)
        for seed in (5, 6):
            check_round(buffer, SHAPE, NUM_TOKENS, seed, hosts=hosts, active_ranks=mask, use_hook=True)
        assert mask.all()
    return reports


@pytest.mark.parametrize("silent", [1, 2])
def test_a_rank_that_stays_away_is_left_out_by_all_and_comes_back_with_sync(silent: int) -> None:
    told = run_on_loopbacks(_silent, PLACEMENT, PLACEMENT, silent, timeout_s=110)
    for nth in range(3):
        verify([reports[nth] if reports else None for reports in told], PLACEMENT)
    for rank, reports in enumerate(told):
        for report in reports:
            assert report["mask"] == [int(peer != silent) for peer in range(4)], rank
            assert report["got"] == report["summed"] == [peer != silent for peer in range(4)]


def _strict(rank: int, num_ranks: int, hosts: Sequence[int]) -> tuple[str, str]:
    """Rank 3 comes too late: nobody has a result, and the next calls are as ever."""
    torch.set_num_threads(1)
    with make(SHAPE) as buffer:
        check_round(buffer, SHAPE, NUM_TOKENS, 1, hosts=hosts)
        given = inputs(SHAPE, NUM_TOKENS, 2)[rank]
        if rank == 3:
            dist.barrier()
        with pytest.raises(epee.CommTimeoutError) as caught:
            dispatch(buffer, given, timeout_us=2 * US if rank != 3 else 60 * US)
        if rank != 3:
            dist.barrier()
        for seed in (3, 4):
            check_round(buffer, SHAPE, NUM_TOKENS, seed, hosts=hosts, use_hook=seed == 3)
        got = dispatch(buffer, given)
        y = buffer.combine_input(got.handle).zero_()
        if rank == 3:
            dist.barrier()
        with pytest.raises(epee.CommTimeoutError) as again:
            combine(buffer, y, got, timeout_us=2 * US if rank != 3 else 60 * US)
        if rank != 3:
            dist.barrier()
        check_round(buffer, SHAPE, NUM_TOKENS, 5, hosts=hosts)
    return str(caught.value), str(again.value)


def test_without_a_mask_a_silent_rank_is_an_error_on_all_and_the_buffer_goes_on() -> None:
    for rank, texts in enumerate(run_on_loopbacks(_strict, PLACEMENT, PLACEMENT, timeout_s=110)):
        for text, op in zip(texts, ("dispatch", "combine"), strict=True):
            assert f"{op} (rank={rank}, " in text
            assert "is aborted" in text


# ---- ranks that are late at random


def _late_at_random(rank: int, num_ranks: int, hosts: Sequence[int], count: int) -> list[Report]:
    torch.set_num_threads(1)
    reports = []
    chosen = random.Random(100 + rank)

    def doze() -> None:
        time.sleep(chosen.choice((0.0, 0.0, 0.05, 0.15, 0.3)))

    with make(SHAPE) as buffer:
        for seed in range(1, count + 1):
            mask = torch.ones(num_ranks, dtype=torch.int32, device="cpu")
            doze()
            reports.append(masked_round(buffer, seed, mask, US // 8, doze))
            dist.barrier()
            buffer.sync()
    return reports


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 1, 1)])
def test_whoever_is_late_results_are_whole(placement: tuple[int, ...]) -> None:
    told = run_on_loopbacks(_late_at_random, placement, placement, 20, timeout_s=110)
    for reports in zip(*told, strict=True):
        verify(reports, placement)
    alone = sum(not all(report["got"]) or not all(report["summed"]) for reports in told for report in reports)
    assert alone > 0, "nobody was ever late"


def _alike(rank: int, num_ranks: int, hosts: Sequence[int], count: int) -> list[str]:
    """Make calls without a mask, late at random, and say how each ended."""
    torch.set_num_threads(1)
    ends: list[str] = []
    chosen, shared = random.Random(200 + rank), random.Random(7)
    given = inputs(SHAPE, NUM_TOKENS, 1)
    packed = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens)
    made = [outputs(each.x.shape, each.num_tokens_per_expert, 1, peer) for peer, each in enumerate(packed)]  # type: ignore[union-attr]
    want = latency_hosts.combine(given, packed, made, hosts)[rank]
    got = None
    with make(SHAPE) as buffer:
        for _ in range(count):
            is_combine = shared.random() < 0.5 and got is not None
            time.sleep(chosen.choice((0.0, 0.0, 0.05, 0.1, 0.2)))
            timeout_us = chosen.choice((US // 10, US // 5, 20 * US))
            try:
                if is_combine and got is not None:
                    assert torch.equal(bits(combine(buffer, made[rank], got, timeout_us=timeout_us).x), bits(want))
                else:
                    fresh = dispatch(buffer, given[rank], timeout_us=timeout_us)
                    check_dispatched(fresh, packed[rank])
                ends.append("done")
            except epee.CommTimeoutError as error:
                ends.append("open" if "may have completed" in str(error) else "given up")
            told: list[Any] = [None] * num_ranks
            dist.all_gather_object(told, ends[-1])
            if "open" in told:  # the ranks may stand before different calls
                buffer.sync()
                got = None
            elif not is_combine and told == ["done"] * num_ranks:
                got = fresh
    return ends


def test_calls_without_a_mask_end_alike_whoever_is_late() -> None:
    told = run_on_loopbacks(_alike, PLACEMENT, PLACEMENT, 40, timeout_s=110)
    for nth, ends in enumerate(zip(*told, strict=True)):
        assert len(set(ends) - {"open"}) <= 1, (nth, ends)
    kinds = {end for ends in told for end in ends}
    assert kinds >= {"done", "given up"}


# ---- a late reader


def _late(rank: int, num_ranks: int, hosts: Sequence[int]) -> list[Report]:
    """Rank 3 stands still while it reads call 1; the others give it up and write the same slot again."""
    torch.set_num_threads(1)
    reports = []
    with make(SHAPE) as buffer:
        mask = torch.ones(num_ranks, dtype=torch.int32, device="cpu")
        if rank == 3:
            wire: Any = buffer._rows.wire  # type: ignore[union-attr]
            half_of, waits = wire.half_of, [1]

            def slow(src: int, seq: int, nbytes: int) -> Any:
                half = half_of(src, seq, nbytes)
                if src == 1 and waits:
                    waits.clear()
                    dist.barrier()
                    dist.barrier()
                return half

            wire.half_of = slow
            reports.append(masked_round(buffer, 1, mask, 30 * US))
            assert not waits
        else:
            reports.append(masked_round(buffer, 1, mask, 2 * US))  # rank 3 does not come to the combine
            dist.barrier()
            for seed in (2, 3):
                reports.append(masked_round(buffer, seed, mask, 2 * US))
            dist.barrier()
        dist.barrier()
        buffer.sync()
        check_round(buffer, SHAPE, NUM_TOKENS, 5, hosts=hosts)
    return reports


def test_who_reads_too_late_gets_nothing_rather_than_a_mixture() -> None:
    told = run_on_loopbacks(_late, PLACEMENT, PLACEMENT, timeout_s=110)
    verify([reports[0] for reports in told], PLACEMENT)
    for nth in (1, 2):
        verify([*(reports[nth] for reports in told[:3]), None], PLACEMENT)
    assert told[3][0]["got"] == [False, False, False, True]  # all had written the slot again
    assert all(reports[0]["got"] == [True] * 4 for reports in told[:3])  # it had sent its half before
    for rank in (0, 2):
        assert told[rank][0]["summed"] == [True, True, True, False]
    assert told[1][0]["summed"] == [True, True, False, False]  # rank 3 would have added up for it; later rank 2 does
    for rank in range(3):
        assert told[rank][1]["summed"] == told[rank][2]["summed"] == [True, True, True, False]


# ---- a rank that one rank alone counts out


def _counted_out(rank: int, num_ranks: int, hosts: Sequence[int], is_late: bool) -> list[Report]:
    """Rank 0 counts rank 3 out, in the dispatch or not before the combine."""
    torch.set_num_threads(1)
    reports = []
    with make(SHAPE) as buffer:
        for seed in (1, 2):
            mask = torch.ones(num_ranks, dtype=torch.int32, device="cpu")
            if rank == 0 and not is_late:
                mask[3] = 0
            late = partial(mask[3:].fill_, 0) if rank == 0 and is_late else None
            reports.append(masked_round(buffer, seed, mask, 20 * US, late))
            dist.barrier()
        check_round(buffer, SHAPE, NUM_TOKENS, 5, hosts=hosts)
    return reports


@pytest.mark.parametrize("is_late", [False, True])
def test_who_is_counted_out_by_one_rank_is_in_no_sum_of_it(is_late: bool) -> None:
    told = run_on_loopbacks(_counted_out, PLACEMENT, PLACEMENT, is_late, timeout_s=110)
    for nth in range(2):
        reports = [each[nth] for each in told]
        verify(reports, PLACEMENT)
        assert reports[0]["got"] == [True, True, True, is_late]
        assert reports[3]["got"] == [is_late, True, True, True]
        summed = reports[0]["summed"]
        assert summed[:2] == [True, True]
        assert not summed[3]
        assert summed[2] or is_late  # that rank 0 had changed its mind may come too late for the sum of host 1
        for rank in (1, 2):
            assert reports[rank]["got"] == reports[rank]["summed"] == [True] * 4


# ---- deaths and cuts


def _killed(rank: int, num_ranks: int, hosts: Sequence[int], victim: int) -> list[Report]:
    torch.set_num_threads(1)
    buffer = make(SHAPE)
    check_round(buffer, SHAPE, NUM_TOKENS, 1, hosts=hosts)
    dist.barrier()
    buffer.barrier()
    if rank == victim:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    given = inputs(SHAPE, NUM_TOKENS, 2)[rank]
    with pytest.raises((epee.RankFailedError, epee.PeerError, epee.CommTimeoutError)):
        dispatch(buffer, given, timeout=20.0)
    mask = torch.ones(num_ranks, dtype=torch.int32, device="cpu")
    reports = []
    for seed in (3, 4, 5):
        reports.append(masked_round(buffer, seed, mask, 10 * US))
    buffer.close()
    return reports


# ---- a rank whose message is on one host only

SPREAD, ALONE, VICTIM = (0, 0, 1, 2), (0, 0, 0, 0), 1  # it sends to rank 2 first, and then to another host, or rank


def _wait_for(wire: Any, folder: str, *names: str) -> None:
    """Wait until others have reached all of these points, while what arrives for this rank's host is moved."""
    while not all((Path(folder) / f"stage-{name}").exists() for name in names):
        wire.nap(0.001)


def _dies_behind_one_host(wire: Any, seq: int, folder: str) -> None:
    """Let this rank die when all others have sent call `seq`, and rank 2 alone has got its message."""
    name = "publish" if isinstance(wire, HostsWire) else "post"
    publish, posted = getattr(wire, name), []

    def published(*args: Any) -> None:
        if wire.seq != seq:
            publish(*args)
            return
        _wait_for(wire, folder, *(("arrived",) if posted else ("sent-0", "sent-2", "sent-3")))
        if posted:
            os.kill(os.getpid(), signal.SIGKILL)
        publish(*args)
        posted.append(args[0])

    setattr(wire, name, published)


def _receive_in_turn(wire: Any, hook: Any, folder: str, first: int) -> str:
    """Run the receive phase of this rank's last call, behind the victim's death and that of rank `first`.

    Returns the ranks that its error names, if it raises one.
    """
    rank, seq = wire.rank, wire.seq
    stages.reach(folder, f"sent-{rank}")
    if rank == 2:
        while not wire.is_here(VICTIM, seq):
            wire.nap(0.001)
        stages.reach(folder, "arrived")
    while VICTIM not in wire.ended():
        wire.nap(0.001)
    _wait_for(wire, folder, *([] if rank == first else [f"over-{first}"]))
    try:
        hook()
        return ""
    except epee.RankFailedError as error:
        return f"{error.ranks}"
    finally:
        stages.reach(folder, f"over-{rank}")


def _on_one_host(
    rank: int, num_ranks: int, hosts: Sequence[int], folder: str, is_combine: bool, first: int
) -> tuple[str, str, Report]:
    """Make a call without a mask in which the victim dies, a further call, and, behind `sync`, a round with a mask."""
    torch.set_num_threads(1)
    buffer = make(SHAPE, timeout=60.0)
    wire: Any = buffer._rows.wire  # type: ignore[union-attr]
    check_round(buffer, SHAPE, NUM_TOKENS, 1, hosts=hosts)
    given = inputs(SHAPE, NUM_TOKENS, 2, "everywhere")
    if rank == VICTIM:
        _dies_behind_one_host(wire, wire.seq + 1 + is_combine, folder)
    got = dispatch(buffer, given[rank], return_hook=not is_combine)
    call: Any = got
    if is_combine:
        call = combine(buffer, buffer.combine_input(got.handle).zero_(), got, return_hook=True)
    told = _receive_in_turn(wire, call.hook, folder, first)
    later = ""
    try:
        if told or is_combine:
            dispatch(buffer, given[rank])
        else:
            combine(buffer, buffer.combine_input(got.handle).zero_(), got)
    except EpeeError as error:
        later = type(error).__name__
    mask = torch.ones(num_ranks, dtype=torch.int32, device="cpu")
    stages.reach(folder, f"later-{rank}")
    _wait_for(wire, folder, "later-0", "later-2", "later-3")
    assert buffer.sync(mask).tolist() == [1, 0, 1, 1]
    report = masked_round(buffer, 3, mask, 60 * US)
    buffer.close()
    return told, later, report


@pytest.mark.parametrize("placement", [SPREAD, ALONE], ids=["hosts", "one host"])
@pytest.mark.parametrize("is_combine", [False, True], ids=["dispatch", "combine"])
@pytest.mark.parametrize("first", [2, 3])
def test_without_a_mask_a_message_that_one_host_has_is_a_result_there_and_a_named_death_elsewhere(
    tmp_path: Path, first: int, is_combine: bool, placement: tuple[int, ...]
) -> None:
    """If a rank without the message ends the call first, all raise. The next call raises on all; `sync` mends it."""
    told = run_on_loopbacks(_on_one_host, placement, placement, str(tmp_path), is_combine, first, dead={VICTIM})
    assert told[VICTIM] == DEAD
    named = [told[rank][0] for rank in (0, 2, 3)]
    assert named == [f"({VICTIM},)", "" if first == 2 else f"({VICTIM},)", f"({VICTIM},)"]
    later = {told[rank][1] for rank in (0, 2, 3)}
    assert later <= {"RankFailedError", *(("MismatchError", "InvalidState") if first == 2 else ())}
    verify([None if answer == DEAD else answer[2] for answer in told], placement)


def _begun_behind_an_abort(rank: int, num_ranks: int, hosts: Sequence[int], folder: str) -> tuple[str, Report]:
    """Make a dispatch without a mask that rank 0 aborts for a death before rank 2 begins it; rank 3 looks last."""
    torch.set_num_threads(1)
    buffer = make(SHAPE, timeout=60.0)
    wire: Any = buffer._rows.wire  # type: ignore[union-attr]
    check_round(buffer, SHAPE, NUM_TOKENS, 1, hosts=hosts)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    while VICTIM not in wire.ended():
        wire.nap(0.001)
    given, told = inputs(SHAPE, NUM_TOKENS, 2, "everywhere")[rank], ""
    _wait_for(wire, folder, *(["over-0"] if rank == 2 else []))
    try:
        got = dispatch(buffer, given, return_hook=True, timeout_us=US // 2 if rank == 0 else 60 * US)
        stages.reach(folder, f"sent-{rank}")
        _wait_for(wire, folder, *(["sent-3"] if rank == 0 else ["over-0", "over-2"]))
        assert got.hook is not None
        got.hook()
    except EpeeError as error:
        told = f"{type(error).__name__} {getattr(error, 'ranks', '')}"
    stages.reach(folder, f"over-{rank}")
    _wait_for(wire, folder, "over-0", "over-2", "over-3")
    mask = torch.ones(num_ranks, dtype=torch.int32, device="cpu")
    assert buffer.sync(mask).tolist() == [1, 0, 1, 1]
    report = masked_round(buffer, 3, mask, 60 * US)
    buffer.close()
    return told, report


@pytest.mark.parametrize("placement", [SPREAD, ALONE], ids=["hosts", "one host"])
def test_a_rank_that_begins_a_call_which_is_aborted_for_a_death_does_not_refuse_it(
    tmp_path: Path, placement: tuple[int, ...]
) -> None:
    told = run_on_loopbacks(_begun_behind_an_abort, placement, placement, str(tmp_path), dead={VICTIM})
    assert [told[rank][0] for rank in (0, 2, 3)] == [f"RankFailedError ({VICTIM},)"] * 3
    verify([None if answer == DEAD else answer[1] for answer in told], placement)


def _masked_on_one_host(rank: int, num_ranks: int, hosts: Sequence[int], folder: str) -> list[Report]:
    """Make a round with a mask in whose dispatch the victim dies, and two more."""
    torch.set_num_threads(1)
    buffer = make(SHAPE, timeout=60.0)
    wire: Any = buffer._rows.wire  # type: ignore[union-attr]
    check_round(buffer, SHAPE, NUM_TOKENS, 1, hosts=hosts)
    if rank == VICTIM:
        _dies_behind_one_host(wire, wire.seq + 1, folder)
    mask = torch.ones(num_ranks, dtype=torch.int32, device="cpu")
    receive = partial(_receive_in_turn, wire, folder=folder, first=2)
    reports = [masked_round(buffer, seed, mask, 60 * US, receive=receive if seed == 2 else None) for seed in (2, 3, 4)]
    buffer.close()
    return reports


def test_with_a_mask_a_message_on_one_host_only_is_in_the_results_of_that_host(tmp_path: Path) -> None:
    told = run_on_loopbacks(_masked_on_one_host, SPREAD, SPREAD, str(tmp_path), dead={VICTIM})
    for nth in range(3):
        verify([None if answer == DEAD else answer[nth] for answer in told], SPREAD)
    assert [told[rank][0]["got"][VICTIM] for rank in (0, 2, 3)] == [False, True, False]
    for rank in (0, 2, 3):
        assert told[rank][0]["summed"] == told[rank][1]["got"] == [True, False, True, True]


# ---- what the errors name


def _error_behind_deaths(
    rank: int,
    num_ranks: int,
    placement: Sequence[int],
    victims: Sequence[int],
    knowing: Sequence[int],
    closing: Sequence[int] = (),
) -> tuple[str, tuple[int, ...]]:
    """Call without a mask behind deaths; ranks that are not `knowing` find them in the others' abort alone. Ranks of
    `closing` have closed the buffer by then."""
    torch.set_num_threads(1)
    store: Any = dist.distributed_c10d._get_default_store()
    if rank not in knowing:
        setattr(LatencyHostsPath, "_ended", lambda _: set())  # noqa: B010 - mypy
    with make(SHAPE, timeout=15.0) as buffer:
        check_round(buffer, SHAPE, NUM_TOKENS, 1, hosts=placement)
        dist.barrier()
        if rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank in closing:
            buffer.close()
            others = set(range(num_ranks)).difference(victims, closing)
            # it stays in the job until then: a barrier ends with the victim, and who leaves may be named as well
            store.wait([f"told {other}" for other in others], timedelta(seconds=60))
            return "closed", ()
        path: Any = buffer._path
        while rank in knowing and not path._ended().issuperset(victims):
            time.sleep(0.001)
        while not all(has_left(path._life[other]) for other in closing):
            time.sleep(0.001)
        if rank > 0:
            time.sleep(0.5)  # rank 0 has nothing of the others when it looks
        with pytest.raises(EpeeError) as caught:
            dispatch(buffer, inputs(SHAPE, NUM_TOKENS, 2, "random")[rank])
        found = type(caught.value).__name__, tuple(getattr(caught.value, "ranks", ()))
        store.set(f"told {rank}", "")
        with contextlib.suppress(EpeeError):
            dist.barrier()  # the end of a rank is no further loss
            dist.barrier()
        return found


GATEWAY = Topology(0, ["a", "b", "b", "b"]).gateway(0, 1)


@pytest.mark.parametrize(
    ("placement", "victims", "knowing"),
    [
        ((0, 0, 1, 1), (1,), (0,)),  # the victim's host knows first
        ((0, 1, 1, 1), (GATEWAY,), range(4)),  # nothing reaches the others there
        ((0, 0, 1, 1), (1, 3), range(4)),  # each host has one of its own
        ((0, 0, 1, 1), (1, 3), (0,)),
    ],
)
def test_without_a_mask_all_ranks_name_those_that_died(
    placement: tuple[int, ...], victims: tuple[int, ...], knowing: Sequence[int]
) -> None:
    told = run_on_loopbacks(_error_behind_deaths, placement, placement, victims, tuple(knowing), dead=set(victims))
    assert told == [DEAD if rank in victims else ("RankFailedError", victims) for rank in range(4)]


def test_without_a_mask_all_ranks_name_a_death_and_not_a_rank_that_has_closed_its_buffer() -> None:
    hosts, there = (0, 0, 1, 1), {2, 3}
    victim = (there - {Topology(0, ["a", "a", "b", "b"]).gateway(1, 1)}).pop()  # the other one hears that rank 1 closes
    told = run_on_loopbacks(_error_behind_deaths, hosts, hosts, (victim,), tuple(range(4)), (1,), dead={victim})
    assert told[1] == ("closed", ())
    assert [told[rank] for rank in (0, *there - {victim})] == [("RankFailedError", (victim,))] * 2


@pytest.mark.hosts
@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_is_an_error_without_a_mask_and_left_out_with_one(victim: int) -> None:
    told = run_on_hosts(_killed, PLACEMENT, PLACEMENT, victim, dead={victim}, timeout_s=110)
    for nth in range(3):
        reports = [None if answer == DEAD else answer[nth] for answer in told]
        verify(reports, PLACEMENT)
        for rank, report in enumerate(reports):
            if report is not None:
                assert not report["got"][victim], rank
                assert not report["mask"][victim], rank
    here = [rank for rank in range(4) if PLACEMENT[rank] != PLACEMENT[victim]]
    for rank in here:  # the other host goes on whole
        assert all(told[rank][2]["got"][peer] for peer in here)


def _until_cut(rank: int, num_ranks: int, hosts: Sequence[int]) -> dict[int, Report]:
    """Do rounds until one has lost somebody, and six more."""
    torch.set_num_threads(1)
    reports: dict[int, Report] = {}
    mask = torch.ones(num_ranks, dtype=torch.int32, device="cpu")
    with make(SHAPE) as buffer:
        seed, end = 0, 1 << 30
        while seed < end:
            seed += 1
            reports[seed] = masked_round(buffer, seed, mask, 3 * US)
            if seed == 3:
                tell("going")
            if mask.all():
                time.sleep(0.02)
            else:
                end = min(end, seed + 6)
    return reports


def _until_stopped(rank: int, num_ranks: int, hosts: Sequence[int]) -> list[int]:
    """Do rounds until one has lost somebody; host 0 does six more. Then all meet again."""
    torch.set_num_threads(1)
    mask = torch.ones(num_ranks, dtype=torch.int32, device="cpu")
    with make(SHAPE) as buffer:
        seed = 0
        while mask.all():
            seed += 1
            masked_round(buffer, seed, mask, 2 * US)
            if seed == 3:
                tell("going")
            time.sleep(0.02)
        for _ in range(6 if hosts[rank] == 0 else 0):
            masked_round(buffer, seed, mask, 2 * US)
        lost = mask.tolist()
        tell("lost")
        assert buffer.sync(timeout=60.0).tolist() == [1] * num_ranks
        mask.fill_(1)
        for seed in (7, 8, 9):
            check_round(buffer, SHAPE, NUM_TOKENS, seed, hosts=hosts, active_ranks=mask)
        assert mask.all()
    return lost


@pytest.mark.hosts
def test_a_host_that_was_stopped_is_in_again_behind_sync() -> None:
    with (
        Hosts(2, "veth") as hosts,
        started_on_hosts(hosts, _until_stopped, PLACEMENT, PLACEMENT, timeout_s=110) as workers,
    ):
        assert take_until(workers, lambda: all("going" in worker.told for worker in workers), 60.0)
        hosts.stop(1)
        try:
            assert take_until(workers[:2], lambda: all("lost" in worker.told for worker in workers[:2]), 60.0)
        finally:
            hosts.cont(1)
        told = collect(workers, (), 110.0)
    assert told[:2] == [[1, 1, 0, 0]] * 2


@pytest.mark.hosts
def test_a_cut_between_hosts_leaves_each_to_itself() -> None:
    with (
        Hosts(2, "veth") as hosts,
        started_on_hosts(hosts, _until_cut, PLACEMENT, PLACEMENT, timeout_s=110) as workers,
    ):
        assert take_until(workers, lambda: all("going" in worker.told for worker in workers), 60.0)
        hosts.cut(1)
        told = collect(workers, (), 110.0)
    for seed in (1, 2, 3):
        verify([reports[seed] for reports in told], PLACEMENT)
    for host in (0, 1):
        ranks = [rank for rank in range(4) if PLACEMENT[rank] == host]
        seed = min(max(told[rank]) for rank in ranks) - 1  # all have lost the other host, none has stopped yet
        verify([told[rank][seed] if rank in ranks else None for rank in range(4)], PLACEMENT)
        for rank in ranks:
            report = told[rank][seed]
            assert [bool(value) for value in report["mask"]] == [peer in ranks for peer in range(4)]
            assert report["got"] == report["summed"] == [peer in ranks for peer in range(4)]
