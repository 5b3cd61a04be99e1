"""Mooncake's names: registration, options in every form, membership calls while all ranks are healthy."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.compat.mooncake import pg
from epee.engine.limits import MAX_RANKS
from epee.errors import InvalidArgument
from tests.forked import Program
from tests.harness import run_ranks

MASK = torch.ones(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("args", "kwargs", "size", "extension", "deactivate", "sync"),
    [
        ((), {}, None, False, True, True),
        ((4,), {}, 4, False, True, True),
        ((4, True), {}, 4, True, True, True),
        ((4, False, True, False), {}, 4, False, True, False),
        ((4, False, False, False), {}, 4, False, False, False),
        ((MASK,), {}, None, False, True, True),
        ((MASK, True), {}, None, True, True, True),
        ((MASK, False, 2), {}, 2, False, True, True),
        ((), {"active_ranks": MASK, "max_group_size": 2}, 2, False, True, True),
        ((), {"max_group_size": 3, "auto_deactivate_on_failure": False}, 3, False, False, False),
    ],
)
def test_options_take_every_form(
    args: tuple[Any, ...], kwargs: dict[str, Any], size: int | None, extension: bool, deactivate: bool, sync: bool
) -> None:
    options = pg.MooncakeBackendOptions(*args, **kwargs)
    assert isinstance(options, epee.BackendOptions)
    assert options.fault_mode == "mask"
    assert (options.max_group_size, options.is_extension) == (size, extension)
    assert (options.auto_deactivate_on_failure, options.auto_sync_on_failure) == (deactivate, sync)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((4, False, True), {}),
        ((4, False, False, True), {}),
        ((4, False, True, True, 1), {}),
        ((MASK, False, 2, True), {}),
        ((4,), {"max_group_size": 4}),
        ((4,), {"colour": 1}),
        ((0,), {}),
        ((torch.ones(2),), {}),
    ],
)
def test_options_in_another_form_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        pg.MooncakeBackendOptions(*args, **kwargs)


def of_environment(rank: int, num_ranks: int, folder: str) -> list[Any]:
    """Make groups without options, in other environments; return what they do on failures, or the refusal."""
    names = [f"MOONCAKE_PG_AUTO_{name}_ON_FAILURE" for name in ("DEACTIVATE", "SYNC")]
    found: list[Any] = []
    for number, values in enumerate([("", ""), ("0", ""), ("false", "0"), ("True", "0"), ("0", "1"), ("maybe", "")]):
        os.environ.update(zip(names, values, strict=True))
        store = dist.FileStore(f"{folder}/store{number}", num_ranks)
        try:
            dist.init_process_group("mooncake-cpu", store=store, rank=rank, world_size=num_ranks)
        except InvalidArgument as error:
            found.append(str(error))
            continue
        options = dist.group.WORLD.options  # type: ignore[union-attr]
        found.append((options.auto_deactivate_on_failure, options.auto_sync_on_failure, options.keeps_lost))
        dist.destroy_process_group()
    return found


def test_groups_without_options_do_as_the_environment_says(tmp_path: Path) -> None:
    for *made, both, bad in run_ranks(of_environment, 2, str(tmp_path), backend=None):
        assert made == [(True, True, False), (False, False, True), (False, False, True), (True, False, False)]
        assert "auto_sync_on_failure=True needs auto_deactivate_on_failure=True" in both
        assert "MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE: must be 0, 1, false or true, got 'maybe'" in bad


def healthy(rank: int, num_ranks: int, folder: str, backend: str) -> None:
    mask = torch.zeros(4, dtype=torch.int32)
    options = pg.MooncakeBackendOptions(mask, False, 4)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    pg.set_collective_timeout_us(20_000_000)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, pg_options=options)
    group = dist.group.WORLD
    assert group._engine.timeout_s == 20.0
    assert mask.tolist() == [1, 1, 0, 0]
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    assert pg.get_local_success(work)
    assert pg.get_failed_ranks_hint(work).tolist() == [0, 0, 0, 0]
    assert x.tolist() == [2.0] * 3
    assert pg.get_peer_state(group, [1, 0]) == [True, True]
    assert pg.get_active_ranks(group).tolist() == [1, 1, 0, 0]
    assert pg.get_num_synced_ranks(group) == 2
    assert pg.get_current_epoch(group) == 1
    for call in (pg.activate_ranks, pg.recover_ranks):
        answer = call(group, [0, 1])
        assert answer.status is pg.ProposalStatus.Applied
        assert answer.new_epoch == 1
    refused = pg.deactivate_ranks(group, [0, 1])
    assert refused.status is pg.ProposalStatus.Rejected
    assert "leave at least one" in refused.reject_reason
    assert pg.sync_after_failure(group).status is pg.SyncStatus.NoPending
    pg.join_group(group)
    pg.extend_group_size_to(group, 2)
    with pytest.raises(InvalidArgument, match="3"):
        pg.extend_group_size_to(group, 3)
    assert pg.get_peer_state(group, [2, 1, 63]) == [False, True, False]
    assert pg._MAX_RANKS == MAX_RANKS
    for nonsense in (-1, MAX_RANKS):
        with pytest.raises(InvalidArgument, match="ranks"):
            pg.get_peer_state(group, [nonsense])
    with pytest.raises(InvalidArgument, match="ranks"):
        pg.activate_ranks(group, [64])
    absent = pg.activate_ranks(group, [2])
    assert absent.status is pg.ProposalStatus.Rejected
    assert "no process waits" in absent.reject_reason
    bad = dist.all_reduce(torch.ones(1 + rank), async_op=True)
    assert not pg.get_local_success(bad)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["mooncake", "mooncake-cpu"])
def test_membership_calls_answer_for_healthy_groups(tmp_path: Path, backend: str) -> None:
    run_ranks(healthy, 2, str(tmp_path), backend, backend=None)


def lost(rank: int, num_ranks: int) -> None:
    group: Any = dist.group.WORLD
    if rank == 1:
        dist.barrier()
        group.shutdown()
        return
    dist.barrier()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert not pg.get_local_success(work)
    assert pg.get_failed_ranks_hint(work).tolist() == [0, 1]
    assert pg.get_peer_state(group, [0, 1]) == [True, False]
    assert pg.recover_ranks(group, [1]).status is pg.ProposalStatus.Rejected
    refused = pg.activate_ranks(group, [1])
    assert "no process waits" in refused.reject_reason
    assert pg.deactivate_ranks(group, [1]).status is pg.ProposalStatus.Applied
    assert pg.sync_after_failure(group).status is pg.SyncStatus.NoPending
    assert group.active_ranks().tolist() == [1, 0]


def test_a_lost_rank_is_reported_and_not_pretended_away() -> None:
    run_ranks(lost, 2, backend="epee")


def reused_options(rank: int, num_ranks: int, folder: str) -> None:
    options = pg.MooncakeBackendOptions(num_ranks)
    timed = pg.MooncakeBackendOptions(num_ranks)
    timed.op_timeout_s = 7.0
    for number, (given, value, wanted) in enumerate(
        [(options, 20_000_000, 20.0), (options, 3_000_000, 3.0), (None, 4_000_000, 4.0), (timed, 5_000_000, 7.0)]
    ):
        pg.set_collective_timeout_us(value)
        store = dist.FileStore(f"{folder}/store{number}", num_ranks)
        dist.init_process_group("mooncake", store=store, rank=rank, world_size=num_ranks, pg_options=given)
        group: Any = dist.group.WORLD
        assert group._engine.timeout_s == wanted
        assert options.op_timeout_s == 0.0, "the user's options were written to"
        dist.barrier()
        dist.destroy_process_group()


def test_options_that_were_used_stay_as_they_are(tmp_path: Path) -> None:
    run_ranks(reused_options, 2, str(tmp_path), backend=None)


def refused_here(rank: int, num_ranks: int, folder: str) -> str:
    if rank == 1:
        os.environ["EPEE_STAGING_BYTES"] = "7"  # no options are given, so ours are made inside
    store = dist.FileStore(f"{folder}/store", num_ranks)
    with pytest.raises(InvalidArgument if rank == 1 else epee.MismatchError, match="EPEE_STAGING_BYTES") as caught:
        dist.init_process_group("mooncake-cpu", store=store, rank=rank, world_size=num_ranks)
    return str(caught.value)


def test_an_error_of_one_rank_at_birth_is_told_to_all(tmp_path: Path) -> None:
    assert "rank 1" in run_ranks(refused_here, 2, str(tmp_path), backend=None)[0]


# What seeds and users of Mooncake's Python side import, from `mooncake.pg` and `mooncake.ep` alike.
NAMES = [
    "MooncakeBackendOptions",
    "ProposalStatus",
    "ProposeViewUpdateResponse",
    "SyncStatus",
    "SyncAfterFailureStatus",
    "ViewUpdateStatus",
    "SyncAfterFailureResponse",
    "get_peer_state",
    "activate_ranks",
    "recover_ranks",
    "deactivate_ranks",
    "join_group",
    "sync_after_failure",
    "get_local_success",
    "get_failed_ranks_hint",
    "get_active_ranks",
    "get_num_synced_ranks",
    "get_current_epoch",
    "extend_group_size_to",
    "set_host_ip",
    "set_device_filter",
    "get_preferred_hca",
    "set_collective_timeout_us",
    "set_p2p_timeout_us",
    "set_fault_reconciliation_window_us",
    "set_transfer_engine",
]


@pytest.mark.parametrize("module", ["pg", "ep"])
def test_every_name_of_mooncake_exists_and_is_documented(module: str) -> None:
    offered = importlib.import_module(f"epee.compat.mooncake.{module}")
    text = (Path(__file__).parents[2] / "docs" / "backend.md").read_text()
    for name in NAMES:
        assert callable(getattr(offered, name))
        assert name in offered.__all__
        assert offered.__all__.count(name) == 1
        assert getattr(offered, name).__doc__
        assert f"`{name}`" in text, f"{name} is not in docs/backend.md"
    of_ep = {"Buffer", "EventHandle", "EventOverlap", "MAX_QP_COUNT", "get_ep_buffer_size_hint"}
    assert {*offered.__all__} - {*NAMES} == (of_ep if module == "ep" else set())
    for enum, members in (
        ("ProposalStatus", ["Rejected", "Applied", "AppliedWithDroppedRanks"]),
        ("SyncStatus", ["Reconciled", "NoPending", "Rejected"]),
        ("SyncAfterFailureStatus", ["Reconciled", "NoPending", "Rejected"]),
        ("ViewUpdateStatus", ["Rejected", "Applied", "AppliedWithDroppedRanks"]),
    ):
        assert [member.name for member in getattr(offered, enum)] == members
    assert {"mooncake", "mooncake-cpu"} <= {name.lower() for name in dist.Backend._plugins}


def test_the_network_names_have_a_defined_answer_without_a_nic() -> None:
    pg.set_host_ip("10.0.0.1")
    pg.set_host_ip("::1")
    with pytest.raises(InvalidArgument, match="ip"):
        pg.set_host_ip("node7")
    pg.set_device_filter([])
    with pytest.raises(InvalidArgument, match="list"):
        pg.set_device_filter("mlx5_0")
    pg.set_device_filter(["no such device"])
    assert pg.get_preferred_hca() == ""
    for where in ((), ("cpu:0",), (None, "cuda:1")):
        assert pg.get_preferred_hca(*where) == ""
    pg.set_device_filter([])
    assert isinstance(pg.get_preferred_hca(), str)
    pg.set_transfer_engine(None)


@pytest.mark.parametrize("setter", [pg.set_collective_timeout_us, pg.set_p2p_timeout_us])
def test_a_timeout_that_is_no_time_is_refused(setter: Any) -> None:
    for value in (0, -1, 1.5, True):
        with pytest.raises(InvalidArgument, match="microseconds"):
            setter(value)


SCRIPT = """
import sys, torch, torch.distributed as dist
from epee.compat.mooncake import {module}
options = {module}.MooncakeBackendOptions(torch.ones(1, dtype=torch.int32))
dist.init_process_group("mooncake-cpu", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
x = torch.ones(2)
dist.all_reduce(x)
assert {module}.get_peer_state(dist.group.WORLD, [0]) == [True]
dist.destroy_process_group()
"""


@pytest.mark.parametrize("module", ["pg", "ep"])
def test_a_users_script_works_by_changing_its_import(module: str) -> None:
    with Program(SCRIPT.format(module=module)) as process:
        told, _ = process.communicate(50)
        assert process.returncode == 0, told


def test_an_exception_of_a_handler_is_no_failure_of_the_call_that_is_waited_for() -> None:
    class Late:
        def wait(self) -> None:
            """Be interrupted."""
            signal.raise_signal(signal.SIGUSR1)

    def handler(*_: Any) -> None:
        raise epee.CommTimeoutError("raised by a signal handler")

    old = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(epee.CommTimeoutError, match="raised by a signal handler"):
            pg.get_local_success(Late())
    finally:
        signal.signal(signal.SIGUSR1, old)
