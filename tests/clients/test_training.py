"""Megatron's and torchtitan's own files on epee, forward and backward, against a dense layer."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import epee.compat.deep_ep as deep_ep
from epee import BackendOptions
from tests.clients import dense, fetch, operators, stubs
from tests.harness import run_ranks
from tests.hosts import run_on_loopbacks

TOKENS = {2: (9, 13), 4: (9, 0, 13, 4)}
NUM_STEPS = 20


def _module(name: str, path: Path, tops: tuple[str, ...], given: dict[str, dict[str, Any]]) -> Any:
    """Execute a client's file, which finds epee as deep_ep."""
    deep_ep.install_as_deep_ep()
    stubs.install(tops, {name: path}, given)
    return importlib.import_module(name)


def _megatron(folder: Path) -> Any:
    path = folder / fetch.MEGATRON.files[0]
    given = {"megatron.core.utils": {"internal_api": lambda function: function}}
    return _module("megatron.core.transformer.moe.fused_a2a", path, ("megatron",), given)


def _group(backend: str) -> dist.ProcessGroup:
    """Return the group that a client is given: the default one, or one of epee's beside it."""
    if backend == "default":
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    group = dist.new_group(backend="epee", pg_options=BackendOptions())
    assert group is not None
    return group


def _megatron_v1(rank: int, num_ranks: int, folder: Path, backend: str, device: str = "cpu") -> None:
    client, group = _megatron(folder), _group(backend)
    assert client.HAVE_DEEP_EP
    client.set_deepep_num_sms(20)

    def layer(is_async: bool) -> dense.Layer:
        """Return Megatron's sequence: dispatch, local experts weighted, combine."""

        def run(x: torch.Tensor, idx: torch.Tensor, probs: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
            rows, recv_idx, recv_probs, counts, handle = client.fused_dispatch(
                x, idx, probs, sizes.num_experts, group, is_async, is_async
            )
            assert counts.tolist() == [int((recv_idx == at).sum()) for at in range(sizes.num_local)]
            y = torch.zeros_like(rows)
            for at, weight in enumerate(local):
                y = y + (recv_probs * (recv_idx == at)).sum(1, keepdim=True) * dense.expert(rows, weight)
            out, _ = client.fused_combine(y, group, handle, is_async, is_async)
            return out

        return run

    for drops in (False, True):
        for is_async in (False, True):
            sizes = dense.Sizes(TOKENS[num_ranks], drops=drops)
            dense.check(sizes, rank, 2 * drops + is_async, layer(is_async), device)
    mapped = client._buffer.runtime.nbytes
    for step in range(NUM_STEPS):
        dense.check(sizes, rank, 10 + step, layer(True), device)
    assert client._buffer.runtime.nbytes == mapped


@pytest.mark.parametrize("backend", ["default", "epee"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_megatrons_fused_dispatch_and_combine(num_ranks: int, backend: str) -> None:
    run_ranks(_megatron_v1, num_ranks, fetch.files_of(fetch.MEGATRON), backend)


def _map_of(idx: torch.Tensor, probs: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Megatron's routing map and its dense, differentiable probs."""
    safe = idx.masked_fill(idx < 0, num_experts)
    shape = len(idx), num_experts + 1
    routing_map = torch.zeros(shape, dtype=torch.bool, device=idx.device).scatter(1, safe, True)[:, :num_experts]
    return routing_map, torch.zeros(shape, device=idx.device).scatter(1, safe, probs)[:, :num_experts]


def _megatron_hybrid(rank: int, num_ranks: int, folder: Path, device: str = "cpu") -> None:
    client, group = _megatron(folder), _group("default")
    assert client.HAVE_HYBRIDEP

    def layer(pad: int | None, num_rows: int | None, is_fused: bool) -> dense.Layer:
        """Return Megatron's sequence: rows grouped by expert, weighted after the expert."""

        def run(x: torch.Tensor, idx: torch.Tensor, probs: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
            routing_map, dense_probs = _map_of(idx, probs, sizes.num_experts)
            rows, row_probs, scales, counts, handle = client.hybrid_ep_dispatch(
                x, routing_map, dense_probs, group, sizes.num_local, 8, 8, None, None, is_fused, num_rows, pad
            )
            assert scales is None
            assert int(handle[-1]) == 0
            assert len(rows) == (num_rows or int(counts.sum()))
            y = dense.by_expert(rows, counts, local) * row_probs[:, None]
            return client.hybrid_ep_combine(y, handle, num_rows or counts.sum(), pad, is_fused)

        return run

    for seed, (drops, pad, num_rows) in enumerate(
        ((False, None, None), (True, None, None), (True, 16, None), (True, None, 128), (False, 16, 160))
    ):
        sizes = dense.Sizes(TOKENS[num_ranks], drops=drops)
        dense.check(sizes, rank, seed, layer(pad, num_rows, is_fused=seed % 2 == 0), device)
    client.reset_hybrid_ep_buffer()
    assert client._hybrid_ep_buffer is None


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_megatrons_hybrid_dispatch_and_combine(num_ranks: int) -> None:
    run_ranks(_megatron_hybrid, num_ranks, fetch.files_of(fetch.MEGATRON))


def _deepspeed(rank: int, num_ranks: int, folder: Path, device: str = "cpu") -> None:
    path = folder / fetch.DEEPSPEED.files[0]
    client = _module("deepspeed.module_inject.auto_ep_comm", path, ("deepspeed",), {})
    group, sizes = _group("default"), dense.Sizes(TOKENS[num_ranks], drops=False)
    kind = sizes.num_experts, sizes.num_topk, sizes.hidden, max(sizes.num_tokens)
    scope = client.new_exchange_scope()
    exchange = client.shared_exchange(scope, group, *kind)
    assert client.shared_exchange(scope, group, *kind) is exchange
    replay = client.DeepEPCheckpointReplay()

    def run(x: torch.Tensor, idx: torch.Tensor, probs: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return AutoEP's sequence (`auto_ep_layer.py`): rows by expert, weighted behind the experts."""
        rows, row_probs, _ = client.deepep_dispatch(exchange, x, idx, probs, replay)
        handle = exchange.last_handle
        rows, row_probs = rows[: handle.num_expanded_tokens], row_probs[: handle.num_expanded_tokens]
        prefix = handle.psum_num_recv_tokens_per_expert
        y = dense.by_expert(rows, torch.diff(prefix, prepend=prefix.new_zeros(1)), local)
        return client.deepep_combine(exchange, y * row_probs.reshape(-1, 1), handle)

    def again(*given: torch.Tensor) -> torch.Tensor:
        """Return the same, done once more in the backward, by the handle of the forward."""
        return checkpoint(run, *given, use_reentrant=False)

    for seed in range(3):
        dense.check(sizes, rank, seed, run, device)
        dense.check(sizes, rank, seed, again, device)
    mapped = exchange.buffer.runtime.nbytes
    for step in range(NUM_STEPS):
        dense.check(sizes, rank, 10 + step, run, device)
    assert exchange.buffer.runtime.nbytes == mapped
    exchange.release()
    assert not exchange.destroyed
    exchange.release()
    assert exchange.destroyed


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_deepspeeds_exchange(num_ranks: int) -> None:
    run_ranks(_deepspeed, num_ranks, fetch.files_of(fetch.DEEPSPEED))


def _over_hosts(rank: int, num_ranks: int, backend: str, megatron: Path, torchtitan: Path) -> None:
    """Run all four dispatchers between two hosts."""
    torch.set_num_threads(1)
    assert dist.get_backend() == backend
    _megatron_v1(rank, num_ranks, megatron, "default")
    _megatron_hybrid(rank, num_ranks, megatron)
    _titan_v2(rank, num_ranks, torchtitan)
    _titan_hybrid(rank, num_ranks, torchtitan)


@pytest.mark.parametrize(("hosts", "backend"), [((0, 1), "gloo"), ((0, 0, 1, 1), "gloo"), ((0, 0, 1, 1), "epee")])
def test_the_dispatchers_over_two_hosts(hosts: tuple[int, ...], backend: str) -> None:
    folders = fetch.files_of(fetch.MEGATRON), fetch.files_of(fetch.TORCHTITAN)
    run_on_loopbacks(_over_hosts, hosts, backend, *folders, backend=backend, timeout_s=100.0)


def _titan_v2(rank: int, num_ranks: int, folder: Path, device: str = "cpu") -> None:
    path = folder / fetch.TORCHTITAN.files[0]
    client = _module("torchtitan.distributed.deepep.deepep", path, ("torchtitan",), {})
    if device == "cpu":  # its operators are registered for GPUs only
        client._lib.impl("dispatch", client._dispatch_op_impl, "CPU")
        client._lib.impl("combine", client._combine_op_impl, "CPU")
    group = _group("default")
    sizes = dense.Sizes(TOKENS[num_ranks])
    num_max = max(sizes.num_tokens)
    made = client.get_buffer(group, hidden=sizes.hidden, num_max_tokens_per_rank=num_max, num_topk=sizes.num_topk)
    again = client.get_buffer(group, hidden=sizes.hidden, num_max_tokens_per_rank=num_max, num_topk=sizes.num_topk)
    assert made is again

    def layer(x: torch.Tensor, idx: torch.Tensor, probs: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return torchtitan's sequence; without grad its expanded one."""
        rows, counts, state = client.dispatch_tokens(
            x, idx, probs, sizes.num_local, sizes.num_experts, num_tokens_per_rank=num_max, cudagraphable=True
        )
        assert state.cudagraphable == (not torch.is_grad_enabled())
        out = client.combine_tokens(dense.by_expert(rows, counts, local), state)
        client.sync_combine()
        return out

    for seed in range(3):
        dense.check(sizes, rank, seed, layer, device)
    mapped = made.runtime.nbytes
    for step in range(NUM_STEPS):
        dense.check(sizes, rank, 10 + step, layer, device)
    assert made.runtime.nbytes == mapped
    assert not client._handle_cache
    with torch.no_grad():
        mine, all_weights = dense.batch(sizes, rank, 5), dense.weights(sizes)
        first = rank * sizes.num_local
        given = mine.x, mine.idx, mine.probs, all_weights[first : first + sizes.num_local]
        out = layer(*(part.to(device) for part in given))
        torch.testing.assert_close(out.cpu(), dense.dense(mine.x, mine.idx, mine.probs, all_weights), **dense.TOLERANCE)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_torchtitans_dispatcher(num_ranks: int) -> None:
    run_ranks(_titan_v2, num_ranks, fetch.files_of(fetch.TORCHTITAN))


def has_opaque_objects() -> bool:
    """Whether this torch lets an operator return an object of its own class, as torchtitan's hybridep.py does.

    Seen with 2.13 to 2.15; 2.11 has the module and refuses the type: the file runs on `operators.py` there.
    """
    return TorchVersion(torch.__version__) >= "2.13"


def _hybridep(folder: Path, stands_in: bool) -> Any:
    """Return torchtitan's hybridep.py; `stands_in`: on operators of `operators.py`."""
    path = folder / fetch.TORCHTITAN.files[1]
    opaque: Any = importlib.import_module("torch._library.opaque_object")
    if not hasattr(opaque, "CustomClassBase"):  # as torch before 2.14 called it
        opaque.CustomClassBase = getattr(opaque, "OpaqueBase", object)
    with operators.stood_in("hybridep") if stands_in else contextlib.nullcontext():
        return _module("torchtitan.distributed.deepep.hybridep", path, ("torchtitan",), {})


def _titan_hybrid(
    rank: int, num_ranks: int, folder: Path, device: str = "cpu", stands_in: bool = not has_opaque_objects()
) -> None:
    client = _hybridep(folder, stands_in)
    for name in ("_dispatch_impl", "_combine_impl", "_dispatch_bwd_impl", "_combine_bwd_impl") * (device == "cpu"):
        operator = getattr(client, name)
        operator.register_kernel("cpu")(operator._init_fn)  # registered for GPUs only
    group = _group("default")
    sizes = dense.Sizes((8,) * num_ranks)
    client.get_buffer(group, sizes.hidden, 8, sizes.num_local)

    def layer(factor: float | None, pad: int | None) -> dense.Layer:
        """Return torchtitan's sequence, with or without a static size."""

        def run(x: torch.Tensor, idx: torch.Tensor, probs: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
            rows, counts, state = client.dispatch_tokens(
                x, idx, probs, sizes.num_local, sizes.num_experts, group,
                non_blocking_expert_capacity_factor=factor, pad_multiple=pad,
            )  # fmt: skip
            return client.combine_tokens(dense.by_expert(rows, counts, local), state, pad)

        return run

    for seed, (factor, pad) in enumerate(((None, None), (None, 8), (1.0, None), (1.0, 4))):
        dense.check(sizes, rank, seed, layer(factor, pad), device)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_torchtitans_hybrid_dispatcher(num_ranks: int) -> None:
    run_ranks(_titan_hybrid, num_ranks, fetch.files_of(fetch.TORCHTITAN))


def test_torchtitans_hybrid_dispatcher_on_stand_in_operators() -> None:
    run_ranks(_titan_hybrid, 2, fetch.files_of(fetch.TORCHTITAN), "cpu", True)
