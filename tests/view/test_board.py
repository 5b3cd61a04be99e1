"""Boards: whole states only, readable after death; heartbeats that need no GIL; endpoints."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from epee.errors import EpeeError, InvalidArgument, ProtocolError, ResourceError
from epee.memory.shared import BLOB_BYTES, HEADER_BYTES, SharedRegion
from epee.view.process import board
from epee.view.protocol import messages as m
from epee.view.transport.wire import Endpoint, pack_endpoint, parse_endpoint
from tests.forked import Program


@pytest.fixture(autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    for thing in gc.get_objects():
        if type(thing) in (board.Board, board.BoardView, board.BeatView):
            thing.close()


def state(epoch: int, endpoint: bytes = b"") -> m.BoardState:
    members = tuple(m.Member(slot, 1, bytes([slot]) * 16, endpoint) for slot in range(3))
    return m.BoardState(m.Decision(epoch, members), m.Ballot(epoch, 1), m.NO_BALLOT, None)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_the_last_state_is_read() -> None:
    mine = board.Board(3)
    view = board.BoardView.attach(mine.blob)
    assert view.read() is None
    for epoch in (1, 2, 3):
        mine.write(state(epoch))
        assert view.read() == state(epoch)
    assert view.owner[0] == os.getpid()
    mine.close()
    mine.close()
    assert view.read() == state(3)
    with pytest.raises(TypeError, match="read-only"):
        view._words[0] = 0  # only its owner writes it
    view.close()
    view.close()


def test_epoch_turns_and_leaving_are_seen() -> None:
    mine = board.Board(0)
    view = board.BoardView.attach(mine.blob)
    assert (view.epoch, view.turns, view.has_left) == (0, 0, False)
    mine.decide(5)
    mine.turn()
    mine.leave()
    assert (view.epoch, view.turns, view.has_left) == (5, 1, True)


def test_a_decision_wakes_who_sleeps_on_the_epoch() -> None:
    mine = board.Board(0)
    seen = []

    def wait() -> None:
        while not seen:
            mine.await_change(0)
            if board.BoardView(mine._region).epoch:
                seen.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    mine.decide(1)
    thread.join(10)
    assert seen == [True]


def test_a_crash_while_writing_leaves_the_old_state() -> None:
    mine = board.Board(0)
    view = board.BoardView.attach(mine.blob)
    mine.write(state(1))
    mine.write(state(2))
    hidden = HEADER_BYTES + board._COPIES + (3 & 1) * board._COPY_BYTES
    mine._region.mapping[hidden : hidden + 40] = b"x" * 40  # a writer died here
    assert view.read() == state(2)
    mine.write(state(3))
    assert view.read() == state(3)


def test_a_reader_beside_a_busy_writer_sees_whole_states() -> None:
    mine = board.Board(0)
    view = board.BoardView.attach(mine.blob)
    stop = threading.Event()

    def write() -> None:
        epoch = 1
        while not stop.is_set():
            mine.write(state(epoch, bytes([epoch % 251]) * (epoch % 900)))
            epoch += 1

    thread = threading.Thread(target=write)
    thread.start()
    until(lambda: view.read() is not None)
    last = 0
    for _ in range(300):
        got = view.read()
        assert got is not None
        assert got.decided.epoch >= last
        last = got.decided.epoch
        assert got == state(last, bytes([last % 251]) * (last % 900))
    stop.set()
    thread.join(10)


DYING = """
import os, signal, sys
from epee.view.process import board
from epee.view.protocol import messages as m
mine = board.Board(1)
decision = m.Decision(4, (m.Member(1, 1, bytes(16), b"here"),))
mine.write(m.BoardState(decision, m.Ballot(2, 1), m.NO_BALLOT, None))
sys.stdout.write(mine.blob.hex() + "\\n")
sys.stdout.flush()
epoch = 4
sys.stdin.readline()
while True:
    epoch += 1
    mine.write(m.BoardState(decision._replace(epoch=epoch), m.Ballot(2, 1), m.NO_BALLOT, None))
"""


def test_a_board_is_read_after_its_owner_was_killed() -> None:
    with Program(DYING) as process:
        view = board.BoardView.attach(bytes.fromhex(process.stdout.readline()))
        found = board.find_board(process.pid)
        process.write("\n")
        until(lambda: view.read().decided.epoch > 50)  # type: ignore[union-attr]
        process.kill()
        process.communicate(10)
        got = view.read()
        assert got is not None
        assert got.decided.members == (m.Member(1, 1, bytes(16), b"here"),)
        assert found.read() == got
        with pytest.raises(ResourceError):
            board.find_board(process.pid)


def test_flipped_bits_are_found_or_harmless() -> None:
    rng = random.Random(5)
    mine = board.Board(0)
    view = board.BoardView.attach(mine.blob)
    mine.write(state(1))
    mine.write(state(2, b"e" * 50))
    num_bytes = board._HEAD.size + 600
    refused = 0
    for _ in range(4000):
        where = rng.choice((HEADER_BYTES + 8, HEADER_BYTES + board._COPIES))
        at = where + rng.randrange(8 if where == HEADER_BYTES + 8 else num_bytes)
        kept, mapping = mine._region.mapping[at], mine._region.mapping
        mapping[at] = kept ^ 1 << rng.randrange(8)
        try:
            assert view.read() in (state(2, b"e" * 50), state(1), None)
        except ProtocolError:
            refused += 1
        mapping[at] = kept
    assert refused > 2000
    assert view.read() == state(2, b"e" * 50)


def test_memory_that_is_no_board_is_refused() -> None:
    small, empty = SharedRegion.create(64, "small"), SharedRegion.create(board._COPIES + 2 * board._COPY_BYTES, "empty")
    with pytest.raises(ProtocolError, match="too small"):
        board.BoardView.attach(small.blob)
    with pytest.raises(ProtocolError, match="no board"):
        board.BoardView.attach(empty.blob)
    with pytest.raises(EpeeError):
        board.BoardView.attach(bytes(BLOB_BYTES))
    with subprocess.Popen(["sleep", "60"]) as stranger:  # not this one's parent, which may be nobody's to look into
        try:
            with pytest.raises(ResourceError, match="no rank"):
                board.find_board(stranger.pid)
        finally:
            stranger.kill()


def test_rows_tell_what_a_lane_does() -> None:
    mine = board.Board(0)
    view = board.BoardView.attach(mine.blob)
    assert view.rows() == []
    first, second = mine.row(7), mine.row(0)
    first.show(b"all_reduce", 12, 3, 0b1010)
    second.show(b"a_name_of_more_than_16_letters", 1, 1)
    rows = view.rows()
    assert [(row.group_id, row.op, row.seq, row.epoch, row.waits_for) for row in rows] == [
        (7, "all_reduce", 12, 3, (1, 3)),
        (0, "a_name_of_more_t", 1, 1, ()),
    ]
    assert abs(rows[0].since_s - time.monotonic()) < 60
    first.clear()
    assert [row.group_id for row in view.rows()] == [0]
    assert mine.row(9)._group_id == 9
    assert [row.group_id for row in view.rows()] == [9, 0]


def test_lanes_beyond_the_rows_work_unseen() -> None:
    mine = board.Board(0)
    rows = [mine.row(group_id) for group_id in range(board.MAX_ROWS + 2)]
    for row in rows:
        row.show(b"barrier", 1, 1)
    assert len(board.BoardView.attach(mine.blob).rows()) == board.MAX_ROWS


def test_rows_of_garbage_are_left_out() -> None:
    rng = random.Random(6)
    mine = board.Board(0)
    view = board.BoardView.attach(mine.blob)
    start = HEADER_BYTES + 8 * board._ROWS
    for _ in range(200):
        mine._region.mapping[start : start + 64 * board.MAX_ROWS] = rng.randbytes(64 * board.MAX_ROWS)
        for row in view.rows():
            assert row.op.isprintable()
            assert all(slot < 64 for slot in row.waits_for)


def test_a_heart_beats_while_the_gil_is_held() -> None:
    mine = board.acquire_beat()
    view = board.BeatView(mine.blob)
    until(lambda: view.count > 0)
    before = view.count
    ctypes.PyDLL(None).usleep(int(3 * board.PERIOD_S * 1e6))  # PyDLL keeps the GIL
    assert view.count > before
    board.release_beat(mine)
    stopped = view.count
    ctypes.CDLL(None).usleep(int(3 * board.PERIOD_S * 1e6))
    assert view.count <= stopped + 1, "a tick may have been under way"
    view.close()


BEATING = """
import sys
from epee.view.process import board
sys.stdout.write(board.acquire_beat().blob.hex() + "\\n")
sys.stdout.flush()
sys.stdin.readline()
"""


def test_the_heart_of_a_stopped_process_stands_still() -> None:
    with subprocess.Popen([sys.executable, "-c", BEATING], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        view = board.BeatView(bytes.fromhex(process.stdout.readline()))
        until(lambda: view.count > 0)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        stopped = view.count
        time.sleep(3 * board.PERIOD_S)
        assert view.count == stopped
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: view.count > stopped)
        process.kill()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on fork with threads
def test_a_forked_child_has_a_heart_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tick the C library holds a lock for which a child forked then waits: here one tick is over, none comes."""
    monkeypatch.setattr(board, "_beats", {})
    monkeypatch.setattr(board, "PERIOD_S", 3600.0)
    mine = board.acquire_beat()
    view = board.BeatView(mine.blob)
    until(lambda: view.count > 0)
    board.Beat()  # whoever makes a timer waits for that lock
    child = os.fork()
    if child == 0:
        other = board.acquire_beat()
        os._exit(0 if other is not mine and other.blob != mine.blob else 1)
    assert os.waitpid(child, 0)[1] == 0
    before = view.count
    mine._set(0.0005, 0.0005)
    until(lambda: view.count > before)
    board.release_beat(mine)


ENDING = """
import time
from epee.view.process import board
board.acquire_beat()._set(0.001, 0.0005)
time.sleep(0.05)
"""


def test_a_process_may_end_while_its_heart_beats() -> None:
    with Program(ENDING) as process:
        assert process.communicate(100)[0] == ""
        assert process.returncode == 0


def test_without_a_timer_the_heart_is_not_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_timer(self: board.Beat) -> None:
        raise OSError(11, "timer_create")

    monkeypatch.setattr(board.Beat, "_create_timer", no_timer)
    mine = board.Beat()
    mine.start()
    mine.stop()
    assert board.BeatView(mine.blob).count == 0
    assert "no heartbeat" in caplog.text


def test_many_users_leave_no_threads_and_no_descriptors() -> None:
    board.release_beat(board.acquire_beat())
    before = (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))
    for _ in range(50):
        board.release_beat(board.acquire_beat())
    until(lambda: (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))) <= before)


ENDPOINT = Endpoint(77, 123456, 9, b"b" * BLOB_BYTES, b"h" * BLOB_BYTES, b"outbox")


def test_endpoints_come_back_or_are_refused() -> None:
    data = pack_endpoint(ENDPOINT)
    assert parse_endpoint(data) == ENDPOINT
    rng = random.Random(7)
    for _ in range(3000):
        broken = bytearray(data)
        broken[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del broken[rng.randrange(len(data)) :]
        with contextlib.suppress(ProtocolError):
            assert pack_endpoint(parse_endpoint(bytes(broken))) == broken
    with pytest.raises(ProtocolError, match="too many"):
        parse_endpoint(data + b"x")
    with pytest.raises(InvalidArgument, match="pid"):
        pack_endpoint(ENDPOINT._replace(pid=0))
    assert len(pack_endpoint(ENDPOINT._replace(extra=bytes(640)))) <= 1024
