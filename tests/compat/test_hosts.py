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
from tests.harness import run_ranks
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


def buffers(group: Any) -> Any:
    refused = [
        told(lambda: deep_ep.Buffer(group)),
        told(lambda: deep_ep.Buffer(group, 1 << 20, 1 << 20, low_latency_mode=True)),
        told(lambda: deep_ep.ElasticBuffer(group, 1 << 20)),
        told(lambda: ep.Buffer(group, 1 << 20)),
    ]
    dist.barrier()
    return refused


@pytest.mark.parametrize("backend", ["epee", "mooncake"])
def test_buffers_over_several_hosts_are_refused(backend: str) -> None:
    results = run_hosts(buffers, (0, 1), backend=backend)
    assert results == results[:1] * 2
    for kind, text in results[0]:
        assert kind == "UnsupportedError"
        assert "a Buffer lives on one host so far" in text
        assert "host 0: rank 0; host 1: rank 1" in text


def first_call(group: Any) -> tuple[str, str]:
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=2, hidden=128, num_topk=1)
    x = torch.ones(1, 128, dtype=torch.bfloat16, device="cpu")
    topk_idx = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    weights = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    return told(lambda: buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=2))


def test_the_first_call_on_another_backends_group_finds_the_hosts() -> None:
    results = run_hosts(first_call, (0, 1), backend="gloo")
    assert results == results[:1] * 2
    assert results[0][0] == "UnsupportedError"
    assert "host 0: rank 0; host 1: rank 1" in results[0][1]


# ---- Mooncake's calls


def membership(group: Any) -> Any:
    seen = pg.get_peer_state(group, [0, 1, 2]), pg.get_num_synced_ranks(group), pg.get_active_ranks(group).tolist()
    applied = pg.activate_ranks(group, [0, 1]).status
    growth = told(lambda: pg.extend_group_size_to(group, 3))
    response = pg.activate_ranks(group, [2])
    dist.barrier()
    return seen, applied, growth, response


def test_mooncakes_membership_calls_say_that_nobody_is_taken_in() -> None:
    for seen, applied, growth, response in run_hosts(membership, (0, 1), backend="mooncake"):
        assert seen == ([True, True, False], 2, [1, 1])
        assert applied is pg.ProposalStatus.Applied
        assert growth[0] == "UnsupportedError"
        assert "takes nobody in" in growth[1]
        assert response.status is pg.ProposalStatus.Rejected
        assert "a group over several hosts takes nobody in yet" in response.reject_reason


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
