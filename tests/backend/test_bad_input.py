"""Arguments that cannot be right are refused by name before anything is sent."""

# ruff: noqa: E501 - a table reads better with one case per line

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.backend.options import BackendOptions
from epee.errors import InvalidArgument, InvalidState, UnsupportedError
from tests.harness import run_ranks
from tests.survive import stages

from . import cases

Op = dist.ReduceOp


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def group() -> Any:
    return dist.group.WORLD


def options(kind: str, **fields: Any) -> Any:
    opts = getattr(torch._C._distributed_c10d, kind)()
    for name, value in fields.items():
        setattr(opts, name, value)
    return opts


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()  # which all_reduce alone takes


REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "expanded all_reduce": (lambda n: dist.all_reduce(ones(1).expand(4)), "overlap"),
    "expanded broadcast": (lambda n: group().broadcast([ones(1).expand(4)], options("BroadcastOptions")).wait(), "overlap"),

    "overlapping output": (lambda n: cases.all_gather_single(torch.zeros(9).as_strided((2 * n,), (0,)), ones(2)), "overlap"),
    "outputs that share memory": (lambda n: dist.all_gather([ones(2)] * n, ones(2)), "share memory"),
    "interleaved outputs that share an element": (
        lambda n: dist.all_gather(_interleaved(n), ones(5)),
        "share memory",
    ),
    "sparse broadcast": (lambda n: dist.broadcast(sparse(), 0), "strided"),
    "sparse rows": (lambda n: dist.all_reduce(sparse().to_sparse_csr()), "strided"),
    "maximum of sparse": (lambda n: dist.all_reduce(sparse(), op=Op.MAX), "sparse tensors have SUM and AVG"),
    "meta": (lambda n: dist.all_reduce(torch.ones(2, device="meta")), "meta"),
    "quantised": (lambda n: dist.all_reduce(torch.quantize_per_tensor(ones(2), 0.1, 0, torch.qint8)), "qint8"),
    "list too short": (lambda n: dist.all_gather([ones(2)] * (n - 1), ones(2)), "one tensor per rank"),
    "list too long": (lambda n: dist.all_to_all([ones(2) for _ in range(n + 1)], [ones(2) for _ in range(n)]), "one tensor per rank"),
    "output too small": (lambda n: cases.all_gather_single(ones(2 * n - 1), ones(2)), "elements"),
    "output of another size in a list": (lambda n: dist.all_gather([ones(2 + (i == 1)) for i in range(n)], ones(2)), r"outputs\[1\]"),
    "input too small": (lambda n: cases.reduce_scatter_single(ones(2), ones(2 * n + 1)), "elements"),
    "two tensors at once": (lambda n: group().allreduce([ones(1), ones(1)]).wait(), "one tensor per call"),
    "no tensor": (lambda n: group().allreduce([]).wait(), "one tensor per call"),
    "BAND on floats": (lambda n: dist.all_reduce(ones(2), op=Op.BAND), "BAND does not exist"),
    "SUM of bool": (lambda n: dist.all_reduce(ones(2).bool(), op=Op.SUM), "SUM does not exist"),
    "SUM of float8": (lambda n: dist.all_reduce(ones(2).to(torch.float8_e4m3fn)), "it has: none"),
    "MAX of complex": (lambda n: group().reduce([ones(2, dtype=torch.complex64)], options("ReduceOptions", reduceOp=Op.MAX)).wait(), "MAX does not exist"),
    "PREMUL_SUM of integers": (lambda n: dist.all_reduce(ones(2).long(), op=torch._C._distributed_c10d._make_nccl_premul_sum(2.0)), "PREMUL_SUM does not exist"),
    "root out of range": (lambda n: group().broadcast([ones(2)], options("BroadcastOptions", rootRank=n)).wait(), "root"),
    "negative root": (lambda n: group().reduce([ones(2)], options("ReduceOptions", rootRank=-1)).wait(), "root"),
    "rows that do not divide": (lambda n: dist.all_to_all_single(ones(n + 1), ones(n + 1)), "divide"),
    "splits that do not add up": (lambda n: dist.all_to_all_single(ones(2 * n), ones(2 * n), None, [3] * n), "add up"),
    "negative splits": (lambda n: dist.all_to_all_single(ones(n), ones(n), [n + 1, -1] + [0] * (n - 2), None), "add up"),
    "different dtypes in a list": (lambda n: group().allgather([[ones(2, dtype=torch.float64) for _ in range(n)]], [ones(2)]).wait(), "dtype"),
    "coalesced call of two dtypes": (
        lambda n: group().allreduce_coalesced([ones(1), ones(1).long()], options("AllreduceCoalescedOptions")).wait(),
        "one dtype",
    ),
    "empty coalesced list": (lambda n: group().allreduce_coalesced([], options("AllreduceCoalescedOptions")).wait(), "at least one"),
    "coalesced lists of different length": (lambda n: group().allgather_into_tensor_coalesced([ones(n)], [ones(1), ones(1)]).wait(), "as many outputs"),
}  # fmt: skip


def _interleaved(n: int) -> list[torch.Tensor]:
    base = torch.zeros(40)
    return [base[i % 2 : i % 2 + 10 : 2] for i in range(n)] if n > 2 else [base[0:10:2], base[4:14:2]]


LOCAL: dict[str, tuple[Callable[[int, int], Any], str]] = {
    "send to self": (lambda r, n: group().send([ones(2)], r, 0), "another rank"),
    "send out of range": (lambda r, n: group().send([ones(2)], n, 0), "another rank"),
    "recv from a negative rank": (lambda r, n: group().recv([ones(2)], -2, 0), "another rank"),
    "negative tag": (lambda r, n: group().send([ones(2)], (r + 1) % n, -1), "tag"),
    "recv into an expanded tensor": (lambda r, n: group().recv([ones(1).expand(3)], (r + 1) % n, 0), "overlap"),
    "two tensors in a send": (lambda r, n: group().send([ones(1), ones(1)], (r + 1) % n, 0), "one tensor"),
    "time-out below zero": (lambda r, n: group().set_timeout(timedelta(seconds=-1)), "timeout"),
}


def refuse_all(rank: int, num_ranks: int) -> dict[str, str]:
    told = {}
    for name, (call, _) in REFUSED.items():
        try:
            call(num_ranks)
        except InvalidArgument as exc:
            told[name] = str(exc)
        except epee.MismatchError as exc:  # the broadcast root's tensor is no output there
            told[name] = str(exc)
    for name, (local, _) in LOCAL.items():
        try:
            local(rank, num_ranks)
        except InvalidArgument as exc:
            told[name] = str(exc)
    x = ones(2)
    dist.all_reduce(x)
    assert x[0].item() == num_ranks
    return told


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_bad_arguments_are_refused_by_name_and_the_group_works_on(num_ranks: int) -> None:
    wanted = {name: word for name, (_, word) in [*REFUSED.items(), *LOCAL.items()]}
    for told in run_ranks(refuse_all, num_ranks, backend="epee"):
        assert set(told) == set(wanted)
        for name, text in told.items():
            assert wanted[name].replace("\\", "") in text, f"{name}: {text!r}"


def test_a_tensor_on_another_device_is_refused_in_words() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from epee.engine.tensors import carrier_of

    with FakeTensorMode(), pytest.raises(UnsupportedError, match=r"input lies on xpu:0.*\.cpu\(\)"):
        carrier_of(torch.empty(2, device="xpu:0"), "input")


def odd_places(rank: int, num_ranks: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        raw = bytearray(8 * 2000 + 1)
        x = torch.frombuffer(raw, dtype=dtype, offset=1, count=2000)
        x.copy_(torch.arange(2000) % 7 + rank)
        assert x.data_ptr() % 8 == 1 or x.data_ptr() % 2 == 1
        dist.all_reduce(x)
        assert torch.equal(x, ((torch.arange(2000) % 7) * num_ranks + sum(range(num_ranks))).to(dtype))
        cases.all_gather_single(
            torch.frombuffer(bytearray(8 * 4000 + 1), dtype=dtype, offset=1, count=2000 * num_ranks), x
        )


def test_tensors_at_odd_addresses_are_served() -> None:
    run_ranks(odd_places, 2, backend="epee")


def from_a_callback(rank: int, num_ranks: int) -> None:
    x, y = ones(2), ones(3)
    inner: list[Any] = []
    dist.all_reduce(x, async_op=True).get_future().then(
        lambda _: inner.append(dist.all_reduce(y, async_op=True))
    ).wait()
    inner[0].wait()
    assert x.tolist() == [num_ranks] * 2
    assert y.tolist() == [num_ranks] * 3

    z = ones(4)
    first = dist.all_reduce(x, async_op=True).get_future()
    chain = first.then(lambda _: dist.all_reduce(z, async_op=True).get_future().wait()[0] * 2)
    assert chain.wait().tolist() == [2 * num_ranks] * 4
    bad = dist.all_reduce(x, async_op=True).get_future()
    bad = bad.then(lambda _: dist.all_reduce(ones(1 + rank), async_op=True).get_future().wait())
    with pytest.raises(RuntimeError, match="disagree"):
        bad.wait()
    dist.barrier()


def test_a_callback_of_a_future_may_start_a_call() -> None:
    run_ranks(from_a_callback, 2, backend="epee")


def torch_refuses(rank: int, num_ranks: int) -> list[Any]:
    """What torch refuses on one rank never reaches us: that rank is one call behind (docs/limits.md)."""
    told: list[Any] = []
    for call in (
        lambda: dist.gather(ones(1), None, dst=0),  # rank 0: ValueError, and no call; rank 1: call 1
        lambda: dist.all_reduce(ones(1)),  # rank 0: call 1; rank 1: call 2
    ):
        try:
            call()
            told.append("returned")
        except (ValueError, RuntimeError) as exc:
            told.append(type(exc).__name__)
        if rank == 1 and told[-1] == "MismatchError":
            break
    return told


def test_what_torch_refuses_on_one_rank_shifts_it_as_the_limits_say() -> None:
    assert run_ranks(torch_refuses, 2, backend="epee") == [["ValueError", "MismatchError"], ["MismatchError"]]


def interleaved_outputs(rank: int, num_ranks: int) -> None:
    base = torch.zeros(5, num_ranks)
    dist.all_gather([base[:, i] for i in range(num_ranks)], torch.full((5,), float(rank)))
    assert base.tolist() == [[float(i) for i in range(num_ranks)]] * 5


def test_outputs_that_interleave_without_sharing_are_served() -> None:
    run_ranks(interleaved_outputs, 3, backend="epee")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"op_timeout": 0}, "op_timeout"),
        ({"op_timeout": -1.0}, "op_timeout"),
        ({"op_timeout": float("nan")}, "op_timeout"),
        ({"op_timeout": timedelta(0)}, "op_timeout"),
        ({"op_timeout": "5"}, "op_timeout"),
        ({"staging_bytes": 0}, "staging_bytes"),
        ({"staging_bytes": 100_000}, "staging_bytes"),
        ({"staging_bytes": 1 << 40}, "staging_bytes"),
        ({"max_group_size": 0}, "max_group_size"),
        ({"max_group_size": 65}, "max_group_size"),
        ({"max_group_size": True}, "max_group_size"),
        ({"fault_mode": "ignore"}, "fault_mode"),
        ({"is_extension": 1}, "is_extension"),
        ({"active_ranks": [1, 1]}, "active_ranks"),
        ({"active_ranks": torch.ones(2)}, "active_ranks"),
        ({"active_ranks": torch.ones(4, dtype=torch.int32)[::2]}, "active_ranks"),
        ({"active_ranks": torch.full((2,), 3, dtype=torch.int32)}, "active_ranks"),
        ({"active_ranks": torch.ones(2, dtype=torch.int32, device="meta")}, "active_ranks"),
        ({"active_ranks": torch.ones(2, dtype=torch.int32), "max_group_size": 3}, "active_ranks"),
    ],
)
def test_an_option_that_breaks_its_rule_names_itself(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        BackendOptions(**fields)


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="colour"):
        BackendOptions(colour="red")  # type: ignore[call-arg]


def test_the_staging_variable_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_STAGING_BYTES", "1000")
    with pytest.raises(InvalidArgument, match="EPEE_STAGING_BYTES"):
        BackendOptions()
    monkeypatch.setenv("EPEE_STAGING_BYTES", "131072")
    assert BackendOptions().staging_bytes == 131072


def bad_groups(rank: int, num_ranks: int) -> None:
    with pytest.raises(InvalidArgument, match="max_group_size"):
        dist.new_group(backend="epee", pg_options=BackendOptions(max_group_size=1))
    with pytest.raises(InvalidArgument, match="active_ranks"):
        dist.new_group(backend="epee", pg_options=BackendOptions(active_ranks=torch.ones(5, dtype=torch.int32)))
    with pytest.raises(InvalidArgument, match="BackendOptions"):
        dist.new_group(backend="epee", pg_options=dist.ProcessGroupGloo._Options())
    with pytest.raises(InvalidState, match=r"is_extension.*no running job"):
        dist.new_group(backend="epee", pg_options=BackendOptions(is_extension=True))


def test_options_that_do_not_fit_the_group_are_refused() -> None:
    run_ranks(bad_groups, 2)


def impossible(rank: int, num_ranks: int) -> None:
    import copy

    from torch.distributed.distributed_c10d import _coalescing_manager, _world

    with pytest.raises(UnsupportedError, match="coalescing by device"), _coalescing_manager(device=torch.device("cpu")):
        pass
    _world.pg_coalesce_state.clear()
    # until 2.13 torch asks for gloo's name before it asks us
    with pytest.raises((ValueError, UnsupportedError), match=r"GLOO|names the silent ranks"):
        dist.monitored_barrier()
    with pytest.raises(UnsupportedError, match="names the silent ranks"):
        group().monitored_barrier()
    with pytest.raises(UnsupportedError, match="new_group"):
        group().split_group()
    with pytest.raises(RuntimeError):
        dist.split_group(group(), [[0, 1]])
    with pytest.raises(UnsupportedError, match="pickled"):
        copy.deepcopy(group())
    dist.barrier()


def test_what_torch_makes_impossible_is_a_clear_error() -> None:
    run_ranks(impossible, 2, backend="epee")


def after_destroy(rank: int, num_ranks: int) -> None:
    held = group()
    dist.destroy_process_group()
    for call in (
        lambda: held.allreduce([ones(2)]),
        lambda: held.barrier(),
        lambda: held.send([ones(2)], 1 - rank, 0),
        lambda: held.recv([ones(2)], 1 - rank, 0),
    ):
        with pytest.raises(InvalidState, match="destroyed"):
            call()
    held.shutdown()
    held.abort()


def test_use_after_destroy_is_an_error_and_destroying_twice_is_not() -> None:
    run_ranks(after_destroy, 2, backend="epee")


def reentry(rank: int, num_ranks: int, folder: str) -> str:
    told = []

    def handler(*_: Any) -> None:
        try:
            dist.all_reduce(ones(1))
        except InvalidState as exc:
            told.append(str(exc))
        stages.reach(folder, "rung")

    signal.signal(signal.SIGALRM, handler)
    if rank == 0:
        me = threading.get_ident()
        cases.when_asleep(group()._engine, lambda: signal.pthread_kill(me, signal.SIGALRM))
        x = ones(2)
        dist.all_reduce(x)  # rank 1 comes after the alarm
        assert x[0].item() == 2
    else:
        stages.wait_for(folder, "rung")
        dist.all_reduce(ones(2))
    dist.barrier()
    return told[0] if told else ""


def test_a_call_from_a_signal_handler_inside_a_call_is_refused(tmp_path: Path) -> None:
    assert "signal handler" in run_ranks(reentry, 2, str(tmp_path), backend="epee")[0]
