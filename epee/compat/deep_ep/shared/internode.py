"""V1's names for calls between hosts. `dispatch` and `combine` choose by the number of hosts, so these are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from epee.errors import UnsupportedError


def internode_dispatch(
    self: Any,
    x: Any,
    handle: Any = None,
    num_tokens_per_rank: torch.Tensor | None = None,
    num_tokens_per_rdma_rank: torch.Tensor | None = None,
    is_token_in_rank: torch.Tensor | None = None,
    num_tokens_per_expert: torch.Tensor | None = None,
    topk_idx: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    expert_alignment: int = 1,
    config: Any = None,
    previous_event: Any = None,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> Any:
    """Send each token to the ranks of its experts, as `dispatch`, over several hosts. Collective.

    Raises:
        UnsupportedError: all ranks are on one host, where DeepEP has no such call either.
        As `dispatch`.
    """
    _require_hosts("internode_dispatch", "dispatch", self)
    return self.dispatch(
        x,
        handle,
        num_tokens_per_rank,
        num_tokens_per_rdma_rank,
        is_token_in_rank,
        num_tokens_per_expert,
        topk_idx,
        topk_weights,
        expert_alignment,
        config=config,
        previous_event=previous_event,
        async_finish=async_finish,
        allocate_on_comm_stream=allocate_on_comm_stream,
    )


def internode_combine(
    self: Any,
    x: torch.Tensor,
    handle: Any,
    topk_weights: torch.Tensor | None = None,
    bias: Any = None,
    config: Any = None,
    previous_event: Any = None,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> Any:
    """Send rows back to their tokens and sum them, as `combine`, over several hosts. Collective.

    Raises:
        As `internode_dispatch`, and as `combine`.
    """
    _require_hosts("internode_combine", "combine", self)
    return self.combine(x, handle, topk_weights, bias, config, previous_event, async_finish, allocate_on_comm_stream)


def _require_hosts(name: str, instead: str, owner: Any) -> None:
    hosts: Sequence[Sequence[int]] = owner.hosts
    if len(hosts) == 1:
        raise UnsupportedError(
            f"{name} is not supported: there is one host, and nothing goes between hosts; call {instead}, which "
            "chooses by the number of hosts"
        )
