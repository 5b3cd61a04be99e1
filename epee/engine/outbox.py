"""The outbox: the memory that a rank shares with the others for one epoch.

A rank writes **only its own outbox** and reads the others'. So no process can overwrite a survivor's memory, whatever
an evicted or stopped process still does; excluding a rank means not reading its outbox any more. The kernel enforces
it: peers map an outbox for reading only, and it is sealed against anything else (`SharedRegion.create`). A new epoch
gets new outboxes, so a late reader of the old ones still finds the data that belonged there.

    state      words that describe the rank: progress, sleepers, life; the owner of the outbox
    cells      NUM_CELLS headers of collective calls, seq modulo NUM_CELLS, each with room for a small payload
    verdicts   per source rank: the outcome of its point-to-point messages (a ring, and a count of freed slots)
    channels      per destination rank: headers of NUM_CHANNEL_SLOTS point-to-point slots
    mirrors    per rank of another host: the mirror that this rank keeps of it, for the ranks of its host (`MIRROR_*`)
    extra      words and bytes of a client of the group's engine (`ep/latency/hosts`)
    staging    payload of collective calls, handed out by `StagingRing`
    channel_data  payload of the point-to-point slots, CHANNEL_SLOT_BYTES each

Order: a writer stores the payload, then the header's words, then the tag (x86-64 keeps that order), then wakes the
sleepers. A crash before the tag leaves an old tag, so a partial contribution is never read. A cell or slot is written
again only when every reader has published, in its own outbox, that it has finished with it.

A rank announces its sleep in its own outbox (the SLEEPERS word) before it enters the kernel; the writer reads that
word after its store (`publish_word`). A full fence is needed between the store and the read, else both sides could miss
each other (Dekker's pattern, the one reordering that x86-64 does; `memory.signals.fence`, here without its call). On
the sleeper's side the futex call itself orders the announcement before the kernel's read of the word. A lost wake-up is
bounded: the sleep is timed. A receive from any source waits for a word of each of several ranks. It sleeps on the BELL
word of its own outbox, which never changes while it sleeps; a sender that finds BELL set wakes the sleepers there.

Ranks of other hosts do not map an outbox: its stores are sent to them (`replication/exports.py`).

An outbox names its owner (`OutboxOwner`), written once before its blob is sent to any rank, so that a blob that was
sent for another rank, group or incarnation is detected when it is mapped.

Memory is lazy: the file is sparse, only pages that were used exist. The first group of a job may grow, so its outboxes
have room for channels to 64 ranks from the beginning (decision 42): 1.1 GiB of addresses each, some pages of it
touched. The engine of a buffer of one host sends no messages, and its outboxes have no channels.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import ProtocolError
from ..memory.layout import Field, Layout
from ..memory.shared import SharedRegion
from ..memory.signals import SEQ_BITS, futex_wake
from ..view.label import Label

NUM_CELLS = 128
CELL_BYTES = 2048
CELL_WORDS = CELL_BYTES // 8
CELL_PAYLOAD_BYTES = CELL_BYTES - 64

# words of a cell; OFFSET is sealed (`seal`), FILLED, MERGED and DRAINED hold counts (`counted`)
TAG, SIGNATURE, DETAIL, OFFSET, FILLED, MERGED, DRAINED, GAVE_UP = range(8)
PREAMBLE = 8  # first word of the payload, where some calls put lists that must agree

# words of the state field, one cache line apart. CONSUMED has a copy beside it and readers take the smaller one, so a
# damaged word never frees data that is still read; the values of LIFE are four bits apart. A rank that stores
# LIFE_BROKEN ends the group for all others as well (`Engine.break_down`).
# VIEW: the epoch up to which this rank has applied decisions, stored before any call is decided by the last of them.
# A reader that loads it after CONSUMED knows the decisions under which the calls have ended there.
# CORE: 1 + where a waiter last ran; a hint, nothing depends on it.
# OWNER: the owner of this outbox, packed (`OutboxOwner`).
# GENERATION: the epoch of the newest join by which this rank plays its roles between hosts; for the ranks of its host.
# BELL: 1 while a receive from any source sleeps on this very word, which never changes: senders wake it (`ring`).
CONSUMED, SLEEPERS, LIFE, CORE, BELL, OWNER, GENERATION = 0, 8, 16, 24, 32, 40, 46
CONSUMED_TOO, VIEW = CONSUMED + 1, CONSUMED + 2
STATE_WORDS = 48
LIFE_BORN, LIFE_READY, LIFE_LEFT, LIFE_ABORTED, LIFE_FAILED, LIFE_BROKEN = 0, 0xF, 0xF0, 0xF00, 0xF000, 0xF0000
LIFE_EXITED = 0xF00000  # the process ends without having destroyed the group
_GONE = frozenset((LIFE_LEFT, LIFE_ABORTED, LIFE_FAILED, LIFE_BROKEN, LIFE_EXITED))

NUM_CHANNEL_SLOTS = 256
CHANNEL_SLOT_BYTES = 64 << 10
CHANNEL_BYTES = NUM_CHANNEL_SLOTS * CHANNEL_SLOT_BYTES
CHANNEL_SLOT_WORDS = 8
CHANNEL_WORDS = NUM_CHANNEL_SLOTS * CHANNEL_SLOT_WORDS
# words of a channel slot
SLOT_TAG, SLOT_MESSAGE, SLOT_USER_TAG, SLOT_SIGNATURE, SLOT_TOTAL_BYTES, SLOT_BYTES, SLOT_KIND = range(7)
# not a word of the slot that it lies in: number of an aborted message, in slot (number - 1) modulo the slots
TAKEN_BACK = 7

NUM_VERDICTS = 256
VERDICT_WORDS = 2  # message number << 2 | outcome, signature that the receiver expected
SOURCE_WORDS = 8 + NUM_VERDICTS * VERDICT_WORDS  # word 0: slots freed so far
CLAIM = 1  # the word with the number of the message that is being taken; apart from the verdict, which a sender polls

# words of a row of the field "mirrors": whether there is one (0: no; else the epoch since which there is), up to which
# epoch it says all that counts (`FINAL`: nothing more comes), whether the cut of an epoch says what counts (0: all that
# is there), its blob
MIRROR_MADE, MIRROR_SETTLED, MIRROR_CUT, MIRROR_BLOB = range(4)
MIRROR_WORDS = 16
FINAL = (1 << 64) - 1

ALIGN_BYTES = 64
_BYTE = np.dtype(np.uint8)


def outbox_layout(capacity: int, staging_bytes: int, extra_bytes: int = 0, has_messages: bool = True) -> Layout:
    """Return the layout of an outbox in a group that may have `capacity` ranks; `staging_bytes`: of one staging buffer.

    Four such buffers are laid out: two that send and two that hold what a rank has reduced for others. `extra_bytes`, a
    multiple of 8, are among the words that peers read, and may request. Without messages, there are no channels.
    """
    num_channels = capacity if has_messages else 0
    return Layout(
        Field("state", torch.uint64, (STATE_WORDS,)),
        Field("cells", torch.uint64, (NUM_CELLS, CELL_WORDS)),
        Field("verdicts", torch.uint64, (capacity, SOURCE_WORDS)),
        Field("channels", torch.uint64, (num_channels, CHANNEL_WORDS)),
        Field("mirrors", torch.uint64, (capacity, MIRROR_WORDS)),
        Field("extra", torch.uint64, (extra_bytes // 8,), align_bytes=4096),
        Field("staging", torch.uint8, (4 * staging_bytes,), align_bytes=4096),
        Field("channel_data", torch.uint8, (num_channels, CHANNEL_BYTES), align_bytes=4096),
    )


class OutboxOwner(NamedTuple):
    """The process and the group to which an outbox belongs.

    Attributes:
        nonce: of the process; it stands for its job and its incarnation.
        group_id: of the group.
        slot: of the process in the job.
    """

    nonce: bytes
    group_id: int
    slot: int

    def pack(self) -> bytes:
        """Return the bytes of the OWNER words."""
        return _OWNER.pack(*self)

    def sign(self, region: SharedRegion) -> None:
        """Write into one's own outbox whose it is."""
        words = region.words(0, STATE_WORDS)
        words[OWNER : OWNER + _OWNER.size // 8] = memoryview(self.pack()).cast("Q")
        words.release()


_OWNER = struct.Struct("<16sQQ")


def open_outbox(blob: bytes, owner: OutboxOwner) -> SharedRegion:
    """Map a peer's outbox for reading.

    Raises:
        ProtocolError: it is the outbox of another owner, or none.
        AuthError, ResourceError: as `SharedRegion.attach`.
    """
    region = SharedRegion.attach(blob, is_writable=False)
    told = bytes(region.words(0, STATE_WORDS)[OWNER:]) if region.nbytes >= 8 * STATE_WORDS else b""
    if told[: _OWNER.size] != owner.pack():
        region.close()
        raise ProtocolError(
            f"the memory of process {region.owner_pid} was told to be slot {owner.slot}'s outbox, and is another's; "
            "the record that said so was not used"
        )
    return region


SEAL_PRIME = (1 << 32) - 5  # no power of two is a multiple of it


def seal(tag: int, signature: int, detail: int, offset: int) -> int:
    """Return the OFFSET word of a header: where the payload is, and above that a check over the header.

    `engine.py` does the same in its own lines.

    A reader that computes the same word from what it reads knows that the words belong together: one flipped bit in
    any of them, or the header of another call under this call's tag, gives another word. `offset` is in bytes, a
    multiple of 64 below 2^38.
    """
    place = offset >> 6
    return ((tag ^ signature ^ detail) % SEAL_PRIME ^ place) << 32 | place


def unsealed(word: int) -> int:
    """Return the offset in bytes that an OFFSET word names."""
    return (word & 0xFFFFFFFF) << 6


def counted(count: int) -> int:
    """Return the word FILLED, MERGED or DRAINED for `count`: it, and its complement below. Words order as counts do."""
    return count << 32 | count ^ 0xFFFFFFFF


# Values of GAVE_UP for a call: 0 while it is open, COMPLETES when its rank has decided to complete it, its tag when it
# is aborted, and `failed_by_view` when a change of the view has ended it.
COMPLETES = 0xC0DE


def failed_by_view(tag: int) -> int:
    """Return the GAVE_UP word of a call that a change of the view has ended."""
    return tag ^ 0xFFFFFFFFFFFFFFFF


COUNTED_0, COUNTED_1 = counted(0), counted(1)  # what most calls write


def count_of(word: int) -> int:
    """Return the count in such a word; -1 when it cannot be right."""
    count = word >> 32
    return count if word == counted(count) else -1


def consumed_of(words: Mapping[int, int] | memoryview) -> int:
    """Return the last call that the rank of these words has ended."""
    first, second = words[CONSUMED], words[CONSUMED_TOO]
    return int(first if first < second else second)


def has_left(words: Mapping[int, int] | memoryview) -> bool:
    """Return whether the rank of these words has left the group, or never joined it; False for a damaged word."""
    return words[LIFE] in _GONE


def has_exited(words: Mapping[int, int] | memoryview) -> bool:
    """Return whether the process of these words has ended without destroying the group, as it has reported itself."""
    return words[LIFE] == LIFE_EXITED


_fence = threading.Lock()
_take, _give_back = _fence.acquire, _fence.release


def publish_word(outboxes: PeerRegions, index: int, value: int, *moved: object) -> None:
    """Store `value` in word `index` of this rank's outbox and wake the waiters of this host.

    `moved`: the data that the word announces; ranks of this host read it in the outbox.
    """
    outboxes.own[index] = value
    if _take(False):
        _give_back()
    else:
        threading.Lock().acquire(False)
    for words in outboxes.peer_words:
        if words[SLEEPERS]:
            futex_wake(outboxes.own_address + 8 * index)
            return


def ring(outboxes: PeerRegions, peer: int) -> None:
    """Wake the receives from any source of `peer`, after a message for it was published."""
    if outboxes.words[peer][BELL]:
        futex_wake(outboxes.address[peer] + 8 * BELL)


class NoExports:
    """`replication.exports.Exports` of a group on one host: its ranks read every store in the outbox.

    Attributes:
        spans: whether ranks of other hosts may take part.
    """

    spans = False
    publish = publish_call = publish_block = publish_share = publish_fragment = staticmethod(publish_word)
    later: Callable[[int], object] = int
    consumed: Callable[[int], object] = int
    tell_ends: Callable[[int], object] = int
    say_goodbye: Callable[[], object] = int
    pump: Callable[[], bool] = bool
    rest: Callable[[], object] = int
    let_go: Callable[[], object] = int
    tell_progress: Callable[[], object] = int

    def is_here(self, rank: int) -> bool:
        """Return whether a rank shares this rank's host."""
        return True

    def placement(self, outboxes: PeerRegions) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each host: of this one, those that the group counts in the calls of `outboxes`."""
        return (tuple(range(outboxes.group_size)),)

    def call_again(self, *call: object) -> None:
        """Do nothing: a store that was made is there for all."""

    def end(self, outboxes: PeerRegions) -> None:
        """Drop the memory of the group."""
        outboxes.close()


NO_EXPORTS = NoExports()


class Views(dict[Any, list[np.ndarray[Any, Any]]]):
    """Every rank's outbox as a flat array of a dtype, made when first asked for: `views[dtype][rank]`.

    Index in an array = byte offset / item size. A dict, because every call asks twice and C finds what is there.
    """

    def __init__(self, regions: Sequence[SharedRegion], nbytes: int) -> None:
        super().__init__()
        self._regions = regions
        self._nbytes = nbytes

    def __missing__(self, dtype: np.dtype[Any]) -> list[np.ndarray[Any, Any]]:
        arrays = self[dtype] = [region.array(dtype, self._nbytes) for region in self._regions]
        return arrays


class PeerRegions:
    """All outboxes of one epoch, mapped: this rank's own and every peer's.

    Attributes:
        words: per rank, its header words (state, cells, verdicts, channels) as unsigned 64-bit.
        address: per rank, the address of its word 0.
        own: `words[rank]`.
        peers: the other ranks, ascending; `peer_words` are their words in that order.
        members: the ranks of the group that these outboxes belong to. At creation all of them, and all lists here are
            indexed by rank. When some have been lost, `membership.narrow` makes outboxes of the rest; `rank` and
            `peers` are then positions in `members`, and only messages and the user's lists know ranks.
        group_size: number of ranks that the group counts in these calls, lost ones included: the length of the user's
            lists with one element per rank.
        capacity: ranks for which there is room in each outbox; the same in all.
        blanks: ranks that have never been here: a blank outbox that no process writes stands for each.
        cells_free_until: calls up to this sequence number find their cell free (refreshed when reached).
        epoch_bits: the upper part of every tag of this epoch.
        first_cell: word index of the cells; a call with sequence number s has cell s modulo NUM_CELLS.
        extra: first byte of the field "extra".
        staging_bytes: size of one staging buffer.
        payload_bytes: offsets handed out by peers must end at or below this.
        num_roots: ranks below it are ranks of the group, lost maybe, also where lists have fewer entries.
        num_entries: of the user's lists with one element per rank, where they end before the highest member, because
            all members from there on are known to be lost; 0: they have `group_size`.
        zeroes: the entries of excluded ranks in the results are filled with zeros; else they stay unchanged.
        exports: publishes words, and sends the stores to ranks of other hosts.
        host_of: per rank of the group the number of its host; nothing in a group on one host.
        placed_in: the epoch of the last view that took a rank in, in which this placement begins; 0: the creation.
        here: the ranks of this rank's host, itself among them; nothing in a group on one host.
        sites: per host its positions, hosts by their lowest; nothing in a group on one host.
        mirror_base: per rank the index of its row in the field "mirrors".
        label: the group's name.
    """

    exports: Any = NO_EXPORTS
    host_of: Sequence[int] = ()
    placed_in = 0
    here: Sequence[int] = ()
    zeroes = False
    num_roots = 0
    num_entries = 0

    def __init__(
        self,
        rank: int,
        regions: list[SharedRegion],
        staging_bytes: int,
        epoch: int,
        capacity: int | None = None,
        extra_bytes: int = 0,
        has_messages: bool = True,
    ) -> None:
        num_ranks = len(regions)
        self.capacity = capacity = num_ranks if capacity is None else capacity
        layout = outbox_layout(capacity, staging_bytes, extra_bytes, has_messages)
        for peer, region in enumerate(regions):
            if region.nbytes < layout.nbytes:
                raise ProtocolError(f"outbox of rank {peer} has {region.nbytes} bytes, {layout.nbytes} expected")
        self.label = Label()
        self.rank = rank
        self.num_ranks = num_ranks
        self.members = tuple(range(num_ranks))
        self.group_size = num_ranks
        self.blanks: set[int] = set()
        self.epoch = epoch
        self.epoch_bits = epoch << SEQ_BITS
        self.regions = regions
        self.peers = tuple(peer for peer in range(num_ranks) if peer != rank)
        num_words = layout.offset("staging") // 8
        self.words = [region.words(0, num_words) for region in regions]
        self.address = [region.address for region in regions]
        self.own = self.words[rank]
        self.own_address = self.address[rank]
        self.peer_words = [self.words[peer] for peer in self.peers]
        self.cells_free_until = NUM_CELLS
        self.first_cell = layout.offset("cells") // 8
        self.verdict_base = [layout.offset("verdicts") // 8 + SOURCE_WORDS * peer for peer in range(capacity)]
        # without messages there is nothing at these, and nobody asks
        self.channel_base = [layout.offset("channels") // 8 + CHANNEL_WORDS * peer for peer in range(capacity)]
        self.channel_data = [layout.offset("channel_data") + CHANNEL_BYTES * peer for peer in range(capacity)]
        self.mirror_base = [layout.offset("mirrors") // 8 + MIRROR_WORDS * peer for peer in range(capacity)]
        self.extra = layout.offset("extra")
        self.sites: dict[int, tuple[int, ...]] = {}
        self.payload_bytes = layout.nbytes
        self.staging_bytes = staging_bytes
        self.ring = StagingRing(layout.offset("staging"), 4 * staging_bytes)
        self.forget_views()

    @property
    def list_length(self) -> int:
        """Entries of the user's lists with one element per rank."""
        return self.num_entries or self.group_size

    def place(self, host_of: Sequence[int], epoch: int = 0) -> None:
        """Set the hosts of the ranks, since which view; these peer regions have all ranks."""
        self.host_of, self.placed_in = host_of, epoch
        self.here = [rank for rank, host in enumerate(host_of) if host == host_of[self.members[self.rank]]]
        self.sites = sites_of(self.members, host_of)

    def forget_views(self) -> None:
        """Make the arrays of `views` anew when they are asked for: the regions are others."""
        self.views = Views(self.regions, self.payload_bytes)

    def bytes_at(self, rank: int, offset: int, nbytes: int) -> bytes:
        """Return a copy of bytes of an outbox; short when the range passes its end."""
        view = self.views[_BYTE][rank]
        return view[offset : offset + nbytes].tobytes()

    def least_consumed(self) -> int:
        """Return the last call that every rank, this one too, has ended; a rank that has left has ended all."""
        own = self.own
        least = min(own[CONSUMED], own[CONSUMED_TOO])  # `consumed_of`, without its calls
        for words in self.peer_words:
            consumed = min(words[CONSUMED], words[CONSUMED_TOO])
            if consumed < least and not has_left(words):
                least = consumed
        return int(least)

    def close(self) -> None:
        """Drop every reference to the mappings; the pages go with the last one."""
        for view in self.words:
            view.release()
        self.words = self.peer_words = []
        for region in self.regions:
            region.close()
        self.regions = []
        self.forget_views()


def leavers(peer_regions: PeerRegions) -> list[int]:
    """Return the peers that have left the group."""
    return [peer for peer in peer_regions.peers if has_left(peer_regions.words[peer])]


def sites_of(members: Sequence[int], host_of: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return per host the positions of its ranks among `members`, hosts by the lowest; nothing if no hosts are known.

    Sums over hosts run in this order, so it is the same on all ranks, whatever numbers they give to hosts.
    """
    found: dict[int, list[int]] = {}
    for position, rank in enumerate(members) if host_of else ():
        if rank < len(host_of) and host_of[rank] >= 0:
            found.setdefault(host_of[rank], []).append(position)
    return {host: tuple(positions) for host, positions in found.items()}


class StagingRing:
    """Hands out parts of the staging area; the part of the oldest call is freed first.

    Low addresses are preferred, so a program that waits for each call alternates between two parts, which stay in
    the cache, while one with many pending calls spreads out.
    """

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self._live: deque[tuple[int, int, int]] = deque()  # (seq, first byte, end), oldest first

    def give_up(self, seq: int) -> None:
        """Free the parts of call `seq` and later ones: they begin again."""
        live = self._live
        while live and live[-1][0] >= seq:
            live.pop()

    def take(self, seq: int, nbytes: int, consumed: int) -> int:
        """Return the offset of `nbytes` for call `seq`, or -1 when there is no room yet.

        First frees the parts of calls up to `consumed`.
        """
        nbytes = -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        live = self._live
        while live and live[0][0] <= consumed:
            live.popleft()
        if live and live[-1][0] == seq:  # asked again after an interrupt
            return self.start + live[-1][1]
        if not live:
            place = 0
        else:
            oldest, newest_end = live[0][1], live[-1][2]
            wrapped = live[-1][1] < oldest
            if wrapped:
                place = newest_end
                if newest_end + nbytes > oldest:
                    return -1
            elif nbytes <= oldest:
                place = 0
            else:
                place = newest_end
        if place + nbytes > self.nbytes:
            return -1
        live.append((seq, place, place + nbytes))
        return self.start + place
