"""Times and sizes of public calls: what breaks their rule is refused in words on all ranks, which stay in step."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee import values
from epee.errors import InvalidArgument, MismatchError
from epee.memory.signals import usable_cores
from tests.backend import cases
from tests.harness import run_ranks

HUGE = 10**5000  # Python refuses to write it
NO_TIMES: list[Any] = [
    True,
    False,
    0,
    -1,
    10**400,
    HUGE,
    -HUGE,
    1 << 70,
    1e308,
    1e-320,
    -1.0,
    float("nan"),
    float("inf"),
]
NO_TIMES += ["x", b"x", [], object(), timedelta(0), timedelta(days=-1), timedelta.max]
NO_SIZES: list[Any] = [
    True,
    -1,
    10**400,
    HUGE,
    -HUGE,
    1 << 70,
    1e308,
    2.5,
    float("nan"),
    "x",
    [],
    timedelta.max,
    object(),
]


@pytest.mark.parametrize("value", NO_TIMES, ids=lambda value: values.shown(value)[:20])
def test_what_is_no_time_is_refused_in_words(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"timeouts must be .* got"):
        values.seconds(value, "timeouts")


@pytest.mark.parametrize("value", [1, 2.5, 1e-6, 1e9, 10**9, timedelta(seconds=3)])
def test_times_may_be_given_in_any_form(value: Any) -> None:
    assert values.seconds(value, "timeouts") == (value.total_seconds() if isinstance(value, timedelta) else value)
    assert type(values.seconds(value, "timeouts")) is float


def test_options_refuse_every_bad_value_in_words() -> None:
    for name in (
        "op_timeout",
        "max_group_size",
        "staging_bytes",
        "is_extension",
        "active_ranks",
        "fault_mode",
        "on_stall",
    ):
        for value in NO_TIMES if name == "op_timeout" else [value for value in NO_SIZES if value is not True]:
            with pytest.raises(InvalidArgument, match=name):
                epee.BackendOptions(**{name: value})


def calls_with_bad_values(rank: int, num_ranks: int, folder: str) -> int:
    """Rank 0 makes calls with bad values, the other one good ones; both get an error, and the next call is right."""
    cases.init(rank, num_ranks, folder, op_timeout=30.0)
    buffer = epee.Buffer(num_experts=4, hidden=32, num_topk=2, max_tokens_per_rank=8, timeout=30.0)
    latency = epee.LatencyBuffer(num_experts=4, hidden=128, num_topk=2, max_tokens_per_rank=8, timeout=30.0)
    idx, weights = torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    x, wide = torch.ones(2, 32).bfloat16(), torch.ones(2, 128).bfloat16()
    result = buffer.dispatch(x, idx, weights)
    bad: list[tuple[Callable[..., Any], str, Any]] = []
    for value in (True, 10**400, HUGE, 1e308, float("nan"), timedelta.max):
        bad.append((lambda **given: buffer.dispatch(x, idx, weights, **given), "timeout", value))
        bad.append((lambda **given: buffer.combine(result.x, result.handle, **given), "timeout", value))
        bad.append((lambda **given: latency.dispatch(wide, idx, weights, **given), "timeout", value))
        bad.append((buffer.barrier, "timeout", value))
    for value in (True, 0, HUGE):
        bad.append((lambda **given: buffer.dispatch(x, idx, weights, **given), "num_sms", value))
        bad.append((lambda **given: buffer.dispatch(x, idx, weights, **given), "expert_alignment", value))
        bad.append((lambda **given: latency.dispatch(wide, idx, weights, **given), "timeout_us", value))
    for call, name, value in bad:
        with pytest.raises(InvalidArgument if rank == 0 else MismatchError, match=name):
            call(**({name: value} if rank == 0 else {}))
    result = buffer.dispatch(x, idx, weights)
    assert torch.equal(buffer.combine(result.x, result.handle).x, x)  # both experts of a token are of one rank
    step = latency.dispatch(wide, idx, weights)
    assert torch.equal(latency.combine(step.x, step.handle).x, 2 * wide)
    group: Any = dist.group.WORLD
    for value in NO_SIZES:
        with pytest.raises(InvalidArgument):
            group.extend_group_size_to(value)
        with pytest.raises(InvalidArgument):
            group.recover_ranks([value])
    for value in NO_TIMES:
        with pytest.raises(InvalidArgument, match="timeout_s"):
            group.recover_ranks([rank], value)
        if not isinstance(value, timedelta):
            with pytest.raises(InvalidArgument, match="timeout must be"):
                group.set_timeout(value)
    group.set_timeout(timedelta.max)  # torch's word for "for ever"
    tensor = torch.ones(2)
    dist.all_reduce(tensor, async_op=True).wait(timedelta.max)  # type: ignore[union-attr]
    assert tensor.tolist() == [2.0, 2.0]
    dist.destroy_process_group()
    return len(bad)


def test_bad_times_and_sizes_of_calls_are_errors_on_all_ranks_and_leave_them_in_step(tmp_path: Any) -> None:
    counts = run_ranks(calls_with_bad_values, 2, str(tmp_path), backend=None)
    assert counts == [33, 33]


def test_a_group_may_wait_as_long_as_torch_can_say() -> None:
    store = dist.HashStore()
    dist.init_process_group("epee", store=store, rank=0, world_size=1, timeout=timedelta.max)
    dist.destroy_process_group()


def test_a_filter_that_hides_the_cores_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert usable_cores() == set(range(os.cpu_count() or 1))
    dist.init_process_group("epee", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
