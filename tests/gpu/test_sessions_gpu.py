"""V2's messages between stages and its sessions on CUDA tensors, on groups of epee, gloo with NCCL, and NCCL alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import epee.compat.deep_ep as deep_ep
from epee.errors import UnsupportedError
from tests.compat import test_deep_ep_sessions as cases
from tests.compat.deep_ep_cases import world
from tests.harness import run_ranks

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(120)]


def _on_gpus(rank: int, num_ranks: int, function: Callable[[int, int], None]) -> None:
    torch.cuda.set_device(rank)
    with torch.device("cuda"):
        function(rank, num_ranks)


@pytest.mark.parametrize("backend", ["epee", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("function", [cases.messages, cases.chain, cases.sessions, cases.inplace])
def test_messages_and_sessions_of_cuda_tensors(function: Callable[[int, int], None], backend: str) -> None:
    run_ranks(_on_gpus, 2, function, backend=backend)


def _nccl(rank: int, num_ranks: int) -> None:
    with pytest.raises(UnsupportedError, match=r"pp_set_config needs a group that serves CPU tensors"):
        deep_ep.ElasticBuffer(world()).pp_set_config(64, 1)
    cases.sessions(rank, num_ranks)


def test_sessions_of_nccl_alone() -> None:
    run_ranks(_on_gpus, 2, _nccl, backend="nccl")
