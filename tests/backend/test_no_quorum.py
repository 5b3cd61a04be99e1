"""Calls without a quorum: repeating them costs no core, and they go on with the news."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from epee import NoQuorumError
from epee.engine.membership.agent_hooks import NO_QUORUM_PAUSE_S
from tests.harness import run_ranks

NUM_PAUSES = 5  # after this many the quorum is back


def repeated(rank: int, num_ranks: int) -> tuple[int, float]:
    """Repeat a call, as its error says, until the agent has news; return how often it failed."""
    group: Any = dist.group.WORLD
    membership = group._engine.membership
    shared = membership.runtime._loop.shared
    dist.barrier()

    def come_back() -> None:
        shared.error = None
        membership.hooks._has_news.set()  # as with a decision

    shared.error = NoQuorumError("nobody answers", [1 - rank])
    membership.hooks.trouble(shared.error)
    threading.Timer(NUM_PAUSES * NO_QUORUM_PAUSE_S, come_back).start()
    x, num_failed, until = torch.ones(3), 0, time.monotonic() + 20
    while time.monotonic() < until:
        try:
            dist.all_reduce(x)
            break
        except NoQuorumError:
            num_failed += 1
    return num_failed, x[0].item()


def test_repeating_a_call_without_a_quorum_does_not_spin() -> None:
    for num_failed, value in run_ranks(repeated, 2, backend="epee"):
        assert 1 <= num_failed <= 2 * NUM_PAUSES
        assert value == 2.0
