"""The links of a group and their thread: who pumps, who stands back, what goes out at the end, what is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
import weakref
from multiprocessing.connection import Connection

import pytest

from epee.errors import ResourceError
from epee.link import poller
from epee.link.frames import NO_WORD
from epee.link.poller import Links
from epee.link.seam import LinkLoss
from tests.forked import Program
from tests.harness import server

from .pairs import (
    BOUND_S,
    KEY_A,
    KEY_B,
    Connected,
    End,
    Memory,
    link_over,
    link_threads,
    links_over,
    num_open,
    over_both,
    pattern,
    reaped,
    reset,
    two_ends,
    until,
)

FEW = 64 << 10


@over_both
def test_the_threads_move_bytes_when_nobody_waits(engine: str) -> None:
    with two_ends(engine=engine) as (a, b, memory_a, memory_b):
        a.links.write(1, 0, b"forth", 1, 11, 1)
        b.links.write(0, 0, b"back", 2, 22, 2)
        until(lambda: memory_b.words[1] == 11 and memory_a.words[2] == 22)
        assert memory_b.bytes[:5] == b"forth"
        assert memory_a.bytes[:4] == b"back"


@over_both
def test_a_peer_that_reads_late_gets_everything_from_the_thread(engine: str) -> None:
    with two_ends(4 << 20, starts=False, engine=engine) as (a, b, _, memory_b):
        a.start()
        data = memoryview(pattern(4 << 20, 1))
        for value in range(1, 13):
            a.links.write(1, 0, data, 1, value, value)
        assert not a.link.is_flushed
        b.start()
        until(lambda: memory_b.words[1] == 12)
        assert memory_b.bytes == data
        until(lambda: a.link.is_flushed and not a.links._writers)


@over_both
def test_questions_are_answered_by_the_thread(engine: str) -> None:
    with two_ends(engine=engine) as (a, b, memory_a, memory_b):
        memory_b.on_ask = lambda number, _: b.links.tell(0, number, [number + 1])
        for number in range(50):
            a.links.ask(1, [(1, 1)], number)
        until(lambda: len(memory_a.others) == 50)
        assert [number for _, number, _ in memory_a.others] == list(range(50))


@over_both
def test_two_writers_and_a_pumping_thread_at_once(engine: str) -> None:
    with two_ends(engine=engine) as (a, b, memory_a, memory_b):
        done = threading.Event()

        def write(word: int) -> None:
            for value in range(1, 400):
                data = bytes([value % 251]) * 5000
                a.links.write(1, FEW * word, data, word, value, value)
                if not value % 5:
                    b.links.write(0, FEW * word, data, word, value, value)

        def pump() -> None:
            while not done.is_set():
                a.links.pump()
                b.links.pump()

        workers = [threading.Thread(target=write, args=(word,)) for word in (1, 2)]
        pumps = [threading.Thread(target=pump) for _ in range(2)]
        for thread in workers + pumps:
            thread.start()
        for thread in workers:
            thread.join(BOUND_S)
        until(lambda: memory_b.words[1] == memory_b.words[2] == 399)
        until(lambda: memory_a.words[1] == memory_a.words[2] == 395)
        done.set()
        for thread in pumps:
            thread.join(BOUND_S)
        for word in (1, 2):
            assert [value for at, value, _ in memory_b.seen if at == word] == list(range(1, 400))
            assert bytes(memory_b.bytes[FEW * word : FEW * word + 5000]) == bytes([399 % 251]) * 5000


def test_the_thread_stands_back_while_a_caller_pumps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "BACK_S", BOUND_S)  # however slow this machine is, the caller counts as pumping
    with two_ends() as (a, b, _, memory_b):
        movers: list[int] = []
        handle = b.links._handle
        monkeypatch.setattr(b.links, "_handle", lambda events: movers.append(threading.get_ident()) or handle(events))
        b.links.pump()
        movers.clear()
        a.links.write(1, 0, b"x" * 8, 1, 1, 1)
        until(lambda: (b.links.pump() and memory_b.words[1]) or memory_b.words[1])
        assert set(movers) == {threading.get_ident()}
        b.links.rest()
        a.links.write(1, 0, b"x" * 8, 1, 2, 1)
        until(lambda: memory_b.words[1] == 2)  # nobody but the thread has moved it
        assert b.links._thread.ident in movers
        a.links.rest()


def test_the_thread_comes_back_by_itself_when_a_caller_only_stops_pumping() -> None:
    with two_ends() as (a, b, _, memory_b):
        b.links.pump()
        a.links.write(1, 0, b"x" * 8, 1, 1, 1)
        until(lambda: memory_b.words[1] == 1)
        until(lambda: b.idles)


def test_a_pump_leaves_the_work_to_the_thread_that_has_the_lock() -> None:
    with two_ends() as (a, b, _, memory_b):
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with b.links.lock:
                entered.set()
                leave.wait(BOUND_S)

        holder = threading.Thread(target=hold)
        holder.start()
        assert entered.wait(BOUND_S)
        a.links.write(1, 0, b"x" * 8, 1, 1, 1)
        assert [b.links.pump() for _ in range(100)] == [False] * 100
        assert memory_b.words[1] == 0
        leave.set()
        holder.join(BOUND_S)
        until(lambda: memory_b.words[1] == 1)


@over_both
def test_an_interrupt_by_a_signal_leaves_no_lock_behind(engine: str) -> None:
    """A real handler that raises, many times, while this thread pumps: the lock would be the main thread's for ever."""
    gc.collect()  # a handler that raises in a finalizer of what other tests have left is reported,
    gc.disable()  # and in a collector's hook, of which hypothesis has one
    with two_ends(engine=engine) as (a, b, _, memory_b):
        num_interrupts, value, deadline, is_over = 0, 0, time.monotonic() + 3.0, False

        def raise_(*_: object) -> None:
            nonlocal num_interrupts, is_over
            if num_interrupts == 150 or time.monotonic() > deadline:  # no interrupt comes behind the loop
                signal.setitimer(signal.ITIMER_PROF, 0.0)
                is_over = True
                return
            num_interrupts += 1
            raise KeyboardInterrupt

        old = signal.signal(signal.SIGPROF, raise_)
        try:
            signal.setitimer(signal.ITIMER_PROF, 0.0005, 0.0005)
            while not is_over:
                with contextlib.suppress(
                    KeyboardInterrupt
                ):  # one that comes below, in the midst of suppressing another
                    while not is_over:
                        with contextlib.suppress(KeyboardInterrupt):
                            for _ in range(20):
                                b.links.pump()
                                a.links.pump()
                            value += 1
                            a.links.write(1, 0, b"x" * 8, 1, value, 1)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.signal(signal.SIGPROF, old)
            gc.enable()
        assert num_interrupts
        assert not a.links.lock._is_owned()
        assert not b.links.lock._is_owned()
        a.links.rest()
        b.links.rest()
        a.links.write(1, 0, b"y" * 8, 2, 1, 1)
        until(lambda: memory_b.words[2] == 1)


# ---- losses


@pytest.mark.parametrize("how", ["closes", "resets", "garbage"])
@over_both
def test_a_loss_is_told_once_and_behind_what_came_before(how: str, engine: str) -> None:
    memory_a, memory_b = Memory(1000), Memory(1000)
    link_a, link_b = links_over(engine, memory_a, memory_b)
    a = End(link_a).start()
    link_b.write(0, b"last", 1, 5, 0)
    until(lambda: (link_b.pump(), memory_a.words[1] == 5)[1])
    if how == "garbage":
        link_b._socket.sendall(bytes(100))
    reset(link_b._socket) if how == "resets" else link_b.close() if how == "closes" else None
    until(lambda: a.lost)
    assert link_a.lost is {"closes": LinkLoss.CLOSED, "resets": LinkLoss.RESET, "garbage": LinkLoss.DAMAGED}[how]
    assert link_a.fd == -1
    a.links.write(1, 0, b"x", 1, 1, 1)
    a.links.ask(1, [(0, 0)], 1)
    a.links.tell(1, 1, [1])
    assert a.links.pump() is False
    link_b.close()
    a.end()
    a.links.join(BOUND_S)
    assert a.lost == [1]


@over_both
def test_the_loss_of_one_peer_leaves_the_others(engine: str) -> None:
    memories = [Memory(1000) for _ in range(6)]
    pairs = [links_over(engine, memories[2 * k], memories[2 * k + 1], peers=(k + 1, 0)) for k in range(3)]
    lost: list[int] = []
    links = Links([ours for ours, _ in pairs])
    links.start(lost.append, int)
    pairs[1][1].close()
    until(lambda: lost == [2])
    for k in (0, 2):
        links.write(k + 1, 0, b"still here", 1, 7, 0)
        until(lambda k=k: (pairs[k][1].pump() and memories[2 * k + 1].words[1]) or memories[2 * k + 1].words[1])
    for _, theirs in pairs:
        theirs.close()
    links.end(lambda: True, int)
    links.join(BOUND_S)
    assert 2 in lost


# ---- the end


@over_both
def test_the_end_sends_what_is_queued_and_says_so_last(engine: str) -> None:
    with two_ends(4 << 20, starts=False, engine=engine) as (a, b, _, memory_b):
        a.start()
        data = memoryview(pattern(4 << 20, 2))
        for value in range(1, 9):
            a.links.write(1, 0, data, 1, value, value)
        closed: list[bool] = []
        a.links.end(lambda: True, lambda: closed.append(a.link.fd == -1))
        assert not closed
        b.start()
        a.links.join(BOUND_S)
        until(lambda: memory_b.words[1] == 8)
        assert memory_b.bytes == data
        assert closed == [True]
        until(lambda: b.lost == [0])
        assert a.lost == [], "who ends has lost nobody"


@over_both
def test_the_last_bytes_arrive_though_the_peer_goes_on_writing(engine: str) -> None:
    """What comes to a closed socket is answered by a reset, which would destroy what is still under way."""
    for turn in range(8 if engine == "tcp" else 3):  # `end` waits for what is in hand, each time in vain
        with two_ends(2 << 20, engine=engine) as (a, b, _, memory_b):
            data = memoryview(pattern(2 << 20, turn))
            with b.links.lock:  # the peer reads late
                a.links.write(1, 0, data, 1, 1, 1)
                a.end()
                for _ in range(20):
                    b.link.write(0, b"progress", NO_WORD, 0, 3)
                    time.sleep(0.0005)
            until(lambda: b.lost)
            assert memory_b.words[1] == 1
            assert memory_b.bytes == data


@over_both
def test_the_thread_goes_on_while_others_need_it(engine: str) -> None:
    with two_ends(engine=engine) as (a, b, memory_a, _):
        needed = [True]
        a.links.end(lambda: not needed[0], int)
        for value in range(1, 20):
            b.links.write(0, 0, b"for others", 1, value, value)
            until(lambda value=value: memory_a.words[1] == value)
        assert a.link.lost is None
        needed[0] = False
        a.links.join(BOUND_S)
        assert not a.links._thread.is_alive()
        assert a.link.fd == -1


def test_the_thread_does_not_linger_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "LINGER_S", 0.05)
    with two_ends() as (a, _, _, _):
        a.links.end(lambda: False, int)
        a.links.join(BOUND_S)
        assert not a.links._thread.is_alive()


@over_both
def test_a_peer_that_never_reads_nor_closes_delays_the_end_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(poller, "FLUSH_S", 0.2)
    memory = Memory(10)
    link, theirs = links_over(engine, memory, memory)
    a = End(link).start()
    for _ in range(30):
        a.links.write(1, 0, memoryview(bytes(1 << 20)), NO_WORD, 0, 0)
    assert not link.is_flushed
    a.end()
    a.links.join(BOUND_S)
    assert not a.links._thread.is_alive()
    assert link.fd == -1
    theirs.close()


def test_to_end_twice_is_to_end_once() -> None:
    with two_ends() as (a, _, _, _):
        closed: list[int] = []
        a.links.end(lambda: True, lambda: closed.append(1))
        a.links.end(lambda: True, lambda: closed.append(2))
        a.links.join(BOUND_S)
        a.links.end(lambda: True, lambda: closed.append(3))
        assert closed == [1]
        assert a.links.pump() is False
        a.links.write(1, 0, b"", 1, 1, 1)


@over_both
def test_links_that_were_never_started_can_be_ended(engine: str) -> None:
    opened = num_open()
    link, theirs = links_over(engine, Memory(10), Memory(10))
    theirs.close()
    end = End(link)
    end.end()
    end.links.join(BOUND_S)
    assert num_open() == opened


@over_both
def test_a_thread_that_cannot_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    opened = num_open()
    link, theirs = links_over(engine, Memory(10), Memory(10))
    theirs.close()
    end = End(link)

    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(end.links._thread, "start", refuse)
    with pytest.raises(ResourceError, match="no thread can be started"):
        end.start()
    end.end()
    assert num_open() == opened


@over_both
def test_many_times_make_and_end_leaves_nothing(engine: str) -> None:
    gc.collect()
    opened, num_threads = num_open(), threading.active_count()
    left = []
    for turn in range(200 if engine == "tcp" else int(os.environ.get("EPEE_NIXL_TURNS", "20"))):  # an agent takes 50 ms
        with two_ends(1000, engine=engine) as (a, b, memory_a, memory_b):
            a.links.write(1, 0, b"x" * 100, 1, turn + 1, 0)
            left += [weakref.ref(each) for each in (a.links, a.link, b.links, b.link, memory_a, memory_b)]
        del a, b, memory_a, memory_b
    assert num_open() == opened
    assert threading.active_count() == num_threads
    assert not link_threads()
    assert poller._ending == []
    gc.collect()
    assert not any(each() for each in left)


@over_both
def test_what_links_refer_to_goes_with_them_without_a_collection(engine: str) -> None:
    """Mirrors are large; they must not wait for the garbage collector."""

    def make() -> weakref.ref[object]:
        memory = Memory(1000)
        link, theirs = links_over(engine, memory, Memory(1000))
        end = End(link).start()
        memory.links = end.links  # a sink that refers to the links, as `LinkReader` does
        theirs.close()
        end.end()
        end.links.join(BOUND_S)
        return weakref.ref(link)

    gc.collect()
    gc.disable()
    try:
        assert make()() is None
    finally:
        gc.enable()


_WRITES_AND_ENDS = """
import socket, sys
from epee.link.poller import Links
from tests.link.pairs import KEY_A, KEY_B, Connected, Memory, link_over

connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
links = Links([link_over(sys.argv[2], 1, Connected(connection, KEY_A, KEY_B), Memory(10))])
links.start(int, int)
for value in range(1, 17):
    links.write(1, 0, memoryview(bytes([value]) * (1 << 20)), 1, value, 0)
links.end(lambda: True, int)
"""


_WRITES_AND_IS_GONE = """
import os, socket, sys
from epee.link.poller import Links
from tests.link.pairs import KEY_A, KEY_B, Connected, Memory, link_over

connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
links = Links([link_over(sys.argv[2], 1, Connected(connection, KEY_A, KEY_B), Memory(10))])
links.start(int, int)
links.write(1, 0, b"last words", 1, 16, 0)
links.end(lambda: False, int)
os._exit(0)
"""


@over_both
@pytest.mark.parametrize(
    "text", [_WRITES_AND_ENDS, _WRITES_AND_IS_GONE], ids=["at its end", "without its exit handlers"]
)
def test_a_process_that_ends_at_once_sends_what_it_has_written(text: str, engine: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(BOUND_S)
        with Program(text, str(listener.getsockname()[1]), engine) as program:
            connection, _ = listener.accept()
            memory = Memory(1 << 20)
            link = link_over(engine, 0, Connected(connection, KEY_B, KEY_A), memory)
            try:
                until(lambda: (link.pump() and link.lost) or link.lost)
            finally:
                link.close()
            said, _ = program.communicate(BOUND_S)
            assert program.returncode == 0, said
    assert link.lost is (LinkLoss.CLOSED if text == _WRITES_AND_ENDS else link.lost)
    assert memory.words[1] == 16
    if text == _WRITES_AND_ENDS:
        assert bytes(memory.bytes) == bytes([16]) * (1 << 20)
    else:
        assert memory.bytes[:10] == b"last words"


# ---- forks


def _fork_with_links(told: Connection, engine: str) -> None:
    """Fork while links are there; the child stays, the parent ends its links. In a process of its own."""
    memory_a, memory_b = Memory(1000), Memory(1000)
    link_a, link_b = links_over(engine, memory_a, memory_b)
    a = End(link_a).start()
    b = End(link_b).start()
    wake, sleep = os.pipe()
    child = os.fork()
    if not child:
        still = [fd for fd in os.listdir("/proc/self/fd") if "socket" in _target(fd)]
        os.close(sleep)
        told.send(("child", a.links._is_closed, len(still), a.links.pump()))
        os.read(wake, 1)  # until the parent has gone
        os._exit(0)
    os.close(wake)
    a.links.write(1, 0, b"works", 1, 1, 1)
    until(lambda: memory_b.words[1] == 1)
    link_a._socket.close()  # without a word, as by a kill
    until(lambda: b.lost == [0])
    told.send(("parent", link_b.lost))
    b.end()
    b.links.join(BOUND_S)
    os.close(sleep)
    os.waitpid(child, 0)


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@over_both
def test_a_forked_child_keeps_no_connection_alive(engine: str) -> None:
    ours, theirs = server.context().Pipe(duplex=False)
    process = server.context().Process(target=_fork_with_links, args=(theirs, engine))
    process.start()
    theirs.close()
    told = {}
    with reaped(process, ours):
        for _ in range(2):
            assert ours.poll(BOUND_S)
            name, *rest = ours.recv()
            told[name] = rest
        process.join(BOUND_S)
        assert process.exitcode == 0
    assert told["child"][0] is True
    assert told["child"][2] is False
    assert told["parent"] == [LinkLoss.CLOSED]
