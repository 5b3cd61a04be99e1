"""What the processes of a round do: calls with a victim, a zombie with a replacement, a group that lives with deaths.

All loops take the number of the next call from the group, so a process that comes in later is in step with the others.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import struct
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import epee
from epee.errors import CommTimeoutError, EpeeError, EvictedError, NoQuorumError, RankFailedError
from tests.harness import tell

from . import kill_points, stages
from .histories import ALL_OPS, COLLECTIVES, UNTOUCHED, Entry, before, expected, make_call, part

NUM_CALLS = 6  # and more where more ranks die
LONG = 20_000  # 160 kB a rank: more than the staging of a round holds
STAGING_BYTES = 64 << 10


def begin(
    rank: int,
    num_ranks: int,
    folder: str,
    mode: str,
    timeout_s: float = 10.0,
    joins: bool = False,
    wait_limit_s: float = 30,
) -> Any:
    """Make or join the default group."""
    store = dist.FileStore(f"{folder}/store", num_ranks)
    options = epee.BackendOptions(
        fault_mode=mode, op_timeout=timeout_s, staging_bytes=STAGING_BYTES, is_extension=joins
    )
    dist.init_process_group(
        "epee",
        store=store,
        rank=rank,
        world_size=num_ranks,
        pg_options=options,
        timeout=timedelta(seconds=wait_limit_s),
    )
    return dist.group.WORLD


def one_call(group: Any, op: str, length: int = 1) -> Entry:
    """Make the next collective call and say how it went; only epee's errors are outcomes."""
    rank, num_ranks, engine = group.rank(), group.size(), group._engine
    seq, root = engine.seq + 1, engine.members.members[0]
    call, read = make_call(op, rank, num_ranks, seq, dist, length, root)
    began = time.monotonic_ns()
    status, ranks, epoch, text = "ok", (), 0, ""
    try:
        call()
        epoch = group.epoch
    except EpeeError as exc:
        text = str(exc)
        status, ranks, epoch = type(exc).__name__, tuple(getattr(exc, "ranks", ())), getattr(exc, "epoch", 0)
    ended = time.monotonic_ns()
    members = group.last_contributors() if status == "ok" else ()
    return Entry(seq, op, status, ranks, epoch, members, read(), (ended - began) / 1e9, rank, root, ended, text)


def exchange_all(group: Any, seq: int, length: int = 1) -> Entry:
    """Exchange a message with every other rank; each message that cannot come names its peer."""
    rank, num_ranks = group.rank(), group.size()
    outs = torch.full((num_ranks, length), UNTOUCHED, dtype=torch.int64)
    requests, failed, has_quorum = [], set(), True
    began = time.monotonic_ns()
    for peer in range(num_ranks):
        if peer == rank:
            continue
        for post, tensor in (
            (dist.irecv, outs[peer]),
            (dist.isend, torch.full((length,), part(rank, seq, peer))),
        ):
            try:
                requests.append((peer, post(tensor, peer)))
            except RankFailedError:
                failed.add(peer)
            except NoQuorumError:
                has_quorum = False
    for peer, request in requests:
        try:
            request.wait()
        except RankFailedError as exc:
            failed.update({peer, *exc.ranks})  # an error that names others is found out by the check
        except NoQuorumError:
            has_quorum = False
    ended = time.monotonic_ns()
    values = [value for row in outs.tolist() for value in sorted(set(row))]
    status = "NoQuorumError" if not has_quorum else "RankFailedError" if failed else "ok"
    return Entry(seq, "send_recv", status, tuple(sorted(failed)), 0, (), values, (ended - began) / 1e9, rank, 0, ended)


class KillRound(NamedTuple):
    """One round: who dies where. `victims`: rank -> (point, number of the call)."""

    op: str
    victims: dict[int, tuple[str, int]]
    num_ranks: int = 4
    mode: str = "raise"
    length: int = 1


def kill_round(rank: int, folder: str, spec: KillRound) -> list[Entry]:
    """Make calls; a victim dies at its point. Return what was seen; the last calls are all_reduce."""
    op, victims, num_ranks, mode, length = spec
    group = begin(rank, num_ranks, folder, mode)
    point, number = victims.get(rank, ("", 0))
    if point:
        kill_points.record_to(f"{folder}/kill{rank}")
    if point in kill_points.AGREE_POINTS:
        kill_points.arm_agreement(point)
    elif point and op != "send_recv":
        kill_points.arm(point, number)
    num_calls = NUM_CALLS + len(victims) - 1
    entries = []
    for seq in range(1, num_calls + 1):
        if op != "send_recv":
            entries.append(one_call(group, op, length))
            continue
        if point and seq == number:
            kill_points.arm_messages(point)
        entries.append(exchange_all(group, seq, length))
        if point and seq == number:
            kill_points.die(True)
    entries += [one_call(group, "all_reduce") for _ in range(1 + len(victims))]  # one may fail for each that died
    dist.destroy_process_group()
    return entries


def resources() -> tuple[int, int, int]:
    """Return the numbers of descriptors, threads and mapped outboxes of this process, without garbage in cycles."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), sum("epee-outbox" in line for line in maps)


# ---- zombies

ZOMBIE = 1
ZOMBIE_TIMEOUT_S = 2.0  # a busy machine may keep a rank that is well from its core for a second
NUM_ZOMBIE_CALLS = 100


def zombie(folder: str, num_ranks: int, op: str, point: str, seed: int) -> list[Entry]:
    """Rank 1: stop in the midst of a call; when woken, learn that the others went on without."""
    group = begin(ZOMBIE, num_ranks, folder, "mask", ZOMBIE_TIMEOUT_S)
    kill_points.record_to(f"{folder}/kill{ZOMBIE}")
    number = 2 + seed % 5
    kill_points.arm(point, number, kill_points.stop)
    entries = []
    while not entries or entries[-1].status == "ok":
        assert group._engine.seq < number + 4, "a zombie went on"
        entries.append(one_call(group, op))
    for _ in range(3):
        entry = one_call(group, op)
        assert entry.status == "EvictedError", entry
        assert all(value in before(entry) for value in entry.value), f"a zombie's call wrote: {entry}"
    stages.reach(folder, "learned")
    return entries


def beside_a_zombie(rank: int, folder: str, num_ranks: int, op: str, joins: bool, zombie_pid: int) -> list[Entry]:
    """The others: lose the zombie, take in its replacement, make 100 calls, wake it after the fiftieth."""
    if joins:
        stages.wait_for(folder, "lost")
        group = begin(ZOMBIE, num_ranks, folder, "mask", 10.0, joins=True)
    else:
        group = begin(rank, num_ranks, folder, "mask", ZOMBIE_TIMEOUT_S)
        deadline = time.monotonic() + 30
        while len(group._engine.members.members) == num_ranks:
            entry = one_call(group, op)
            assert entry.status == "ok" or (entry.status == "RankFailedError" and entry.root in entry.ranks), entry
            assert time.monotonic() < deadline, "nobody voted the zombie out"
        group._engine.timeout_s = 10.0
        stages.reach(folder, "lost")
        while not group.get_peer_state([ZOMBIE])[0]:
            assert time.monotonic() < deadline, "no replacement came"
            time.sleep(0.005)  # between two questions
        group.recover_ranks([ZOMBIE])
    entries = []
    for i in range(NUM_ZOMBIE_CALLS):
        entries.append(one_call(group, COLLECTIVES[group._engine.seq % len(COLLECTIVES)]))
        if i == NUM_ZOMBIE_CALLS // 2 and rank == 0:
            os.kill(zombie_pid, signal.SIGCONT)
    stages.wait_for(folder, "learned")
    for i in range(10):
        entries.append(one_call(group, COLLECTIVES[i % len(COLLECTIVES)]))
    dist.destroy_process_group()
    return entries


# ---- a group that lives with deaths

LOG = struct.Struct("<QBQIB")  # seq, op, contributors, epoch, 1: it failed
STOP_EVERY = 16


def live(rank: int, num_ranks: int, folder: str, mode: str, joins: bool, seed: int) -> dict[str, Any]:
    """Make random calls until somebody writes the file `stop`, whatever happens to the others.

    Every result is recomputed here; a log of 22 bytes a call lets the owner compare the ranks, the dead included. The
    lowest rank takes in those who wait for a place.
    """
    log = os.open(f"{folder}/log-{rank}-{os.getpid()}", os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        group = begin(rank, num_ranks, folder, mode, 10.0, joins)
    except EpeeError as exc:
        tell(("refused", repr(exc)))
        raise
    tell(("joined", group.epoch))
    engine = group._engine
    counts: dict[str, int] = {}
    first: Any = None
    epoch = group.epoch
    try:
        while True:
            seq = engine.seq + 1
            if seq % STOP_EVERY == 0:
                if _shall_stop(group, folder):
                    break
                continue
            dice = random.Random(seq * 1_000_003 + seed)
            op = COLLECTIVES[dice.randrange(len(COLLECTIVES))]
            is_new = epoch != group.epoch or not counts
            entry = one_call(group, op, dice.choice((1, 1, 1, 1, 300, LONG // 4)))
            try:
                is_new = is_new or epoch != group.epoch or _is_first_of_somebody(engine, seq)
                _check_alone(entry, num_ranks, mode, is_new)
            except AssertionError as exc:
                raise AssertionError(f"{exc}; {_place_of(group, counts)}") from exc
            mask = sum(1 << other for other in entry.contributors)
            failed = entry.status != "ok"
            if failed:
                _note_failure(f"{folder}/failed-{rank}-{os.getpid()}", entry, _place_of(group, counts))
            os.write(log, LOG.pack(seq, ALL_OPS.index(op), mask, entry.epoch, failed))
            key = entry.status if failed or len(entry.contributors) == num_ranks else "degraded"
            counts[key] = counts.get(key, 0) + 1
            if group.epoch != epoch:
                epoch = group.epoch
                tell(("epoch", epoch, len(engine.members.members), engine.num_retired))
                if len(engine.members.members) == num_ranks:
                    first = first or resources()
            waiting = group.waiting_ranks()
            if waiting and rank == engine.members.members[0]:
                try:
                    group.recover_ranks(waiting, 1.0)
                except CommTimeoutError:
                    counts["late joiner"] = counts.get("late joiner", 0) + 1
        counts["epoch"] = group.epoch
        last = resources()
        dist.destroy_process_group()
    finally:
        os.close(log)
    return {"counts": counts, "first": first, "last": last}


def _shall_stop(group: Any, folder: str) -> bool:
    flag = torch.tensor([int((Path(folder) / "stop").exists())])
    try:
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    except RankFailedError:
        return False  # the same on all
    return bool(flag)


def _note_failure(path: str, entry: Entry, place: str) -> None:
    """Keep what a failed call said, to be shown when the logs differ."""
    with open(path, "a") as file:
        file.write(f"{entry.seq} {entry.status} {entry.text}; {place}\n")


def _is_first_of_somebody(engine: Any, seq: int) -> bool:
    course = engine.membership._course
    return seq in course.starts(course._latest)


def _place_of(group: Any, counts: dict[str, int]) -> str:
    """Describe where this rank is, for a violation."""
    engine = group._engine
    course = engine.membership._course
    consumed = [int(words[0]) for words in engine.peer_regions.words]
    return (
        f"calls so far {counts}, epoch {group.epoch}, members {engine.members.members}, CONSUMED {consumed}, "
        f"base {course.base}, turns {[(t.epoch, t.hit, t.limit, t.removed) for t in course.turns]}, members by epoch "
        f"{course._members}"
    )


def _check_alone(entry: Entry, num_ranks: int, mode: str, is_new: bool) -> None:
    """Check an entry as far as one rank can.

    Roots are chosen by what each rank knows before the call. In the call with which a newcomer begins, only the
    newcomer knows that it is there, so their roots may differ: the call is refused on all ranks, or it fails on all
    because one of the roots is lost.
    """
    if entry.status == "ok":
        want = expected(entry.op, entry.seq, entry.contributors, num_ranks, entry.rank, entry.root)
        assert entry.value == want, (entry, want)
    elif entry.status == "EvictedError":
        raise EvictedError(f"a live rank was voted out: {entry}")
    elif entry.status == "MismatchError":
        assert is_new, entry
        assert entry.op in ("broadcast", "reduce", "gather", "scatter"), entry
    else:
        assert entry.status == "RankFailedError", entry
        assert mode == "raise" or is_new or entry.root in entry.ranks, entry
