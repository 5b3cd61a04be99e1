"""Kernels of calls between hosts, emulated, with the proxies' machines: bits as `epee.reference` says."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from epee import reference
from epee.errors import InvalidArgument
from epee.gpu.hosts import BROKEN_STREAMS_CODE, PULL_CHUNK_BITS, state_layout
from epee.gpu.params import control_layout
from epee.gpu.report import PEER_GAVE_UP
from epee.link.proxy.words import ABORT, CHUNKS, KINDS, LOST
from epee.reference import Routed
from tests.csrc.emulated import has_compiler
from tests.csrc.hosts_cases import HostsCase, HostsRank, HostsWorld, run_case

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with"),
]
TWO = ((0, 1), (2, 3))
CASES = {
    "2 hosts of 1 rank": HostsCase(((0,), (1,)), (37, 23)),
    "2 hosts of 2 ranks": HostsCase(TWO, (19, 30, 8, 25), num_calls=6),  # slots of rows are used again
    "3 hosts": HostsCase(((0, 1), (2,), (3, 4)), (11, 9, 17, 6, 13), num_topk=4),
    "1 + 3 ranks": HostsCase(((0,), (1, 2, 3)), (33, 12, 7, 20)),
    "3 + 1 ranks": HostsCase(((0, 1, 2), (3,)), (13, 12, 7, 40)),
    "interleaved": HostsCase(((0, 2), (1, 3)), (16, 21, 9, 14)),
    "no tokens": HostsCase(TWO, (0, 0, 0, 0)),
    "some without tokens": HostsCase(TWO, (0, 22, 5, 0)),
    "all to one host": HostsCase(TWO, (24, 18, 11, 20), routing="one host"),
    "nowhere": HostsCase(TWO, (9, 4, 0, 7), routing="nowhere"),
    "without weights": HostsCase(TWO, (9, 14, 3, 7), has_weights=False),
    "one slot": HostsCase(TWO, (70, 50, 64, 66), num_slots=1, chunk_records=1, num_calls=1),
    "two slots, two warps of each kind": HostsCase(((0,), (1,)), (200, 180), num_slots=2, chunk_records=2, warps=2),
    "rows in pieces": HostsCase(TWO, (19, 30, 8, 25), hidden=104, piece_bytes=96),
    "rows longer than a warp adds up at once": HostsCase(TWO, (9, 6, 8, 5), hidden=32 * 7 * 8 + 8, num_calls=1),
    "a bias": HostsCase(TWO, (19, 0, 8, 25), num_biases=1),
    "two biases": HostsCase(((0, 1), (2,), (3, 4)), (11, 9, 17, 6, 13), num_topk=4, num_biases=2),
    "two biases and nothing else": HostsCase(TWO, (9, 4, 0, 7), routing="nowhere", num_biases=2),
    "FP8 pairs": HostsCase(TWO, (19, 30, 8, 25), num_scales=3),
    "FP8 pairs in pieces": HostsCase(TWO, (19, 30, 8, 25), hidden=208, num_scales=5, piece_bytes=96),
    "more scales than are read ahead": HostsCase(((0,), (1,)), (21, 16), num_scales=101),
    "experts anywhere": HostsCase(((0, 1), (2,), (3, 4)), (11, 9, 17, 6, 13), num_topk=4, is_permuted=True),
    "a later epoch": HostsCase(TWO, (19, 30, 8, 25), first=1 << 33),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_and_sums_have_the_bits_of_the_reference(name: str) -> None:
    run_case(CASES[name])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("num_slots", "num_chunks", "stall_one_in"), [(1, 1000, 0), (2, 1000, 0), (1, 200, 5)])
def test_many_chunks_pass_through_few_slots(num_slots: int, num_chunks: int, stall_one_in: int) -> None:
    case = HostsCase(((0,), (1,)), (num_chunks,) * 2, num_slots, 1, routing="all ranks", num_topk=2)
    run_case(replace(case, num_calls=1, stall_one_in=stall_one_in))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(3))
def test_warps_that_stand_still_change_no_bit(seed: int) -> None:
    run_case(HostsCase(((0, 2), (1, 4), (3,)), (30, 21, 9, 40, 14), stall_one_in=3, seed=seed, num_topk=4))


def test_a_call_may_have_more_than_65536_chunks() -> None:
    count = 66_000
    case = HostsCase(((0,), (1,), (2,)), (1, count, 1), 1, 1, routing="all ranks", num_topk=3, hidden=8, timeout_s=60.0)
    world, given = HostsWorld(case, 0.0), case.inputs(0)
    world.run(lambda rank: rank.lay_out(given[rank.rank]))
    assert [reports_of(world), int(world.ranks[2].keep["info"][3])] == [[[]] * 3, 1 + count]
    order = world.ranks[2].keep["pull_order"][: 1 + count].tolist()
    sources = [(entry >> PULL_CHUNK_BITS, entry & (1 << PULL_CHUNK_BITS) - 1) for entry in order]
    assert sources == [(0, 0), *((1, chunk) for chunk in range(count))]


@pytest.mark.parametrize(("num_hosts", "num_slots"), [(9, 64), (16, 33)])
def test_more_hosts_than_a_dispatch_counts_slots_of_are_refused(num_hosts: int, num_slots: int) -> None:
    case = HostsCase(tuple((rank,) for rank in range(num_hosts)), (1,) * num_hosts, num_slots)
    rank = HostsRank(case, 0)
    with pytest.raises(InvalidArgument, match=rf"at most {512 // num_slots} islands \(with {num_slots} slots\), got"):
        rank.routes_among([rank])


def test_many_hosts_whose_tokens_need_different_chunks_at_once_do_not_wait_in_a_circle() -> None:
    run_case(
        HostsCase(
            ((0,), (1,), (2,)), (40, 40, 40), num_slots=1, chunk_records=1, routing="skewed", num_calls=1, num_topk=2
        )
    )


LIMIT_S = 3.0
WAITING = HostsCase(((0,), (1, 2)), (20, 14, 9), timeout_s=LIMIT_S)
PATIENT = replace(WAITING, timeout_s=60.0)  # where nobody has to wait for the time-out


def reports_of(world: HostsWorld) -> list[list[int]]:
    """The first report of each rank: code, and what it says of peer, expected, got and where."""
    found = []
    for rank in world.ranks:
        rows = [row.tolist() for row in rank.reports.view(-1, 8) if row.any()]
        found.append([rows[0][0], *rows[0][3:7]] if rows else [])
        rank.reports.zero_()
    return found


def lay_out_all(world: HostsWorld, given: list[Routed]) -> None:
    world.run(lambda rank: rank.dispatch(given[rank.rank]))


def check_three_calls(world: HostsWorld) -> None:
    """Three are more than a stream has slots for rows: one that nobody freed shows."""
    given = world.case.inputs(1)
    received = reference.dispatch(given, world.case.num_experts, layout="rank")
    for _ in range(3):
        world.again()
        lay_out_all(world, given)
        for rank in world.ranks:
            rank.check(received[rank.rank])


@pytest.mark.parametrize("late", [(), (0, 2), (1,)])
def test_a_bad_id_is_refused_by_all_and_the_next_calls_are_right(late: tuple[int, ...]) -> None:
    world = HostsWorld(PATIENT)
    wrong = PATIENT.inputs(0)
    assert wrong[1].topk_idx is not None
    wrong[1].topk_idx[3, 1] = 1000

    def calls(rank: HostsRank) -> None:
        if rank.rank in late:
            time.sleep(0.3)
        rank.dispatch(wrong[rank.rank])

    world.run(calls)
    assert [report[:2] for report in reports_of(world)] == [[4, 1], [7, 1], [4, 1]]
    check_three_calls(world)


def test_a_slow_rank_reads_the_row_of_a_neighbour_that_is_a_refused_call_ahead() -> None:
    case = HostsCase(((0, 1), (2,)), (4, 10_000, 4), timeout_s=60.0, hidden=8)
    world, given = HostsWorld(case, 0.0), case.inputs(0)
    layouts = [rank.kernels["layout_hosts"][1] for rank in world.ranks]

    def calls(rank: HostsRank) -> None:
        for _ in range(3):
            layouts[2].refused = 5
            rank.lay_out(given[rank.rank])
            rank.move(given[rank.rank])

    world.run(calls)
    # that rank's cpu knows why it refuses: its kernel does not report it
    assert [report[:2] for report in reports_of(world)] == [[4, 2], [4, 2], []]


def test_a_row_that_is_too_late_for_its_call_is_taken_later_and_every_call_is_refused() -> None:
    world, given = HostsWorld(replace(WAITING, timeout_s=0.5)), WAITING.inputs(0)
    others_left = threading.Barrier(3)

    def calls(rank: HostsRank) -> None:
        if rank.rank == 0:
            others_left.wait(60)
        rank.dispatch(given[rank.rank])
        if rank.rank != 0:
            others_left.wait(60)

    world.run(calls)
    assert [report[0] for report in reports_of(world)][1:] == [1, 1]
    for rank in world.ranks:
        for _, args in rank.kernels.values():
            args.host.call.timeout_ns = int(60e9)
    for _ in range(3):
        world.again()
        lay_out_all(world, given)
        assert [(report[0], report[3]) for report in reports_of(world)] == [(4, BROKEN_STREAMS_CODE)] * 3


def test_too_many_rows_fail_the_call_on_all_ranks() -> None:
    world, given = HostsWorld(PATIENT), PATIENT.inputs(0)
    counts = [len(there.src_rank) for there in reference.dispatch(given, PATIENT.num_experts, layout="rank")]
    for rank in world.ranks:
        rank.kernels["layout_hosts"][1].max_recv_rows = max(counts) - 1
    lay_out_all(world, given)
    assert {(report[0], report[1]) for report in reports_of(world)} == {(5, counts.index(max(counts)))}
    assert [int(rank.keep["info"][0]) for rank in world.ranks] == [2, 2, 2]
    for rank in world.ranks:
        rank.kernels["layout_hosts"][1].max_recv_rows = rank.max_rows
    check_three_calls(world)


def test_other_facts_are_named_by_all() -> None:
    world, given = HostsWorld(PATIENT), PATIENT.inputs(0)
    world.ranks[2].kernels["layout_hosts"][1].signature = 78
    lay_out_all(world, given)
    found = reports_of(world)
    assert [report[0] for report in found] == [3, 3, 3]
    assert [report[1] for report in found[:2]] == [2, 2]
    world.ranks[2].kernels["layout_hosts"][1].signature = 77
    check_three_calls(world)


def check_that_all_calls_are_refused(world: HostsWorld, given: list[Routed]) -> None:
    """By rows of counts, and without waiting for the time-out."""
    for wire in world.wires.values():
        wire.forge = lambda kind, word, address: word
    for _ in range(3):
        world.again()
        lay_out_all(world, given)
        assert {(report[0], report[3]) for report in reports_of(world)} == {(4, BROKEN_STREAMS_CODE)}


@pytest.mark.parametrize("what", ["size", "place"])
def test_what_a_partner_says_is_checked_and_the_streams_serve_nobody_afterwards(what: str) -> None:
    world, given = HostsWorld(PATIENT), PATIENT.inputs(0)
    row = 2 * PATIENT.hidden

    def forge(kind: int, word: int, address: int) -> int:
        if kind != CHUNKS:
            return word
        if what == "size":
            return word - 16
        ctypes.c_int32.from_address(address + row + 4).value = 10_000  # the first record's place at position 0
        return word

    world.wires[0, 1].forge = forge
    lay_out_all(world, given)
    # both ranks of that host read the size; the one that ends the call first may be all that the other finds
    told, flaw = [report[:2] for report in reports_of(world)[1:]], [{"size": 3, "place": 8}[what], 0]
    assert flaw in told
    assert all(report == flaw or report[0] == PEER_GAVE_UP for report in told)
    check_that_all_calls_are_refused(world, given)


ISLANDS = HostsCase(((0,), (1, 2), (3, 4)), (20, 14, 9, 16, 11), timeout_s=60.0)


def combine_all(world: HostsWorld, spoil: Callable[[HostsRank], None]) -> list[list[int]]:
    """Combine behind a good dispatch and `spoil`; returns `reports_of`."""
    given = world.case.inputs(0)

    def calls(rank: HostsRank) -> None:
        rank.dispatch(given[rank.rank])
        assert not rank.reports.any()

    world.run(calls)
    world.again()
    for rank in world.ranks:
        spoil(rank)
    world.run(HostsRank.add_up)
    return reports_of(world)


@pytest.mark.parametrize("refusing", [2, 3])
def test_a_combine_that_one_rank_refuses_ends_on_all_without_the_time_out(refusing: int) -> None:
    world = HostsWorld(ISLANDS)

    def spoil(rank: HostsRank) -> None:
        if rank.rank == refusing:
            rank.keep["info"][0] = 2

    found = combine_all(world, spoil)
    assert found[refusing][:4] == [4, refusing, 0, 4]
    assert all(report and report[0] in (4, 9) for report in found), found
    check_that_all_calls_are_refused(world, ISLANDS.inputs(0))


def test_a_combine_on_broken_streams_ends_on_all_without_the_time_out() -> None:
    world = HostsWorld(ISLANDS)
    broken = state_layout().offset("broken")

    def spoil(rank: HostsRank) -> None:
        if rank.rank == 0:
            rank.state[broken] = 1

    found = combine_all(world, spoil)
    assert found[0][:4] == [4, 0, 0, BROKEN_STREAMS_CODE]
    assert all(report and report[0] in (4, 9) for report in found), found


def test_a_handle_of_another_view_is_refused_by_all_and_breaks_nothing() -> None:
    world = HostsWorld(PATIENT)

    def spoil(rank: HostsRank) -> None:
        rank.control[control_layout(rank.num_local).offset("view") + 8] = 1

    found = [report[:4] for report in combine_all(world, spoil)]
    for rank, (code, refuser, *values) in enumerate(found):
        # of its island's ranks, which all refuse, it may read a neighbour's refusal before its own block reports
        island = next(island for island in PATIENT.islands if rank in island)
        assert (code, values) == (4, [0, 6]), found
        assert refuser in island, found
    check_three_calls(world)


@pytest.mark.parametrize("other", [0, 2])
def test_handles_of_different_dispatches_are_told_apart(other: int) -> None:
    """Inside an island by the words of its ranks, between hosts by the words of the chunks."""
    world = HostsWorld(PATIENT)
    given = PATIENT.inputs(0)

    def calls(rank: HostsRank) -> None:
        rank.dispatch(given[rank.rank])
        first = {name: part.clone() for name, part in rank.keep.items()}
        rank.dispatch(given[rank.rank])
        if rank.rank == other:
            for name, part in first.items():
                rank.keep[name].copy_(part)
        rank.add_up()

    world.run(calls)
    found = reports_of(world)
    assert all(report and report[0] in (3, 9) for report in found), found
    assert 3 in {report[0] for report in found}
    check_that_all_calls_are_refused(world, given)


@pytest.mark.parametrize("what", ["ABORT", "LOST"])
@pytest.mark.parametrize("step", ["layout", "dispatch"])
def test_the_end_of_a_proxy_or_partner_ends_the_kernels(what: str, step: str) -> None:
    world, given = HostsWorld(replace(WAITING, timeout_s=30.0)), WAITING.inputs(0)
    kept = world.wires[1, 0]  # nothing of rank 1 arrives any more: in the layout its row, later its chunks
    kept.kinds = KINDS if step == "layout" else (CHUNKS,)
    shape, words = world.ranks[0].shape, world.ranks[0].words

    def end() -> None:
        time.sleep(0.3)
        if what == "ABORT":
            words[ABORT] = 2
        else:
            words[shape.process_words(0) + LOST] = 1 << world.ranks[0].partners.index(1)

    ender = threading.Thread(target=end)
    ender.start()
    only = [rank for rank in world.ranks if rank.rank == 0]
    others = [rank for rank in world.ranks if rank.rank != 0]

    def calls(rank: HostsRank) -> None:
        rank.dispatch(given[rank.rank])
        if rank in only:
            for other in others:
                other.words[ABORT] = 1

    world.run(calls)
    ender.join()
    assert reports_of(world)[0][:2] == ([2, 0] if what == "ABORT" else [10, 1])
