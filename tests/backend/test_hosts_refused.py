"""What a group over several hosts cannot do yet is refused in words, on all ranks alike; what it tells of itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.errors import EpeeError, InvalidArgument
from epee.link.topology import placement as in_words
from tests.harness import run_ranks
from tests.loopback import TIMEOUT_S, run_hosts, settle

UNEVEN = (0, 1, 1)
SIZES: dict[str, Any] = {"num_experts": 6, "num_topk": 1, "hidden": 128, "max_tokens_per_rank": 4}


def told(call: Callable[[], Any]) -> tuple[str, str]:
    """Return kind and words of what a call raises."""
    try:
        call()
    except EpeeError as error:
        return type(error).__name__, str(error)
    return "", ""


# ---- what it says of itself


def hosts_of(group: Any) -> Any:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group.hosts, alone.hosts


@pytest.mark.parametrize(
    ("placement", "hosts"),
    [((0, 0), ((0, 1),)), (UNEVEN, ((0,), (1, 2))), ((1, 0, 1, 0), ((0, 2), (1, 3)))],
)
def test_a_group_tells_its_hosts(placement: tuple[int, ...], hosts: Any) -> None:
    assert run_hosts(hosts_of, placement) == [(hosts, ((0,),))] * len(placement)


def test_placements_are_told_in_few_words() -> None:
    assert in_words([(0, 1, 2, 5), (3,), (4, 6, 7)]) == "host 0: ranks 0-2, 5; host 1: rank 3; host 2: ranks 4, 6-7"


def state_of(group: Any) -> Any:
    peers = group.get_peer_state([0, 1, 2, 3]), group.get_num_synced_ranks()
    seen = peers, group.active_ranks().tolist(), group.ready_ranks(), group.waiting_ranks(), not group.in_view(3).slots
    dist.barrier()  # who leaves shows at once
    return seen


def test_questions_about_the_view_have_answers() -> None:
    expected = (([True, True, True, False], 3), [1, 1, 1], {0, 1, 2}, (), False)
    assert run_hosts(state_of, UNEVEN) == [expected] * 3


# ---- what needs a view


def changes_of_the_view(group: Any) -> Any:
    refused = [
        told(lambda: group.recover_ranks([1])),
        told(lambda: group.extend_group_size_to(4, timeout_s=1.0)),
        told(lambda: group.put_out([1])),
        told(lambda: group.extend_group_size_to(3)),
        told(lambda: group.extend_group_size_to(2)),
    ]
    dist.barrier()
    return refused


def test_where_nobody_waits_nobody_is_taken_in_and_the_group_works_on() -> None:
    for recover, grow, out, same, shrink in run_hosts(changes_of_the_view, UNEVEN):
        assert recover == same == ("", "")  # nothing to do
        assert grow[0] == "CommTimeoutError"
        assert "rank(s) 3 did not come within 1.0 s" in grow[1]
        assert out[0] == "UnsupportedError"
        assert 'put_out needs fault_mode="mask"' in out[1]
        assert shrink[0] == "InvalidArgument"
        assert "rank(s) 2 are members" in shrink[1]


def joined(rank: int, num_ranks: int, folder: str, placement: tuple[int, ...]) -> tuple[str, str]:
    """Make a group of `num_ranks - 1` ranks; the last process asks to be taken in."""
    settle(placement[rank])
    store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
    if rank < num_ranks - 1:
        dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks - 1)
        store.set(f"made{rank}", "")
        store.wait(["asked"])
        dist.destroy_process_group()
        return "", ""
    store.wait([f"made{member}" for member in range(rank)])
    options: Any = epee.BackendOptions(is_extension=True)
    refusal = told(
        lambda: dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, pg_options=options)
    )
    store.set("asked", "")
    return refusal


def test_who_asks_to_join_a_job_of_another_host_alone_is_told_why_not() -> None:
    with TemporaryDirectory() as folder:
        *members, joiner = run_ranks(joined, 3, folder, (0, 0, 1), backend=None, timeout_s=TIMEOUT_S)
    assert members == [("", "")] * 2
    assert joiner[0] == "UnsupportedError"
    assert "a job that began on one host stays there" in joiner[1]


# ---- buffers


def on_each_host(group: Any) -> Any:
    """Make a buffer in a group of this host's ranks and send each token to the other rank."""
    groups = [dist.new_group(list(ranks)) for ranks in group.hosts]
    mine = next(one for one, ranks in zip(groups, group.hosts, strict=True) if group.rank() in ranks)
    sizes = {**SIZES, "num_experts": 2}
    with epee.Buffer(mine, **sizes) as buffer:
        x = torch.full((1, 128), float(group.rank()), dtype=torch.bfloat16, device="cpu")
        return buffer.dispatch(x, torch.tensor([[1 - mine.rank()]], device="cpu")).x[0, 0].item()


def test_a_buffer_is_made_in_a_group_of_one_hosts_ranks() -> None:
    assert run_hosts(on_each_host, (0, 1, 0, 1)) == [2.0, 3.0, 0.0, 1.0]


def with_a_stray_key(rank: int, num_ranks: int) -> None:
    settle(0)
    del os.environ["EPEE_TEST"]
    with pytest.raises(InvalidArgument, match="EPEE_HOST_KEY is for tests"):
        epee.Buffer(None, **SIZES)


def test_a_key_outside_of_tests_is_refused() -> None:
    run_ranks(with_a_stray_key, 2, backend="gloo")
