"""A process takes a lost rank's place in a running `LatencyBuffer` over hosts: it is in by `sync`, wherever it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.errors import PeerError
from tests.compat import test_mooncake_ep
from tests.ep.latency_cases import Shape, check_round, dispatch, inputs, make
from tests.harness import DEAD, run_ranks
from tests.hosts.joins import hear, lose, say, sums
from tests.hosts.rejoins import arrive, end
from tests.loopback import settle
from tests.survive.buffer_rounds import die

SHAPE = Shape()
NUM_TOKENS = (6, 3, 4, 5)
TWO_BY_TWO = (0, 0, 1, 1)


def rounds(buffer: epee.LatencyBuffer, where: list[int], seed: int) -> None:
    """Whole rounds, bit for bit, with masks and without, in halves and not."""
    num_ranks = buffer.num_ranks
    mask = torch.ones(num_ranks, dtype=torch.int32)
    for number, payload in enumerate(("bfloat16", "fp8", "fp8 packed", "bfloat16", "bfloat16")):
        options: dict[str, Any] = {"active_ranks": mask} if number % 2 else {}
        options.update(late_weights=number == 3, partial_dtype=torch.float32 if number == 2 else torch.bfloat16)
        tokens, routing = NUM_TOKENS[:num_ranks], "everywhere" if number == 4 else "random"
        args = {"payload": payload, "use_hook": number % 2 == 0, "routing": routing, "hosts": where}
        check_round(buffer, SHAPE, tokens, seed + number, **args, **options)
    assert mask.all()


def replaced(index: int, num_processes: int, folder: str, placement: tuple[int, ...], turns: Any) -> Any:
    """As in `test_buffer_rejoin.py`; a victim dies with a half sent, in an epoch whose calls have counted up."""
    torch.set_num_threads(1)
    num_ranks = len(placement)
    rank, turn, where, group = arrive(index, folder, placement, turns)
    epochs = []
    with make(SHAPE, timeout=20.0) as buffer:
        for number in range(turn, len(turns)):
            if number > turn:
                victim, host = turns[number]
                given = inputs(SHAPE, NUM_TOKENS[:num_ranks], 99)[rank]
                if rank == victim:
                    dispatch(buffer, given, return_hook=True)
                    die()
                mask = torch.ones(num_ranks, dtype=torch.int32)
                dispatch(buffer, given, active_ranks=mask)
                lose(group, {victim})
                where[victim] = host
                say(folder, f"lost{number}")
                group.recover_ranks([victim])
                sums(group, range(num_ranks))
                assert buffer.sync(mask).tolist() == mask.tolist() == [1] * num_ranks
            rounds(buffer, where, 10 + 10 * number)
            epochs.append(buffer.epoch)
            assert buffer.takes_replacements
        end(folder, rank, range(num_ranks))
    dist.destroy_process_group()
    return epochs[-1]


@pytest.mark.parametrize(
    ("placement", "turns"),
    [
        (TWO_BY_TWO, ((3, 1), (3, 1))),
        (TWO_BY_TWO, ((0, 1), (3, 2))),
        ((0, 1, 0, 1), ((1, 2), (0, 2))),
        ((0, 1), ((1, 0), (1, 1))),
        ((0, 1, 2, 2), ((1, 2), (0, 2))),
    ],
)
def test_a_lost_rank_is_replaced(tmp_path: Path, placement: tuple[int, ...], turns: Any) -> None:
    num = len(placement) + len(turns)
    holder, dead = list(range(len(placement))), set()
    for number, (victim, _) in enumerate(turns):
        dead.add(holder[victim])
        holder[victim] = len(placement) + number
    told = run_ranks(replaced, num, str(tmp_path), placement, turns, backend=None, timeout_s=80, dead=dead)
    left = [answer for answer in told if answer != DEAD]
    assert len(left) == len(placement)
    assert len(set(left)) == 1


def between_halves(index: int, num_processes: int, folder: str) -> Any:
    """The ranks stand between their halves while rank 3 dies and another process takes its place in the buffer.

    It is wanted in as a `sync` does that fails behind its decision, after which calls go on in the old epoch.
    """
    torch.set_num_threads(1)
    rank, turn, _, group = arrive(index, folder, TWO_BY_TWO, ((3, 1),))
    told = "came"
    with make(SHAPE, timeout=20.0) as buffer:
        if turn < 0:
            given = inputs(SHAPE, NUM_TOKENS, 99)[rank]
            if rank == 3:
                for peer in range(3):
                    hear(folder, f"sent-{peer}")
                die()
            hook = dispatch(buffer, given, active_ranks=None, return_hook=True).hook
            assert hook is not None
            say(folder, f"sent-{rank}")
            lose(group, {3})
            say(folder, "lost0")
            group.recover_ranks([3])
            sums(group, range(4))
            admission = buffer._exchange.engine.membership.admission
            while 3 not in admission.present():
                admission.take_in({3}, time.monotonic() + 0.2)
            with pytest.raises(PeerError) as caught:
                hook()
            told = type(caught.value).__name__
            assert buffer.sync().tolist() == [1] * 4  # the newcomer is in it, as it makes its buffer
        rounds(buffer, list(TWO_BY_TWO), 10)
        end(folder, rank, range(4))
    dist.destroy_process_group()
    return told


def test_who_came_after_an_epoch_began_is_not_waited_for_in_it(tmp_path: Path) -> None:
    told = run_ranks(between_halves, 5, str(tmp_path), backend=None, timeout_s=80, dead={3})
    assert told == ["RankFailedError"] * 3 + [DEAD, "came"]


def by_mooncakes_names(slot: int, num_processes: int, folder: str, host: int) -> Any:
    """As on one host: `update_ep_member` lets the ranks meet, and the newcomer finds their memory."""
    settle((0, 1, host)[slot])
    return test_mooncake_ep._replaced(slot, num_processes, folder)


@pytest.mark.parametrize("host", [1, 2])
def test_a_replacement_is_connected_after_update_ep_member(tmp_path: Path, host: int) -> None:
    told = run_ranks(by_mooncakes_names, 3, str(tmp_path), host, backend=None, timeout_s=60, dead={1})
    assert told == [[1, 1], DEAD, [1, 1]]
