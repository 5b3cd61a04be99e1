"""A process takes a lost rank's place in a running `Buffer` over hosts: it is in by `sync`, wherever it runs.

Processes beyond the ranks are replacements; each waits for its turn in a file. What comes back is compared with the
oracle bit for bit, as in `survival_steps.py`, with the hosts that there are then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import DEAD, run_ranks
from tests.hosts.joins import lose, say, sums
from tests.hosts.rejoins import arrive, begin, check_all, end
from tests.survive.buffer_rounds import die

TWO_BY_TWO = (0, 0, 1, 1)


def replaced(index: int, num_processes: int, folder: str, mode: str, placement: tuple[int, ...], turns: Any) -> Any:
    """Processes beyond the ranks come one after the other; `turns` has (victim, host of its replacement)."""
    num_ranks = len(placement)
    rank, turn, where, group = arrive(index, folder, placement, turns, mode)
    epochs = []
    with begin(group) as buffer:
        for number in range(turn, len(turns)):
            if number > turn:
                victim, host = turns[number]
                if rank == victim:
                    die()
                lose(group, {victim})
                where[victim] = host
                say(folder, f"lost{number}")
                group.recover_ranks([victim])
                sums(group, range(num_ranks))
                mask = torch.ones(num_ranks, dtype=torch.int32)
                assert buffer.sync(mask).tolist() == mask.tolist() == [1] * num_ranks
            check_all(buffer, where, 10 + 10 * number)
            epochs.append(buffer.epoch)
            assert buffer.takes_replacements
        end(folder, rank, range(num_ranks))
    dist.destroy_process_group()
    return epochs[-1]


CASES: list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = [
    (TWO_BY_TWO, ((3, 1),)),
    (TWO_BY_TWO, ((0, 1), (3, 2))),
    ((0, 1, 0, 1), ((1, 2), (0, 2))),
    ((0, 1), ((1, 0), (1, 1))),
]


@pytest.mark.parametrize("mode", ["raise", "mask"])
@pytest.mark.parametrize(("placement", "turns"), CASES)
def test_a_lost_rank_is_replaced(tmp_path: Path, mode: str, placement: tuple[int, ...], turns: Any) -> None:
    num = len(placement) + len(turns)
    holder, dead = list(range(len(placement))), set()
    for number, (victim, _) in enumerate(turns):
        dead.add(holder[victim])
        holder[victim] = len(placement) + number
    told = run_ranks(replaced, num, str(tmp_path), mode, placement, turns, backend=None, timeout_s=80, dead=dead)
    left = [answer for answer in told if answer != DEAD]
    assert len(left) == len(placement)
    assert len(set(left)) == 1
