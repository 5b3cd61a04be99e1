"""Steps of a program that uses one Buffer over hosts while ranks die, and what must be true of each of them.

What a step must give is that of `tests/survive/buffer_rounds.py`, which holds for one host as for several; how sums are
rounded is said here.
"""

from __future__ import annotations

from typing import Any

import torch

import epee
from epee.errors import EvictedError, PeerError, StaleHandleError
from tests.survive.buffer_rounds import HIDDEN, LOCAL, NUM_TOKENS, die, make_buffer, make_step, routing, start

from .stand_in import arm, invent_hosts

BETWEEN = "between"


def go_on(buffer: epee.Buffer, first: int, end: int, victims: dict[int, tuple[int, str]], layout: str) -> Any:
    """Make steps `first ... end - 1`; one that a loss ends is made again. Return what each has ended with, and errors.

    Args:
        buffer: of the steps.
        first, end: their numbers.
        victims: rank -> (step, point) at which it dies.
        layout: "rank" or "expert"; "both": in turns.
    """
    done, errors = [], []
    at, point = victims.get(buffer.rank, (-1, ""))
    step = first
    while step < end:
        kind = ("rank", "expert")[step % 2] if layout == "both" else layout
        if step == at and point != BETWEEN:
            arm(buffer._path._engine, point, die)  # type: ignore[attr-defined]
        between = die if (step, BETWEEN) == (at, point) else None
        try:
            done.append(make_step(buffer, step, kind, is_fp8=step % 4 > 1, between=between))
            step += 1
        except EvictedError:
            raise
        except (PeerError, StaleHandleError) as error:
            errors.append(type(error).__name__)
            assert len(errors) < 20, errors
    return done, errors


def check_bits(buffer: epee.Buffer, placement: tuple[int, ...], wide: bool) -> list[int]:
    """Make a step of bfloat16 rows and compare what comes back bit for bit; return who is in it."""
    rank, num_ranks = buffer.rank, buffer.num_ranks
    idx, _ = routing(rank, num_ranks, 77)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    d = buffer.dispatch(x, idx)
    assert isinstance(d.x, torch.Tensor)
    c = buffer.combine(d.x * (1 + rank / 8), d.handle)
    owners, there = idx // LOCAL, c.got.tolist()
    assert d.got.tolist() == there
    total = torch.full((NUM_TOKENS, HIDDEN), -0.0)
    has = torch.zeros(NUM_TOKENS, dtype=torch.bool)
    for host in dict.fromkeys(placement):
        part = torch.full((NUM_TOKENS, HIDDEN), -0.0)
        mine = torch.zeros(NUM_TOKENS, dtype=torch.bool)
        for dst in (dst for dst in range(num_ranks) if placement[dst] == host and there[dst]):
            goes = (owners == dst).any(1)
            part[goes] += (x * (1 + dst / 8))[goes].float()
            mine |= goes
        total[mine] += (part if wide else part.bfloat16().float())[mine]
        has |= mine
    total[~has] = 0.0
    assert torch.equal(c.x.view(torch.int16), total.bfloat16().view(torch.int16))
    return there


def program(
    rank: int,
    num_ranks: int,
    folder: str,
    mode: str,
    placement: tuple[int, ...],
    victims: dict[int, tuple[int, str]],
    layout: str,
    num_steps: int,
) -> Any:
    """One rank's program over invented hosts."""
    invent_hosts(placement)
    return whole_program(rank, num_ranks, folder, mode, placement, victims, layout, num_steps)


def whole_program(
    rank: int,
    num_ranks: int,
    folder: str,
    mode: str,
    placement: tuple[int, ...],
    victims: dict[int, tuple[int, str]],
    layout: str,
    num_steps: int,
) -> Any:
    """Make steps with deaths, an agreement, and a step whose bits are looked at."""
    group = start(rank, num_ranks, folder, mode)
    with make_buffer(group) as buffer:
        done, errors = go_on(buffer, 0, num_steps, victims, layout)
        mask = torch.ones(num_ranks, dtype=torch.int32)
        agreed = buffer.sync(mask).tolist()
        assert mask.tolist() == agreed
        there = check_bits(buffer, placement, wide=False)
        return done, errors, agreed, there, buffer.epoch


def check(told: list[Any], mode: str, num_steps: int, dead: set[int], num_losses: int) -> None:
    """Compare what the survivors of a program say with each other, and with who died.

    Args:
        told: what each rank has returned.
        mode: of the buffer.
        num_steps: of the program.
        dead: who died.
        num_losses: the most errors that a rank may see in mode "raise", one for each change of the view.
    """
    left = [answer for rank, answer in enumerate(told) if rank not in dead]
    want = [int(rank not in dead) for rank in range(len(told))]
    for answer in left:
        done, errors, agreed, there, epoch = answer
        assert done == left[0][0], f"survivors differ in what a step ended with: {done} {left[0][0]}"
        assert agreed == there == want, (agreed, there, want)
        assert epoch == left[0][4], [answer[4] for answer in left]
        assert [step for step, _, _ in done] == list(range(num_steps)), done
        if mode == "mask":
            assert errors == [], errors
        else:
            assert errors == left[0][1] == ["RankFailedError"] * len(errors), (errors, left[0][1])
            assert bool(dead) <= len(errors) <= num_losses, errors
    assert list(left[0][0][-1][2]) == want
