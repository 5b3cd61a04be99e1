"""`LatencyBuffer` over several hosts: every result against the oracle, calls in flight, disagreement, damage, bytes."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import epee
from epee.engine.outbox import SLEEPERS
from epee.ep.config import BufferConfig
from epee.ep.latency.wire import SectionHeader, Wire
from epee.errors import AbortedError, InvalidState, MismatchError, ProtocolError, StaleHandleError, UnsupportedError
from epee.link.topology import Topology
from epee.reference import latency as oracle
from epee.reference import latency_hosts
from epee.reference.latency import Sent
from tests.ep.latency_cases import (
    BF16,
    PLAIN,
    Shape,
    bits,
    check_dispatched,
    check_round,
    combine,
    dispatch,
    expert_outputs,
    inputs,
    make,
)

from . import interface_bytes, run_on_hosts, run_on_loopbacks

SHAPE = Shape()
PLACEMENTS = [(0, 0, 1, 1), (0, 1), (0, 1, 1, 1), (0, 0, 0, 1), (0, 1, 0, 1)]
NUM_TOKENS = (6, 3, 0, 5)


def everything(rank: int, num_ranks: int, hosts: Sequence[int]) -> int:
    """Check each kind of row, both halves with hooks, weights given late, sums in float32, and one-sided routing."""
    torch.set_num_threads(1)
    tokens = NUM_TOKENS[:num_ranks]
    with make(SHAPE) as buffer:
        seed = 0
        for payload in PLAIN:
            for use_hook, late_weights, dtype in ((False, True, BF16), (True, False, torch.float32)):
                seed += 1
                options: Any = {"payload": payload, "use_hook": use_hook, "late_weights": late_weights}
                check_round(buffer, SHAPE, tokens, seed, partial_dtype=dtype, hosts=hosts, **options)
        for routing in ("one expert", "nowhere", "everywhere"):
            seed += 1
            check_round(buffer, SHAPE, [6] * num_ranks, seed, routing=routing, hosts=hosts, zero_copy=True)
        check_round(buffer, SHAPE, [0] * num_ranks, seed + 1, hosts=hosts)
        assert buffer.all_gather_bytes(bytes([rank])) == [bytes([peer]) for peer in range(num_ranks)]
        mask = torch.ones(num_ranks, dtype=torch.int32, device="cpu")
        check_round(buffer, SHAPE, tokens, seed + 2, hosts=hosts, active_ranks=mask, late_weights=True)
        assert mask.all()
        assert buffer.sync().tolist() == [1] * num_ranks
        check_round(buffer, SHAPE, tokens, seed + 3, hosts=hosts)
        assert buffer.nbytes > 0
    return seed


@pytest.mark.hosts
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_results_on_hosts_are_the_oracles(placement: tuple[int, ...]) -> None:
    run_on_hosts(everything, placement, placement, timeout_s=100)


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 1, 0)])
def test_results_on_loopbacks_are_the_oracles(placement: tuple[int, ...]) -> None:
    run_on_loopbacks(everything, placement, placement, timeout_s=100)


def _random_rounds(rank: int, num_ranks: int, hosts: Sequence[int], count: int) -> None:
    torch.set_num_threads(1)
    shape = Shape(num_experts=12, hidden=512, num_topk=4, max_tokens=7)
    chosen = random.Random(7)
    mask = torch.ones(num_ranks, dtype=torch.int32, device="cpu")
    with make(shape, num_slots=3) as buffer:
        for seed in range(count):
            check_round(
                buffer,
                shape,
                [chosen.randrange(8) for _ in range(num_ranks)],
                seed,
                payload=chosen.choice(PLAIN),
                routing=chosen.choice(("random", "random", "everywhere", "one expert", "nowhere")),
                use_hook=chosen.random() < 0.5,
                zero_copy=chosen.random() < 0.5,
                late_weights=chosen.random() < 0.3,
                partial_dtype=chosen.choice((BF16, torch.float32)),
                hosts=hosts,
                active_ranks=mask if chosen.random() < 0.5 else None,
            )
        assert mask.all()


@pytest.mark.hosts
def test_random_rounds() -> None:
    run_on_hosts(_random_rounds, (0, 0, 1, 1), (0, 0, 1, 1), 200, timeout_s=110)


@pytest.mark.hosts
def test_random_rounds_on_three_uneven_hosts() -> None:
    run_on_hosts(_random_rounds, (0, 1, 2, 1), (0, 1, 2, 1), 60, timeout_s=110)


def _in_flight(rank: int, num_ranks: int, hosts: Sequence[int]) -> None:
    """Call hooks in another order on each rank, for dispatches and combines."""
    torch.set_num_threads(1)
    num_slots = 3
    with make(SHAPE, num_slots=num_slots) as buffer:
        for seed in range(4):
            pending_calls = []
            for nth in range(num_slots):
                given = inputs(SHAPE, NUM_TOKENS[:num_ranks], 10 * seed + nth)
                packed = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens)
                pending_calls.append((given, packed, dispatch(buffer, given[rank], return_hook=True)))
            with pytest.raises(InvalidState, match=f"{num_slots} calls have been sent and not received"):
                dispatch(buffer, given[rank])
            order = list(range(num_slots))
            random.Random(seed * num_ranks + rank).shuffle(order)
            for nth in order:
                _, packed, got = pending_calls[nth]
                assert got.hook is not None
                got.hook()
                check_dispatched(got, packed[rank])
            backs = []
            for nth, (_, packed, got) in enumerate(pending_calls):
                backs.append(combine(buffer, expert_outputs(packed, nth)[rank], got, return_hook=True))
            for nth in reversed(order):
                given, packed, _ = pending_calls[nth]
                hook = backs[nth].hook
                assert hook is not None
                hook()
                want = latency_hosts.combine(given, packed, expert_outputs(packed, nth), hosts)[rank]
                assert torch.equal(bits(backs[nth].x), bits(want))


@pytest.mark.hosts
def test_hooks_may_be_called_in_another_order_on_each_rank() -> None:
    run_on_hosts(_in_flight, (0, 0, 1, 1), (0, 0, 1, 1), timeout_s=100)


def _several_sizes(rank: int, num_ranks: int, hosts: Sequence[int]) -> None:
    """Calls of two sizes in one memory, made for as many bytes as they need on one host."""
    torch.set_num_threads(1)
    shapes = [Shape(), Shape(num_experts=4, hidden=1024, num_topk=3, max_tokens=9)]
    sizes = [
        {"num_experts": s.num_experts, "hidden": s.hidden, "num_topk": s.num_topk, "max_tokens_per_rank": s.max_tokens}
        for s in shapes
    ]
    needed = max(epee.LatencyBuffer.bytes_for(num_ranks, **each) for each in sizes)
    with epee.LatencyBuffer.of_bytes(dist.group.WORLD, needed) as room:
        buffers = [room.of_sizes(**each) for each in sizes]
        for seed in range(6):
            which = seed % 2
            check_round(buffers[which], shapes[which], NUM_TOKENS[:num_ranks], seed, hosts=hosts)
        with pytest.raises(epee.InvalidArgument, match="make it with more"):
            room.of_sizes(num_experts=4, hidden=1 << 14, num_topk=3, max_tokens_per_rank=99)


def _refusals(rank: int, num_ranks: int, hosts: Sequence[int]) -> list[str]:
    """Wrong arguments, different calls, an interrupt: all ranks hear of it, and the buffer goes on."""
    torch.set_num_threads(1)
    texts = []
    with make(SHAPE) as buffer:
        given = inputs(SHAPE, (6,) * num_ranks, 3)[rank]
        error = epee.InvalidArgument if rank == 0 else MismatchError
        with pytest.raises(error, match="topk_idx must hold expert ids") as caught:
            dispatch(buffer, given if rank else Sent(given.x, given.topk_idx + 8, given.topk_weights))
        texts.append(str(caught.value))
        got = dispatch(buffer, given)
        y = buffer.combine_input(got.handle).zero_()
        pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
            (lambda: dispatch(buffer, given), lambda: dispatch(buffer, given, use_fp8=True)),
            (lambda: dispatch(buffer, given), lambda: combine(buffer, y, got)),
            (lambda: combine(buffer, y, got), lambda: combine(buffer, y, got, topk_weights=given.topk_weights)),
        ]
        for pair in pairs:
            with pytest.raises(MismatchError) as caught:
                pair[rank == num_ranks - 1]()
            texts.append(str(caught.value))
        check_round(buffer, SHAPE, (6,) * num_ranks, 4, hosts=hosts, late_weights=True)
        wire: Any = buffer._rows.wire  # type: ignore[union-attr]
        part_for, half_for = wire.part_for, wire.half_for

        def press(*args: Any) -> None:
            raise KeyboardInterrupt

        for name, call in (
            ("half_for", lambda: dispatch(buffer, given)),
            ("part_for", lambda: combine(buffer, y, got)),
        ):
            if rank == 1:
                setattr(wire, name, press if name == "part_for" else _once(half_for))
            with pytest.raises(KeyboardInterrupt if rank == 1 else MismatchError):
                call()
            wire.half_for, wire.part_for = half_for, part_for
            check_round(buffer, SHAPE, (6,) * num_ranks, 5, hosts=hosts)
        error_of_caller = epee.InvalidArgument("of a caller of this buffer")
        if rank == 0:
            buffer.refuse(error_of_caller)
        else:
            with pytest.raises(MismatchError, match="of a caller"):
                dispatch(buffer, given)
        check_round(buffer, SHAPE, (6,) * num_ranks, 6, hosts=hosts)
    return texts


def _once(half_for: Callable[..., Any]) -> Callable[..., Any]:
    """Return what interrupts the first call and passes the others through: those that tell of it."""
    calls: list[int] = []

    def pressed(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return half_for(*args)

    return pressed


def _damaged(rank: int, num_ranks: int, hosts: Sequence[int]) -> None:
    """What a peer says is checked before it is a size or an index."""
    torch.set_num_threads(1)
    with make(SHAPE) as buffer:
        wire: Any = buffer._rows.wire  # type: ignore[union-attr]
        given = inputs(SHAPE, (6,) * num_ranks, 3, "everywhere")
        publish, half_of = wire.publish, wire.half_of

        def too_many(host: int, seq: int, head: SectionHeader, half: Any, reason: bytes = b"") -> None:
            publish(host, seq, head._replace(num_rows=1 << 20), half, reason)

        def no_tokens(host: int, seq: int, head: SectionHeader, half: Any, reason: bytes = b"") -> None:
            half[312:].view(np.int32)[:1] = -5
            publish(host, seq, head, half, reason)

        def more_than_fit(host: int, seq: int, head: SectionHeader, half: Any, reason: bytes = b"") -> None:
            publish(host, seq, head._replace(num_rows=SHAPE.max_tokens + 1), half, reason)

        for lie in (too_many, more_than_fit, no_tokens):
            wire.publish = lie
            with pytest.raises(ProtocolError, match="memory is corrupt"):
                dispatch(buffer, given[rank])
            wire.publish = publish
        packed = oracle.dispatch(given, SHAPE.num_experts, SHAPE.max_tokens)
        got = dispatch(buffer, given[rank])
        check_dispatched(got, packed[rank])

        def no_rows(src: int, seq: int, nbytes: int) -> Any:
            half = half_of(src, seq, nbytes).copy()
            half[312:].view(np.uint64)[2 : 3 * 2 + 2 : 3] = 1 << 30
            return half

        wire.half_of = no_rows
        with pytest.raises(ProtocolError, match="rows 0"):
            combine(buffer, expert_outputs(packed, 1)[rank], got)
        wire.half_of = half_of
        with pytest.raises(InvalidState, match="before different calls"):
            dispatch(buffer, given[rank])
        buffer.sync()
        check_round(buffer, SHAPE, (6,) * num_ranks, 4, hosts=hosts)


def _strange(rank: int, num_ranks: int, hosts: Sequence[int]) -> None:
    """A mask without one who comes, calls that are open, another kind of buffer."""
    torch.set_num_threads(1)
    with make(SHAPE) as buffer:
        given = inputs(SHAPE, NUM_TOKENS[:num_ranks], 1)[rank]
        got = dispatch(buffer, given, return_hook=True)
        with pytest.raises(InvalidState, match="not received"):
            buffer.sync()
        assert got.hook is not None
        got.hook()
        y = buffer.combine_input(got.handle)
        mask = torch.ones(num_ranks, dtype=torch.int32, device="cpu")
        mask[1] = 0
        assert buffer.sync(mask).tolist() == [1] * num_ranks, "who lives and comes is in"
        buffer.sync()
        with pytest.raises(MismatchError if rank == 0 else StaleHandleError):
            dispatch(buffer, given) if rank == 0 else combine(buffer, y, got)
        buffer.barrier()
        check_round(buffer, SHAPE, NUM_TOKENS[:num_ranks], 2, hosts=hosts)
    with pytest.raises(InvalidState, match="closed"):
        dispatch(buffer, given)


@pytest.mark.parametrize("function", [_several_sizes, _refusals, _damaged])
def test_what_does_not_need_a_network(function: Callable[..., Any]) -> None:
    run_on_loopbacks(function, (0, 0, 1, 1), (0, 0, 1, 1), timeout_s=100)


def test_sync_brings_all_ranks_together_or_says_that_it_cannot() -> None:
    run_on_loopbacks(_strange, (0, 1, 1, 0), (0, 1, 1, 0), timeout_s=100)


def test_gpus_on_several_hosts_are_refused() -> None:
    config = BufferConfig(2, 8, 512, 2, 6, BF16, is_latency=True)
    buffer: Any = object.__new__(epee.LatencyBuffer)
    with pytest.raises(UnsupportedError, match="a LatencyBuffer on GPUs lives on one host so far"):
        buffer._over_hosts(config, Topology(0, ["a", "b"]), True)


# ---- bytes

WIDE = Shape(num_experts=16, hidden=7168, num_topk=4, max_tokens=32)


def _sent(rank: int, num_ranks: int, hosts: Sequence[int], use_fp8: bool) -> tuple[int, int]:
    """Return what the interface of this rank's host sends in some calls, and what the records make."""
    torch.set_num_threads(1)
    given = inputs(WIDE, [32] * num_ranks, 5)
    calls = 3
    with make(WIDE) as buffer:
        check_round(buffer, WIDE, [1] * num_ranks, 1, hosts=hosts)
        dist.barrier()
        before = interface_bytes("/proc/self/net/dev")[1]
        dist.barrier()
        for _ in range(calls):
            got = dispatch(buffer, given[rank], use_fp8=use_fp8)
            combine(buffer, buffer.combine_input(got.handle).zero_(), got)
        dist.barrier()
        sent = interface_bytes("/proc/self/net/dev")[1] - before
        dist.barrier()
    topology = Topology(rank, [str(host) for host in hosts])
    num_local = WIDE.num_experts // num_ranks
    row = 4 * (1 + 2 * WIDE.num_topk) + (WIDE.hidden + 4 * WIDE.hidden // 128 if use_fp8 else 2 * WIDE.hidden)
    total = 0
    for source, each in enumerate(given):
        owners = np.where(each.topk_idx.numpy() < 0, -1, each.topk_idx.numpy() // num_local)
        for host, ranks in enumerate(topology.hosts):
            records = int(np.isin(owners, ranks).any(1).sum())
            if hosts[source] == topology.host and host != topology.host:
                total += records * row
            if hosts[source] != topology.host and host == topology.host:
                total += records * 2 * WIDE.hidden
    return sent, calls * total


@pytest.mark.hosts
@pytest.mark.parametrize("use_fp8", [False, True])
def test_a_token_crosses_the_network_once_per_host_and_a_sum_comes_back(use_fp8: bool) -> None:
    for sent, formula in run_on_hosts(_sent, (0, 0, 1, 1), (0, 0, 1, 1), use_fp8, timeout_s=100):
        assert formula < sent <= 1.08 * formula + (64 << 10), (sent, formula)


# ---- the end


def _closing(rank: int, num_ranks: int, hosts: Sequence[int]) -> None:
    """Close in the midst of a call, leave the others in one, drop buffers; nothing stays open."""
    torch.set_num_threads(1)
    given = inputs(SHAPE, (6,) * num_ranks, 3)[rank]
    buffer = make(SHAPE)
    if rank == 0:
        wire: Any = buffer._rows.wire  # type: ignore[union-attr]
        say_waiting, waits = wire._say_waiting, threading.Event()
        wire._say_waiting = lambda seq, until: (say_waiting(seq, until), waits.set())
        closer = threading.Thread(target=lambda: (waits.wait(60.0), buffer.close()))
        closer.start()
        with pytest.raises(AbortedError, match="closed"):
            dispatch(buffer, given)
        closer.join()
        dist.barrier()
    elif rank == 1:
        with pytest.raises((epee.PeerError, epee.CommTimeoutError)):
            dispatch(buffer, given, timeout=20.0)
        dist.barrier()
    else:
        dist.barrier()
    buffer.close()
    before = 0
    for seed in range(4):
        again = make(SHAPE)
        check_round(again, SHAPE, (6,) * num_ranks, seed, hosts=hosts)
        again.close()
        del again
        gc.collect()
        dist.barrier()
        if seed == 1:
            before = _mappings()
    assert wait_until(lambda: _mappings() <= before, 20.0), (before, _mappings())


def _mappings() -> int:
    """Return how many descriptors and mappings of lent memory this process has.

    Unix sockets are left out: agents of a job connect to each other when they have something to say, be it late.
    """
    agents = {f"socket:[{line.split()[6]}]" for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(name not in agents for name in names) + Path("/proc/self/maps").read_text().count("memfd:")


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Wait for something that other threads do."""
    until = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until:
        time.sleep(0.05)
    return is_so()


def test_closing_ends_a_call_and_leaves_nothing_open() -> None:
    run_on_loopbacks(_closing, (0, 0, 1, 1), (0, 0, 1, 1), timeout_s=100)


def _says_who_sleeps(rank: int, num_ranks: int) -> None:
    """The buffer's engine has a thread asleep; a wait of the buffer's begins and ends meanwhile."""
    with make(SHAPE) as buffer:
        wire: Any = buffer._rows.wire  # type: ignore[union-attr]
        own, seen = wire._own, []
        at = own.at("head", 0)
        wire._state[SLEEPERS] = 1
        doze = Wire._doze
        try:
            Wire._doze = lambda self, *args: seen.append(self._state[SLEEPERS])  # type: ignore[method-assign]
            wire._doze(own.address + 8 * at, own.words[at])
        finally:
            Wire._doze = doze  # type: ignore[method-assign]
        seen.append(wire._state[SLEEPERS])
        wire._state[SLEEPERS] = 0
        assert seen == [2, 1]
        dist.barrier()


def test_a_wait_leaves_the_note_of_another_sleeper() -> None:
    run_on_loopbacks(_says_who_sleeps, (0, 1), timeout_s=60)
