"""The memory of a `LatencyBuffer` over several hosts: its writers and readers, and what orders them.

Data path: a source lays its message of a call, header and rows in one piece, into its own outbox for its own host, and
sends it to its gateway on each other host (`link/topology.py`), which stores it in the mirror of that outbox. **Every
rank of a host reads its own part there** (`region.py` has the fields). So a token's record crosses once per host, and
no rank forwards anything; counts, rows and tag of a message are one write. Weights of a combine travel in the same way,
ahead of it. Sums for ranks of this host never leave it; those for another host's rank are added up by its gateway here,
the only rank with a link to it, which has one row per token and host to send.

Writers: each rank writes its own outbox, a gateway writes its mirrors from frames, which it checks before a byte is
stored (`engine/replication/mirror.py`). Data for other hosts is sent from memory of the call alone, which is never
written again: so a message that the network has not taken yet cannot be changed by the next call.

Order: on one link frames are applied in the order of their writing, the tag after its rows. A source writes the next
message of a slot when its readers have freed the slot (`freed`, sent to all hosts), and the network has taken what it
had of it. A late reader that the source has excluded may still be reading the old message then: the tag is cleared
first, on that host as well (`_reopen`), and **a reader checks the tag once more after reading**. A message that has
lost its tag counts as not arrived: so a source is in a result as a whole, or not at all.

Words that stay true (`freed`, tags, that a call was aborted) are read in mirrors. The end of a call without a mask is
queried (see below). Clocks of hosts differ: a rank reports how long it waits, and its readers count from when they
receive that.

A crash leaves a part of a message without its tag, which no rank reads; a mirror whose gateway has died no longer
changes, and its rank counts as lost there until `sync`, which assigns another gateway (`begin_epoch`). A host whose
ranks are all lost has no gateway, and nothing is sent there.

The end of a call without a mask is common to all ranks, by the words of `latency/aborts.py`. Each rank writes its
own words only. A rank that aborts a call sends that to all hosts, after the word that it had gathered an earlier one.
With it goes the word LOST: an abort can arrive on another host before the death shows there. Then a rank that has
aborted reads the words of the others: on its own host directly, on another one by a query on the same stream
(`engine/replication/remote_reads.py`), which is answered after the words sent before it: the word is in the mirror
there, followed by a fence. A rank that continues reads the mirrors first. So of two ranks one of which aborts and the
other continues, at least one sees the other, as on one host.

A message that is missing fails a call when all hosts have answered (three and more: twice, `end_behind`). The state of
a rank that has not answered is unknown: the call stays open. If the link to it is lost no answer arrives. The caller
gets its error then, which names the lost rank; from the next call on (`GRACE_S` later) it decides nothing more, because
it never rejoins this buffer. Should it have completed the call there, it is the only one.

A crash leaves words as they were, for which the gateway continues to answer queries as long as it lives.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from ....engine import Engine
from ....engine.outbox import CONSUMED, SLEEPERS, STATE_WORDS
from ....engine.replication.exports import Exports
from ....engine.replication.remote_reads import RemoteReads
from ....engine.waiting import MOST_MOVES_S
from ....errors import ProtocolError, expected
from ....link.frames import NO_WORD
from ....link.topology import Roles, Topology
from ....memory.signals import YIELD_S, futex_wake, tag, usable_cores
from ....view.protocol.withdrawal import GRACE_S, Look, Stance, end_behind
from ...config import BufferConfig
from ..aborts import ABORTED, FAILED, GATHERED, LOST, EndWords
from ..region import RegionWords, SectionCut
from ..rows import Floats
from ..wire import SectionHeader, Timeouts, Wire, pack_head
from .region import Bytes, HostsFields, blank_half, latency_layout, weights_of


class HostsEndWords(EndWords):
    """The words of all ranks about one call.

    Args:
        rank: this rank.
        words: of each rank, as they are read here.
        line: index of a rank's line for this call, in all of them.
        topology: the placement of the ranks.
        first: index of word 0 of `words` among those of an outbox.
        looks: the queries.
        tell: sends the own line to all hosts.
    """

    def __init__(
        self,
        rank: int,
        words: Mapping[int, memoryview],
        line: int,
        topology: Topology,
        first: int,
        looks: RemoteReads,
        tell: Callable[[], None],
    ) -> None:
        super().__init__(rank, words, line)
        self._first = first
        self._topology = topology
        self._looks, self._tell = looks, tell
        self._since = 0.0  # when this rank has first checked
        self._is_repeated = topology.num_hosts <= 2  # as of `engine.withdrawal.Withdrawal`

    def abort(self, mark: int) -> None:
        """As `EndWords.abort`."""
        super().abort(mark)
        self._tell()

    def poll(self, mark: int, dead: Collection[int] = ()) -> Look:
        """As `EndWords.poll`; a rank that has not answered, though it may be lost, may have completed the call."""
        self._since = self._since or time.monotonic()
        is_over = time.monotonic() - self._since >= GRACE_S
        answers = {peer: self._answer_of(peer, mark) for peer in self._topology.elsewhere}
        stances: dict[int, Stance | None] = {}
        for peer in self._peers:  # words of this host are loaded behind all answers
            stances[peer] = (
                super()._stance_of(peer, mark)
                if self._topology.is_here(peer)
                else _stance_of(answers[peer], self._line, mark)
            )
            if stances[peer] is None and is_over and peer in dead:
                stances[peer] = Stance.GAVE_UP
        found = end_behind(stances, dead, self._is_repeated)
        self._is_repeated = self._is_repeated or None not in stances.values()
        return found

    def _answer_of(self, peer: int, mark: int) -> dict[int, int] | None:
        """Return the line of a rank of another host as of a time after this rank's word; None if it is not here yet."""
        # each is loaded before those that were stored before it
        indices = [self._first + self._line + word for word in (FAILED, ABORTED, GATHERED, 0)]
        found = self._looks.at(peer, indices, ("latency", mark, self._is_repeated))
        return None if found is None else {index - self._first: value for index, value in found.items()}


def _stance_of(found: Mapping[int, int] | None, at: int, mark: int) -> Stance | None:
    """Return the state in a line of another host's rank, as of a time after this rank's word; None: there is none."""
    if found is None:
        return None
    if found[at + GATHERED] == mark:
        return Stance.COMPLETES
    if found[at + FAILED] >= mark or found[at + ABORTED] > mark:
        return Stance.FAILED
    if found[at] != mark:
        return Stance.MISSING
    return Stance.GAVE_UP if found[at + ABORTED] == mark else Stance.OPEN


_FIRST_LOOK = 1 << 40  # queries of the engine have smaller numbers
_PUMPS = 40  # each takes some microseconds


class TakenBack(Exception):
    """A message was overwritten while it was read: its source has excluded this rank."""


class HostsWire(Wire):
    """Lays messages into this rank's outbox, and has them carried to other hosts.

    Args:
        config: of the buffer.
        topology: the placement of the ranks.
        engine: of the buffer.
        ended, interrupt, epoch: as of `Wire`.
        poison: fill memory with 0xFF before it is written.

    Attributes:
        gateways: by other host the rank that receives there what this rank sends; hosts without living ranks have none.
    """

    _max_had = (1 << 64) - 1

    def __init__(
        self,
        config: BufferConfig,
        topology: Topology,
        engine: Engine,
        ended: Callable[[], Collection[int]],
        interrupt: Callable[[], None],
        epoch: Callable[[], int],
        poison: bool,
    ) -> None:
        super().__init__(config, topology.rank, ended, interrupt, _show_nobody, epoch)
        peer_regions = engine.peer_regions
        exports: Exports = peer_regions.exports
        layout = latency_layout(config)
        self.topology = topology
        self._layout, self._peer_regions = layout, peer_regions
        self._fields = [HostsFields(region, layout, peer_regions.extra) for region in peer_regions.regions]
        self._own = self._fields[topology.rank]
        self._state = peer_regions.regions[topology.rank].words(0, STATE_WORDS)
        self.gateways = topology.gateways()  # by host; of the epoch
        self._links = exports.links
        self._looks = exports.new_looks(_FIRST_LOOK)
        self._poison = poison
        self._posted: dict[int, int] = {}  # by host: tag of the last message
        self._reopened: dict[int, int] = {}  # by host: tag of the last call for which tags were cleared
        self._sent: dict[tuple[int, int], int] = {}  # by host and slot: number of the last frame
        self._waits: dict[int, tuple[int, int, float]] = {}  # by peer: its last wait, and until when it lasts
        self._own_core = config.num_ranks <= len(usable_cores())

    @property
    def regions(self) -> Sequence[HostsFields]:
        """The fields of all ranks: outboxes of this host, mirrors of others."""
        return self._fields

    def begin_epoch(self, roles: Roles) -> None:
        """Begin an epoch with these ranks, which have met: read their current mirrors, send to their gateways."""
        old = self._fields
        self._fields = [
            HostsFields(region, self._layout, self._peer_regions.extra) for region in self._peer_regions.regions
        ]
        self._own = self._fields[self.rank]
        self.topology = roles.topology
        self.gateways = roles.gateways()
        for fields in old:
            fields.close()
        self.restart()

    def restart(self) -> None:
        """As `Wire.restart`; all ranks have met."""
        super().restart()
        for table in (self._posted, self._reopened, self._waits, self._sent):
            table.clear()

    def close(self) -> None:
        """As `Wire.close`."""
        for fields in self._fields:
            fields.close()
        self._state.release()
        self._fields = []

    # -- words

    def _tell(self, host: int, first: int, count: int, index: int) -> None:
        """Send to a host `count` words of this rank from word `first` on, and after them word `index`."""
        own = self._own
        data = bytes(own.words[first : first + count]) if count else b""
        self._write(host, 8 * first, data, index, own.words[index])

    def _write(self, host: int, first: int, data: object, index: int, value: int) -> None:
        """Write bytes and a word (both counted from the fields' beginning) to the mirror on a host."""
        base = self._own.base
        word = base // 8 + index if index >= 0 else NO_WORD
        self._links.write(self.gateways[host], base + first, data, word, value, self._state[CONSUMED])

    def free(self, seq: int) -> None:
        """As `Wire.free`."""
        super().free(seq)
        for host in self.gateways:
            self._tell(host, 0, 0, self._own.at("freed", self.slot(seq)))

    def end_words(self, seq: int) -> EndWords:
        """As `Wire.end_words`."""
        line = self._own.at("ends", self.slot(seq))
        words = {rank: fields.words for rank, fields in enumerate(self._fields)}

        def tell() -> None:
            """Notify all hosts that this rank has aborted, after what it had gathered before."""
            for host in self.gateways:
                self._tell(host, 0, 0, line + GATHERED)
                self._tell(host, line + LOST, 1, line + ABORTED)

        return HostsEndWords(self.rank, words, line, self.topology, self._own.base // 8, self._looks, tell)

    def set_cut(self, active: Sequence[bool], seq: int) -> None:
        """As `Wire.set_cut`."""
        own = self._own
        for peer, is_active in enumerate(active):
            index, value = own.at("cut", peer), 0 if is_active else seq
            if peer == self.rank or own.words[index] == value:
                continue
            own.words[index] = value
            if self.topology.is_here(peer):
                for slot in range(self.config.num_slots):  # the peer sleeps on the word it waits for
                    futex_wake(own.address + 8 * own.at("head", slot))
                    futex_wake(own.address + 8 * own.at("early", slot))
            elif self.topology.host_of[peer] in self.gateways:
                self._tell(self.topology.host_of[peer], 0, 0, index)

    def is_cut_by(self, peer: int, seq: int) -> bool:
        """As `Wire.is_cut_by`."""
        return self.has_cut(peer, self.rank, seq)

    def has_cut(self, source: int, peer: int, seq: int) -> bool:
        """Whether, as far as is known here, `source` excludes `peer` in call `seq`."""
        fields = self._fields[source]
        return fields.words[fields.at("cut", peer)] >= seq

    # -- waiting

    def _at(self, field: str, src: int, seq: int) -> tuple[RegionWords, int]:
        fields = self._fields[src]
        return fields, fields.at(field, self.slot(seq))

    def has_room(self, dst: int, seq: int, timeouts: Timeouts) -> bool:
        """As `Wire.has_room`; the network must have taken what was sent of the slot to that host, too."""
        if not super().has_room(dst, seq, timeouts):
            return False
        host = self.topology.host_of[dst]
        if host != self.topology.host and host not in self.gateways:
            return False
        number = self._sent.get((host, self.slot(seq)))
        if host == self.topology.host or number is None:
            return True
        gateway = self.gateways[host]
        while not self._links.is_out(gateway, number):
            self.interrupt()
            if time.monotonic() > timeouts.deadline or dst in self.ended():
                return False
            self.nap(0.0005)
        return True

    def _poll(self, words: memoryview, index: int, is_there: Callable[[int], bool], timeouts: Timeouts) -> bool:
        """As `Wire._poll`, pumping the links: as long as bytes arrive they are moved here."""
        pump = self._links.pump
        for _ in range(_PUMPS if self._own_core else 2):
            if is_there(words[index]):
                return True
            pump()
        now = time.monotonic()
        until, end = min(now + YIELD_S, timeouts.deadline), now + MOST_MOVES_S
        while now < until:
            if is_there(words[index]):
                return True
            if pump():
                until = min(now + YIELD_S, end, timeouts.deadline)
            else:
                os.sched_yield()
            now = time.monotonic()
        return is_there(words[index])

    def nap(self, seconds: float) -> None:
        """As `Wire.nap`; not while bytes arrive."""
        self.note_waits()
        if not self._links.pump():
            time.sleep(seconds)

    def _doze(self, address: int, seen: int) -> None:
        self.note_waits()
        self._links.pump()
        self._links.rest()
        asleep = self._state[SLEEPERS]  # of the engine's calls, which use the word too
        self._state[SLEEPERS] = asleep + 1  # read by the process that applies a frame (`engine/replication/mirror.py`)
        try:
            super()._doze(address, seen)
        finally:
            self._state[SLEEPERS] = asleep

    def _say_waiting(self, seq: int, until: float) -> None:
        own = self._own
        index = own.at("waiting")
        own.words[index + 2] = max(0, int((until - time.monotonic()) * 1e6))
        own.words[index + 3] += 1
        super()._say_waiting(seq, until)
        for host in self.gateways:
            self._tell(host, index + 1, 3, index)

    def _waits_until(self, peer: int, seq: int) -> float:
        if self.topology.is_here(peer):
            return super()._waits_until(peer, seq)
        self.note_waits()
        call, _, until = self._waits[peer]
        return until if 0 < call <= seq else -math.inf

    def note_waits(self) -> None:
        """Read how long ranks of other hosts wait, if they have reported since the last check; times count from now."""
        for peer in self.topology.elsewhere:
            fields = self._fields[peer]
            index = fields.at("waiting")
            call, wait_limit_us, number = fields.words[index], fields.words[index + 2], fields.words[index + 3]
            known = self._waits.get(peer)
            if known is None or known[:2] != (call, number):
                self._waits[peer] = call, number, time.monotonic() + wait_limit_us / 1e6

    # -- messages

    def _reopen(self, host: int, seq: int) -> None:
        """Clear the tags of a slot before it is written: a late reader must find them cleared."""
        mark = tag(self._epoch(), seq)
        if self._reopened.get(host) == mark:
            return
        self._reopened[host] = mark
        own, slot = self._own, self.slot(seq)
        head, early = own.at("head", slot), own.at("early", slot)
        if host == self.topology.host:
            own.words[head] = own.words[early] = own.words[own.at("laid", slot)] = 0
            return
        index = own.at("freed", slot)
        if not all(self._is_freed(self._fields[rank].words[index], seq) for rank in self.topology.hosts[host]):
            self._write(host, 0, b"", head, 0)
            self._write(host, 0, b"", early, 0)

    def half_for(self, host: int, seq: int, nbytes: int) -> Bytes:
        """Return where the message for a host is to be laid: a header, and `nbytes` after it; `publish` follows."""
        self._reopen(host, seq)
        if host == self.topology.host:
            own, slot = self._own, self.slot(seq)
            own.words[own.at("laid", slot)] = 0
            half = own.half(slot, nbytes)
        else:
            half = blank_half(nbytes)
        if self._poison:
            half[:] = 0xFF
        return half

    def publish(self, host: int, seq: int, head: SectionHeader, half: Bytes, reason: bytes = b"") -> None:
        """Complete a message with its header, and make it visible to a host."""
        self._posted[host] = tag(self._epoch(), seq)  # first: if it is interrupted, the call is aborted for all
        words = pack_head(head, reason)
        half[: words.nbytes] = np.frombuffer(words, dtype=np.uint8)
        own, slot, mark = self._own, self.slot(seq), tag(self._epoch(), seq)
        index = own.at("head", slot)
        if host == self.topology.host:
            self._let_see(seq)
        else:
            self._write(host, 8 * index + 8, half.data, index, mark)
            self._sent[host, slot] = self._links.newest(self.gateways[host])

    def _let_see(self, seq: int) -> None:
        """Store the tag of the message for this rank's host, and wake the ranks that wait for any part of it."""
        own, slot = self._own, self.slot(seq)
        own.words[own.at("head", slot)] = tag(self._epoch(), seq)
        for field in ("head", "early", "laid"):
            futex_wake(own.address + 8 * own.at(field, slot))

    def post(self, dst: int, seq: int, head: SectionHeader, reason: bytes = b"") -> None:
        """As `Wire.post`, for all ranks of the host of `dst`."""
        host = self.topology.host_of[dst]
        self.publish(host, seq, head, self.half_for(host, seq, 0), reason)

    def is_posted(self, dst: int, seq: int) -> bool:
        """As `Wire.is_posted`."""
        return self._posted.get(self.topology.host_of[dst]) == tag(self._epoch(), seq)

    def half_of(self, src: int, seq: int, nbytes: int) -> Bytes:
        """Return the message of a rank, and `nbytes` after its header; check the tag (`is_here`) after reading."""
        return self._fields[src].half(self.slot(seq), nbytes)

    def head_of(self, src: int, seq: int, field: str = "head") -> tuple[SectionHeader, str]:
        """As `Wire.head_of`, for a message that has arrived, or whose header can be read (`field="laid"`).

        Raises:
            TakenBack: its source has overwritten it meanwhile.
        """
        while self.is_there(field, src, seq):
            seen = self._tags(src, seq)
            try:
                found = super().head_of(src, seq)
            except expected(ProtocolError):
                if self._tags(src, seq) == seen:
                    raise
                continue
            if self._tags(src, seq) == seen:
                return found
        raise TakenBack

    def _tags(self, src: int, seq: int) -> list[int]:
        """Return the tags that say how far a message is; one of them changes before its header does."""
        fields, slot = self._fields[src], self.slot(seq)
        return [fields.words[fields.at(field, slot)] for field in ("laid", "head")]

    def is_there(self, field: str, src: int, seq: int) -> bool:
        """Whether a message has arrived ("head"), or can be read by its own host as far as that ("laid")."""
        fields, index = self._at(field, src, seq)
        return fields.words[index] == tag(self._epoch(), seq) or self.is_here(src, seq)

    # -- weights, and sums for this host

    def send_weights(self, host: int, seq: int, weights: Floats, cut: SectionCut) -> None:
        """Send the weights of a combine, a row for each record that went to a host."""
        self._reopen(host, seq)
        own, slot = self._own, self.slot(seq)
        first, _ = own.section("weights", slot)
        index, mark = own.at("early", slot), tag(self._epoch(), seq)
        if host == self.topology.host:
            weights_of(own.part(first, weights.nbytes), len(weights), cut)[:] = weights
            own.words[index] = mark
            futex_wake(own.address + 8 * index)
        else:
            self._write(host, first, np.ascontiguousarray(weights).reshape(-1).view(np.uint8).data, index, mark)

    def read_weights(self, src: int, seq: int, count: int, cut: SectionCut) -> Floats:
        """Return a copy of the weights that `src` has sent, a row per record.

        Raises:
            TakenBack: as `head_of`.
        """
        fields = self._fields[src]
        first, nbytes = fields.section("weights", self.slot(seq))
        found = weights_of(fields.part(first, nbytes), count, cut).copy()
        if not self.is_early(src, seq):
            raise TakenBack
        return found

    def lay(self, seq: int, head: SectionHeader) -> None:
        """Make a header, and what this rank has laid, readable for this rank's host."""
        half, own = self.half_for(self.topology.host, seq, 0), self._own
        words = pack_head(head)
        half[: words.nbytes] = np.frombuffer(words, dtype=np.uint8)
        index = own.at("laid", self.slot(seq))
        own.words[index] = tag(self._epoch(), seq)
        futex_wake(own.address + 8 * index)

    def complete(self, seq: int) -> None:
        """Post for this rank's host the message that it has laid, with its header."""
        self._posted[self.topology.host] = tag(self._epoch(), seq)
        self._let_see(seq)

    def part_for(self, src: int, seq: int, count: int, row_bytes: int) -> Bytes:
        """Return where this rank's sums for `src` are to be laid, for its host to read; `lay` follows."""
        self._reopen(self.topology.host, seq)
        own, slot = self._own, self.slot(seq)
        own.words[own.at("counts", slot) + src] = count
        first, _ = own.section("parts", slot, src)
        return own.part(first, count * row_bytes)

    def part_of(self, peer: int, src: int, seq: int, count: int, row_bytes: int) -> Bytes:
        """Return the sums of a rank of this host for `src`.

        Raises:
            ProtocolError: they are not for as many tokens as `src` had for that rank.
        """
        fields, slot = self._fields[peer], self.slot(seq)
        told = fields.words[fields.at("counts", slot) + src]
        if told != count and self.is_there("laid", peer, seq):
            raise ProtocolError(f"combine: rank {peer} has {told} rows for {count} tokens of rank {src}")
        first, _ = fields.section("parts", slot, src)
        return fields.part(first, count * row_bytes)


def _show_nobody(op: str, seq: int, ranks: list[int]) -> None:
    """Do nothing: a group over several hosts has no board."""
