"""Places of rows over up to 64 ranks on up to 8 hosts, as pure functions: those of one host, whatever the placement."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epee.ep.checks import GivenRouting, check_dispatch
from epee.ep.config import BufferConfig
from epee.ep.members.header import ExchangedRows, dispatch_header
from epee.ep.throughput.hosts.host_records import Records, sent_records
from epee.ep.throughput.hosts.layout import MIN_SUMMED, Parts, SectionLayout, dispatch_length, staging_bytes
from epee.ep.throughput.rows import CallPlace, new_handle
from epee.link.topology import Roles, Topology

TOPK, TOKENS = 4, 6


def _sent(keys: list[str], ids: list[torch.Tensor], layout: str) -> list[list[Records]]:
    """Return what every rank sends to every host, each by what it knows after the exchange of counts."""
    num_ranks = len(keys)
    config = BufferConfig(num_ranks, num_ranks, 8, TOPK, TOKENS, torch.float32, num_hosts=len(set(keys)))
    config.check()
    calls = []
    for idx in ids:
        x = torch.zeros(len(idx), 8)
        calls.append(check_dispatch(config, x, GivenRouting(idx, None, None), (None, layout, 1)))
    headers = [dispatch_header(call, rank, 0, 1) for rank, call in enumerate(calls)]
    counts = np.stack([call.plan.counts for call in calls if call.plan is not None])
    rows = ExchangedRows(headers, counts, [b""] * num_ranks, tuple(range(num_ranks)))
    sent = []
    for rank, call in enumerate(calls):
        handle = new_handle(call, rows, CallPlace(1, 1, 0, rank), config, may_lose=False)
        sent.append(sent_records(handle.plan, handle.placement, handle.num_tokens, Topology(rank, keys)))
    return sent


@settings(max_examples=30, deadline=None)
@given(
    keys=st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=64),
    seed=st.integers(0, 10_000),
    layout=st.sampled_from(["rank", "expert"]),
)
def test_a_token_goes_once_to_each_host_and_rows_come_in_the_order_of_one_host(
    keys: list[str], seed: int, layout: str
) -> None:
    num_ranks, generator = len(keys), torch.Generator().manual_seed(seed)
    counts = torch.randint(0, TOKENS + 1, (num_ranks,), generator=generator).tolist()
    ids = [torch.randint(-1, num_ranks, (count, TOPK), generator=generator) for count in counts]  # an expert a rank
    sent = _sent(keys, ids, layout)
    for rank in range(num_ranks):
        topology = Topology(rank, keys)
        position = topology.here.index(rank)
        came = [
            (source, token)
            for source in range(num_ranks)
            for token in sent[source][topology.host].tokens[sent[source][topology.host].of(position)].tolist()
        ]
        wanted = [(source, token) for source in range(num_ranks) for token in _going(ids[source], [rank])]
        assert came == wanted
        for host, ranks in enumerate(topology.hosts):
            assert sent[rank][host].tokens.tolist() == _going(ids[rank], ranks), "once per host"


def _going(idx: torch.Tensor, ranks: list[int] | tuple[int, ...]) -> list[int]:
    """Return the tokens with an expert on one of these ranks, ascending."""
    going: list[int] = torch.isin(idx, torch.tensor(ranks)).any(1).nonzero()[:, 0].tolist()
    return going


@settings(max_examples=100, deadline=None)
@given(keys=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=64))
def test_each_host_sums_for_a_source_at_one_rank_which_others_lend_to(keys: list[str]) -> None:
    topology = Topology(0, keys)
    parts = Parts(Roles(topology, range(len(keys))))
    for source in range(len(keys)):
        servers = [rank for rank in range(len(keys)) if source in parts.served[rank]]
        assert sorted(topology.host_of[rank] for rank in servers) == list(range(topology.num_hosts))
        assert source in servers, "its own host's sum is its own work"
        for rank in range(len(keys)):
            assert (source in parts.lent[rank]) == (rank not in servers)


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 64), st.integers(2, 8), st.sampled_from([8, 512, 7168, 1 << 20]), st.integers(1, 32), st.data())
def test_rounds_of_records_fit_what_was_staged_at_birth_on_any_number_of_hosts(
    num_ranks: int, num_hosts: int, hidden: int, num_topk: int, data: st.DataObject
) -> None:
    """A process that takes a lost rank's place may run on a new host; then rounds are shorter, if they must."""
    tokens = data.draw(st.sampled_from([1, 3, 100, 4096]))
    num_hosts = min(num_hosts, num_ranks)
    config = BufferConfig(num_ranks, num_ranks, hidden, num_topk, tokens, torch.bfloat16, num_hosts=num_hosts)
    config.check()
    staged = staging_bytes(config)
    section = SectionLayout(1 + config.meta_words["rank"], config.row_words, config.scale_words)
    lengths = [dispatch_length(config, hosts, staged) for hosts in range(1, num_ranks + 1)]
    for hosts, length in enumerate(lengths, 1):
        assert hosts * section.room(length) <= staged
        assert min(tokens, MIN_SUMMED) <= length <= lengths[0]
    assert lengths[num_hosts - 1] == lengths[0]
