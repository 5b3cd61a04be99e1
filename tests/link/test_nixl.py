"""The engine `nixl`: its ring, what peers may say of it, its agent's life. What both engines promise: `test_tcp.py`."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epee.errors import ForkError, InvalidArgument, ProtocolError, ResourceError, UnsupportedError
from epee.link import address, engine
from epee.link.engine import LinkMaker, chosen_engine
from epee.link.frames import ASK, NO_WORD, WRITE, Frame, FrameOpener, FrameSealer
from epee.link.meeting import Connected
from epee.link.nixl import devices, library, link
from epee.link.nixl.control import (
    ControlSink,
    Introduction,
    RingCounts,
    check,
    pack_introduction,
    parse_introduction,
)
from epee.link.nixl.ring import InRing, OutRing
from epee.link.seam import LinkLoss
from epee.link.stream import Instream, Outstream
from tests.harness import server

from .pairs import (
    BOUND_S,
    KEY_A,
    KEY_B,
    End,
    Memory,
    link_over,
    links_over,
    num_open,
    pattern,
    reaped,
    socket_pair,
    until,
)
from .test_interrupts import Interrupt

NAME = "0123456789abcdef" * 2
TOLD = Introduction(NAME, 1 << 40, 4096, b"metadata")

# ---- the ring: pure


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(100, 5000), st.booleans())
def test_a_stream_through_a_ring_of_any_size_arrives_as_it_was(seed: int, size: int, covers: bool) -> None:
    """The network is a copy of ranges, in any order, each done at some time; credit comes at some time."""
    choose = random.Random(seed)
    out, memory = Outstream(FrameSealer(KEY_A, covers)), Memory(20_000)
    into = Instream(FrameOpener(KEY_A, covers), memory)
    staging, ring = bytearray(size), bytearray(b"\xee" * size)
    writer, reader = OutRing(memoryview(staging), out), InRing(memoryview(ring), into)
    expected, num_frames, posted = bytearray(memory.bytes), 8, 0
    posts: list[list[Any]] = []
    for value in range(1, num_frames + 1):
        start = choose.randrange(10_000)
        payload = choose.randbytes(choose.choice((0, 8, 300, 3_000)))
        expected[start : start + len(payload)] = payload
        out.put((WRITE, len(payload), start, value % 16, value, 0), payload)
    turns = 0
    while len(memory.seen) < num_frames:
        turns += 1
        assert turns < 200_000
        what = choose.randrange(5)
        try:
            if what == 0:
                out.send(writer.sendmsg)
            elif what == 1 and posted < out.position:
                at, end = writer.piece(posted, choose.randint(1, size))
                assert at + end - posted <= size
                posts.append([posted, end, at, False])
                posted = end
            elif what == 2 and posts:
                start, end, at, is_there = choose.choice(posts)
                if not is_there:
                    ring[at : at + end - start] = staging[at : at + end - start]
                    next(post for post in posts if post[0] == start)[3] = True
                while posts and posts[0][3]:
                    reader.done = posts.pop(0)[1]
            elif what == 3:
                into.receive(reader.recv_into)
            else:
                writer.freed = choose.choice((writer.freed, into.position))
        except BlockingIOError:
            pass
        assert into.position <= reader.done <= posted <= out.position <= writer.freed + size
    assert memory.bytes == expected
    assert [value for _, value, _ in memory.seen] == list(range(1, num_frames + 1))
    assert memory.is_sound


def test_a_move_that_was_broken_off_is_made_again_at_the_same_place() -> None:
    out = Outstream(FrameSealer(KEY_A, False))
    staging = bytearray(1000)
    writer = OutRing(memoryview(staging), out)
    assert writer.sendmsg([b"abc", b"defg"]) == 7  # the stream has not noted it
    assert writer.sendmsg([b"abc", b"defg", b"h"]) == 8
    assert staging[:9] == b"abcdefgh\0"


# ---- what peers say


@given(st.binary(max_size=200))
def test_no_bytes_are_an_introduction_by_chance(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_introduction(payload, 4096)


def test_an_introduction_is_what_was_packed() -> None:
    assert parse_introduction(pack_introduction(TOLD), 4096) == TOLD


@pytest.mark.parametrize(
    "bad",
    [
        TOLD._replace(name="x" * 32),
        TOLD._replace(name=NAME[:31]),
        TOLD._replace(nbytes=8192),
        TOLD._replace(address=0),
        TOLD._replace(address=(1 << 64) - 4095),
        TOLD._replace(metadata=b""),
        TOLD._replace(metadata=bytes(1 << 16)),
    ],
)
def test_an_introduction_that_cannot_be_is_refused(bad: Introduction) -> None:
    with pytest.raises(ProtocolError):
        parse_introduction(pack_introduction(bad), 4096)


def control(*frames: Frame) -> ControlSink:
    """Return a sink to which these frames came, after an introduction."""
    sink = ControlSink()
    for frame in (Frame(WRITE, 3, 0, NO_WORD, 0), *frames):
        place = sink.place(frame)
        place[:] = b"abc"[: frame.nbytes]
        sink.apply(frame, place)
    return sink


def counts(posted: int, done: int, freed: int) -> Frame:
    return Frame(WRITE, 0, posted, NO_WORD, done, freed)


def test_counts_that_grow_are_kept() -> None:
    assert control(counts(5, 3, 0), counts(5, 5, 0), counts(9, 5, 2)).counts == RingCounts(9, 5, 2)


@pytest.mark.parametrize(
    "frames",
    [
        (counts(3, 5, 0),),
        (counts(5, 3, 0), counts(4, 3, 0)),
        (counts(5, 3, 0), counts(5, 2, 0)),
        (counts(5, 3, 2), counts(5, 3, 1)),
        (Frame(ASK, 0, 0, NO_WORD, 0),),
        (Frame(WRITE, 0, 0, 3, 0),),
        (Frame(WRITE, 1 << 17, 0, NO_WORD, 0),),
        (Frame(WRITE, 2, 0, NO_WORD, 0),),
    ],
)
def test_control_frames_that_cannot_be_are_refused(frames: tuple[Frame, ...]) -> None:
    with pytest.raises(ProtocolError):
        control(*frames)


def test_counts_before_an_introduction_are_refused() -> None:
    with pytest.raises(ProtocolError):
        ControlSink().apply(counts(0, 0, 0), memoryview(b""))


@pytest.mark.parametrize(("theirs", "ours"), [((4097, 0, 0), (0, 0, 0)), ((0, 0, 6), (9, 5, 0))])
def test_counts_beyond_the_ring_or_what_was_sent_are_refused(
    theirs: tuple[int, int, int], ours: tuple[int, int, int]
) -> None:
    with pytest.raises(ProtocolError):
        check(RingCounts(*theirs), RingCounts(*ours), 4096)
    check(RingCounts(4096, 0, 5), RingCounts(9, 5, 0), 4096)


# ---- damage, over NIXL


def lost(one: Any, other: Any) -> LinkLoss:
    until(lambda: (other.pump(), one.pump()) and one.lost)
    return one.lost


@pytest.mark.nixl
@pytest.mark.parametrize("what", ["garbage", "repeated", "wrong key", "bad place", "trailers"])
def test_what_cannot_be_right_in_a_ring_ends_the_link_and_nothing_of_it_is_applied(what: str) -> None:
    memory = Memory(1000)
    a, b = links_over("nixl", memory, Memory(1000))

    def frame(number: int, key: bytes = KEY_B, covers: bool = False, offset: int = 0) -> bytes:
        return b"".join(FrameSealer(key, covers).seal((WRITE, 8, offset, 1, 7, 0), number, b"evil" * 2))

    data = {
        "garbage": bytes(range(256)) * 4,
        "repeated": frame(1),
        "wrong key": frame(0, KEY_A),
        "bad place": frame(0, offset=995),
        "trailers": frame(0, covers=True),
    }[what]
    b._out._queue.append((0, 0, len(data), (data,)))
    assert lost(a, b) is LinkLoss.DAMAGED
    assert bytes(memory.bytes) == bytes([0xA5]) * 1000
    assert memory.seen == []
    a.close()
    b.close()


@pytest.mark.nixl
@pytest.mark.parametrize("said", [(1 << 23, 0, 0), (1 << 23, 1 << 23, 0), (0, 0, 1), (5, 9, 0)])
def test_a_peer_that_says_counts_that_cannot_be_is_damaged(said: tuple[int, int, int]) -> None:
    memory = Memory(1000)
    a, b = links_over("nixl", memory, Memory(1000))
    b._control.write(said[0], b"", NO_WORD, said[1], said[2])
    assert lost(a, b) is LinkLoss.DAMAGED
    assert memory.seen == []
    a.close()
    b.close()


@pytest.mark.nixl
def test_a_stranger_to_the_keys_says_nothing_that_is_used() -> None:
    """Control frames under the key of the frames themselves, and an end of `tcp`."""
    ours, theirs = socket_pair()
    a = link_over("nixl", 1, Connected(ours, KEY_A, KEY_B), Memory(1000))
    b = link_over("tcp", 0, Connected(theirs, KEY_B, KEY_A), Memory(1000))
    b.write(0, b"x", 1, 1, 1)
    assert lost(a, b) is LinkLoss.DAMAGED
    assert lost(b, a) is LinkLoss.DAMAGED
    a.close()
    b.close()


# ---- the ring over NIXL


@pytest.mark.nixl
def test_a_peer_that_does_not_read_fills_the_ring_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = links_over("nixl", Memory(100), Memory(1 << 20))
    until(lambda: (a.pump(), b.pump()) and a._remote and b._remote)
    data = memoryview(pattern(1 << 20, 1))
    monkeypatch.setattr(b, "_drain", lambda: False)
    for value in range(1, 9):
        a.write(0, data, 1, value, value)
    until(lambda: (a.pump(), b.pump()) and a._told.done == link.RING_BYTES)
    for _ in range(100):
        a.pump()
        b.pump()
    assert a._out.position == link.RING_BYTES
    assert not a.is_flushed
    assert a.lost is None
    monkeypatch.undo()
    until(lambda: (a.pump(), b.pump()) and a.is_flushed)
    until(lambda: (a.pump(), b.pump()) and not a.is_stuck and not b.is_stuck)
    a.close()
    b.close()


@pytest.mark.nixl
def test_memory_that_was_lent_stays_with_the_agent_until_that_is_dropped() -> None:
    """The fence: a peer's write that comes after `close` changes memory that nobody uses."""
    ours, theirs = socket_pair()
    more = socket_pair()
    maker = LinkMaker(False, "nixl")
    memory = Memory(1000)
    a = maker.make(1, Connected(ours, KEY_A, KEY_B), memory)
    also = maker.make(2, Connected(more[0], KEY_A, KEY_B), Memory(1000))
    maker.close()
    b = link_over("nixl", 0, Connected(theirs, KEY_B, KEY_A), Memory(1000))
    until(lambda: (a.pump(), b.pump()) and a._remote and b._remote)
    agent, region = a._agent, a._region
    region.ring[:8] = b"\xee" * 8
    a.close()
    a.close()
    b.write(0, b"zombie" * 10, 1, 1, 1)
    until(lambda: (also.pump(), b.pump(), agent.progress()) and (b._posts or b.lost))
    until(lambda: (agent.progress(), b.pump()) and (region.ring[:8] != b"\xee" * 8 or b.lost))
    assert memory.words == [0] * 16
    assert agent._agent is not None
    assert agent.lend(link.RING_BYTES).address != region.address
    agent.leave(agent._regions[-1])
    also.close()
    assert agent._agent is None
    assert agent._regions == []
    with pytest.raises(ValueError, match="released"):
        region.ring[0]
    b.close()
    more[1].close()


@pytest.mark.nixl
def test_links_that_are_made_again_leave_a_bounded_number_of_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent that too many have left goes with the last link that it serves, and its memory with it."""
    monkeypatch.setattr(engine, "MAX_LEFT", 2)
    maker = LinkMaker(False, "nixl")
    ends = [socket_pair() for _ in range(4)]
    links = []
    for ours, _ in ends[:3]:
        links.append(maker.make(1, Connected(ours, KEY_A, KEY_B), Memory(1000)))
    first = links[0]._agent
    links[0].close()
    links[1].close()
    assert len(first._regions) == 3, "what was lent stays"
    links.append(maker.make(1, Connected(ends[3][0], KEY_A, KEY_B), Memory(1000)))
    assert links[3]._agent is not first
    assert first._agent is not None, "the third link needs it"
    links[2].close()
    assert first._agent is None
    assert first._regions == []
    maker.close()
    second = links[3]._agent
    assert second._agent is not None
    links[3].close()
    assert second._agent is None
    for _, theirs in ends:
        theirs.close()


@pytest.mark.nixl
def test_links_that_come_and_go_leave_no_agent_no_ring_and_no_descriptor() -> None:
    gc.collect()
    left, opened = [], 0
    for turn in range(25):
        a, b = links_over("nixl", Memory(1000), Memory(1000))
        a.write(0, b"x" * 100, 1, turn + 1, 0)
        left += [weakref.ref(each) for each in (a, b, a._agent, b._agent, a._region, b._region)]
        a.close()
        b.close()
        opened = opened or num_open()  # UCX keeps one or another for the process
    del a, b
    assert num_open() <= opened
    assert not any(each() for each in left)


@pytest.mark.nixl
def test_what_was_written_goes_out_after_an_interrupt_before_any_line() -> None:
    """Nobody writes again: the poller itself finishes what was begun. The agents serve all turns."""
    makers = LinkMaker(False, "nixl"), LinkMaker(False, "nixl")
    at, was_interrupted, data = -1, True, pattern(30_000, 1)
    stride = 1 if "EPEE_NIXL_TURNS" in os.environ else 3  # every line takes 15 s, and more where others work
    while was_interrupted:
        at += stride
        interrupt, was_interrupted = (
            Interrupt(at, "stream", "tcp", "poller", "nixl/link", "nixl/agent", "nixl/ring"),
            False,
        )
        memory = Memory(40_000)
        first, second = socket_pair()
        a, b = (
            End(makers[0].make(1, Connected(first, KEY_A, KEY_B), Memory(40_000))),
            End(makers[1].make(0, Connected(second, KEY_B, KEY_A), memory)),
        )
        calls: list[Any] = [a.links.pump, b.links.pump, a.links.pump]
        calls += [lambda a=a: a.links.write(1, 0, data, 1, 11, 1), a.links.pump, b.links.pump, a.links.pump]
        for call in calls:
            was_interrupted |= interrupt.run(call)
            assert not a.links.lock._is_owned(), interrupt.where
            assert not b.links.lock._is_owned(), interrupt.where
        until(lambda a=a, b=b: (a.links.pump(), b.links.pump()) and a.link.is_flushed)
        a.links.write(1, 0, data, 2, 99, 1)
        until(lambda a=a, b=b, memory=memory: (a.links.pump(), b.links.pump()) and memory.words[2])
        assert memory.bytes[: len(data)] == data, interrupt.where
        assert a.link.lost is None
        assert b.link.lost is None
        was_interrupted |= interrupt.run(a.link.close)
        a.links._close()
        b.links._close()
        assert a.link._region not in makers[0]._agent._users, interrupt.where
    for maker in makers:
        maker.close()
    assert at > 200


# ---- choosing, and what is missing


def test_the_engine_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPEE_LINK", raising=False)
    assert chosen_engine() == "tcp"
    monkeypatch.setenv("EPEE_LINK", "nixl")
    assert chosen_engine() == "nixl"
    monkeypatch.setenv("EPEE_LINK", "smoke signals")
    with pytest.raises(InvalidArgument, match="tcp or nixl"):
        chosen_engine()


def test_without_the_extra_the_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "WHEELS", ("nothing_like_it",))
    library.load.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=r"\.\[nixl\]"):
            LinkMaker(False, "nixl")
    finally:
        library.load.cache_clear()


def _a_device(folder: Path, name: str, layer: str, driver: str) -> None:
    for port in ("1", "2", "10"):
        (folder / name / "ports" / port).mkdir(parents=True)
        (folder / name / "ports" / port / "link_layer").write_text(layer + "\n")
    (folder / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (folder / name / "device").mkdir()
    (folder / name / "device" / "driver").symlink_to(folder / "drivers" / driver)


def test_devices_are_named_as_people_and_ucx_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, layer, driver in (("mlx5_0", "InfiniBand", "mlx5_core"), ("mlx5_1", "Ethernet", "mlx5_core")):
        _a_device(tmp_path, name, layer, driver)
    _a_device(tmp_path, "rdmap0", "Unspecified", "efa")
    found = [device for device in devices.rdma_devices(tmp_path) if device.name != "drivers"]
    assert [(each.name, each.kind, each.ports) for each in found] == [
        ("mlx5_0", "InfiniBand", ("1", "2", "10")),
        ("mlx5_1", "RoCE", ("1", "2", "10")),
        ("rdmap0", "EFA", ("1", "2", "10")),
    ]
    assert devices.rdma_devices(tmp_path / "nothing") == []
    monkeypatch.setattr(address, "rdma_devices", lambda: found)
    monkeypatch.setattr(address, "_settings", address._Settings(device_filter=("mlx5_0", "eth7")))
    assert address.allowed_devices() == ["mlx5_0:1", "mlx5_0:2", "mlx5_0:10", "eth7"]
    monkeypatch.setattr(address, "_settings", address._Settings())
    assert address.allowed_devices() == []


@pytest.mark.nixl
def test_a_filter_restricts_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.setattr(address, "_settings", address._Settings(device_filter=("no-such-device", "lo")))
    a, b = links_over("nixl", Memory(1000), (memory := Memory(1000)))
    a.write(0, b"over lo", 1, 1, 1)
    until(lambda: (a.pump(), b.pump()) and memory.words[1])
    a.close()
    b.close()
    assert os.environ.get("UCX_NET_DEVICES") is None
    monkeypatch.setattr(address, "_settings", address._Settings(device_filter=("no-such-device", "nor-this")))
    with pytest.raises(ResourceError, match="no-such-device,nor-this"):
        LinkMaker(False, "nixl")


# ---- processes


def _fork_after_an_agent(told: Connection) -> None:
    maker = LinkMaker(False, "nixl")
    child = os.fork()
    if not child:
        try:
            LinkMaker(False, "nixl")
        except ForkError as exc:
            told.send(str(exc))
        maker.close()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    told.send(os.waitstatus_to_exitcode(status))
    maker.close()


@pytest.mark.nixl
def test_a_child_of_a_process_with_an_agent_makes_none() -> None:
    ours, theirs = server.context().Pipe(duplex=False)
    process = server.context().Process(target=_fork_after_an_agent, args=(theirs,))
    process.start()
    theirs.close()
    with reaped(process, ours):
        assert ours.poll(BOUND_S)
        assert "forked" in ours.recv()
        assert ours.poll(BOUND_S)
        assert ours.recv() == 0
        process.join(BOUND_S)
        assert process.exitcode == 0


_ENDS = """
import os, sys
from tests.link.pairs import Memory, links_over, until
a, b = links_over("nixl", Memory(1000), Memory(1000))
a.write(0, b"x", 1, 1, 1)
until(lambda: (a.pump(), b.pump()) and a.is_flushed)
if "closes" in sys.argv:
    a.close(), b.close()
if "raises" in sys.argv:
    raise KeyError("as a program may")
sys.exit(3 if "three" in sys.argv else 0)
"""


@pytest.mark.nixl
@pytest.mark.parametrize(("words", "code"), [(("closes",), 0), ((), 0), (("three",), 3), (("raises",), 1)])
def test_a_process_with_agents_ends_with_its_own_exit_code(words: tuple[str, ...], code: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "UCX_MODULES"}  # ours is to do it
    done = subprocess.run(
        [sys.executable, "-c", _ENDS, *words], capture_output=True, text=True, timeout=150, env=environment
    )
    assert done.returncode == code, done.stderr


@pytest.mark.nixl
def test_loading_nixl_leaves_the_programs_logging_alone() -> None:
    text = "import logging; from epee.link.nixl.library import load; load(); "
    text += "assert logging.raiseExceptions; assert 'nixl' not in logging.Logger.manager.loggerDict"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
