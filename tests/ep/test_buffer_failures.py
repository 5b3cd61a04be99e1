"""What a Buffer does when something outside its arguments goes wrong: silence, death, forks, threads, closing.

A rank that is to die does so by SIGKILL.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee import errors
from tests.ep.buffer_cases import until_all_succeed
from tests.ep.moments import when_it_waits
from tests.forked import Program
from tests.harness import run_ranks
from tests.survive import stages

HIDDEN = 32
NUM_TOPK = 2
LONG_S = 300
BEAT = "epee-beat"  # a process has one for ever, whatever it makes (`view/process/board.py`)


def _buffer(num_ranks: int, **changes: Any) -> epee.Buffer:
    os.environ["EPEE_POISON"] = "1"
    options = {"num_experts": 2 * num_ranks, "hidden": HIDDEN, "num_topk": NUM_TOPK, "max_tokens_per_rank": 16}
    return epee.Buffer(dist.group.WORLD, **{**options, **changes})


def _tokens(rank: int, num_ranks: int, num_tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose value names the rank, and experts such that every token goes to every rank that top-k allows."""
    x = torch.full((num_tokens, HIDDEN), float(rank + 1), dtype=torch.bfloat16)
    first = torch.arange(num_tokens) % (2 * num_ranks)
    return x, torch.stack([first, (first + 2) % (2 * num_ranks)], 1)


def _round(buffer: epee.Buffer, **options: Any) -> None:
    """One dispatch and combine that must give back each token as often as it was sent."""
    x, idx = _tokens(buffer.rank, buffer.num_ranks)
    received = buffer.dispatch(x, idx, **options)
    combined = buffer.combine(received.x, received.handle, **options).x
    owners = idx // 2
    factor = torch.where(owners[:, 0] == owners[:, 1], 1, 2).to(torch.bfloat16)
    assert torch.equal(combined, x * factor[:, None])


def _barrier() -> None:
    dist.barrier()


def _when_it_waits(buffer: epee.Buffer, act: Callable[[], Any]) -> None:
    """Let `act` run in another thread as soon as the next call of this rank waits for a peer."""
    when_it_waits(buffer, threading.Timer(0.05, act).start)


# --- silence ---


def _silent_peer(rank: int, num_ranks: int, op: str, late_s: float = 20.0) -> dict[str, Any]:
    with _buffer(num_ranks) as buffer:
        x, idx = _tokens(rank, num_ranks)
        received = buffer.dispatch(x, idx)
        result: dict[str, Any] = {"kind": "none"}
        _barrier()  # ranks 0 and 2 must come at about the same time
        if rank != 1:
            try:
                if op == "dispatch":
                    buffer.dispatch(x, idx, timeout=1.0)
                else:
                    buffer.combine(received.x, received.handle, timeout=1.0)
            except epee.CommTimeoutError as exc:
                result = {"kind": type(exc).__name__, "message": str(exc), "ranks": exc.ranks}
        _barrier()
        late = ""
        if rank == 1:  # it comes too late: the others have given the call up
            try:
                if op == "dispatch":
                    buffer.dispatch(x, idx, timeout=late_s)
                else:
                    buffer.combine(received.x, received.handle, timeout=late_s)
            except epee.EpeeError as exc:
                late = type(exc).__name__
        _barrier()
        for _ in range(3):
            _round(buffer, timeout=20)
        return {**result, "late": late}


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_time_out_names_op_rank_peer_and_call(op: str) -> None:
    results = run_ranks(_silent_peer, 3, op)
    for rank in (0, 2):
        assert results[rank]["kind"] == "CommTimeoutError"
        assert tuple(results[rank]["ranks"]) == (1,)
        for words in (op, f"rank={rank}", "peer=1", "seq=2", "waited ", "rank 1 did not send"):
            assert words in results[rank]["message"], results[rank]["message"]
    # One of them has given the call up; the other may have learned it from this one.
    assert any("a rank that skipped a call must make the aborted one" in results[rank]["message"] for rank in (0, 2))


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_rank_that_comes_late_hears_of_it(op: str) -> None:
    """Then the buffer works again (`_silent_peer` ends with three good rounds)."""
    assert run_ranks(_silent_peer, 3, op)[1]["late"] == "CommTimeoutError"


def _slow_reader(rank: int, num_ranks: int) -> str:
    """Rank 1 dawdles in the first call, with everything sent and nothing read, until rank 0 has given up the second."""
    with _buffer(num_ranks) as buffer:
        _round(buffer)
        x, idx = _tokens(rank, num_ranks)
        seen = "nothing"
        if rank == 1:
            wait_data = buffer._exchange.wait_data

            def dawdle(*args: Any, **options: Any) -> Any:
                buffer._exchange.wait_data = wait_data  # type: ignore[method-assign]
                wait_data(*args, **options)  # it says that this rank has sent everything
                _barrier()

            buffer._exchange.wait_data = dawdle  # type: ignore[method-assign]
        received = buffer.dispatch(x, idx, timeout=5)
        assert bool((received.x == received.handle.src_rank[:, None] + 1).all())
        try:
            if rank == 0:
                buffer.dispatch(x, idx, timeout=0.2)
            else:
                buffer.dispatch(x, idx, timeout=5)
        except epee.EpeeError as exc:
            seen = type(exc).__name__
        if rank == 0:
            _barrier()
        _round(buffer)
        return seen


def test_a_time_out_in_the_next_call_leaves_this_one_whole() -> None:
    assert run_ranks(_slow_reader, 2) == ["CommTimeoutError", "CommTimeoutError"]


def _stopped_peer(rank: int, num_ranks: int) -> str:
    with _buffer(num_ranks) as buffer:
        _round(buffer)
        pids: list[Any] = [None] * num_ranks
        dist.all_gather_object(pids, os.getpid())
        x, idx = _tokens(rank, num_ranks)
        if rank == 1:
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
        try:
            while True:
                buffer.dispatch(x, idx, timeout=1.5)
        except epee.EpeeError as exc:
            seen = type(exc).__name__
        if rank == 0:
            stages.await_stop(pids[1])  # this call's time may have been over before, on a busy machine
            os.kill(pids[1], signal.SIGCONT)
        until_all_succeed(buffer, lambda: buffer.dispatch(x, idx, timeout=1))
        for _ in range(3):
            _round(buffer, timeout=20)
        return seen


def test_a_stopped_rank_is_silent_not_dead() -> None:
    """SIGSTOP in the middle of calls, a time-out at the peer, SIGCONT: the buffer works again."""
    stayed, stopped = run_ranks(_stopped_peer, 2)
    assert stayed == "CommTimeoutError"
    assert stopped in ("MismatchError", "CommTimeoutError")


# --- death ---


def _survive(rank: int, num_ranks: int, folder: str, victim: int, when: str) -> dict[str, Any]:
    buffer = _buffer(num_ranks)
    for _ in range(3):
        _round(buffer)
    x, idx = _tokens(rank, num_ranks)
    kept = buffer.dispatch(x, idx)
    want = kept.x.clone()
    _barrier()
    stages.meet(folder, "through", rank, range(num_ranks))  # nobody is in gloo's barrier any more
    if rank == victim:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            _round(buffer, timeout=LONG_S)
    except epee.EpeeError as exc:
        report: dict[str, Any] = {
            "kind": type(exc).__name__,
            "message": str(exc),
            "ranks": list(getattr(exc, "ranks", ())),
            "op": getattr(exc, "op", ""),
        }
    try:
        x, idx = _tokens(rank, num_ranks)
        received = buffer.dispatch(x, idx, timeout=LONG_S)
        buffer.combine(received.x, received.handle, timeout=LONG_S)
        report["again"] = received.got.tolist()
    except epee.EpeeError as exc:
        report["again"] = type(exc).__name__
    report["kept"] = torch.equal(kept.x, want)
    stages.meet(folder, "told", rank, set(range(num_ranks)) - {victim})  # who ends first is dead to the others
    buffer.close()
    return report


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("when", ["before", "during"])
def test_survivors_of_a_kill_get_rank_failed_at_once(tmp_path: Path, victim: int, when: str) -> None:
    """Long before the time-out, of which the harness would not see the end."""
    for rank, report in enumerate(run_ranks(_survive, 4, str(tmp_path), victim, when, dead={victim})):
        if rank == victim:
            continue
        assert report["kind"] == "RankFailedError", report
        assert report["ranks"] == [victim]
        assert report["op"] in ("dispatch", "combine")
        for words in (report["op"], f"rank={rank}", f"peer={victim}", "seq=", "waited", "has ended"):
            assert words in report["message"], report["message"]
        assert report["again"] == [int(rank != victim) for rank in range(4)], "the buffer goes on without it"
        assert report["kept"], "what was received stays readable"


# --- closing ---


def _close(rank: int, num_ranks: int) -> list[str]:
    x, idx = _tokens(rank, num_ranks)
    with _buffer(num_ranks) as buffer:
        handle = buffer.dispatch(x, idx).handle
    buffer.close()
    buffer.close()
    seen = []
    y = torch.zeros(handle.num_recv, HIDDEN, dtype=torch.bfloat16)
    for call in (
        lambda: buffer.dispatch(x, idx),
        lambda: buffer.dispatch(x, handle=handle),
        lambda: buffer.combine(y, handle),
        lambda: buffer.combine_input(handle),
    ):
        try:
            call()
            seen.append("nothing")
        except epee.EpeeError as exc:
            seen.append(f"{type(exc).__name__}: {exc}")
    with _buffer(num_ranks) as fresh:
        _round(fresh)
    return seen


def test_a_closed_buffer_refuses_and_closing_again_is_nothing() -> None:
    for seen in run_ranks(_close, 2):
        assert len(seen) == 4
        for line in seen:
            assert line.startswith("InvalidState: the buffer is closed"), line


def _close_meanwhile(rank: int, num_ranks: int) -> str:
    buffer = _buffer(num_ranks)
    _round(buffer)
    _barrier()
    if rank == 1:
        _barrier()
        buffer.close()
        return "AbortedError"
    x, idx = _tokens(rank, num_ranks)
    _when_it_waits(buffer, buffer.close)
    try:
        buffer.dispatch(x, idx, timeout=30)
        seen = "nothing"
    except epee.EpeeError as exc:
        seen = type(exc).__name__
    _barrier()
    return seen


def test_closing_in_another_thread_ends_a_waiting_call() -> None:
    assert run_ranks(_close_meanwhile, 2) == ["AbortedError"] * 2


def _user_error(rank: int, num_ranks: int) -> str:
    x, idx = _tokens(rank, num_ranks)
    seen = ""
    buffer = _buffer(num_ranks)
    try:
        buffer.dispatch(x, idx)
        raise KeyError("user code failed between dispatch and combine")
    except KeyError:
        _round(buffer)
        seen = "works"
    with pytest.raises(ZeroDivisionError), buffer:
        _ = 1 / 0
    try:
        buffer.dispatch(x, idx)
    except errors.InvalidState:
        return seen
    return "not closed"


def test_an_error_of_the_user_between_the_calls_costs_nothing() -> None:
    assert run_ranks(_user_error, 2) == ["works"] * 2


_EXIT = """
import torch, torch.distributed as dist, epee, sys, warnings
warnings.simplefilter("error")
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
buffer = epee.Buffer(None, num_experts=4, hidden=64, num_topk=2, max_tokens_per_rank=8)
kept = buffer.dispatch(torch.ones(3, 64, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 3))
lease = buffer.combine_input(kept.handle)
print(int(kept.x.sum()))
"""


def test_exit_without_close_is_clean(tmp_path: Path) -> None:
    with Program(_EXIT, str(tmp_path / "store")) as process:
        told, _ = process.communicate(50)
        assert process.returncode == 0, told
        assert told.strip() == "192"


# --- forks and threads ---


def _fork(rank: int, num_ranks: int) -> tuple[str, str]:
    x, idx = _tokens(rank, num_ranks)
    with _buffer(num_ranks) as buffer:
        handle = buffer.dispatch(x, idx).handle
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            seen = []
            for call in (lambda: buffer.dispatch(x, idx), lambda: buffer.combine(x, handle)):
                try:
                    call()
                except epee.EpeeError as exc:
                    seen.append(f"{type(exc).__name__} {exc}")
            buffer.close()  # must not touch what is the parent's
            os.write(writer, "\n".join(seen).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            lines = pipe.read().splitlines()
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert len(lines) == 2, lines
        _round(buffer)
        return lines[0], lines[1]


def test_a_forked_child_is_refused_and_the_parent_unaffected() -> None:
    for lines in run_ranks(_fork, 2):
        for line in lines:
            assert line.startswith("ForkError"), line
            assert "fork" in line
            assert "new one" in line


def _reenter(rank: int, num_ranks: int, folder: str) -> list[str]:
    x, idx = _tokens(rank, num_ranks)
    seen: list[str] = []
    with _buffer(num_ranks) as buffer:
        _round(buffer)
        _barrier()
        if rank == 1:
            stages.wait_for(folder, "rung")
        else:

            def handler(number: int, frame: Any) -> None:
                try:
                    buffer.dispatch(x, idx)
                except epee.EpeeError as exc:
                    seen.append(f"{type(exc).__name__} {exc}")
                stages.reach(folder, "rung")

            signal.signal(signal.SIGUSR1, handler)
            _when_it_waits(buffer, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        received = buffer.dispatch(x, idx, timeout=30)
        assert received.handle.num_recv > 0
        _round(buffer)
    return seen


def test_a_call_from_within_a_call_is_refused(tmp_path: Path) -> None:
    seen, _ = run_ranks(_reenter, 2, str(tmp_path))
    assert len(seen) == 1
    assert seen[0].startswith("InvalidState"), seen
    assert "in progress" in seen[0]


def _threads(rank: int, num_ranks: int) -> int:
    """Two threads make equal calls, so their order among the ranks does not matter."""
    problems: list[BaseException] = []
    with _buffer(num_ranks) as buffer:

        def work() -> None:
            x, idx = _tokens(rank, num_ranks)
            try:
                for _ in range(25):
                    received = buffer.dispatch(x, idx, timeout=30)
                    assert bool((received.x == received.handle.src_rank[:, None] + 1).all())
            except BaseException as exc:  # noqa: BLE001 - the main thread raises it
                problems.append(exc)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        _round(buffer)
        return len(problems)


def test_threads_take_turns() -> None:
    assert run_ranks(_threads, 2) == [0, 0]


# --- nothing stays ---


def _open_files() -> list[str]:
    names = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return sorted(name for name in names if BEAT not in name)


def _num_threads() -> int:
    time.sleep(0.005)
    return len(os.listdir("/proc/self/task"))


def _held() -> dict[str, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "files": len(_open_files()),
        "threads": min(_num_threads() for _ in range(20)),  # each tick of a beat has a thread of its own, in glibc
        "shared mappings": sum("memfd" in line and BEAT not in line for line in maps),
    }


def _many_rounds(rank: int, num_ranks: int) -> tuple[dict[str, int], dict[str, int]]:
    before: dict[str, int] = {}
    for number in range(52):
        with _buffer(num_ranks) as buffer:
            x, idx = _tokens(rank, num_ranks)
            for layout, alignment in (("rank", 1), ("expert", 1), ("expert", 8)):
                received = buffer.dispatch(x, idx, layout=layout, expert_alignment=alignment)
                place = buffer.combine_input(received.handle)
                place.copy_(received.x)
                buffer.combine(place, received.handle)
            del received, place
        if number % 10 == 3:  # construction that fails must not leave anything either
            try:
                _buffer(num_ranks, hidden=HIDDEN * (1 + rank))
            except epee.MismatchError:
                pass
            else:
                raise AssertionError("a mismatch was not seen")
        if number == 1:
            before = _held()
    return before, _held()


def test_fifty_buffers_leave_nothing_behind() -> None:
    for before, after in run_ranks(_many_rounds, 2):
        grown = {kind: (before[kind], after[kind]) for kind in after if after[kind] > before[kind]}
        assert not grown, f"{grown} (after two rounds, after 52)"
        assert after["shared mappings"] == 0
