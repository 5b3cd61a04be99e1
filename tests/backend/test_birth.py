"""An error on one rank while a group is made: every rank fails at once, and says which rank and why."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.engine.bootstrap import creation, record
from epee.errors import InvalidArgument, MismatchError, PeerError, ProtocolError, ResourceError
from epee.memory.shared import SharedRegion
from tests.harness import run_ranks

from . import cases

NO_MEMORY = "no memory for tests " + "x" * 5000


def fail_create(*_: Any, **__: Any) -> Any:
    raise ResourceError(NO_MEMORY)


def fail_attach(*_: Any) -> Any:
    raise ResourceError("cannot map \x1b[31m it")


def bad_environment() -> None:
    os.environ["EPEE_STAGING_BYTES"] = "1000"


def bad_words_in_environment() -> None:
    os.environ["EPEE_STAGING_BYTES"] = "plenty"


def no_memory() -> None:
    SharedRegion.create = fail_create  # type: ignore[method-assign]


def no_mapping() -> None:
    creation._attach = fail_attach


def interrupt() -> None:
    creation._attach = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt())  # type: ignore[assignment]


def nothing() -> None:
    pass


# name -> (what makes rank 1 fail, its pg_options, its exception, the peers' exception, words in the peers' message)
Row = tuple[Callable[[], None], Callable[[], Any], type[BaseException], type[Exception], tuple[str, ...]]
FAILURES: dict[str, Row] = {
    "staging variable": (bad_environment, lambda: None, InvalidArgument, MismatchError, ("EPEE_STAGING_BYTES", "1000")),
    "no number": (bad_words_in_environment, lambda: None, InvalidArgument, MismatchError, ("EPEE_STAGING_BYTES",)),
    "group too small": (
        nothing,
        lambda: epee.BackendOptions(max_group_size=1),
        InvalidArgument,
        MismatchError,
        ("max_group_size is 1",),
    ),
    "mask too long": (
        nothing,
        lambda: epee.BackendOptions(active_ranks=torch.ones(9, dtype=torch.int32)),
        InvalidArgument,
        MismatchError,
        ("active_ranks", "got 9"),
    ),
    "another backend's options": (
        nothing,
        lambda: dist.ProcessGroupGloo._Options(),
        InvalidArgument,
        MismatchError,
        ("epee.BackendOptions",),
    ),
    "no memory": (no_memory, lambda: None, ResourceError, PeerError, ("ResourceError", "no memory for tests")),
    "no mapping": (no_mapping, lambda: None, ResourceError, PeerError, ("cannot map",)),
    "interrupted": (interrupt, lambda: None, KeyboardInterrupt, PeerError, ("KeyboardInterrupt",)),
}


def failing(rank: int, num_ranks: int, folder: str, port: int, name: str) -> tuple[str, float]:
    spoil, options, own, theirs, _ = FAILURES[name]
    store: Any = (
        dist.TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0)
        if port
        else dist.FileStore(f"{folder}/store", num_ranks)
    )
    kept = os.environ.get("EPEE_STAGING_BYTES"), SharedRegion.create, creation._attach
    if rank == 1:
        time.sleep(0.3)  # the others wait already
        spoil()
    begin = time.monotonic()
    with pytest.raises(own if rank == 1 else theirs) as caught:
        dist.init_process_group(
            "epee",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=25),
            pg_options=options() if rank == 1 else None,
        )
    elapsed = time.monotonic() - begin
    assert not dist.is_initialized()
    os.environ.pop("EPEE_STAGING_BYTES", None)
    SharedRegion.create, creation._attach = kept[1:]  # type: ignore[method-assign]
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "epee-outbox" in line]
    assert not mapped, mapped
    # all ranks have counted one attempt: the next one, with the same store, works
    dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=25))
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [num_ranks] * 3
    dist.barrier()
    dist.destroy_process_group()
    if rank != 1 and isinstance(caught.value, PeerError):
        assert caught.value.ranks == (1,)
        assert caught.value.op == "init"
    return str(caught.value), elapsed


@pytest.mark.parametrize("name", FAILURES)
def test_an_error_of_one_rank_at_birth_is_told_to_all(name: str, tmp_path: Path) -> None:
    told = run_ranks(failing, 3, str(tmp_path), 0, name, backend=None)
    for rank in (0, 2):
        text, elapsed = told[rank]
        assert "rank 1" in text
        for word in FAILURES[name][4]:
            assert word in text, text
        assert elapsed < 15, "the peers waited for their time-out"
        assert len(text) < 2000
        assert text.isprintable()


def founds_late(rank: int, num_ranks: int, folder: str) -> str:
    """Rank 0 has founded its part of the job when the others, of whom rank 1 has failed, have left it again."""
    start, attach, gone = creation.start_job, creation._attach, Path(f"{folder}/gone")

    def start_late(*args: Any) -> None:
        start(*args)
        deadline = time.monotonic() + 20
        while not gone.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)  # their agents say that they leave

    def attach_late(*args: Any) -> Any:
        time.sleep(0.2)  # rank 0 has mapped all by then
        return attach(*args) if rank == 2 else fail_attach()

    if rank == 0:
        creation.start_job = start_late
    else:
        creation._attach = attach_late
    with pytest.raises(ResourceError if rank == 1 else PeerError) as caught:
        cases.init(rank, num_ranks, folder, timeout_s=25)
    if rank == 2:
        gone.write_text("")
    creation.start_job, creation._attach = start, attach
    assert rank == 1 or caught.value.ranks == (1,)  # type: ignore[union-attr]
    return str(caught.value)


def test_who_has_failed_is_named_where_its_leaving_is_seen_first(tmp_path: Path) -> None:
    for told in run_ranks(founds_late, 3, str(tmp_path), backend=None):
        assert "cannot map" in told


def test_an_error_at_birth_is_told_through_a_tcp_store(tmp_path: Path) -> None:
    listener = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = listener.port
    del listener
    told = run_ranks(failing, 3, str(tmp_path), port, "staging variable", backend=None)
    assert all("EPEE_STAGING_BYTES" in text for text, _ in told)


def in_a_new_group(rank: int, num_ranks: int) -> str:
    options = epee.BackendOptions(is_extension=True) if rank == 1 else None
    with pytest.raises(InvalidArgument if rank == 1 else MismatchError) as caught:
        dist.new_group(backend="epee", pg_options=options, timeout=timedelta(seconds=25))
    dist.barrier()  # the group around it lives on
    again = dist.new_group(backend="epee", timeout=timedelta(seconds=25))
    x = torch.ones(2)
    dist.all_reduce(x, group=again)
    assert x.tolist() == [num_ranks] * 2
    return str(caught.value)


def test_an_error_in_a_new_group_leaves_the_world_alone() -> None:
    for told in run_ranks(in_a_new_group, 3, backend="epee"):
        assert "is_extension" in told


def slow_third(rank: int, num_ranks: int, folder: str) -> str:
    """Rank 2 fails while rank 1 has not come yet: rank 0 must not wait for rank 1 first."""
    if rank == 1:
        deadline = time.monotonic() + 20
        while not Path(f"{folder}/zero").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    if rank == 2:
        os.environ["EPEE_STAGING_BYTES"] = "5"
    with pytest.raises(InvalidArgument if rank == 2 else MismatchError) as caught:
        cases.init(rank, num_ranks, folder, timeout_s=25) if rank != 2 else dist.init_process_group(
            "epee", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks
        )
    if rank == 0:
        Path(f"{folder}/zero").write_text("failed")
    return str(caught.value)


def test_nobody_waits_for_a_late_rank_once_another_has_failed(tmp_path: Path) -> None:
    for told in run_ranks(slow_third, 3, str(tmp_path), backend=None):
        assert "EPEE_STAGING_BYTES" in told


@pytest.mark.parametrize(
    "raw",
    [
        b'{"failed": 1}',
        b'{"failed": 1, "kind": "X", "reason": 5}',
        b'{"failed": 9, "kind": "X", "reason": "y"}',
        b'{"failed": true, "kind": "X", "reason": "y"}',
        b'{"failed": 1, "kind": "X", "reason": "' + b"y" * 5000 + b'"}',
    ],
)
def test_a_damaged_error_record_is_a_protocol_error(raw: bytes) -> None:
    region = SharedRegion.create(4096, "test")
    with pytest.raises(ProtocolError):
        record.parse(raw, 1, record.own_record(2, 65536, region))
    region.close()


def twice(rank: int, num_ranks: int, folder: str) -> str:
    time.sleep(0.3 * rank)
    with pytest.raises(epee.CommTimeoutError) as caught:
        cases.init(0, num_ranks, folder, timeout_s=1)
    return str(caught.value)


def test_a_rank_given_twice_is_a_timeout_that_says_what_to_look_at(tmp_path: Path) -> None:
    for told in run_ranks(twice, 2, str(tmp_path), backend=None):
        assert "rank 1 did not come to the rendezvous" in told
        assert "rank numbers that differ" in told
        assert "a replacement needs BackendOptions(is_extension=True)" in told


def sizes(rank: int, num_ranks: int, folder: str) -> str:
    store = dist.FileStore(f"{folder}/store", num_ranks)
    with pytest.raises(ProtocolError, match="num_ranks") as caught:
        dist.init_process_group("epee", store=store, rank=rank, world_size=num_ranks + rank)
    return str(caught.value)


def test_world_sizes_that_differ_are_an_error_on_both(tmp_path: Path) -> None:
    first, second = run_ranks(sizes, 2, str(tmp_path), backend=None)
    assert "2 here, 3 on rank 1" in first
    assert "3 here, 2 on rank 0" in second


def timeouts(rank: int, num_ranks: int, folder: str) -> None:
    """`op_timeout` is for calls: a rank that starts late is awaited for the group's time-out."""
    time.sleep(0.8 * rank)
    cases.init(rank, num_ranks, folder, op_timeout=0.2)
    group: Any = dist.group.WORLD
    assert group._engine.timeout_s == 0.2
    dist.destroy_process_group()


def test_op_timeout_does_not_shorten_the_birth(tmp_path: Path) -> None:
    run_ranks(timeouts, 2, str(tmp_path), backend=None)
