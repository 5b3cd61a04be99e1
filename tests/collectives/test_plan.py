"""Which calls are made how."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from epee.backend.cuda import moves
from epee.backend.cuda.calls import Prepared
from epee.backend.cuda.machine import Collectives
from epee.backend.cuda.moves import Move, Stretch
from epee.backend.cuda.params import CollectiveConfig
from epee.backend.cuda.plan import CollectivePlan

MIB = 1 << 20
KIND = (torch.bfloat16, "sum")


def move_of(op: str, nbytes: int, num_ranks: int, rank: int) -> Move:
    """A call of so many bytes in all on a rank; of what is rooted, rank 1 is the root."""
    whole, row = Stretch(0, nbytes), Stretch(0, nbytes // num_ranks)
    rows = [row] * num_ranks
    return {
        "all_reduce": lambda: moves.all_reduce(num_ranks, whole, whole, KIND),
        "broadcast": lambda: moves.broadcast(num_ranks, rank, whole, 1, torch.bfloat16),
        "all_gather": lambda: moves.all_gather(row, rows, torch.bfloat16),
        "reduce_scatter": lambda: moves.reduce_scatter(rows, row, KIND),
        "all_to_all": lambda: moves.all_to_all(rows, rows, torch.bfloat16, True),
        "uneven": lambda: moves.all_to_all(rows, rows, torch.bfloat16, False),
        "reduce": lambda: moves.reduce(num_ranks, rank, whole, whole, KIND, 1),
    }[op]()


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "uneven"])
def test_who_sends_much_pushes_it(op: str) -> None:
    plan = CollectivePlan()
    for nbytes, num_ranks, wanted in ((16, 2, False), (63, 2, False), (64, 2, True), (256, 2, True), (44, 4, True)):
        for rank in range(num_ranks):
            assert plan.pushes(move_of(op, nbytes * MIB, num_ranks, rank), rank) == wanted, (nbytes, num_ranks)


def test_broadcasts_are_stored_by_threads_and_who_sends_nothing_pushes_nothing() -> None:
    plan = CollectivePlan()
    for rank in range(3):
        assert not plan.pushes(move_of("broadcast", 256 * MIB, 3, rank), rank)
        assert plan.pushes(move_of("reduce", 256 * MIB, 3, rank), rank) == (rank != 1)


@pytest.mark.parametrize("first_is_short", [False, True])
def test_the_memory_for_a_copy_of_a_sum_in_place_has_room_for_all_of_the_row_where_coalesced_tensors_overlap(
    first_is_short: bool,
) -> None:
    whole = torch.arange(8, dtype=torch.float32, device="cpu")
    given = [whole[:3], whole] if first_is_short else [whole, whole[:3]]
    prepared = Prepared(0, 2)
    prepared._given = given
    at = (whole.data_ptr(),) * 2
    move = Move("all_reduce", (torch.float32, "sum"), 0, at, at, (32, 32), (32, 32), 32, 3, 3)
    again = prepared.again(move)
    (copy,) = prepared._kept
    assert copy.nbytes == whole.nbytes
    assert again.inputs == (copy.data_ptr(),) * 2 != move.inputs
    assert again.outputs == move.outputs


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_only_source_of_a_call_has_the_slots_of_all_ranks_and_small_chunks_have_more(num_ranks: int) -> None:
    config = CollectiveConfig(1, num_ranks)
    machine = Collectives.__new__(Collectives)  # the arithmetic only
    machine.plan, machine.config, machine.pool = CollectivePlan(), config, None
    machine.platform = SimpleNamespace(limits=SimpleNamespace(num_sms=132))  # type: ignore[assignment]
    for op, nbytes in (("broadcast", 256 * MIB), ("all_reduce", 256 * MIB), ("all_reduce", 5 * MIB)):
        slot_bytes, _, num_slots, vecs, *_, scatter_slots = machine._shape(move_of(op, nbytes, num_ranks, 1), 132, 1)[3]
        assert 16 * vecs <= slot_bytes, "a chunk fits"
        assert slot_bytes * num_slots <= config.chunk_bytes * config.num_slots, "and all in the memory of a source"
        assert slot_bytes * (num_slots + 1) > config.chunk_bytes * config.num_slots or nbytes < 256 * MIB
        assert scatter_slots == num_slots * (num_ranks if op == "broadcast" else 1)
