"""Errors of calls name the group or buffer, show nothing of the inside, and time-outs end with the command to run."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.doctor.hang import all_as_json, as_text, look
from tests.csrc.emulated import has_compiler
from tests.csrc.emulated_buffer import emulated
from tests.harness import run_ranks
from tests.survive import stages

SIZES: dict[str, Any] = {"num_experts": 4, "hidden": 128, "num_topk": 2, "max_tokens_per_rank": 8}


def _routing() -> tuple[torch.Tensor, torch.Tensor]:
    weights, topk_idx = torch.rand(8, 4).topk(2)
    return topk_idx, weights


def _all_reduce(group: Any) -> None:
    dist.all_reduce(torch.ones(4), group=group)


def _wait_for_it(group: Any) -> None:
    from datetime import timedelta

    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    assert work is not None
    work.wait(timedelta(seconds=0.2))


def _recv(group: Any) -> None:
    dist.recv(torch.ones(4), group=group, group_src=1)


def _send_recv_any(group: Any) -> None:
    dist.recv(torch.ones(4), group=group)


def _barrier(group: Any) -> None:
    dist.barrier(group)


GROUP_CALLS = (_all_reduce, _recv, _send_recv_any, _barrier, _wait_for_it)


def _timed_out(call: Any) -> str:
    with pytest.raises(epee.CommTimeoutError) as caught:
        call()
    return str(caught.value)


def _groups(rank: int, num_ranks: int, folder: str) -> list[str]:
    options = epee.BackendOptions(op_timeout=0.5)
    ranks = list(range(num_ranks))
    named = dist.new_group(ranks, backend="epee", pg_options=options, group_desc="experts")
    plain = dist.new_group(ranks, backend="epee", pg_options=options)
    found = []
    if rank == 0:
        found = [_timed_out(lambda call=call: call(named)) for call in GROUP_CALLS]
        found.append(_timed_out(lambda: _all_reduce(plain)))
        found.append(plain.group_name)
        stages.reach(folder, "over")
    else:
        stages.wait_for(folder, "over")
    return found


def _check_ends(text: str, pid: int | None = None) -> None:
    assert re.search(r"run: epee doctor --pid \d+$", text), text
    assert pid is None or text.endswith(f" {pid}")
    assert text.count("epee doctor") == 1
    assert "0x" not in text
    assert not re.search(r"\d{11,}", text), text


def test_time_outs_of_groups_name_the_group(tmp_path: Any) -> None:
    *texts, other, name = run_ranks(_groups, 2, str(tmp_path), backend="epee")[0]
    for text in (*texts, other):
        _check_ends(text)
    assert all("[group experts]" in text for text in texts), texts
    assert f"[group {name}]" in other


def _buffers(rank: int, num_ranks: int, folder: str) -> list[str]:
    del num_ranks
    topk_idx, weights = _routing()
    x = torch.ones(8, 128, dtype=torch.bfloat16)
    found = []
    with (
        epee.Buffer(timeout=90.0, **SIZES) as first,
        epee.Buffer(timeout=90.0, **SIZES) as second,
        epee.LatencyBuffer(timeout=90.0, **SIZES) as latency,
    ):
        d, h = first.dispatch(x, topk_idx, weights), latency.dispatch(x, topk_idx, weights)
        if rank == 0:
            found = [
                _timed_out(lambda: second.dispatch(x, topk_idx, weights, timeout=0.3)),
                _timed_out(lambda: first.combine(d.x, d.handle, timeout=0.3)),
                _timed_out(lambda: first.barrier(timeout=0.3)),
                _timed_out(lambda: latency.combine(latency.combine_input(h.handle), h.handle, timeout=0.3)),
            ]
            stages.reach(folder, "over")
        else:
            stages.wait_for(folder, "over")
    return [*found, str(os.getpid())]


@pytest.mark.parametrize("backend", ["epee", "gloo"])
def test_time_outs_of_buffers_name_the_buffer(backend: str, tmp_path: Any) -> None:
    *texts, pid = run_ranks(_buffers, 2, str(tmp_path), backend=backend)[0]
    for text in texts:
        _check_ends(text, int(pid))
    names = [re.findall(r"\[(.*?) of group default_pg\]", text) for text in texts]
    assert all(len(each) == 1 for each in names), texts
    assert [each[0].split()[0] for each in names] == ["Buffer", "Buffer", "Buffer", "LatencyBuffer"]
    assert names[0] != names[1] == names[2]


def _gpu_buffer(rank: int, num_ranks: int, folder: str) -> list[str]:
    """A dispatch on the emulated GPU, to which the other rank does not come."""
    del num_ranks
    topk_idx, weights = _routing()
    x = torch.ones(8, 128, dtype=torch.bfloat16)
    found = []
    with epee.Buffer(timeout=90.0, **SIZES) as buffer:
        buffer.dispatch(x, topk_idx, weights)
        if rank == 0:
            found.append(_timed_out(lambda: buffer.dispatch(x, topk_idx, weights, timeout=0.3)))
            stages.reach(folder, "over")
        else:
            stages.wait_for(folder, "over")
    return found


@pytest.mark.compiler
@pytest.mark.timeout(240)  # it may have to build the kernels
@pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with")
def test_time_outs_of_gpu_buffers_name_the_buffer(tmp_path: Any) -> None:
    (text,) = run_ranks(emulated, 2, _gpu_buffer, str(tmp_path), backend="epee", timeout_s=200)[0]
    _check_ends(text)
    assert re.search(r"\[EmulatedBuffer \d+ of group default_pg\]", text)


def _mismatch(rank: int, num_ranks: int) -> list[str]:
    del num_ranks
    topk_idx, weights = _routing()
    x = torch.ones(8, 128, dtype=torch.bfloat16)
    found = []
    with pytest.raises(epee.MismatchError) as caught:
        dist.all_reduce(torch.ones(4 + rank))
    found.append(str(caught.value))
    with epee.Buffer(timeout=90.0, **SIZES) as buffer:
        with pytest.raises(epee.MismatchError) as caught:
            buffer.dispatch(x, topk_idx, weights, layout=("rank", "expert")[rank])
        found.append(str(caught.value))
    return found


def test_errors_of_calls_that_do_not_match_name_group_and_buffer() -> None:
    first, second = run_ranks(_mismatch, 2, backend="epee")
    assert first[0].endswith("[group default_pg]")
    assert second[0].endswith("[group default_pg]")
    assert first[1] == second[1]
    assert re.search(r"\[Buffer \d+ of group default_pg\]$", first[1])


def _hang(rank: int, num_ranks: int, folder: str) -> list[str]:
    """Rank 0 waits in a group, then in a buffer of each kind; rank 1 looks at it."""
    del num_ranks
    group = dist.new_group([0, 1], backend="epee", group_desc="experts")
    topk_idx, weights = _routing()
    x = torch.ones(8, 128, dtype=torch.bfloat16)
    found = []
    with epee.Buffer(timeout=90.0, **SIZES) as buffer, epee.LatencyBuffer(timeout=90.0, **SIZES) as latency:
        calls = (
            lambda: _all_reduce(group),
            lambda: buffer.dispatch(x, topk_idx, weights),
            lambda: latency.dispatch(x, topk_idx),
        )
        for number, call in enumerate(calls):
            if rank == 1:
                stages.wait_for(folder, f"begun{number}")
                report = look(os.getpid())
                found += [as_text(report), all_as_json(report, [])]
            else:
                stages.reach(folder, f"begun{number}")
            call()
    return found


def test_the_doctor_names_groups_and_buffers(tmp_path: Any) -> None:
    found = run_ranks(_hang, 2, str(tmp_path), backend="epee")[1]
    assert re.search(r"^  group experts: all_reduce seq ", found[0], re.MULTILINE), found[0]
    assert '"name": "group experts"' in found[1]
    assert re.search(r"^  Buffer \d+ of group default_pg: dispatch seq ", found[2], re.MULTILINE), found[2]
    assert re.search(r"^  LatencyBuffer \d+ of group default_pg: dispatch seq ", found[4], re.MULTILINE), found[4]
    assert not any(re.search(r"group \d", text) for text in found)
