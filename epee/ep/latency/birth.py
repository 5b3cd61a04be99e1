"""Birth of the memory of latency mode: every rank makes its card and its memory and maps everybody's.

All ranks together: two exchanges through the buffer's own control plane. The first has each rank's card, rank 0's
table, and the newest number of a buffer of the group; then everybody maps everybody's card and, on CPUs, the memory
that it names. The second says that all of it is mapped. A rank that has no memory or descriptors refuses, so that all
others raise at once.

A replacement (`membership/rejoin.py` has the protocol) looks for a running buffer first: `find_running`. A buffer runs
when a member has it open, and none of those who took part in its last decision, are in the view and live has closed
it.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from ...errors import CommTimeoutError, EpeeError, NoQuorumError, ProtocolError, context
from ...memory.host import BLOB_BYTES, HostRegion
from ...view.group import GroupInView
from ...view.process.detector import is_leaving
from ..config import CONFIG_NAMES, BufferConfig, describe_word
from ..control.bootstrap import Born
from ..control.inbox import OP_GATHER, inbox_layout
from ..control.messages import ControlPlane
from ..membership.agreement import Agreement
from ..membership.birth import registry_of
from ..membership.card import Card, Lent, new_serial
from ..membership.registry import Line, find
from ..membership.rejoin import Held, Kin, Memory, Place, card_of
from ..membership.table import Decision, Table, word_of

logger = logging.getLogger("epee")

_GREETING = struct.Struct(f"<{BLOB_BYTES}s{BLOB_BYTES}sQ")  # card, table (rank 0's), newest buffer


class Running(NamedTuple):
    """A running buffer that a replacement takes part in."""

    number: int
    table: Table


class LatencyBorn(NamedTuple):
    """What a latency buffer begins with.

    Attributes:
        born: inboxes and the watch on everybody's process; for a replacement nothing yet.
        place: in a group of the backend "epee"; else None.
        running: the buffer to take part in; None when all ranks make one together.
    """

    born: Born
    place: Place | None
    running: Running | None


def find_place(
    group: dist.ProcessGroup, seat: GroupInView | None, config: BufferConfig, refusal: EpeeError | None
) -> tuple[Place | None, Running | None]:
    """Return the buffer's place in its group, and the running buffer if this process is to take part in one."""
    if seat is None or refusal is not None:
        return None, None
    place = Place(seat, registry_of(group, seat))
    return place, find_running(place, config, group.rank()) if seat.is_joiner else None


def find_running(place: Place, config: BufferConfig, rank: int) -> Running | None:
    """Return the oldest running buffer with equal arguments that this process does not have."""
    processes = place.processes()
    lines = _lines_of(place, processes, rank)
    numbers = {number for held in lines.values() for number in held}
    for number in sorted(numbers - place.registry.had):
        for other, held in lines.items():
            if number not in held or not _fits(held[number], other, config, rank):
                continue
            table = _table_of(held[number], processes[other], config.num_ranks)
            if table is None:
                continue
            try:
                last = table.read(table.round)
            except BaseException:
                table.close()
                raise
            held_now = _lines_of(place, processes, rank)  # after the table: who is in it has shown its line before
            if all(number in held_now.get(member, ()) for member in _members(last, processes)):
                return Running(number, table)
            table.close()
            break
    return None


def _lines_of(place: Place, processes: dict[int, tuple[int, int]], rank: int) -> dict[int, dict[int, Line]]:
    """Return the open buffers of the other ranks' processes, by number."""
    found = {other: find(place.seat.lane, *process) for other, process in processes.items() if other != rank}
    return {other: registry.numbers() for other, registry in found.items() if registry is not None}


def _members(last: Decision, processes: dict[int, tuple[int, int]]) -> list[int]:
    """Return the ranks whose processes took part in a decision, are in the view, and live."""
    return [
        rank
        for rank, process in processes.items()
        if last.members[rank] and word_of(process) == last.processes[rank] and not is_leaving(*process)
    ]


def _table_of(line: Line, process: tuple[int, int], num_ranks: int) -> Table | None:
    with contextlib.suppress(EpeeError):  # its owner has just ended; another one has the table, too
        card = card_of(line, process, num_ranks)
        if card is not None:
            try:
                return Table.attach(card.table(), num_ranks)
            finally:
                card.close()
    return None


def _fits(line: Line, other: int, config: BufferConfig, rank: int) -> bool:
    """Return whether a running buffer was made with these arguments; notes a latency buffer that was not."""
    words, theirs = config.words(), line.config(len(CONFIG_NAMES))
    if theirs == words:
        return True
    index = CONFIG_NAMES.index("mode")
    if theirs[index] == words[index] and theirs[0] == words[0]:
        different = [name for name, own, their in zip(CONFIG_NAMES, words, theirs, strict=True) if own != their]
        shown = ", ".join(
            f"{name} {describe_word(name, theirs[CONFIG_NAMES.index(name)])} on rank {other}, "
            f"{describe_word(name, words[CONFIG_NAMES.index(name)])} here (rank {rank})"
            for name in different
        )
        logger.info("a latency buffer of the group runs that was made with other arguments: %s", shown)
    return False


class Household(NamedTuple):
    """What a path has for agreements and replacements."""

    kin: Kin
    agreement: Agreement
    first: Decision | None  # of a replacement: the decision that took it in, to be committed


def settle(
    rank: int,
    control: ControlPlane,
    start: LatencyBorn,
    memory: Memory,
    interrupt: Callable[[], None],
    deadline: float,
    maps: bool = True,
) -> Household:
    """Make this rank's card and meet the others: all together, or as a replacement.

    Args:
        rank: this rank.
        control: of the buffer.
        start: what the buffer begins with.
        memory: of the path.
        interrupt: called while waiting; raises to end the wait.
        deadline: `time.monotonic()` value.
        maps: False when the path has mapped the peers' memory by itself (all ranks together).

    Raises:
        ResourceError: no memory or descriptors, here.
        MismatchError: another rank could not; the same on all others.
        CommTimeoutError: a replacement was not taken in.
    """
    if start.running is not None:
        return _join(rank, control, start, memory, interrupt, deadline)
    return _meet(rank, control, start, memory, interrupt, deadline, maps)


def _meet(
    rank: int,
    control: ControlPlane,
    start: LatencyBorn,
    memory: Memory,
    interrupt: Callable[[], None],
    deadline: float,
    maps: bool,
) -> Household:
    config, inboxes = control.config, start.born.inboxes
    with contextlib.ExitStack() as undo:
        try:
            card = Card.make(config.num_ranks, rank)
            undo.callback(card.close)
            blob, own = memory.renew()
            if own is not None:
                undo.callback(memory.drop, own)
            card.lend(Lent(new_serial(), inboxes[rank].blob, blob))
            table = Table.make(config.num_ranks) if rank == 0 else None
            if table is not None:
                undo.callback(table.close)
            newest = 0 if start.place is None else start.place.registry.newest
            told = _greet(control, card, table, newest, deadline)
            if table is None:
                table = Table.attach(told[0][1], config.num_ranks)
                undo.callback(table.close)
            cards = [
                card if other == rank else Card.attach(each[0], config.num_ranks) for other, each in enumerate(told)
            ]
            for other, each in enumerate(cards):
                undo.callback(each.close if other != rank else _nothing)
            blobs = [_lent(each).memory for each in cards]
            held: list[Any] = [None] * config.num_ranks
            held[rank] = own
            for other in range(config.num_ranks) if maps else ():
                if other != rank:
                    held[other] = memory.attach(blobs[other])
                    undo.callback(memory.drop, held[other])
            card.lend_table(table.blob)
            kin = Kin(config, rank, card, table, memory, control.exchange, start.place)
            undo.callback(kin.close)
            kin.meet(cards, inboxes, held, blobs)
            if rank == 0:
                serials = [each.serial for each in cards]
                processes = [word_of(each.process) for each in cards]
                table.write(Decision(0, 0, 0, [True] * config.num_ranks, processes, serials))
            if start.place is not None:
                undo.callback(start.place.close)
                start.place.open(1 + max(each[2] for each in told), config, card)
        except EpeeError as error:
            control.refuse(OP_GATHER, error, deadline)
            raise
        control.all_gather_bytes(bytes(8), deadline)
        for other in range(config.num_ranks) if maps else ():
            memory.use(other, held[other])
        undo.pop_all()
    return Household(kin, Agreement(kin, interrupt), None)


def _nothing() -> None:
    pass


def _greet(
    control: ControlPlane, card: Card, table: Table | None, newest: int, deadline: float
) -> list[tuple[bytes, bytes, int]]:
    """Exchange cards, table and numbers of buffers."""
    greeting = _GREETING.pack(card.blob, b"" if table is None else table.blob, newest)
    return [_GREETING.unpack(data) for data in control.all_gather_bytes(greeting, deadline)]


def _lent(card: Card) -> Lent:
    lent = card.lent()
    if lent is None:
        raise ProtocolError(f"process {card.process[0]} shows a card without its memory")
    return lent


def _told(problems: dict[int, str]) -> str:
    return "".join(f"; the memory of rank {rank} cannot be mapped: {text}" for rank, text in problems.items())


def _join(
    rank: int,
    control: ControlPlane,
    start: LatencyBorn,
    memory: Memory,
    interrupt: Callable[[], None],
    deadline: float,
) -> Household:
    config, place, running = control.config, start.place, start.running
    assert place is not None
    assert running is not None
    started = time.monotonic()
    with contextlib.ExitStack() as undo:
        undo.callback(running.table.close)
        card = Card.make(config.num_ranks, rank)
        undo.callback(card.close)
        inbox = HostRegion.create(inbox_layout(config).nbytes, f"inbox-{rank}-joins")
        undo.callback(inbox.close)
        blob, own = memory.renew()
        with contextlib.ExitStack() as not_yet:  # until `kin` has it
            if own is not None:
                not_yet.callback(memory.drop, own)
            held = Held(new_serial(), inbox, blob, own)
            card.lend(Lent(held.serial, inbox.blob, blob))
            card.lend_table(running.table.blob)
            kin = Kin(config, rank, card, running.table, memory, control.exchange, place)
            kin.join(held)
            undo.callback(kin.close)
            not_yet.pop_all()
        undo.callback(place.registry.had.discard, running.number)
        place.open(running.number, config, card)
        agreement = Agreement(kin, interrupt)
        try:
            decision = agreement.sync([True] * config.num_ranks, 0, deadline)
        except NoQuorumError as error:
            where = context("Buffer", rank=rank, elapsed=time.monotonic() - started)
            raise CommTimeoutError(
                f"{where}: the members of the running buffer have not taken this process in; all of them must call "
                f"buffer.sync() while this one makes its buffer{_told(kin.problems)}",
                error.ranks,
            ) from error
        undo.pop_all()
    return Household(kin, agreement, decision)
