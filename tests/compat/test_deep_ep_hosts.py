"""DeepEP's buffers over several hosts: results against the reference, handles by counting, on loopback addresses."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee.compat.deep_ep as deep_ep
from epee import reference
from epee.errors import InvalidArgument, MismatchError, UnsupportedError
from tests.compat import test_deep_ep_buffer as v1
from tests.compat import test_deep_ep_elastic as v2
from tests.compat.deep_ep_cases import NUM_SMS, routing_of, v1_handle_over_hosts
from tests.ep.buffer_cases import Call, Setup, make_bias, make_input, make_output, same_bits
from tests.harness import run_ranks
from tests.loopback import run_hosts

# ---- V1


def _run_v1(group: Any, setup: Setup) -> list[dict[str, Any]]:
    return v1._run(group.rank(), group.size(), setup)


@pytest.mark.parametrize(
    ("host_of", "backend"),
    [((0, 1), "epee"), ((0, 0, 1, 1), "gloo"), ((0, 1, 0, 1), "epee"), ((0, 0, 1, 1, 1), "epee")],
)
def test_v1_agrees_with_the_reference_and_with_counting(host_of: tuple[int, ...], backend: str) -> None:
    """Routing by experts and by mask, FP8 pairs, biases, weights back, worst case of rows; all ten of the handle."""
    setup = replace(v1._setup(len(host_of)), host_of=host_of)
    by_rank = run_hosts(_run_v1, host_of, setup, backend=backend, timeout_s=100.0)
    at = 0
    for call in setup.calls:
        for num_worst in (0,) if call.routing == "mask" else (0, v1.NUM_WORST):
            v1._check(setup, call, [results[at] for results in by_rank], num_worst)
            at += 1
    assert all(len(results) == at for results in by_rank)


ALONE = Setup(4, 2, 64, 3, "bfloat16", 2, (Call(21, (11, 0, 6, 9)), Call(22, (4, 8, 9, 1))), (0, 0, 1, 1))
ASKER = 2


def _alone(group: Any) -> dict[str, Any]:
    """Dispatch and combine by DeepEP's names for hosts; one rank reads its handles while the others wait elsewhere."""
    rank, found = group.rank(), {}
    buffer = deep_ep.Buffer(group)
    handles = []
    for call in ALONE.calls:
        given = make_input(ALONE, call, rank)
        counts = routing_of(ALONE, given)
        recv_x, _, _, _, handle, _ = buffer.internode_dispatch(
            given.x,
            topk_idx=given.topk_idx,
            topk_weights=given.topk_weights,
            config=deep_ep.Config(NUM_SMS),
            **counts,
        )
        handles.append((handle, recv_x))
    if rank == ASKER:
        found["handles"] = [tuple(handle) for handle, _ in handles]
    dist.barrier()
    call = ALONE.calls[0]
    handle, recv_x = handles[0]
    bias = make_bias(ALONE, replace(call, num_bias=1), rank)
    y = make_output(ALONE, call, rank, len(recv_x))
    found["combined"] = buffer.internode_combine(y, handle, None, bias[0])[0]
    with pytest.raises(InvalidArgument if rank == ASKER else MismatchError) as caught:
        buffer.internode_combine(y, [part.clone() for part in handle] if rank == ASKER else handle)
    found["refused"] = str(caught.value)
    dist.barrier()  # who is refused needs nobody for that, and would be gone while the others still hear of it
    return found


def _same_mask(group: Any) -> None:
    """Dispatch twice with the same mask, which is the first entry of both handles; rank 1 changes its own meanwhile."""
    rank, size = group.rank(), group.size()
    buffer = deep_ep.Buffer(group)
    x = torch.ones(3, 8, dtype=torch.bfloat16)
    mask, nothing = torch.ones(3, size, dtype=torch.bool), torch.zeros(3, size, dtype=torch.bool)
    counts = torch.ones(size, dtype=torch.int32)
    apart = []
    for given in (mask, nothing if rank == 1 else mask):
        recv_x, _, _, _, handle, _ = buffer.dispatch(
            x, num_tokens_per_rank=counts, is_token_in_rank=given, num_tokens_per_expert=counts
        )
        assert handle is not None
        apart.append((recv_x, list(handle)))
    for times, (recv_x, parts) in zip((size, 0 if rank == 1 else size), apart, strict=True):
        back = buffer.combine(recv_x, parts)[0]  # type: ignore[arg-type]
        assert torch.equal(back, x * times)


def test_handles_of_one_mask_are_told_apart() -> None:
    run_hosts(_same_mask, (0, 1))


def test_one_rank_may_read_its_handle_alone() -> None:
    by_rank = run_hosts(_alone, ALONE.host_of)
    for index, call in enumerate(ALONE.calls):
        inputs = [make_input(ALONE, call, rank) for rank in range(4)]
        members = [routing_of(ALONE, given)["is_token_in_rank"] for given in inputs]
        received = reference.dispatch(inputs, ALONE.num_experts)
        wanted = v1_handle_over_hosts(members, received[ASKER], ASKER, ALONE.host_of, NUM_SMS // 2)
        for entry, (got, want) in enumerate(zip(by_rank[ASKER]["handles"][index], wanted, strict=True)):
            same_bits(got, want, f"handle[{entry}] of call {index}")
        if index:
            continue
        y = [make_output(ALONE, call, rank, len(there.src_rank)) for rank, there in enumerate(received)]
        bias = [make_bias(ALONE, replace(call, num_bias=1), rank) for rank in range(4)]
        sums = reference.combine_by_host(inputs, received, y, ALONE.host_of, bias=bias)
        for rank, want in enumerate(sums):
            same_bits(by_rank[rank]["combined"], want, f"internode_combine of rank {rank}")
    for rank, found in enumerate(by_rank):
        assert found["refused"].startswith("handle must be") == (rank == ASKER)
        assert "rank 2 refused" in found["refused"] or rank == ASKER


def _on_one_host(rank: int, num_ranks: int) -> None:
    buffer = deep_ep.Buffer(dist.group.WORLD)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    for name, call in {
        "internode_dispatch is not supported: .*call dispatch": lambda: buffer.internode_dispatch(x),
        "internode_combine is not supported: .*call combine": lambda: buffer.internode_combine(x, ()),
    }.items():
        with pytest.raises(UnsupportedError, match=name):
            call()
    assert buffer.get_dispatch_layout(torch.zeros(1, 1, dtype=torch.int64), num_ranks)[1] is None


def test_on_one_host_the_names_for_several_refuse() -> None:
    run_ranks(_on_one_host, 2)


# ---- V2


def _run_v2(group: Any, setup: Setup, cases: tuple[v2.Case, ...]) -> Any:
    buffer = deep_ep.ElasticBuffer(group, 1 << 20)
    sizes = buffer.get_physical_domain_size(), buffer.get_logical_domain_size()
    places = buffer.scaleout_rank_idx, buffer.scaleup_rank_idx
    return sizes, places, v2._run(group.rank(), group.size(), setup, cases)


@pytest.mark.parametrize(("host_of", "backend"), [((0, 1), "gloo"), ((0, 0, 1, 1), "epee")])
def test_v2_agrees_with_the_reference_and_with_counting(host_of: tuple[int, ...], backend: str) -> None:
    """Plain and expanded, cached, with and without CPU sync; sums with rounded and with wide partial sums of hosts."""
    num_ranks, num_local = len(host_of), host_of.count(0)
    setup, cases = replace(v2._setup(num_ranks), host_of=host_of), v2._cases(num_ranks)
    by_rank = run_hosts(_run_v2, host_of, setup, cases, backend=backend, timeout_s=100.0)
    for rank, (sizes, places, _) in enumerate(by_rank):
        assert sizes == ((2, num_local), (2, num_local))
        assert places == divmod(rank, num_local)
    for index, case in enumerate(cases):
        v2._check(setup, case, [results[index] for _, _, results in by_rank])


def _without_hybrid(group: Any) -> Any:
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=4, allow_hybrid_mode=False, explicitly_destroy=True)
    x = torch.full((3, 8), group.rank() + 1.0, dtype=torch.bfloat16)
    topk_idx = torch.tensor([[0, 3], [1, -1], [2, 0]])
    recv_x, _, _, handle, _ = buffer.dispatch(x, topk_idx, num_experts=8)
    ends, metadata = handle.psum_num_recv_tokens_per_scaleup_rank.tolist(), handle.recv_src_metadata.tolist()
    back = buffer.combine(recv_x, handle)[0]
    buffer.barrier(with_cpu_sync=True)
    buffer.destroy()
    gc.collect()
    return buffer.get_logical_domain_size(), buffer.scaleup_rank_idx, ends, metadata, (back / x)[:, 0].tolist()


def test_v2_without_hybrid_mode_has_all_ranks_in_one_domain() -> None:
    for rank, found in enumerate(run_hosts(_without_hybrid, (0, 0, 1, 1))):
        sizes, scaleup_rank, ends, metadata, times = found
        assert sizes == (1, 4)
        assert scaleup_rank == rank
        assert ends == ([3, 6, 9, 12] if rank == 0 else [2, 4, 6, 8] if rank == 1 else [0] * 4)
        assert [row[1] // 2 for row in metadata] == [row[0] // 4 for row in metadata]
        assert times == [2.0, 1.0, 2.0]
