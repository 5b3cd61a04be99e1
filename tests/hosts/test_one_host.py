"""What was made while all its ranks were on one host stays there: who comes from another one is refused at once.

Time-outs are longer than the tests may last: where one waited for them the test would fail.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.errors import MismatchError, UnsupportedError
from epee.view.process.peers import Peers
from epee.view.transport.wire import GROUP_ID_LIMIT
from tests.harness import DEAD, run_ranks
from tests.hosts.joins import full, hear, joiner, lose, member, say, sums
from tests.loopback import settle
from tests.survive.kill_points import die

LONG_S = 1000.0
SIZES: dict[str, Any] = {"num_experts": 6, "hidden": 128, "num_topk": 2, "max_tokens_per_rank": 4, "timeout": LONG_S}


def make(group: Any, kind: str) -> Any:
    return epee.Buffer(group, **SIZES) if kind == "Buffer" else epee.LatencyBuffer(group, **SIZES)


def synced(buffer: Any) -> list[int]:
    mask = torch.ones(3, dtype=torch.int32)
    found: list[int] = buffer.sync(mask).tolist()
    assert mask.tolist() == found
    return found


def replaced(index: int, num_processes: int, folder: str, kind: str) -> Any:
    """Ranks 0 to 2 begin on a host and make a buffer; process 3, of another, takes rank 2, process 4, of it, rank 1."""
    os.environ["EPEE_OVER_HOSTS"] = "1"
    if index == 3:
        note = Peers.note_told

        def note_late(peers: Peers, nonce: bytes, group_id: int, data: bytes) -> None:
            """Take long for the removal of a notice: calls of the group overtake it."""
            time.sleep(0.0 if data or group_id == GROUP_ID_LIMIT else 0.3)  # that one is a sign of life
            note(peers, nonce, group_id, data)

        Peers.note_told = note_late  # type: ignore[method-assign]
    rank = index if index < 3 else 5 - index
    settle(int(index == 3))
    told = ""
    if index < 3:
        group = member(rank, 3, folder)
    else:
        hear(folder, f"lost{rank}")
        group = joiner(rank, 3, folder)
        sums(group, range(3))
    if index == 3:
        with pytest.raises(UnsupportedError) as caught:
            make(group, kind)
        told = str(caught.value)
        say(folder, "refused")
        lose(group, {1})
        group.recover_ranks([1])
        sums(group, range(3))
    else:
        with make(group, kind) as buffer:
            for victim in (2, 1) if index < 3 else ():
                if rank == victim:
                    die()
                lose(group, {victim})
                say(folder, f"lost{victim}")
                group.recover_ranks([victim])
                sums(group, range(3))
                if victim == 2:
                    hear(folder, "refused")
                    assert synced(buffer) == [1, 1, 0]
            if index < 3 or kind == "Buffer":  # the other is in that of the members when it has made it
                assert synced(buffer) == [1, 1, 0], "a process of the buffer's host comes in, wherever others are"
    dist.barrier()  # all have closed it, or never had it
    with make(group, kind) as buffer:
        assert synced(buffer) == [1, 1, 1]
        assert buffer.all_gather_bytes(bytes([rank])) == [b"\0", b"\1", b"\2"]
        dist.barrier()
    dist.destroy_process_group()
    return told


@pytest.mark.parametrize("kind", ["Buffer", "LatencyBuffer"])
def test_a_buffer_that_was_made_on_one_host_refuses_who_comes_from_another(tmp_path: Path, kind: str) -> None:
    results = run_ranks(replaced, 5, str(tmp_path), kind, backend=None, timeout_s=60, dead={1, 2})
    assert results[1] == results[2] == DEAD
    assert results[0] == results[4] == ""
    assert f"rank 0 has a {kind} of the group that was made while all ranks were on one host" in results[3]
    assert "close it on all ranks" in results[3]


def unlike(index: int, num_processes: int, folder: str) -> str:
    """Process 3 takes rank 2 of a group over hosts, on the buffer's host, and makes its buffer with other arguments."""
    os.environ["EPEE_OVER_HOSTS"] = "1"
    rank = min(index, 2)
    settle(0)
    if index < 3:
        group = member(rank, 3, folder)
        with make(group, "Buffer") as buffer:
            if rank == 2:
                die()
            lose(group, {2})
            say(folder, "lost")
            group.recover_ranks([2])
            sums(group, range(3))
            hear(folder, "told")
            assert synced(buffer) == [1, 1, 1]
        return ""
    hear(folder, "lost")
    group = joiner(rank, 3, folder)
    sums(group, range(3))
    with pytest.raises(MismatchError) as caught:
        epee.Buffer(group, **{**SIZES, "hidden": 256, "max_tokens_per_rank": 2})  # as many bytes
    say(folder, "told")
    with make(group, "Buffer") as buffer:
        assert synced(buffer) == [1, 1, 1]
    return str(caught.value)


def test_who_comes_with_other_arguments_than_the_buffer_of_its_host_is_told(tmp_path: Path) -> None:
    results = run_ranks(unlike, 4, str(tmp_path), backend=None, timeout_s=60, dead={2})
    assert results[:3] == ["", "", DEAD]
    assert "was made with another hidden" in results[3]


def asked(index: int, num_processes: int, folder: str, grows: bool) -> Any:
    """A group of ranks 0 and 1 on one host, in a job over two: somebody of the other host tries to come into it."""
    settle((0, 0, 1, 1)[index])
    chosen: dict[str, Any] = {"fault_mode": "mask", "op_timeout": LONG_S}
    if index == 3:
        hear(folder, "lost")
        world = joiner(1, 3, folder)
    else:
        world = member(index, 3, folder)
    newcomer = 2 if grows else 3
    if index in (0, 1):
        group: Any = dist.new_group([0, 1], pg_options=epee.BackendOptions(max_group_size=3, **chosen))
        sums(group, range(2))
        say(folder, "born")
    if not grows:
        if index == 1:
            hear(folder, "born")
            die()
        if index in (0, 2):
            lose(world, {1})
            say(folder, "lost")
            world.recover_ranks([1])
        sums(world, range(3))
    told = ""
    if index == newcomer:
        hear(folder, "born")
        ranks = [0, 1, 2] if grows else [0, 1]
        with pytest.raises(UnsupportedError) as caught:
            dist.new_group(ranks, pg_options=epee.BackendOptions(is_extension=True, **chosen))
        told = str(caught.value)
    elif index in (0, 1):
        with pytest.raises(UnsupportedError) as caught:
            group.extend_group_size_to(3) if grows else group.recover_ranks([1])
        told = str(caught.value)
        sums(group, range(2 if grows else 1))
    dist.all_reduce(full(1, 1))
    dist.barrier()
    dist.destroy_process_group()
    return told


@pytest.mark.parametrize("grows", [False, True])
def test_a_group_of_one_host_refuses_who_comes_from_another(tmp_path: Path, grows: bool) -> None:
    num, dead = (3, set()) if grows else (4, {1})
    results = run_ranks(asked, num, str(tmp_path), grows, backend=None, timeout_s=60, dead=dead)
    newcomer = results[2 if grows else 3]
    assert "stays there, and this process runs on host" in newcomer
    for told in results[: 2 if grows else 1]:
        assert f"rank {2 if grows else 1} cannot be admitted" in told
        assert "stays on the host where it was made" in told
    assert grows or results[2] == ""


def told_unlike(rank: int, num_ranks: int, folder: str, placement: tuple[int, ...], yes: tuple[int, ...]) -> str:
    """Only some ranks have the variable."""
    settle(placement[rank])
    os.environ["EPEE_OVER_HOSTS"] = str(int(rank in yes))
    try:
        group = member(rank, num_ranks, folder, timeout_s=LONG_S)
    except MismatchError as error:
        return str(error)
    sums(group, range(num_ranks))
    dist.destroy_process_group()
    return "born"


@pytest.mark.parametrize(("yes", "words"), [((0,), ("0", "1, 2")), ((1, 2), ("1, 2", "0"))])
def test_ranks_of_one_host_that_differ_in_whether_others_may_come_all_say_so(
    tmp_path: Path, yes: tuple[int, ...], words: tuple[str, str]
) -> None:
    told = run_ranks(told_unlike, 3, str(tmp_path), (0, 0, 0), yes, backend=None, timeout_s=40)
    assert len(set(told)) == 1
    assert (
        f"EPEE_OVER_HOSTS must be equal on all ranks of a group that begins on one host: 1 on rank(s) {words[0]}"
        in told[0]
    )
    assert f"0 or unset on rank(s) {words[1]};" in told[0]


def test_what_some_ranks_say_is_nothing_where_ranks_are_on_several_hosts(tmp_path: Path) -> None:
    assert run_ranks(told_unlike, 3, str(tmp_path), (0, 1, 1), (1,), backend=None, timeout_s=40) == ["born"] * 3
