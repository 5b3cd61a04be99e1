"""What the tests of `epee.compat.deep_ep` share: calls on a rank, and DeepEP's matrices by counting, one at a time."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import epee.compat.deep_ep as deep_ep
from epee.reference import Received, Routed
from tests.ep.buffer_cases import Call, Setup, copy_of, make_bias, make_input, make_output, make_weights_back

NUM_SMS = 6  # three channels


def routing_of(setup: Setup, given: Routed) -> dict[str, Any]:
    """Return V1's routing arguments of a rank, counted one at a time."""
    num_local = setup.num_local_experts
    member = given.is_token_in_rank
    per_expert = torch.zeros(setup.num_experts, dtype=torch.int32)
    if given.topk_idx is not None:
        member = torch.zeros(len(given.topk_idx), setup.num_ranks, dtype=torch.bool)
        for token, experts in enumerate(given.topk_idx.tolist()):
            for expert in experts:
                if expert >= 0:
                    member[token, expert // num_local] = True
                    per_expert[expert] += 1
    assert member is not None
    return {
        "num_tokens_per_rank": member.sum(0, dtype=torch.int32),
        "is_token_in_rank": member,
        "num_tokens_per_expert": per_expert,
    }


def run_v1(buffer: deep_ep.Buffer, setup: Setup, call: Call, rank: int, num_worst_tokens: int = 0) -> dict[str, Any]:
    """Dispatch, dispatch again by the handle, combine twice; return copies of everything."""
    given = make_input(setup, call, rank)
    config = deep_ep.Config(NUM_SMS)
    if given.topk_idx is not None:
        found = buffer.get_dispatch_layout(given.topk_idx, setup.num_experts)
        names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
        routing: dict[str, Any] = dict(zip(names, found, strict=False))
        has_topk = {"topk_idx": given.topk_idx, "topk_weights": given.topk_weights}
    else:
        routing = routing_of(setup, given)
        routing["num_tokens_per_expert"] = torch.arange(setup.num_experts, dtype=torch.int32) + rank
        has_topk = {}
    first = buffer.dispatch(
        given.x,
        **routing,
        **has_topk,
        expert_alignment=call.expert_alignment,
        num_worst_tokens=num_worst_tokens,
        config=config,
    )
    handle = first[4]
    assert handle is not None
    again = buffer.dispatch(make_input(setup, call, rank, again=True).x, handle=handle)
    assert again[1:5] == (None, None, None, None)
    y = make_output(setup, call, rank, num_rows_of(first[0]))
    bias: Any = make_bias(setup, call, rank)
    bias = None if not bias else bias[0] if len(bias) == 1 else tuple(bias)
    weights = None
    if call.with_weights_back and given.topk_idx is not None:
        weights = make_weights_back(call, rank, (len(y), setup.num_topk), torch.float32)
    combined = buffer.combine(y, list(handle), topk_weights=weights, bias=bias, config=config)  # type: ignore[arg-type]
    return {
        "routing": {name: copy_of(value) for name, value in routing.items()},
        "x": copy_of(first[0]),
        "topk_idx": copy_of(first[1]),
        "topk_weights": copy_of(first[2]),
        "list": first[3],
        "handle": list(handle),
        "again": copy_of(again[0]),
        "combined": copy_of(combined[0]),
        "weights": copy_of(combined[1]),
    }


def num_rows_of(x: Any) -> int:
    """Rows of a payload."""
    return len(x[0] if isinstance(x, tuple) else x)


def v1_handle(members: list[torch.Tensor], received: Received, rank: int, num_channels: int) -> list[torch.Tensor]:
    """Return DeepEP V1's handle of `rank`, counted one token at a time.

    Args:
        members: `is_token_in_rank` of all ranks.
        received: what the reference says that `rank` receives.
        rank: whose handle.
        num_channels: C.
    """
    num_ranks = len(members)
    sizes = [-(-len(member) // num_channels) for member in members]
    rank_prefix = torch.zeros(num_ranks, num_ranks, dtype=torch.int32)
    for dst in range(num_ranks):
        total = 0
        for src in range(num_ranks):
            total += int(members[src][:, dst].sum())
            rank_prefix[src, dst] = total
    channel_prefix = torch.zeros(num_ranks, num_channels, dtype=torch.int32)
    recv_channel_prefix = torch.zeros(num_ranks, num_channels, dtype=torch.int32)
    head = torch.full((len(members[rank]), num_ranks), -1, dtype=torch.int32)
    for peer in range(num_ranks):
        for channel in range(num_channels):
            for token in range(len(members[rank])):
                if token // sizes[rank] <= channel and members[rank][token, peer]:
                    channel_prefix[peer, channel] += 1
            for token in range(len(members[peer])):
                if token // sizes[peer] < channel and members[peer][token, rank]:
                    recv_channel_prefix[peer, channel] += 1
        seen: dict[int, int] = {}
        for token in range(len(members[rank])):
            if members[rank][token, peer]:
                channel = token // sizes[rank]
                head[token, peer] = seen.get(channel, 0)
                seen[channel] = seen.get(channel, 0) + 1
    src_idx = received.src_token.to(torch.int32)
    return [rank_prefix, channel_prefix, recv_channel_prefix, src_idx, members[rank], head]


def v1_handle_over_hosts(
    members: list[torch.Tensor], received: Received, rank: int, host_of: Sequence[int], num_channels: int
) -> list[torch.Tensor]:
    """Return DeepEP V1's handle of `rank` over several hosts, counted one token at a time.

    Args:
        members: `is_token_in_rank` of all ranks.
        received: what the reference says that `rank` receives.
        rank: whose handle.
        host_of: of each rank.
        num_channels: C.
    """
    num_ranks, num_hosts = len(members), max(host_of) + 1
    hosts = [[peer for peer in range(num_ranks) if host_of[peer] == host] for host in range(num_hosts)]
    here = hosts[host_of[rank]]
    sent = [[row.tolist() for row in member] for member in members]
    sizes = [max(1, -(-len(member) // num_channels)) for member in members]

    def goes(src: int, token: int, host: int) -> bool:
        return any(sent[src][token][peer] for peer in hosts[host])

    rdma, gbl = ([[0] * num_channels for _ in range(count)] for count in (num_hosts, num_ranks))
    rdma_head, before = [], dict[tuple[int, int], int]()
    for token in range(len(sent[rank])):
        channel = token // sizes[rank]
        row = []
        for host in range(num_hosts):
            place = before.get((host, channel), 0)
            row.append(place if goes(rank, token, host) else -1)
            before[host, channel] = place + goes(rank, token, host)
        rdma_head.append(row)
        for later in range(channel, num_channels):
            for host in range(num_hosts):
                rdma[host][later] += goes(rank, token, host)
            for peer in range(num_ranks):
                gbl[peer][later] += sent[rank][token][peer]

    recv_rdma, nvl_head, rdma_ends, handed_on = [], [], [], 0
    for host in range(num_hosts):
        line = []
        for channel in range(num_channels):
            seen = [0] * len(here)
            for src in hosts[host]:
                is_mine = (
                    src == rank if host == host_of[rank] else hosts[host].index(src) % len(here) == here.index(rank)
                )
                for token in range(len(sent[src])):
                    if not (is_mine and token // sizes[src] == channel and goes(src, token, host_of[rank])):
                        continue
                    handed_on += 1
                    row = []
                    for position, peer in enumerate(here):
                        row.append(seen[position] if sent[src][token][peer] else -1)
                        seen[position] += sent[src][token][peer]
                    nvl_head.append(row)
            line.append(handed_on - (rdma_ends[-1] if rdma_ends else 0))
        recv_rdma.append(line)
        rdma_ends.append(handed_on)

    starts, ends, first = [], [], 0
    for src in range(num_ranks):
        mine = [token for token in range(len(sent[src])) if sent[src][token][rank]]
        starts.append([first + sum(token // sizes[src] < channel for token in mine) for channel in range(num_channels)])
        first += len(mine)
        ends.append(first)

    meta = []
    for src, token in zip(received.src_rank.tolist(), received.src_token.tolist(), strict=True):
        bits = sum(1 << position for position, peer in enumerate(here) if sent[src][token][peer])
        meta.append(struct.pack("<ii", host_of[src], bits))
    raw = torch.tensor([list(entry) for entry in meta], dtype=torch.uint8).view(-1, 8)

    def matrix(rows: list[Any], width: int) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32).view(-1, width)

    return [
        members[rank],
        matrix(rdma, num_channels),
        matrix(gbl, num_channels),
        matrix(recv_rdma, num_channels),
        torch.tensor(rdma_ends, dtype=torch.int32),
        matrix(starts, num_channels),
        torch.tensor(ends, dtype=torch.int32),
        raw,
        matrix(rdma_head, num_hosts),
        matrix(nvl_head, len(here)),
    ]


def world() -> Any:
    """The default group."""
    return dist.group.WORLD
