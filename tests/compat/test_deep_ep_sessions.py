"""V2's messages between pipeline stages and sessions of all-gathers: contents by formula, misuse, a rank that dies.

Functions without "misuse" make tensors on the current default device (`tests/gpu/test_sessions_gpu.py`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee.compat.deep_ep as deep_ep
from epee.compat.deep_ep.experimental import _HEADER, _TAG
from epee.compat.deep_ep.shared.layout import align_up
from epee.errors import InvalidArgument, InvalidState, MismatchError, PeerError, ProtocolError, UnsupportedError
from tests.compat.deep_ep_cases import world
from tests.harness import run_ranks

DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.uint16)
BACKENDS = pytest.mark.parametrize("backend", ["gloo", "epee"])


def filled(rank: int, index: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor that no other rank and index has."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel) * 7 + 31 * rank + 5 * index).remainder(119).to(torch.float32).to(dtype).reshape(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether shapes, dtypes and bytes agree."""
    bytes_of = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*bytes_of)


def messages(rank: int, num_ranks: int) -> None:
    buffer = deep_ep.ElasticBuffer(world(), explicitly_destroy=True)
    buffer.pp_set_config(1 << 22, 4)
    behind, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    for dtype in DTYPES:  # all ranks send first; tensors are the caller's again at once
        for shape in ((3, 5), (), (0,)):
            given = filled(rank, 1, shape, dtype)
            buffer.pp_send(given, behind)
            given.zero_()
            got = torch.empty(shape, dtype=dtype)
            buffer.pp_recv(got, before)
            assert same(got, filled(before, 1, shape, dtype))
    # both directions, as many as may be under way, larger than any socket's buffer; then in the order of each
    large = 1 << (20 if torch.get_default_device().type == "cpu" else 21)  # on GPUs larger than a pair's ring
    for index in range(4):
        buffer.pp_send(filled(rank, index, (large,)), behind)
        if num_ranks > 2:
            buffer.pp_send(filled(rank, 10 + index, (large,)), before)
    for index in range(4):
        got = torch.empty(large)
        buffer.pp_recv(got, before)
        assert same(got, filled(before, index, (large,)))
        if num_ranks > 2:
            buffer.pp_recv(got, behind)
            assert same(got, filled(behind, 10 + index, (large,)))
    buffer.pp_set_config(64, 1)  # another one, by all
    if rank == 0:
        buffer.pp_send(filled(rank, 0, (16,)), behind)
    if rank == 1:
        got = torch.empty(16)
        buffer.pp_recv(got, before)
        assert same(got, filled(before, 0, (16,)))
    buffer.destroy()  # waits until rank 1 has received


@BACKENDS
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_messages_arrive_in_order_in_both_directions(num_ranks: int, backend: str) -> None:
    run_ranks(messages, num_ranks, backend=backend)


def chain(rank: int, num_ranks: int) -> None:
    """Rank 0 sends more than may be under way; each stage adds one and passes on."""
    buffer = deep_ep.ElasticBuffer(world())
    buffer.pp_set_config(400, 2)
    for index in range(9):
        t = torch.full((100,), float(index))  # on GPUs it is used on one stream without a wait of the CPU
        if rank > 0:
            buffer.pp_recv(t, rank - 1)
            assert torch.equal(t, torch.full((100,), float(index + rank)))
        if rank + 1 < num_ranks:
            buffer.pp_send(t + 1, rank + 1)
    buffer.barrier(with_cpu_sync=True)


@BACKENDS
def test_stages_pass_on_more_than_may_be_under_way(backend: str) -> None:
    run_ranks(chain, 3, backend=backend)


def raised(call: Callable[[], Any]) -> str:
    """Return class and text of the error of a call."""
    with pytest.raises((InvalidArgument, InvalidState, MismatchError)) as caught:
        call()
    return f"{caught.type.__name__}: {caught.value}"


def _message_misuse(rank: int, num_ranks: int) -> list[str]:
    buffer = deep_ep.ElasticBuffer(world())
    t, peer = torch.ones(4), 1 - rank if num_ranks == 2 else 1
    texts = [raised(lambda: buffer.pp_send(t, peer)), raised(lambda: buffer.pp_set_config(16, 3 + rank))]
    texts.append(raised(lambda: buffer.pp_set_config(16 if rank else -1, 3)))
    buffer.pp_set_config(16, 3)
    for wrong in (
        lambda: buffer.pp_send(t, rank),
        lambda: buffer.pp_recv(t, 7),
        lambda: buffer.pp_recv(t, None),  # type: ignore[arg-type]
        lambda: buffer.pp_send(torch.ones(5), peer),
        lambda: buffer.pp_send(torch.ones(2, 2).t(), peer),
        lambda: buffer.pp_recv([1], peer),  # type: ignore[arg-type]
    ):
        texts.append(raised(wrong))
    if rank == 0:
        buffer.pp_send(t, peer)
        buffer.pp_send(torch.ones(2), peer)
        buffer.pp_send(t * 3, peer)
    else:
        before = torch.full((4,), 9, dtype=torch.int32)
        texts.append(raised(lambda: buffer.pp_recv(before, peer)))
        texts.append(raised(lambda: buffer.pp_recv(t, peer)))
        assert torch.equal(before, torch.full((4,), 9, dtype=torch.int32))
        assert torch.equal(t, torch.ones(4))
        buffer.pp_recv(t, peer)  # a message lost to an error disturbs no other
        assert torch.equal(t, torch.full((4,), 3.0))
    buffer.barrier(with_cpu_sync=True)
    return texts


@BACKENDS
def test_misuse_of_messages_is_an_error_on_the_rank_that_meets_it(backend: str) -> None:
    here, there = run_ranks(_message_misuse, 2, backend=backend)
    rules = [
        "InvalidState: pp_send needs a configuration; call pp_set_config",
        "MismatchError: pp_set_config: arguments must be equal",
        "",
        r"InvalidArgument: dst_rank_idx must be a neighbour in the ring, one of [1], got 0",
        "InvalidArgument: src_rank_idx must be a neighbour in the ring, one of [1], got 7",
        "InvalidArgument: src_rank_idx must be a neighbour in the ring, one of [1], got None",
        "InvalidArgument: t must have at most num_max_tensor_bytes=16 bytes, got 20; raise it",
        "InvalidArgument: t must be contiguous, its memory its values, got strides (1, 2)",
        "InvalidArgument: t must be a tensor, got list",
    ]
    assert [text for text, rule in zip(here, rules, strict=True) if not text.startswith(rule)] == []
    assert here[2].startswith("InvalidArgument: num_max_tensor_bytes must be a whole number of at least 1, got -1")
    assert there[2].startswith("MismatchError: pp_set_config")
    assert "others, or refused ones, on ranks [0]" in there[2]
    sent = "MismatchError: pp_recv: t must be what rank 0 sent, "
    assert there[-2].startswith(sent + "16 bytes of torch.float32, got 16 bytes of torch.int32")
    assert there[-1].startswith(sent + "8 bytes of torch.float32, got 16 bytes of torch.float32")


def _forged(rank: int, num_ranks: int) -> str:
    buffer = deep_ep.ElasticBuffer(world())
    buffer.pp_set_config(64, 1)
    if rank == 0:
        for nbytes, kind in ((-1, b"cpu"), (1 << 40, b"cpu"), (16, b"meta")):
            header = bytearray(_HEADER.pack(nbytes, b"torch.float32", kind))
            dist.send(torch.frombuffer(header, dtype=torch.uint8), 1, tag=_TAG)
        buffer.pp_send(torch.full((4,), 7.0), 1)
        dist.barrier()
        return ""
    for _ in range(3):
        with pytest.raises(ProtocolError, match="a header of rank 0 must say 0 to 64 bytes on cpu or cuda, got"):
            buffer.pp_recv(torch.empty(4), 0)
    got = torch.empty(4)
    buffer.pp_recv(got, 0)
    dist.barrier()
    return str(got.tolist())


def test_a_header_of_others_is_no_size() -> None:
    assert run_ranks(_forged, 2, backend="gloo") == ["", "[7.0, 7.0, 7.0, 7.0]"]


def _dies(rank: int, num_ranks: int) -> str:
    buffer = deep_ep.ElasticBuffer(world())
    buffer.pp_set_config(64, 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError) as caught:
        buffer.pp_recv(torch.ones(1), 1)
    return str(caught.value)


@BACKENDS
def test_a_dead_stage_is_an_error_of_the_receive(backend: str) -> None:
    text = run_ranks(_dies, 2, backend=backend, dead={1})[0]
    assert {"gloo": "pp_recv: the ranks' exchange over the process group has failed", "epee": "peer=1"}[backend] in text


def _alone(rank: int, num_ranks: int) -> None:
    buffer = deep_ep.ElasticBuffer(world())
    buffer.pp_set_config(64, 1)
    assert "one of [], got 0" in raised(lambda: buffer.pp_send(torch.ones(1), 0))
    buffer.agrs_set_config(64, 1)
    with buffer.agrs_new_session():
        out, handle = buffer.all_gather(torch.ones(2))
        handle()
    assert torch.equal(out, torch.ones(1, 2))


def test_a_rank_alone_gathers_and_has_nobody_to_send_to() -> None:
    run_ranks(_alone, 1)


def gathered(num_ranks: int, index: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what a gather of `filled` tensors must give."""
    return torch.stack([filled(rank, index, shape, dtype) for rank in range(num_ranks)])


def sessions(rank: int, num_ranks: int) -> None:
    buffer = deep_ep.ElasticBuffer(world(), explicitly_destroy=True)
    shapes = [(4, 3), (5,), (), (0, 2)]
    num_bytes = sum(buffer.get_agrs_num_max_session_bytes(world(), shapes, dtype) for dtype in DTYPES)
    buffer.agrs_set_config(num_bytes, len(DTYPES))
    kept = []
    for session in range(3):
        with buffer.agrs_new_session():
            calls = []
            for index, dtype in enumerate(DTYPES):  # all outstanding at the same time, waited for from the last one on
                inputs = [filled(rank, session + index, shape, dtype) for shape in shapes]
                if (session + index) % 2:
                    rows = buffer.agrs_get_inplace_tensor(shapes, dtype)
                    for row, given in zip(rows, inputs, strict=True):
                        row.copy_(given)
                    inputs = rows
                calls.append((index, dtype, inputs, buffer.all_gather(inputs)))
            for index, dtype, _, (*outs, handle) in reversed(calls):
                handle()
                handle()
                for shape, out in zip(shapes, outs, strict=True):
                    assert same(out, gathered(num_ranks, session + index, shape, dtype))
                kept.append((outs[0], gathered(num_ranks, session + index, shapes[0], dtype)))
        with buffer.agrs_new_session(enabled=False):
            assert raised(lambda: buffer.all_gather(torch.ones(1))).startswith("InvalidState: all_gather needs")
    assert all(same(out, want) for out, want in kept)  # results outlive sessions
    buffer.destroy()


@BACKENDS
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sessions_gather_in_rank_order(num_ranks: int, backend: str) -> None:
    run_ranks(sessions, num_ranks, backend=backend)


def inplace(rank: int, num_ranks: int) -> None:
    buffer = deep_ep.ElasticBuffer(world())
    buffer.agrs_set_config(1 << 12, 8)
    buffer.create_agrs_session()
    row = buffer.agrs_get_inplace_tensor((2, 3), torch.float32)
    assert row.shape == (2, 3)
    row.copy_(filled(rank, 0, (2, 3)))
    out, handle = buffer.all_gather(row)
    handle()
    assert out[rank].data_ptr() == row.data_ptr()
    assert same(out, gathered(num_ranks, 0, (2, 3)))
    row += 1  # gathered a second time it is a tensor like others
    more, handle = buffer.all_gather(row)
    handle()
    assert same(more, gathered(num_ranks, 0, (2, 3)) + 1)
    assert more.data_ptr() != out.data_ptr()
    seen = buffer.agrs_get_inplace_tensor((6,), torch.float32)
    seen.copy_(filled(rank, 2, (6,)))
    shaped, handle = buffer.all_gather(seen.view(3, 2).view(torch.int32))  # its memory, otherwise seen
    part, _ = buffer.all_gather(seen[:2])
    buffer.destroy_agrs_session()  # waits for the gathers
    assert same(shaped, gathered(num_ranks, 2, (3, 2)).view(torch.int32))
    assert same(part, gathered(num_ranks, 2, (6,))[:, :2].contiguous())
    assert raised(handle).startswith("InvalidState: handle of all_gather: its session has ended")


@BACKENDS
def test_an_in_place_tensor_is_the_ranks_row(backend: str) -> None:
    run_ranks(inplace, 2, backend=backend)


def _session_misuse(rank: int, num_ranks: int) -> list[str]:
    buffer = deep_ep.ElasticBuffer(world())
    texts = [raised(buffer.destroy_agrs_session)]
    buffer.create_agrs_session()
    texts += [raised(buffer.create_agrs_session), raised(lambda: buffer.all_gather(torch.ones(1)))]
    texts.append(raised(lambda: buffer.agrs_set_config(64, 2)))
    buffer.destroy_agrs_session()
    texts.append(raised(lambda: buffer.agrs_set_config(64, 2 + rank)))
    buffer.agrs_set_config(64, 2)
    with buffer.agrs_new_session():
        fitting = torch.ones(8)
        for mine in (
            fitting if rank else torch.ones(4),  # shapes differ
            fitting if rank else fitting.to(torch.int32),  # dtypes
            fitting if rank else torch.ones(8, 2)[:, 0],  # one refuses
            fitting if rank else torch.ones(8).to_sparse(),
            fitting if rank else torch.ones(4, dtype=torch.complex64).conj(),
            fitting if rank else [],
            fitting if rank else None,
            torch.ones(9),  # all refuse
        ):
            texts.append(raised(lambda mine=mine: buffer.all_gather(mine)))  # type: ignore[misc]
        texts.append(raised(lambda: buffer.agrs_get_inplace_tensor((9,), torch.float32)))
        texts.append(raised(lambda: buffer.agrs_get_inplace_tensor((-1,), torch.float32)))
        texts.append(raised(lambda: buffer.agrs_get_inplace_tensor((1,), "f4")))  # type: ignore[arg-type]
        out, handle = buffer.all_gather(fitting + rank)  # refused calls take nothing
        handle()
        assert torch.equal(out, torch.stack([torch.ones(8) + each for each in range(2)]))
        texts.append(raised(lambda: buffer.all_gather(torch.ones(1))))
        buffer.all_gather(torch.ones(0))
        texts.append(raised(lambda: buffer.all_gather(torch.ones(0))))
    return texts


@BACKENDS
def test_misuse_of_sessions_is_an_error_on_all_ranks_alike(backend: str) -> None:
    here, there = run_ranks(_session_misuse, 2, backend=backend)
    equal, tensor = (
        "MismatchError: all_gather: arguments must be equal",
        "InvalidArgument: t must be ",
    )
    room = (
        "InvalidArgument: t must fit into the session of num_max_session_bytes=64 and num_max_all_gathers_per_session=2"
    )
    rules = [
        "InvalidState: destroy_agrs_session: no session is open",
        "InvalidState: create_agrs_session: a session is open",
        "InvalidState: all_gather needs agrs_set_config, and then a session",
        "InvalidState: agrs_set_config must not be called in a session",
        "MismatchError: agrs_set_config: arguments must be equal",
        equal,
        equal,
        tensor + "contiguous, its memory its values, got strides (2,)",
        tensor + "contiguous, its memory its values, got torch.sparse_coo",
        tensor + "contiguous, its memory its values, got strides (1,), is_conj True",
        "InvalidArgument: t must be a tensor or a sequence of at least one, got none",
        tensor + "a tensor, got NoneType",
        room + ", got 96 bytes in 1 calls",
        room + ", got 96 bytes",
        "InvalidArgument: shapes must be a tuple of sizes from 0 on, or a sequence of such, got (-1,)",
        "InvalidArgument: dtype must be a torch.dtype, got 'f4'",
        room + ", got 96 bytes in 2 calls",
        room + ", got 64 bytes in 3 calls",
    ]
    for texts, theirs in ((here, {}), (there, dict.fromkeys(range(7, 12), equal))):
        for index, (text, rule) in enumerate(zip(texts, rules, strict=True)):
            assert text.startswith(theirs.get(index, rule)), text


def _hints(rank: int, num_ranks: int) -> None:
    hints = deep_ep.ElasticBuffer
    page = 2 << 20
    assert hints.get_pp_buffer_size_hint(1, 1) == page
    assert hints.get_pp_buffer_size_hint(page + 1, 3) == align_up((page + 32) * 12, page)
    assert hints.get_agrs_num_max_session_bytes(world(), (5,), torch.float32) == 64
    assert hints.get_agrs_num_max_session_bytes(world(), [(5,), (2, 8)], torch.bfloat16) == 32 + 64
    assert hints.get_agrs_buffer_size_hint(world(), page + 1) == 2 * page
    for wrong in (
        lambda: hints.get_pp_buffer_size_hint(0, 1),
        lambda: hints.get_agrs_buffer_size_hint(world(), 0.5),  # type: ignore[arg-type]
    ):
        assert "must be a whole number of at least 1" in raised(wrong)
    buffer = hints(world())
    for refused in (lambda: buffer.engram_write(torch.ones(1)), lambda: buffer.engram_fetch(torch.ones(1))):
        with pytest.raises(UnsupportedError, match="epee has no remote storage; keep the table on each rank"):
            refused()


def test_sizes_are_deep_eps_and_remote_storage_is_refused() -> None:
    run_ranks(_hints, 2)
