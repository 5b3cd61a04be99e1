"""Proxies as processes: data between them, epochs, and every way in which a proxy, its rank or a partner ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from epee.errors import CommTimeoutError, InvalidArgument, ProtocolError, ResourceError, UnsupportedError
from epee.link.proxy import rank as rank_module
from epee.link.proxy.process import ProxyProcess
from epee.link.proxy.rank import Proxy, shape_for
from epee.link.proxy.setup import send_message
from epee.link.proxy.words import ABORT, ASLEEP, BY_RANK, CHUNKS, PROCESS_ENDED, PROXY_FAILED, chunk_word
from epee.memory.claim import process_start_time
from epee.view.transport.auth import Token

from ..pairs import num_open, over_both, until
from .kernels import Streams, me, meet_all, proxies, run_all

ROOT = Path(__file__).resolve().parents[3]
PAIR = ((0,), (1,))
SMALL = {"slot_bytes": 4096, "row_bytes": 64}


@contextlib.contextmanager
def serving(
    islands: Sequence[Sequence[int]] = PAIR, *args: int, meets: bool = True, engine: str = "tcp", **sizes: int
) -> Iterator[list[Proxy]]:
    """Yield proxies of all ranks, which have met."""
    made = proxies(islands, *args, engine=engine, **sizes)
    try:
        if meets:
            meet_all(made)
        yield made
    finally:
        for proxy in made:
            proxy.close()


def pids(proxy: Proxy) -> list[int]:
    """Return the processes of a proxy."""
    return [helper.process.pid for helper in proxy._helpers]


# ---- data


@over_both
@pytest.mark.parametrize(
    ("islands", "num_processes"),
    [(PAIR, 1), (PAIR, 2), (((0,), (1, 2, 3)), 1), (((0, 2), (1, 3)), 1), (((0,), (1,), (2,)), 1)],
)
def test_every_byte_arrives(islands: tuple[tuple[int, ...], ...], num_processes: int, engine: str) -> None:
    sizes = {} if islands == PAIR else {"slot_bytes": 262_144}
    with serving(islands, 4, num_processes, engine=engine, **sizes) as made:
        run_all([Streams(proxy, 12) for proxy in made])
        assert [proxy.epoch for proxy in made] == [0] * len(made)
        assert [proxy.lost for proxy in made] == [()] * len(made)


@over_both
@pytest.mark.parametrize("num_slots", [1, 2])
def test_few_slots_carry_a_thousand_chunks(num_slots: int, engine: str) -> None:
    with serving(PAIR, num_slots, engine=engine, **SMALL) as made:
        run_all([Streams(proxy, 1000) for proxy in made])


def test_payloads_are_authenticated_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_LINK_MAC", "1")
    with serving() as made:
        run_all([Streams(proxy, 9) for proxy in made])


def test_kernels_that_wake_nobody_are_served_too() -> None:
    with serving(**SMALL) as made:
        until(lambda: all(proxy.words[proxy.shape.process_words(0) + ASLEEP] for proxy in made))
        run_all([Streams(proxy, 50, wakes=False) for proxy in made])


def test_a_proxy_goes_on_in_the_next_epoch_and_nothing_of_the_last_one_counts() -> None:
    with serving(PAIR, 4, 2, **SMALL) as made:
        run_all([Streams(proxy, 30) for proxy in made])
        before = [pids(proxy) for proxy in made]
        # chunks of the old epoch that nobody takes
        for proxy in made:
            posted = proxy.shape.stream_words(0, CHUNKS)[0]
            proxy.words[posted + 30 % 4] = chunk_word(30, 16)
        meet_all(made, epoch=1, first=1000)
        run_all([Streams(proxy, 30, first=1000) for proxy in made])
        assert [proxy.epoch for proxy in made] == [1, 1]
        assert [pids(proxy) for proxy in made] == before


def test_a_partner_that_the_next_epoch_leaves_out_changes_nothing() -> None:
    with serving(((0,), (1,), (2,)), 2, **SMALL) as made:
        run_all([Streams(proxy, 6) for proxy in made])
        meet_all(made[:2], epoch=1, first=100)
        until(lambda: made[2].lost == (0, 1))
        assert [proxy.lost for proxy in made[:2]] == [(), ()]
        before = [bytes(proxy.staging.mapping) for proxy in made[:2]]
        stale = Streams(made[2], 20, first=6)
        for _ in range(50):
            stale.step()
            time.sleep(0.002)
        assert [bytes(proxy.staging.mapping) for proxy in made[:2]] == before
        streams = [Streams(proxy, 30, first=100, partners=(i,)) for proxy, i in zip(made[:2], (0, 0), strict=True)]
        run_all(streams)


@pytest.mark.nixl
def test_a_proxy_over_nixl_serves_one_epoch() -> None:
    """Memory that NIXL may still write is never used for another one."""
    with serving(engine="nixl", **SMALL) as made:
        run_all([Streams(proxy, 5) for proxy in made])
        with pytest.raises(UnsupportedError, match="serves one epoch; make another for the next one"):
            meet_all(made, epoch=1, first=100)
        for proxy in made:
            proxy.check()


@pytest.mark.nixl
def test_partners_with_other_engines_are_refused() -> None:
    made = []
    for rank, engine in enumerate(("tcp", "nixl")):
        shape = shape_for(rank, PAIR, 4, 4096, 64)
        made.append(Proxy(rank, PAIR, [me()], shape, address="127.0.0.1", engine=engine))
    try:
        with pytest.raises(ProtocolError, match="EPEE_LINK"):
            meet_all(made)
    finally:
        for proxy in made:
            proxy.close()


def test_a_proxy_over_an_engine_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_module, "why_missing", lambda: "none of the wheels is installed")
    with pytest.raises(UnsupportedError, match="a proxy over NIXL: none of the wheels is installed"):
        proxies(PAIR, engine="nixl", **SMALL)
    with pytest.raises(InvalidArgument, match="engine must be one of tcp, nixl, got 'rdma'"):
        proxies(PAIR, engine="rdma", **SMALL)


def test_the_engine_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_LINK", "nixl")
    monkeypatch.setattr(rank_module, "why_missing", lambda: "not here")
    with pytest.raises(UnsupportedError, match="not here"):
        proxies(PAIR, engine="", **SMALL)


def test_a_rank_alone_has_a_proxy_without_partners() -> None:
    with serving(((0,),), **SMALL) as made:
        assert made[0].epoch == 0


# ---- who serves whom


def test_partners_of_other_sizes_are_refused() -> None:
    made = []
    for rank in (0, 1):
        shape = shape_for(rank, PAIR, 4, 4096 + 16 * rank, 64)
        made.append(Proxy(rank, PAIR, [me()], shape, address="127.0.0.1"))
    try:
        with pytest.raises((ProtocolError, CommTimeoutError), match=r"cannot serve each other|no introduction"):
            meet_all(made, timeout_s=20.0)
        assert [proxy.epoch for proxy in made] == [-1, -1]
        for proxy in made:
            proxy.check()  # it may be given other partners
    finally:
        for proxy in made:
            proxy.close()


def test_a_partner_that_does_not_come_is_named() -> None:
    with serving(meets=False, **SMALL) as made:
        offers = [proxy.offer() for proxy in made]
        with pytest.raises(CommTimeoutError, match=r"no connection with rank\(s\) 1") as caught:
            made[0].meet(0, 0, {1: offers[1]}, Token(secrets.token_bytes(32)), b"j" * 16, 0.5)
        assert caught.value.ranks == (1,)
        meet_all(made)  # both of them, now
        run_all([Streams(proxy, 5) for proxy in made])


def test_a_partner_with_another_token_is_refused() -> None:
    with serving(meets=False, **SMALL) as made:
        with pytest.raises(CommTimeoutError, match="no connection with rank"):
            meet_all(made, timeout_s=1.0, tokens=[Token(b"a" * 32), Token(b"b" * 32)])
        assert [proxy.epoch for proxy in made] == [-1, -1]


def test_endpoints_of_ranks_that_are_no_partners_are_refused() -> None:
    with serving(meets=False, **SMALL) as made:
        (mine,) = made[0].offer()
        for wrong in ({0: (mine,)}, {1: (mine, mine)}, {1: ()}):
            with pytest.raises(InvalidArgument, match=r"endpoints must be those of partners \(1,\), 1 each"):
                made[0].meet(0, 0, wrong, Token(b"t" * 32), b"j" * 16, 1.0)


def test_a_proxy_meets_nobody_without_an_offer() -> None:
    before = pytest.raises(ProtocolError, match="before it has offered an endpoint")
    with serving(meets=False, **SMALL) as made, before:
        made[0].meet(0, 0, {}, Token(b"t" * 32), b"j" * 16, 1.0)


# ---- the end of a proxy


@over_both
@pytest.mark.parametrize("process", [0, 1])
def test_a_killed_process_is_noticed_at_once_by_rank_and_partners(process: int, engine: str) -> None:
    with serving(PAIR, 4, 2, engine=engine, **SMALL) as made:
        first, second = made
        run_all([Streams(proxy, 6) for proxy in made])
        victim, other = pids(first)[process], pids(first)[1 - process]
        os.kill(victim, signal.SIGKILL)
        until(lambda: first.words[ABORT])
        assert first.words[ABORT] == PROCESS_ENDED
        with pytest.raises(ResourceError, match=rf"rank 0 has no proxy.*process {victim} was killed by signal 9"):
            first.check()
        until(lambda: first._helpers[1 - process].process.poll() is not None)
        assert other != victim
        until(lambda: second.lost == (0,))
        second.check()
        with pytest.raises(ResourceError, match="killed by signal 9"):
            first.offer()


@over_both
def test_a_kill_in_the_middle_of_a_call_ends_it_on_both_sides(engine: str) -> None:
    for steps in range(0, 60, 15):
        with serving(PAIR, 2, engine=engine, **SMALL) as made:
            streams = [Streams(proxy, 10_000) for proxy in made]
            for _ in range(steps):
                for each in streams:
                    each.step()
            os.kill(pids(made[1])[0], signal.SIGKILL)
            with pytest.raises(ResourceError, match="killed by signal 9"):
                run_all(streams, bound_s=20)
            until(lambda: made[0].lost == (1,))
            for each in streams:
                each.step()  # kernels may go on storing: no harm


def test_a_stopped_process_is_named_when_it_is_asked_and_goes_on_later() -> None:
    with serving(**SMALL) as made:
        os.kill(pids(made[0])[0], signal.SIGSTOP)
        with pytest.raises(CommTimeoutError, match=rf"{pids(made[0])[0]} of the proxy of rank 0 does not answer"):
            made[0].offer(timeout_s=0.3)
        os.kill(pids(made[0])[0], signal.SIGCONT)
        assert len(made[0].offer()) == 1, "the late answer to the first request is not taken for this one"
        run_all([Streams(proxy, 5) for proxy in made])


def test_a_word_that_cannot_be_ends_the_proxy_with_its_reason() -> None:
    with serving(**SMALL) as made:
        posted = made[0].shape.stream_words(0, CHUNKS)[0]
        made[0].words[posted] = chunk_word(5, 16)
        made[0].wake()
        until(lambda: made[0].words[ABORT])
        assert made[0].words[ABORT] in (PROXY_FAILED, PROCESS_ENDED)
        with pytest.raises(
            ResourceError, match=r"exited with 1 .*a kernel has posted chunk 5 in slot 0, where 0 is next"
        ):
            until(lambda: made[0].check())
        until(lambda: made[1].lost == (0,))


def test_an_aborted_proxy_ends_and_its_partner_sees_a_loss() -> None:
    with serving(**SMALL) as made:
        made[0].abort()
        assert made[0].words[ABORT] == BY_RANK
        until(lambda: made[0]._helpers[0].process.poll() == 0)
        with pytest.raises(ResourceError, match="the rank has ended its proxy"):
            made[0].check()
        until(lambda: made[1].lost == (0,))


def test_a_loss_can_be_read_after_an_orderly_end() -> None:
    with serving(**SMALL) as made:
        made[0].abort()
        until(lambda: made[1].lost == (0,))
        made[1].close()
        assert made[1].lost == (0,)


@over_both
def test_a_chunk_that_was_posted_before_an_orderly_end_still_arrives(engine: str) -> None:
    with serving(engine=engine, **SMALL) as made:
        posted = made[0].shape.stream_words(0, CHUNKS)[0]
        arrived = made[1].shape.stream_words(0, CHUNKS)[2]
        helper = made[0]._helpers[0]
        os.kill(helper.process.pid, signal.SIGSTOP)
        try:
            made[0]._is_closing = True
            made[0].words[posted] = chunk_word(0, 16)
            send_message(helper.control, {"do": "end", "number": -1})  # read before the chunk is seen
        finally:
            os.kill(helper.process.pid, signal.SIGCONT)
        until(lambda: made[1].words[arrived] == chunk_word(0, 16))


@over_both
def test_an_orderly_end_is_no_loss_until_something_is_posted_for_it(engine: str) -> None:
    with serving(engine=engine, **SMALL) as made:
        run_all([Streams(proxy, 5) for proxy in made])
        made[0].close()
        made[0].close()
        time.sleep(0.1)
        assert made[1].lost == ()
        made[1].check()
        posted = made[1].shape.stream_words(0, CHUNKS)[0]
        made[1].words[posted + 5 % 4] = chunk_word(5, 16)
        made[1].wake()
        until(lambda: made[1].lost == (0,))
        with pytest.raises(ResourceError, match="it has been closed"):
            made[0].check()


def test_nothing_is_left_of_a_closed_proxy() -> None:
    with serving(**SMALL):
        pass
    before = num_open()
    with serving(PAIR, 4, 2, **SMALL) as made:
        numbers = [pid for proxy in made for pid in pids(proxy)]
    made.clear()  # the memory lives as long as something refers to it
    assert num_open() <= before
    assert not any(Path(f"/proc/{pid}").exists() for pid in numbers)


# ---- the end of a rank

_RANK = """
import sys, time
from tests.link.proxy.kernels import Streams, meet_all, proxies
made = proxies(((0,), (1,)), 4, 2, slot_bytes=4096, row_bytes=64)
meet_all(made)
print(*(helper.process.pid for proxy in made for helper in proxy._helpers), flush=True)
streams = [Streams(proxy, 1 << 20) for proxy in made]
while True:
    if sys.argv[1] == "busy":
        for each in streams:
            each.step()
    else:
        time.sleep(0.1)
"""


@pytest.mark.parametrize(("state", "sign"), [("busy", signal.SIGKILL), ("idle", signal.SIGTERM)])
def test_proxies_end_with_their_rank(state: str, sign: int) -> None:
    rank = subprocess.Popen([sys.executable, "-c", _RANK, state], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert rank.stdout is not None
        numbers = [int(text) for text in rank.stdout.readline().split()]
        assert len(numbers) == 4
        assert all(process_start_time(pid) > 0 for pid in numbers)
        rank.send_signal(sign)
        rank.wait()
        until(lambda: all(process_start_time(pid) < 0 for pid in numbers))
    finally:
        rank.kill()
        rank.wait()
        if rank.stdout is not None:
            rank.stdout.close()


def test_a_dead_neighbour_does_not_hold_up_its_island() -> None:
    """Rank 1 is another process, which takes nothing of what arrives at rank 0."""
    islands = ((0, 1), (2, 3))
    neighbour = subprocess.Popen(["sleep", "100"])
    made: list[Proxy] = []
    try:
        shape = shape_for(0, islands, 2, 4096, 64)
        both = [me(), (neighbour.pid, process_start_time(neighbour.pid))]
        made.append(Proxy(0, islands, both, shape, address="127.0.0.1"))
        made.append(Proxy(2, islands, [me(), me()], shape, address="127.0.0.1"))
        meet_all(made)
        streams = [Streams(made[0], 20, positions=(0,)), Streams(made[1], 20)]
        until(lambda: [each.step() for each in streams] and streams[1].sent[0, CHUNKS] == 4)
        for _ in range(100):
            for each in streams:
                each.step()
            time.sleep(0.002)
        assert streams[1].sent[0, CHUNKS] == 4, "two slots at each end wait for the neighbour"
        assert streams[0].sent[0, CHUNKS] == 20
        neighbour.kill()
        neighbour.wait()
        run_all(streams)
    finally:
        neighbour.kill()
        neighbour.wait()
        for proxy in made:
            proxy.close()


def test_an_interrupt_of_the_terminal_is_left_to_the_rank() -> None:
    with serving(**SMALL) as made:
        for proxy in made:
            os.kill(pids(proxy)[0], signal.SIGINT)
        run_all([Streams(proxy, 5) for proxy in made])


# ---- the process itself


def test_a_proxy_has_no_torch() -> None:
    with serving(meets=False, **SMALL) as made:
        maps = Path(f"/proc/{pids(made[0])[0]}/maps").read_text()
        assert "libtorch" not in maps
        assert "memfd:epee-proxy-0-page" in maps


def _cpus(proxy: Proxy) -> list[set[int]]:
    return [os.sched_getaffinity(pid) for pid in pids(proxy)]


def test_processes_run_on_the_named_cpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("EPEE_PROXY_CPUS", ",".join(map(str, cpus)))
    with serving(PAIR, 3, 3, meets=False, **SMALL) as made:
        assert _cpus(made[0]) == [{cpus[i % len(cpus)]} for i in range(3)]


def test_a_cpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_PROXY_CPUS", "1023")
    with pytest.raises(InvalidArgument, match="EPEE_PROXY_CPUS must name CPUs that this process may use, got 1023"):
        proxies(PAIR, **SMALL)


def test_without_a_name_they_run_where_the_rank_runs() -> None:
    with serving(meets=False, **SMALL) as made:
        assert _cpus(made[0]) == [os.sched_getaffinity(0)]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"island": [(1, 1)]}, "island must name the processes of ranks"),
        ({"island": []}, "island must name"),
        ({"shape": shape_for(0, ((0,), (1,), (2,)), 4, 4096, 64)}, "must have 1 partners and 1 readers"),
        ({"islands": ((0,), (2,))}, "islands must hold each rank once"),
    ],
)
def test_arguments_that_do_not_fit_each_other_are_refused(changes: dict[str, Any], rule: str) -> None:
    good: dict[str, Any] = {"islands": PAIR, "island": [me()], "shape": shape_for(0, PAIR, 4, 4096, 64)}
    with pytest.raises(InvalidArgument, match=rule):
        Proxy(0, **(good | changes))


def test_a_forked_child_leaves_the_proxy_to_its_parent() -> None:
    with serving(**SMALL) as made:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                made[0].close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        run_all([Streams(proxy, 5) for proxy in made])


def test_the_loop_has_no_thread_of_its_own() -> None:
    assert ProxyProcess.__init__.__code__.co_names.count("Thread") == 0
    with serving(**SMALL) as made:
        assert len(os.listdir(f"/proc/{pids(made[0])[0]}/task")) == 1
