"""What the drop-in layers say of hosts, and what they refuse on groups over several of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from epee.compat import deep_ep
from epee.compat.mooncake import ep, pg
from epee.errors import EpeeError, InvalidArgument, ResourceError
from epee.link import address
from tests.compat.test_deep_ep_low_latency import _calls as deep_ep_calls
from tests.compat.test_mooncake_ep import _calls as mooncake_calls
from tests.harness import run_ranks
from tests.hosts import run_on_loopbacks
from tests.loopback import run_hosts, world


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the process, as they are at first."""
    monkeypatch.setattr(address, "_settings", address._Settings())
    monkeypatch.delenv("EPEE_HOST_IP", raising=False)


def told(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except EpeeError as error:
        return type(error).__name__, str(error)
    return "", ""


# ---- DeepEP's sizes


def sizes(group: Any) -> Any:
    physical = deep_ep.get_physical_domain_size(group)
    return physical, deep_ep.get_logical_domain_size(group), deep_ep.get_logical_domain_size(group, False)


def test_domain_sizes_are_those_of_the_hosts() -> None:
    assert run_hosts(sizes, (0, 0, 1, 1)) == [((2, 2), (2, 2), (1, 4))] * 4


def refused_sizes(group: Any) -> Any:
    elastic = told(lambda: deep_ep.ElasticBuffer(group, 1 << 20))
    return told(lambda: deep_ep.get_physical_domain_size(group)), elastic


@pytest.mark.parametrize(
    ("placement", "words"),
    [((0, 1, 1), "host 0: rank 0; host 1: ranks 1-2"), ((0, 1, 0, 1), "host 0: ranks 0, 2; host 1: ranks 1, 3")],
)
def test_sizes_that_would_mislead_are_refused(placement: tuple[int, ...], words: str) -> None:
    results = run_hosts(refused_sizes, placement)
    assert results == results[:1] * len(placement)
    for kind, text in results[0]:
        assert kind == "UnsupportedError"
        assert words in text


# ---- buffers


def one_token(rank: int) -> dict[str, Any]:
    return {
        "x": torch.full((1, 128), rank + 1.0, dtype=torch.bfloat16, device="cpu"),
        "topk_idx": torch.tensor([[1 - rank]], device="cpu"),
        "topk_weights": torch.ones(1, 1, dtype=torch.float32, device="cpu"),
    }


def buffers(group: Any) -> Any:
    """Make buffers of all names with bytes for normal calls, and make such a call: the ranks' tokens change places."""
    given = one_token(group.rank())
    elastic = deep_ep.ElasticBuffer(group, 1 << 20, num_max_tokens_per_rank=2, hidden=128, num_topk=1)
    there = elastic.dispatch(**given, num_experts=2)
    back = elastic.combine(there[0], there[3])[0]
    first = deep_ep.Buffer(group, 1 << 20)
    per_rank, per_host, per_expert, is_in, _ = first.get_dispatch_layout(given["topk_idx"], 2)
    counts = {"num_tokens_per_rank": per_rank, "is_token_in_rank": is_in, "num_tokens_per_expert": per_expert}
    found = first.dispatch(**given, num_tokens_per_rdma_rank=per_host, **counts)
    mooncake = ep.Buffer(group)
    dist.barrier()
    checked = sizes(group), first.hosts, len(found[4]), mooncake.group_size
    assert torch.equal(back, given["x"])
    return checked, there[0][0, 0].item(), found[0][0, 0].item(), per_host.tolist()


@pytest.mark.parametrize("backend", ["epee", "mooncake", "gloo"])
def test_buffers_work_over_several_hosts_on_groups_of_any_backend(backend: str) -> None:
    for rank, (checked, second, first, per_host) in enumerate(run_hosts(buffers, (0, 1), backend=backend)):
        assert checked == (((2, 1), (2, 1), (1, 2)), ((0,), (1,)), 10, 2)
        assert second == first == 2 - rank
        assert per_host == [rank, 1 - rank]


def one_refuses(group: Any) -> tuple[str, str]:
    """Rank 1's arguments are wrong."""
    rank = group.rank()
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=2)
    given = one_token(rank)
    first = buffer.dispatch(**given, num_experts=2)
    refused = told(lambda: buffer.dispatch(**given, num_experts=2 + rank))
    again = buffer.dispatch(given["x"], handle=first[3])
    assert torch.equal(again[0], first[0])
    return refused


def test_a_refused_call_is_refused_on_all_hosts_and_the_buffer_works_on() -> None:
    peer, here = run_hosts(one_refuses, (0, 1), backend="gloo")
    assert here[0] == "InvalidArgument"
    assert peer[0] == "MismatchError"
    assert "rank 1 refused" in peer[1]
    assert "num_experts must be given and a multiple of 2" in peer[1]


# ---- low latency


@pytest.mark.parametrize(
    ("function", "backend"), [(deep_ep_calls, "epee"), (deep_ep_calls, "gloo"), (mooncake_calls, "mooncake-cpu")]
)
def test_low_latency_calls_over_hosts_are_those_of_one(function: Callable[..., Any], backend: str) -> None:
    run_on_loopbacks(function, (0, 1), backend=backend)  # a rank a host: sums are rounded as on one


# ---- Mooncake's calls


def membership(group: Any) -> Any:
    seen = pg.get_peer_state(group, [0, 1, 2]), pg.get_num_synced_ranks(group), pg.get_active_ranks(group).tolist()
    applied = pg.activate_ranks(group, [0, 1]).status
    growth = told(lambda: pg.extend_group_size_to(group, 3))
    response = pg.activate_ranks(group, [2])
    dist.barrier()
    return seen, applied, growth, response


def test_mooncakes_membership_calls_say_that_nobody_waits() -> None:
    for seen, applied, growth, response in run_hosts(membership, (0, 1), backend="mooncake"):
        assert seen == ([True, True, False], 2, [1, 1])
        assert applied is pg.ProposalStatus.Applied
        assert growth[0] == "InvalidArgument"
        assert "no process waits for rank 2" in growth[1]
        assert response.status is pg.ProposalStatus.Rejected
        assert "rank 2 is not there and no process waits in its place" in response.reject_reason


# ---- the network's settings


def test_the_address_is_the_one_that_was_set() -> None:
    pg.set_host_ip("127.0.77.9")
    assert address.choose_address() == ("127.0.77.9", "set_host_ip")


def test_the_address_is_that_of_the_device() -> None:
    pg.set_device_filter(["lo"])
    assert address.choose_address() == ("127.0.0.1", "set_device_filter")
    pg.set_device_filter(["no such device"])
    with pytest.raises(InvalidArgument, match="none of the devices no such device has an address"):
        address.choose_address()


def listens_elsewhere(rank: int, num_ranks: int, folder: str) -> tuple[str, str]:
    """Rank 1 names an address of another machine."""
    if rank == 1:
        pg.set_host_ip("192.0.2.77")

    def make() -> None:
        with world(rank, (0, 1), folder):
            raise AssertionError("the group was made")

    return told(make)


def test_an_address_of_another_machine_fails_on_all_ranks(tmp_path: Any) -> None:
    for kind, text in run_ranks(listens_elsewhere, 2, str(tmp_path), backend=None, timeout_s=40.0):
        assert kind in (ResourceError.__name__, "PeerError")
        assert "cannot listen at 192.0.2.77" in text
