"""The matrices of DeepEP's handles over several hosts, each by its closed form, from the data of one rank.

A rank sends a token's record once to each host that has one of its destinations, where one rank relays it: the sender's
gateway there, on its own host the sender itself. So besides its sent and received rows (`layout.py`), a rank knows the
records that it relays. With equally many ranks per host these are those of one source on each host; else they may be
those of several sources of a host, merged by channel, or of none. They are in order of (host, channel, source, token)
here; those of one host and channel form a group.

Nothing communicates. All results are int32 on the device of the input (the CPU) unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epee.compat.deep_ep.shared import layout
from epee.ep import CpuHandle


def in_hosts(is_token_in_rank: torch.Tensor, hosts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return `[num_tokens, num_hosts]` bool: whether a token goes to one of the host's ranks."""
    return torch.stack([is_token_in_rank[:, list(ranks)].any(1) for ranks in hosts], 1)


def num_tokens_per_host(is_token_in_rank: torch.Tensor, hosts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return `[num_hosts]`: tokens that go to each host, each once."""
    return in_hosts(is_token_in_rank, hosts).sum(0).to(torch.int32)


def num_relayed(handle: CpuHandle, num_channels: int) -> torch.Tensor:
    """Return `[num_hosts, num_channels]`: records that this rank relays from a host's channels 0 ... c."""
    flows, _ = _relayed(handle, num_channels)
    num_hosts = handle.by_host.topology.num_hosts
    counts = torch.bincount(flows, minlength=num_hosts * num_channels)
    return counts.view(num_hosts, num_channels).cumsum(1).to(torch.int32)


def relayed_up_to(handle: CpuHandle) -> torch.Tensor:
    """Return `[num_hosts]`: records that this rank relays from hosts 0 ... h."""
    return num_relayed(handle, 1)[:, 0].cumsum(0).to(torch.int32)


def relay_head(handle: CpuHandle, num_channels: int) -> torch.Tensor:
    """Return `[num_records, ranks of this host]`: a record's index among those of its group for a rank, -1 for none."""
    flows, bits = _relayed(handle, num_channels)
    member = bits[:, None] >> torch.arange(len(handle.by_host.topology.here), dtype=torch.int64, device="cpu") & 1
    before = member.cumsum(0) - member
    if len(flows):
        before = before - before[torch.searchsorted(flows, flows)]  # without those of earlier groups
    return torch.where(member == 1, before, -1).to(torch.int32)


def received_up_to(handle: CpuHandle) -> torch.Tensor:
    """Return `[num_ranks]`: rows from ranks 0 ... s."""
    return torch.tensor(handle.num_received, dtype=torch.int64, device="cpu").cumsum(0).to(torch.int32)


def first_rows(handle: CpuHandle, num_channels: int) -> torch.Tensor:
    """Return `[num_ranks, num_channels]`: the first row of each channel of each source."""
    received = received_up_to(handle)
    num_tokens = torch.tensor(handle.by_host.num_source_tokens, dtype=torch.int64, device="cpu")
    most = int(num_tokens.max())
    within = layout.recv_channel_prefix_matrix(handle.src_token, received, num_tokens, most, num_channels)
    starts = received - torch.tensor(handle.num_received, dtype=torch.int32, device="cpu")
    return starts[:, None] + within


def source_meta(handle: CpuHandle) -> torch.Tensor:
    """Return `[num_rows, 8]` uint8: of each row two int32, its source's host and the bits of the ranks that received
    it.

    Bit j stands for the rank at position j of this host; those of positions above 31 have no bit.
    """
    parts = []
    for source, sent in enumerate(handle.by_host.received):
        bits = torch.from_numpy(sent.bits[sent.of(handle.by_host.position)])
        host = torch.full_like(bits, handle.by_host.topology.host_of[source])
        parts.append(torch.stack([host, bits], 1).to(torch.int32))
    return torch.cat(parts).view(torch.uint8)


def _relayed(handle: CpuHandle, num_channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the group and the bits of each record that this rank relays, `[num_records]` int64 both."""
    topology = handle.by_host.topology
    flows, bits = [], []
    for source in topology.relayed():
        sent = handle.by_host.received[source]
        size = layout.channel_size(handle.by_host.num_source_tokens[source], num_channels)
        channels = torch.from_numpy(sent.tokens).div(size, rounding_mode="floor")
        flows.append(topology.host_of[source] * num_channels + channels)
        bits.append(torch.from_numpy(sent.bits))
    flow = torch.cat(flows)
    order = torch.argsort(flow, stable=True)
    return flow[order], torch.cat(bits)[order]
