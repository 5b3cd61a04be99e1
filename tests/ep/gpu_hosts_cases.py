"""Cases of GPU buffers over several hosts: refusals, losses, graphs, streams; on the emulated GPU or a real one.

Every function runs on one rank (`tests/csrc/test_buffer_hosts_emulated.py`, `tests/gpu/test_buffer_hosts_gpu.py`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee import InvalidArgument, InvalidState, MismatchError, PeerError, UnsupportedError
from epee.engine.outbox import has_left
from epee.gpu import island
from tests.ep.buffer_cases import same_bits
from tests.ep.gpu_buffer_cases import HIDDEN, NUM_LOCAL, NUM_TOPK, make, times_sent, tokens
from tests.harness.meeting import meet

BOUND_S = 15.0  # of a call that a loss ends, with a timeout of 60 s or more
PATIENT_S = 90.0


def summed(x: torch.Tensor, idx: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return the sums of a combine of the rows that came: of nothing it is +0."""
    return x * times_sent(idx, num_ranks).to(x) + 0


def check_round(buffer: epee.Buffer, seed: int, num_tokens: int = 9) -> None:
    """A dispatch and a combine, whose sums are exact."""
    x, idx, weights = tokens(buffer, num_tokens, seed)
    got = buffer.dispatch(x, idx, weights)
    assert isinstance(got.x, torch.Tensor)
    want = summed(x, idx, buffer.num_ranks)
    same_bits(buffer.combine(got.x, got.handle).x.cpu(), want.cpu(), f"round {seed}")


def refusals(rank: int, num_ranks: int) -> None:
    """Calls that one rank cannot make, or nobody, leave the buffer as it is; all ranks raise."""
    with make(num_ranks, timeout=PATIENT_S) as buffer:
        x, idx, weights = tokens(buffer, 7)
        check_round(buffer, 1)
        bad = idx.clone()
        if rank == 0:
            bad[3, 1] = NUM_LOCAL * num_ranks
        with pytest.raises(InvalidArgument if rank == 0 else MismatchError, match=r"topk_idx (must hold|holds a bad)"):
            buffer.dispatch(x, bad, weights)
        check_round(buffer, 2)
        given = x.float() if rank == num_ranks - 1 else x
        with pytest.raises((InvalidArgument, MismatchError), match=r"no wider than|rank \d refused its call"):
            buffer.dispatch(given, idx, weights)
        check_round(buffer, 3)
        if rank == 0:  # unlike arguments
            weights = None  # type: ignore[assignment]
        with pytest.raises(MismatchError, match="ranks disagree about"):
            buffer.dispatch(x, idx, weights)
        check_round(buffer, 4)
        got = buffer.dispatch(x, idx)
        mask = torch.ones(7, num_ranks, dtype=torch.bool, device=x.device)
        y = got.x
        assert isinstance(y, torch.Tensor)
        half = x.half()
        back = torch.zeros(len(y), NUM_TOPK, device=x.device)
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("layout must be 'rank'", lambda: buffer.dispatch(x, idx, layout="expert")),
            ("topk_idx must be the routing", lambda: buffer.dispatch(x, is_token_in_rank=mask)),
            ("capacity must be None", lambda: buffer.dispatch(x, idx, capacity=4)),
            ("x must be bfloat16", lambda: buffer.dispatch(half, idx)),
            ("topk_weights of combine must be None", lambda: buffer.combine(y, got.handle, topk_weights=back)),
            ("y must be bfloat16", lambda: buffer.combine(y.half(), got.handle)),
            ("bias must be bfloat16", lambda: buffer.combine(y, got.handle, bias=x.float())),
            ("sync is no part", buffer.sync),
            ("of_sizes is no part", lambda: of_sizes(buffer)),
            ("source_tokens", lambda: got.handle.source_tokens),
        ]
        for what, call in calls:
            with pytest.raises(UnsupportedError, match=what):
                call()
        same_bits(buffer.combine(y, got.handle).x, summed(x, idx, num_ranks), "after refusals")
        buffer.barrier()
        assert buffer.all_gather_bytes(bytes([rank])) == [bytes([each]) for each in range(num_ranks)]
        check_round(buffer, 5)
    for options, what in (
        ({"dtype": torch.float32}, "dtype must be torch.bfloat16"),
        ({"wide_partials": True}, "wide_partials must be False"),
    ):
        with pytest.raises(UnsupportedError, match=what):
            make(num_ranks, **options)


def of_sizes(buffer: epee.Buffer) -> epee.Buffer:
    """Ask for a buffer of other sizes."""
    sizes = {"num_experts": NUM_LOCAL * buffer.num_ranks, "num_topk": NUM_TOPK, "max_tokens_per_rank": 4}
    return buffer.of_sizes(hidden=HIDDEN, **sizes)


def too_many_rows(rank: int, num_ranks: int) -> None:
    """Rows beyond the room of one rank: all ranks raise the same before any row moves."""
    with make(num_ranks, max_recv_rows=6, timeout=PATIENT_S) as buffer:
        x, idx, weights = tokens(buffer, 8)
        with pytest.raises(
            InvalidArgument, match=rf"rank 1 would receive {8 * num_ranks} rows, its rank layout holds 6"
        ):
            buffer.dispatch(x, torch.full_like(idx, NUM_LOCAL), weights)
        check_round(buffer, 1, num_tokens=1)


def refused_combine(rank: int, num_ranks: int) -> None:
    """A combine that one rank cannot make ends on all ranks without a time-out, and so does the buffer."""
    with make(num_ranks, timeout=PATIENT_S) as buffer:
        x, idx, weights = tokens(buffer, 7)
        got = buffer.dispatch(x, idx, weights)
        y = got.x
        assert isinstance(y, torch.Tensor)
        synchronize(buffer)
        meet("dispatched", rank, num_ranks)  # a dispatch that has not ended would fail as well
        start = time.monotonic()
        with pytest.raises((InvalidArgument, MismatchError, epee.CommTimeoutError)):
            combine_to_its_end(buffer, y[:, :8] if rank == 0 else y, got.handle)
        with pytest.raises(InvalidState, match="serves no further call"):
            buffer.dispatch(x, idx, weights)
        assert time.monotonic() - start < BOUND_S


def combine_to_its_end(buffer: epee.Buffer, y: torch.Tensor, handle: epee.Handle) -> None:
    """Combine, and raise what the kernel reports."""
    buffer.combine(y, handle)
    synchronize(buffer)
    buffer.check()


def synchronize(buffer: epee.Buffer) -> None:
    """Wait for all work of the GPU."""
    if buffer.config.device.type == "cuda":
        torch.cuda.synchronize()


def until_it_fails(buffer: epee.Buffer) -> None:
    """Make calls; the first ones may still end well: their chunks were under way."""
    for seed in range(1000):
        check_round(buffer, 2 + seed)


def loss(rank: int, num_ranks: int, victim: int, kills_proxy: bool) -> list[str]:
    """A rank, or its proxy, is killed: calls of all that live end with an error that names it, and so do later ones."""
    buffer = make(num_ranks, timeout=PATIENT_S)
    check_round(buffer, 1)
    meet("before", rank, num_ranks)
    if rank == victim and not kills_proxy:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == victim:
        path: Any = buffer._path
        path.machine.island.proxy._helpers[0].process.kill()
    texts, start = [], time.monotonic()
    living = [each for each in range(num_ranks) if kills_proxy or each != victim]
    for _ in range(2):
        with pytest.raises(PeerError) as raised:
            until_it_fails(buffer)
        assert victim in raised.value.ranks, str(raised.value)
        texts.append(str(raised.value))
    assert time.monotonic() - start < BOUND_S
    meet("failed", living.index(rank), len(living))
    buffer.close()
    with pytest.raises(InvalidState, match="closed"):
        check_round(buffer, 9)
    return texts


def loss_in_call(rank: int, num_ranks: int, victim: int, kills_proxy: bool) -> str:
    """The same while the others wait in a dispatch: their kernels end, long before their time-out."""
    buffer = make(num_ranks, timeout=PATIENT_S)
    check_round(buffer, 1)
    path: Any = buffer._path
    store = dist.distributed_c10d._get_default_store()
    if rank == victim:
        store.wait([f"waiting/{other}" for other in range(num_ranks) if other != victim], timedelta(seconds=BOUND_S))
        if not kills_proxy:
            os.kill(os.getpid(), signal.SIGKILL)
        path.machine.island.proxy._helpers[0].process.kill()
    else:
        device = path.machine.device
        watcher = threading.Thread(target=_tell_wait, args=(device, device.waiting(), store, f"waiting/{rank}"))
        watcher.start()
    start = time.monotonic()
    with pytest.raises(PeerError) as raised:
        until_it_fails(buffer)
    assert victim in raised.value.ranks, str(raised.value)
    assert time.monotonic() - start < BOUND_S
    living = [each for each in range(num_ranks) if kills_proxy or each != victim]
    meet("failed", living.index(rank), len(living))
    buffer.close()
    return str(raised.value)


def _tell_wait(device: Any, before: int, store: Any, key: str) -> None:
    """Store a key once a kernel waits for another rank."""
    deadline = time.monotonic() + BOUND_S
    while device.waiting() == before and time.monotonic() < deadline:
        time.sleep(0.001)
    store.set(key, "yes")


def closed_in_call(rank: int, num_ranks: int) -> None:
    """A thread closes the buffer while a call waits: the call ends with `AbortedError`."""
    buffer = make(num_ranks, timeout=PATIENT_S)
    check_round(buffer, 1)
    meet("made", rank, num_ranks)
    if rank == 0:
        device: Any = buffer._path.machine.device  # type: ignore[attr-defined]

        def close(before: int) -> None:
            deadline = time.monotonic() + BOUND_S
            while device.waiting() == before and time.monotonic() < deadline:
                time.sleep(0.001)
            buffer.close()

        closer = threading.Thread(target=close, args=(device.waiting(),))
        closer.start()
        with pytest.raises(epee.AbortedError):
            check_round(buffer, 2)
        closer.join()
    meet("over", rank, num_ranks)
    buffer.close()


def unlike_slots(rank: int, num_ranks: int) -> None:
    """Ranks hold different numbers of results, so each uses other slots than its neighbours."""
    with make(num_ranks, num_slots=3, timeout=PATIENT_S) as buffer:
        held: list[tuple[epee.Dispatched, torch.Tensor]] = []
        for step in range(8):
            x, idx, weights = tokens(buffer, 5 + step, step)
            got = buffer.dispatch(x, idx, weights)
            assert isinstance(got.x, torch.Tensor)
            held.append((got, got.x.clone()))
            held = held[-(1 + (rank + step) % 4) :]
            y = buffer.combine_input(got.handle) if (rank + step) % 3 else torch.empty_like(got.x)
            y.copy_(got.x)
            same_bits(buffer.combine(y, got.handle).x, summed(x, idx, num_ranks), f"step {step}")
            for old, copy in held:
                assert isinstance(old.x, torch.Tensor)
                same_bits(old.x, copy, f"a result of before, step {step}")


def closed(rank: int, num_ranks: int) -> None:
    """Calls of the others say which rank has closed the buffer."""
    buffer = make(num_ranks, timeout=PATIENT_S)
    check_round(buffer, 1)
    meet("made", rank, num_ranks)
    if rank == 0:
        buffer.close()
    meet("closed", rank, num_ranks)
    if rank:
        words = buffer._exchange.engine.peer_regions.words[0]
        deadline = time.monotonic() + BOUND_S
        while not has_left(words) and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(PeerError, match="rank 0 has closed the buffer"):
            check_round(buffer, 2)
        buffer.close()
    meet("over", rank, num_ranks)


def failed_construction(rank: int, num_ranks: int) -> None:
    """What fails on one rank alone, between the offers and the meeting of the proxies, is raised by all at once."""
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(island, "make_routes", _no_routes)
        with pytest.raises(epee.EpeeError, match="no routes can be made"):
            make(num_ranks, timeout=PATIENT_S)
    assert time.monotonic() - start < BOUND_S
    meet("over", rank, num_ranks)


def _no_routes(*_: Any) -> None:
    raise InvalidArgument("no routes can be made")


def nothing_is_kept(rank: int, num_ranks: int) -> None:
    """A refused combine keeps nothing alive, and no memory of proxies stays mapped behind `close`."""
    buffer = make(num_ranks, timeout=PATIENT_S)
    x, idx, _ = tokens(buffer, 7)
    got = buffer.dispatch(x, idx)
    y = got.x
    assert isinstance(y, torch.Tensor)
    back = torch.zeros(len(y), NUM_TOPK, device=x.device)
    rows = y.clone()
    kept = weakref.ref(rows)
    with contextlib.suppress(UnsupportedError):
        buffer.combine(rows, got.handle, topk_weights=back)
    del rows
    gc.collect()
    assert kept() is None
    check_round(buffer, 1)
    assert "proxy-" in Path("/proc/self/maps").read_text()
    del got, y
    meet("checked", rank, num_ranks)
    buffer.close()
    gc.collect()
    assert "proxy-" not in Path("/proc/self/maps").read_text()


def last_combine(rank: int, num_ranks: int) -> None:
    """A last combine ends well behind the end of ranks that needed none of this one's rows."""
    buffer = make(num_ranks, timeout=PATIENT_S)
    first = NUM_LOCAL * (num_ranks - 1)  # of the last rank, alone on its host; it sends to all, the others to rank 0
    x, idx, _ = tokens(buffer, 6)
    idx = idx if rank == num_ranks - 1 else torch.arange(NUM_TOPK, device=idx.device).expand(6, NUM_TOPK) % NUM_LOCAL
    assert first > 0
    got = buffer.dispatch(x, idx.contiguous())
    assert isinstance(got.x, torch.Tensor)
    if rank == num_ranks - 1:
        for other in range(first // NUM_LOCAL):
            words = buffer._exchange.engine.peer_regions.words[other]
            deadline = time.monotonic() + BOUND_S
            while not has_left(words) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert has_left(words)
    same_bits(buffer.combine(got.x, got.handle).x, summed(x, idx, num_ranks), "the last combine")
    synchronize(buffer)
    buffer.close()
    meet("over", rank, num_ranks)


def graphs(rank: int, num_ranks: int) -> None:
    """Dispatch and combine in a CUDA graph, replayed with other rows and routings."""
    with make(num_ranks, timeout=PATIENT_S) as buffer:
        check_round(buffer, 1)
        x, idx, weights = tokens(buffer, 11)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            got = buffer.dispatch(x, idx, weights, sync=False)
            assert isinstance(got.x, torch.Tensor)
            back = buffer.combine(got.x, got.handle)
        for seed in range(8):
            for mine, new in zip((x, idx, weights), tokens(buffer, 11, seed), strict=True):
                mine.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            buffer.check()
            same_bits(back.x.cpu(), summed(x, idx, num_ranks).cpu(), f"replay {seed}")
        check_round(buffer, 2)


def streams(rank: int, num_ranks: int) -> None:
    """Calls on the buffer's own stream, and on two streams of the caller in turn."""
    with make(num_ranks, timeout=PATIENT_S) as buffer:
        others = [torch.cuda.Stream(), torch.cuda.Stream()]
        for step in range(6):
            with torch.cuda.stream(others[step % 2]):
                x, idx, weights = tokens(buffer, 9, step)
                got = buffer.dispatch(x, idx, weights, async_op=True)
                got.event.wait()
                assert isinstance(got.x, torch.Tensor)
                back = buffer.combine(got.x, got.handle, async_op=True)
                back.event.wait()
                same_bits(back.x.cpu(), summed(x, idx, num_ranks).cpu(), f"step {step}")
