"""Batches of messages with the kernels' own sources in the calling process, each compared byte for byte."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from epee.backend.cuda.messages.machine import ANY, MessagePlan, Messages, Parcel
from epee.backend.cuda.messages.params import MessageConfig
from epee.backend.cuda.messages.report import error_of
from epee.errors import EpeeError
from tests.csrc.emulated import EmulatedPlatform, all_gather_bytes

# Small enough that a few kilobytes are many chunks, in slots that are used many times over.
SMALL = {"num_lanes": 3, "num_slots": 2, "slot_bytes": 256, "lane_bytes": 256}
RING_BYTES = 3 * 2 * 256
THREADS = 96  # a warp that waits, one that lets go, one that moves


class Mail(NamedTuple):
    """A message of a plan that all ranks know."""

    src: int
    dst: int
    nbytes: int
    tag: int
    seed: int
    shift: int = 0  # bytes by which memory is off its alignment


def make(rank: int, num_ranks: int, blocks: int = 3, stall_one_in: int = 0) -> Messages:
    """The machine of a rank, all pairs of which have met."""
    plan = MessagePlan(blocks, 1, 3 * blocks)
    machine = Messages(EmulatedPlatform(), MessageConfig(rank, num_ranks, **SMALL), plan, stall_one_in)
    machine.threads, machine.timeout_s = THREADS, 60.0
    for peer, blob in enumerate(all_gather_bytes(machine.blob)):
        machine.connect(peer, blob)
    all_gather_bytes(b"met")
    return machine


def check(machine: Messages) -> None:
    """Raise what kernels have reported."""
    for report in machine.device.take_reports():
        raise error_of(report, machine.config.rank)


def content(mail: Mail) -> torch.Tensor:
    """The bytes of a message."""
    gen = torch.Generator().manual_seed(mail.seed)
    return torch.randint(0, 256, (mail.nbytes,), generator=gen, dtype=torch.uint8)


class Room:
    """Memory for one end of a message, with poison around it."""

    def __init__(self, mail: Mail, is_send: bool) -> None:
        self.mail, self.is_send = mail, is_send
        self.bytes = torch.full((mail.shift + mail.nbytes + 64,), 0xA5, dtype=torch.uint8)
        self.row = self.bytes[mail.shift : mail.shift + mail.nbytes]
        if is_send:
            self.row.copy_(content(mail))

    def parcel(self, peer: int | None = None) -> Parcel:
        """What is moved; `peer` instead of the other end."""
        other = self.mail.dst if self.is_send else self.mail.src
        at = self.row.data_ptr() if self.mail.nbytes else 0
        return Parcel(self.is_send, other if peer is None else peer, at, self.mail.nbytes, self.mail.tag, 7)

    def verify(self) -> None:
        """Fail unless a receive has what was sent, and nothing else was written."""
        assert torch.equal(self.row, content(self.mail)), self.mail
        around = torch.cat([self.bytes[: self.mail.shift], self.bytes[self.mail.shift + self.mail.nbytes :]])
        assert bool((around == 0xA5).all()), f"written beside {self.mail}"


def rooms_of(rank: int, mails: Sequence[Mail]) -> list[Room]:
    """This rank's ends: of a message to itself both."""
    found = [Room(mail, True) for mail in mails if mail.src == rank]
    return found + [Room(mail, False) for mail in mails if mail.dst == rank]


def run_batch(machine: Messages, mails: Sequence[Mail], order: random.Random | None = None) -> None:
    """Make a batch of all messages of this rank, in an order of its own where the order does not count."""
    rooms = rooms_of(machine.config.rank, mails)
    if order is not None:
        keys = [(room.parcel().peer, room.is_send) for room in rooms]
        order.shuffle(keys)
        rooms.sort(key=lambda room: keys.index((room.parcel().peer, room.is_send)))
    if rooms:
        machine.run([room.parcel() for room in rooms], 0, False)
    check(machine)
    for room in rooms:
        room.verify()


SIZES = (0, 1, 15, 16, 17, 255, 256, 257, 1000, RING_BYTES, RING_BYTES + 1, 5000, 20_003)


def every_size(rank: int, num_ranks: int) -> None:
    """Each size to each rank, this one included, each a batch; and all of them as one."""
    machine = make(rank, num_ranks)
    pairs = [(src, dst) for src in range(num_ranks) for dst in range(num_ranks)]
    mails = [
        Mail(src, dst, size, 5 + n, n * 100 + src * 10 + dst, shift=n % 3)
        for n, size in enumerate(SIZES)
        for src, dst in pairs
    ]
    for n in range(len(SIZES)):
        run_batch(machine, mails[n * len(pairs) : (n + 1) * len(pairs)])
    run_batch(machine, mails)  # more operations than fit among a kernel's arguments
    all_gather_bytes(b"done")
    machine.close()


def random_batches(rank: int, num_ranks: int, seed: int, how_many: int, stall_one_in: int, blocks: int) -> None:
    """Batches of any size and any pairs, in an order of its own on each rank."""
    machine = make(rank, num_ranks, blocks if rank else 1, stall_one_in)  # grids need not be alike
    plan, own = random.Random(seed), random.Random(seed * 10 + rank)
    for number in range(how_many):
        mails = [
            Mail(
                plan.randrange(num_ranks), plan.randrange(num_ranks), plan.choice(SIZES), plan.randrange(3),
                number * 1000 + n, plan.choice((0, 0, 1, 4)),
            )
            for n in range(plan.randrange(1, 12))
        ]  # fmt: skip
        run_batch(machine, mails, own)
    all_gather_bytes(b"done")
    machine.close()


def early_sends(rank: int, num_ranks: int) -> None:
    """Messages that fit the ring are sent before anybody receives; a longer one waits for its receive."""
    machine = make(rank, num_ranks)
    small = [Mail(0, 1, 200, 1, n) for n in range(2)]  # a lane has two slots
    large = Mail(0, 1, 6 * RING_BYTES, 2, 9)
    if rank == 0:
        rooms = [Room(mail, True) for mail in small]
        for room in rooms:
            machine.run([room.parcel()], 0, False)
        check(machine)
    all_gather_bytes(b"sent")
    if rank == 1:
        for mail in small:
            run_batch(machine, [mail])
    if rank == 0:
        started = time.monotonic()
        run_batch(machine, [large])
        assert time.monotonic() - started > 0.2
    else:
        time.sleep(0.5)
        run_batch(machine, [large])
    all_gather_bytes(b"done")
    machine.close()


def any_source(rank: int, num_ranks: int) -> list[int]:
    """Rank 0 takes messages from whoever has one with the tag, whatever else waits in front of others' rings."""
    machine = make(rank, num_ranks)
    found = []
    if rank:
        time.sleep(0.1 * (num_ranks - rank))
        for n in range(3):
            run_batch(machine, [Mail(rank, 0, 3000, 4 + n, 50 * n + rank)])
    else:
        for n in (0, 1):
            for _ in range(1, num_ranks):
                room = Room(Mail(0, 0, 3000, 4 + n, 0), False)
                queued = machine.receive_any(room.parcel(ANY), 0)
                check(machine)
                assert queued.source is not None
                src = int(queued.source.words[0]) - 1
                assert torch.equal(room.row, content(Mail(src, 0, 3000, 4 + n, 50 * n + src)))
                found.append(src)
        run_batch(machine, [Mail(src, 0, 3000, 6, 100 + src) for src in range(1, num_ranks)])
    all_gather_bytes(b"done")
    machine.close()
    return found


def error_from(call: Any, machine: Messages) -> EpeeError:
    """What a call leads to."""
    call()
    try:
        check(machine)
    except EpeeError as error:
        return error
    raise AssertionError("nothing was reported")


def mend(machine: Messages, num_ranks: int) -> None:
    """What hosts do when a pair has lost a message."""
    all_gather_bytes(b"still")
    machine.device.take_reports()
    for peer in range(num_ranks):
        machine.reset(peer)
    all_gather_bytes(b"empty")


def differing(rank: int, num_ranks: int, sent: Mail, wanted: Mail, dtype: int) -> tuple[str, str]:
    """A receive that does not fit the message is told at both ends, and the pair works after they have met."""
    machine = make(rank, num_ranks)
    mail = wanted if rank else sent
    mine = Room(mail, rank == 0)
    parcel = mine.parcel()._replace(dtype=dtype if rank else 7)
    room = Room(Mail(0, 1, 100, 1, 1), rank == 0)
    if rank:
        error = error_from(lambda: machine.run([parcel], 0, False), machine)
        all_gather_bytes(b"told")
    else:
        machine.run([parcel], 0, False)  # a short one has ended before
        all_gather_bytes(b"told")
        found = machine.device.take_reports()
        if found:
            error = error_of(found[0], rank)
        else:
            error = error_from(lambda: machine.run([room.parcel()], 0, False), machine)
    mend(machine, num_ranks)
    run_batch(machine, [Mail(0, 1, 3000, 6, 3), Mail(1, 0, 2000, 6, 4)])
    all_gather_bytes(b"done")
    machine.close()
    return type(error).__name__, str(error)


def stopped(rank: int, num_ranks: int, how: str, nbytes: int, is_send: bool) -> tuple[str, str]:
    """A message whose other end does not come ends by the time-out, by an abort, or by the peer's death."""
    machine = make(rank, num_ranks)
    if rank == 0:
        if how == "time":
            machine.timeout_s = 0.5
        else:
            say = machine.device.abort if how == "abort" else lambda: machine.device.mark_dead([1])
            threading.Timer(0.3, say).start()
        room = Room(Mail(0, 1, nbytes, 2, 1) if is_send else Mail(1, 0, nbytes, 2, 1), is_send)
        error = error_from(lambda: machine.run([room.parcel()], 0, False), machine)
        all_gather_bytes(b"over")
    else:
        all_gather_bytes(b"over")
        room = Room(Mail(1, 0, nbytes, 2, 1) if is_send else Mail(0, 1, nbytes, 2, 1), is_send)
        error = error_from(lambda: machine.run([room.parcel()], 0, False), machine)
    all_gather_bytes(b"told")
    machine.device.news.words[0] = machine.device.news.words[1] = 0
    machine.timeout_s = 60.0
    if how == "time":
        mend(machine, num_ranks)
        run_batch(machine, [Mail(0, 1, 3000, 6, 3), Mail(1, 0, 2000, 6, 4)])
    all_gather_bytes(b"done")
    return type(error).__name__, str(error)


def nobody(rank: int, num_ranks: int) -> str:
    """A receive from any source that nobody sends to ends by the time-out, and loses no pair."""
    machine = make(rank, num_ranks)
    told = ""
    if rank == 0:
        machine.timeout_s = 0.3
        room = Room(Mail(1, 0, 100, 9, 1), False)
        for _ in range(2):
            told = str(error_from(lambda: machine.receive_any(room.parcel(ANY), 0), machine))
        machine.timeout_s = 60.0
    all_gather_bytes(b"late")
    run_batch(machine, [Mail(1, 0, 100, 1, 1)])
    all_gather_bytes(b"done")
    return told


def successor(rank: int, num_ranks: int) -> None:
    """What this GPU has copied of the host's word about the dead is about an earlier process: the host's own counts."""
    machine = make(rank, num_ranks)
    late = 2**62 + time.monotonic_ns()  # another block has just renewed the copy, and goes on doing so
    for number in range(3):
        if rank == 0:
            machine._store("news", 0, [late, 1 << 1, 0, 0])
        else:
            time.sleep(0.1)
        run_batch(machine, [Mail(1, 0, 3000, 6, number), Mail(0, 1, 6 * RING_BYTES, 7, 10 + number)])
    all_gather_bytes(b"done")
    machine.close()


def forgotten(rank: int, num_ranks: int, is_send: bool) -> str:
    """A launch for a peer that the host has forgotten (a graph's, say) stores nowhere, and is told as lost."""
    machine, told = make(rank, num_ranks), ""
    if rank == 0:
        machine.disconnect(1)
        room = Room(Mail(0, 1, 700, 2, 1) if is_send else Mail(1, 0, 700, 2, 1), is_send)
        queued = machine.run_one(room.parcel(), 0, False)
        assert machine.is_lost(1, is_send, queued.ticket)
        (report,) = machine.device.take_reports()
        told = str(error_of(report, rank))
    blobs = all_gather_bytes(machine.blob)
    machine.connect(rank ^ 1, blobs[rank ^ 1])
    all_gather_bytes(b"met")
    run_batch(machine, [Mail(0, 1, 3000, 6, 3), Mail(1, 0, 2000, 6, 4)])
    all_gather_bytes(b"done")
    machine.close()
    return told
