"""The exchange of rows, by which every rank learns in one step what all ranks are about to do.

Each rank lends an inbox. A call starts when a rank writes its **row** (operation, arguments, how many rows for each
rank, which slot of its arena the peers may access) into every inbox, its own included, and ends its announcement by
storing the row's tag. It then waits until its own inbox holds all rows of this call. Since all ranks have the same
rows, all reach the same result: continue, or raise the same error. `words.py` has the layout of an inbox.

Order: a rank publishes row s only after it has seen all rows s-1. So when row s of a peer is seen, that peer has
finished every call before s, its stores included, and no row s+1 can overwrite a row s-1 that is still needed: two
parities suffice. A call that was refused or aborted leaves its rows unread; `settle` waits for them before the next row
is published: no rank is more than one call ahead. A rank that aborts a call in the wait for rows does so together with
all others (`withdrawal.py`), so after an error all ranks are before the same call. The same argument lets one `data`
word per source serve forever: it is compared for equality with the tag of the call. A rank that cannot finish a call
whose row it has published stores the call's tag in another word of its own, so that its peers need not wait for the
timeout. (Not in the `data` word: a slow peer may still have to read the previous call in it. A reader reads `data`
again after it has seen a call aborted: the data of that or of an earlier call was stored before.)

A crash leaves a row without its tag, which no rank reads; or a row with its tag and no payload, which ends in
`RankFailedError` for a rank that waits for the payload. No state needs repair: each epoch has inboxes of its own, of
its members only; a wait ends when the view changes, and `membership` decides how the call continues. A rank stores its
row into its own inbox first: whether it has a part in a call is seen there, by all alike, also after its death, and its
row is read there if it has not arrived here. Calls are numbered through all epochs, so the first call of an epoch can
have any number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from ...errors import (
    CommTimeoutError,
    EpeeError,
    MismatchError,
    ProtocolError,
    RankFailedError,
    context,
    expected,
    is_own,
)
from ...memory.shared import SharedRegion
from ...memory.signals import fence, tag, wait_equal
from ...view.process.detector import DeathWatch
from ..config import BufferConfig
from ..throughput.placement import Ints
from .ending import CallEnd
from .ending import Turned as Turned
from .ending import Withdrawn as Withdrawn
from .header import (
    HEADER,
    NUM_HEADER,
    OP_COMBINE,
    OP_DISPATCH,
    OP_NAMES,
    REASON_BYTES,
    TIMED_OUT,
    ExchangedRows,
    Header,
    Moved,
    check_agreed,
    limits_of,
    parse_header,
)
from .membership import Membership, Parties
from .words import InboxWords

RETRY_S = 0.1  # between two reports of a rank that is silent beyond the timeout


class Exchange:
    """Row exchange over attached inboxes.

    Args:
        config: of the buffer.
        rank: this rank.
        inboxes: one region per rank, the own one included; none if `membership` will provide them (`begin`).
        watch: knows the dead ranks.
        interrupt: called while waiting; raises to end the wait.

    Attributes:
        op: name of that call.
        epoch: of the view; 0 while membership cannot change, and before the first epoch.
        members: ranks of the epoch, ascending.
        parties: those with a part in the last call; `absent` the others.
        gone: members that have left the epoch.
        reduced_members: the members if these are not all ranks, else None.
        pids: the ranks' processes.
        settled: the rows of all calls up to this one have been seen, so all peers have finished the calls before it.
        gathered: the last call whose rows were seen, or that is over for another reason.
        began: when the last call was published, a `time.monotonic()` value.
        end: how the last call ends.
        num_calls: published so far, in all epochs.
        membership: defines what a new view does to a call.
        is_dropped: the buffer ends without having been closed.
    """

    part = "call"
    is_dropped = False

    def __init__(
        self,
        config: BufferConfig,
        rank: int,
        inboxes: Sequence[SharedRegion],
        watch: DeathWatch,
        interrupt: Callable[[], None],
    ) -> None:
        self.config = config
        self.rank = rank
        self._earlier_calls = 0  # of earlier epochs, less the number before the first one of this epoch
        self._row = (0, b"")
        self.membership = Membership(inboxes[rank].mapped_bytes if inboxes else 0)
        self.end = CallEnd(self)
        self._watch = watch
        self._interrupt = interrupt
        self._limits = limits_of(config)
        self.op = "none"
        self._inboxes = dict(enumerate(inboxes))
        self.begin(0, self._inboxes)

    def begin(self, epoch: int, inboxes: Mapping[int, SharedRegion], first_seq: int = 1) -> None:
        """Begin an epoch with its members' inboxes and the number of its first call. The last store begins it."""
        self.settled = self.gathered = first_seq - 1
        self.began = 0.0
        self._is_left = False  # its caller has left the last call
        self._earlier_calls = self.num_calls - (first_seq - 1)
        self._row = (first_seq - 1, b"")  # number and bytes of the last call's row
        self._stored = first_seq - 1  # the last call whose row has been stored into every inbox
        self.members = self.parties = tuple(sorted(inboxes))
        self.gone: Collection[int] = ()
        self.absent: Collection[int] = ()
        self.reduced_members = self.members if len(self.members) < self.config.num_ranks else None
        self._peers = tuple(rank for rank in self.members if rank != self.rank)
        self.pids = {rank: inboxes[rank].owner_pid for rank in self.members}
        self.words = InboxWords(self.config, self.rank, inboxes)
        self.end.begin(self.words.ends())
        self.epoch = epoch

    def call(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> ExchangedRows:
        """Make the next call: `publish` this rank's row and `gather` all. The user of the rows closes `end`.

        Raises:
            InvalidState: an earlier call has ended otherwise here than on the other ranks.
        """
        if self.end.is_open:
            self.settle(deadline)
        self.end.check()
        last = self._row
        try:
            self.publish(header, counts, text, deadline)
            return self.gather(deadline)
        except expected(Moved):
            raise
        except BaseException as error:
            if is_own(error):
                raise
            if self._row is not last and self.end.is_open and not self._is_left:
                self._is_left = True
                self.end.give_up(error)  # interrupted on its way to the wait
            raise

    def publish(self, header: Header, counts: Ints | None, text: bytes, deadline: float) -> None:
        """Start the next call: write this rank's row into every inbox.

        Args:
            header: `rank` must be this rank.
            counts: `[num_ranks + num_experts]` int64, or None when the receivers know them from a handle.
            text: at most `REASON_BYTES` bytes.
            deadline: `time.monotonic()` value; peers that have not passed the last call by then end it.

        Raises:
            Moved: the view has changed before the call was started.
        """
        self.settle(deadline)
        self.op = OP_NAMES[header.op]
        row = self.words.pack(header, text, counts)
        seq = self.seq + 1

        def announce() -> None:
            """Begin the call; run by the membership, so that no view can come in between."""
            self._is_left = False
            self.parties, self.absent = self.members, ()  # a rank that has left may have announced it
            if not header.refused:
                self.end.open(seq)
            self.began = time.monotonic()
            # one assignment, so that an interrupt leaves either no call or one that `settle` can finish storing
            self._row = (seq, row)
            self._store_own_row()

        if not self.membership.issue(seq, header.op == OP_COMBINE and not header.refused, announce):
            raise Moved
        self._store_row()
        if header.refused:
            self.end.refuse()

    @property
    def num_calls(self) -> int:
        """Calls published so far, in all epochs: it changes with the row, by the same store."""
        return self._earlier_calls + self._row[0]

    @property
    def seq(self) -> int:
        """Number of the last published call of the epoch, from 1."""
        return self._row[0]

    @property
    def is_pull(self) -> bool:
        """Whether the others complete that call without anything more from this rank."""
        return self.header.op != OP_DISPATCH

    def dead(self) -> Collection[int]:
        """Return the ranks that decide nothing more: they are dead, or have left the view."""
        return {*self._watch.dead(), *self.gone}

    @property
    def header(self) -> Header:
        """The header that this rank has published last."""
        return Header(*HEADER.unpack_from(self._row[1]))

    def reason(self) -> bytes:
        """Return the free bytes of the last row."""
        return self._row[1][8 * NUM_HEADER :][:REASON_BYTES]

    def _store_own_row(self) -> None:
        """Write the current row into this rank's inbox: from now on it has a part in the call."""
        seq, row = self._row
        self.words.store(seq & 1, tag(self.epoch, seq), row, (self.rank,))  # no rank sleeps on it

    def _store_row(self) -> None:
        """Write the current row into the others' inboxes."""
        seq, row = self._row
        self.words.store(seq & 1, tag(self.epoch, seq), row, self._peers)
        self.words.wake(seq & 1, self._peers)
        fence()  # before the check for ranks that have aborted the call
        self._stored = seq

    def gather(self, deadline: float) -> ExchangedRows:
        """Wait for all rows of the current call; return them once they are complete, checked and agreed on.

        Raises:
            MismatchError: the ranks disagree, or a peer's call was refused; the same on every rank that was not.
            CommTimeoutError, RankFailedError: a peer did not publish its row, or has aborted the call.
            ProtocolError: a row cannot be right.
            Moved: the view has changed; see there.
        """
        are_here = self._await_parties(deadline)
        if are_here and len(self.parties) == self.config.num_ranks and not self.gone:
            copy = self.words.copy_all(self.seq & 1)
        else:
            copy = self._copy_rows(self.parties)
        self.gathered = self.seq
        try:
            return self._checked(copy, self.parties)
        except expected(EpeeError) as error:
            if is_own(error):
                self.end.close()  # all ranks see the same rows, so none has a result
            raise

    def _checked(self, copy: bytes, parties: tuple[int, ...]) -> ExchangedRows:
        """Return the contents of a copy of all rows, checked and agreed on."""
        if self.words.own_part(copy) != self._row[1]:
            raise ProtocolError(f"{context(self.op, seq=self.seq)}: this rank's own row was changed by somebody else")
        raw, texts, counts = self.words.split(copy)
        headers = [parse_header(words, src, self._limits) for src, words in enumerate(raw)]
        check_agreed(headers, texts, parties, self.seq, self.epoch)
        return ExchangedRows(headers, counts[:, : self.config.num_ranks + self.config.num_experts], texts, parties)

    def _await_parties(self, deadline: float) -> bool:
        """Wait until this rank may continue the call; return whether all rows have arrived here.

        They have not if this rank's timeout has expired first, but others have gathered the call.
        """
        cause: BaseException | None = None
        while True:
            try:
                if not self._is_left:
                    cause = self._wait_for_all(deadline)
                    if not self._is_left:
                        return True
                self.end.give_up(cause)
                return False
            except Turned:
                cause = self._ask_again(deadline) or cause
                deadline = self.membership.patience(deadline)

    def _wait_for_all(self, deadline: float) -> BaseException | None:
        """Wait for all rows and publish that this rank continues; if it leaves the call (`_is_left`) return why."""
        try:
            self._wait_rows(deadline, is_current=True)
            if not self.end.withdrawn():
                self.end.go_on()
                return None
            cause = None
        except Turned:
            raise
        except Withdrawn:
            cause = None
        except BaseException as error:  # noqa: BLE001 - an interrupt, too: raised again when the others know of it
            cause = error
        self._is_left = True
        return cause

    def _ask_again(self, deadline: float) -> BaseException | None:
        """Determine what becomes of the call after a view change; raises if it does not continue here.

        Returns:
            The error with which the caller left the call before that was known; the call is to be aborted for it.
        """
        try:
            self.lose(self.membership.decide(self.op, self.seq, deadline))
            return None
        except BaseException as error:
            if self.gathered >= self.seq:  # it was made again, or a loss has ended it
                self.end.close()
                raise
            self._is_left = True
            return error

    def lose(self, parties: Parties) -> None:
        """Continue the last call, or the next one, without the lost ranks."""
        self.parties, self.gone = parties
        self.absent = tuple(rank for rank in self.members if rank not in self.parties)

    def _copy_rows(self, parties: tuple[int, ...]) -> bytes:
        """Return the rows of the current call, `num_ranks` of them.

        A row that did not arrive here is read in its writer's own inbox. A rank without a part gets an empty row.
        """
        parity, mark = self.seq & 1, tag(self.epoch, self.seq)
        return b"".join(
            self.words.copy(parity, mark, src) if src in parties else self.words.blank(self.header.of_absent(src))
            for src in range(self.config.num_ranks)
        )

    def has_row_of(self, src: int, seq: int) -> bool:
        """Return whether a member of the epoch has announced a call, or a later one, according to its own inbox."""
        return any(self.words.tag_of(parity, src) >= tag(self.epoch, seq) for parity in (0, 1))

    def waits_in_next(self, src: int) -> bool:
        """Return whether a rank has announced the call after this rank's last one, and has not refused or aborted
        it.
        """
        mark = tag(self.epoch, self.seq + 1)
        header = self.words.header_if_here((self.seq + 1) & 1, mark, src)
        return header is not None and not header.refused and src not in self.end.given_up_by(mark)

    def signal_data(self, dst_rank: int) -> None:
        """Notify `dst_rank` that this rank's payload of the current call is complete in its arena."""
        self.words.store_data(tag(self.epoch, self.seq), dst_rank, is_given_up=False)

    def abandon(self) -> None:
        """Notify all peers that this rank's payload of the current call will not arrive."""
        for peer in self._peers:
            self.words.store_data(tag(self.epoch, self.seq), peer, is_given_up=True)

    def wait_data(self, deadline: float, parties: Sequence[int] | None = None) -> list[int]:
        """Wait until the payload of every peer with a part in the call has arrived whole.

        Returns:
            The ranks that have left the view with theirs unfinished.
        """
        want = tag(self.epoch, self.seq)
        unfinished: list[int] = []
        if self.membership.has_turned:
            deadline = self.membership.patience(deadline)
        for src in self._peers if parties is None else parties:
            if src == self.rank:
                continue
            index = self.words.data_at(src)
            try:
                self._wait(index, want, src, deadline, is_data=True)
            except Turned:  # it has left: nothing more may count, but what arrived before does
                if self.words.own[index] != want:
                    unfinished.append(src)
                deadline = self.membership.patience(deadline)
        return unfinished

    def abort(self) -> None:
        """Do nothing: every wait checks whether the buffer is to be closed."""

    def release(self) -> None:
        """Release all views of the inboxes, so that their mappings can end."""
        self.words.release()
        self._inboxes.clear()

    def settle(self, deadline: float) -> None:
        """Wait until all peers have announced the last call, so that none can be behind it.

        Raises:
            Moved: the view has changed meanwhile.
        """
        if self._stored < self.seq:
            if not self.membership.issue(self.seq, False, self._store_own_row):
                raise Moved
            self._store_row()
        if self.end.is_open:
            self.end.settle()
        if self.settled < self.seq:
            try:
                self._wait_rows(deadline)
            except Turned:
                raise Moved from None
            if self.gathered < self.seq and not self.membership.gather(self.seq, _nothing):
                raise Moved
            self.gathered = self.seq

    def _wait_rows(self, deadline: float, is_current: bool = False) -> None:
        """Wait for all rows of the last call; `is_current`: its caller waits, and a peer's abort ends the wait."""
        want = tag(self.epoch, self.seq)
        for src in self._peers:
            if src in self.parties and src not in self.gone:
                self._wait(self.words.row_at(self.seq & 1, src), want, src, deadline, is_current=is_current)
        self.settled = self.seq

    def _wait(
        self, index: int, want: int, src: int, deadline: float, is_data: bool = False, is_current: bool = False
    ) -> None:
        words = self.words.own
        if words[index] == want:
            return
        started = time.monotonic()
        membership = self.membership

        def check() -> None:
            """Raise what ends the wait before the word has arrived."""
            self._interrupt()
            membership.show(self.op, self.seq, self.behind(want, is_data))
            gave_up = is_data and words[index + 1] >= want
            dead = self._watch.dead()
            if words[index] == want:
                return
            membership.check(src, is_data)
            dead = tuple(rank for rank in dead if rank in self.members)
            # a peer may have met a death first and aborted: the death is the cause, so it comes first
            if src in dead or (dead and gave_up):
                behind = self.behind(want, is_data)
                raise self._death(tuple(rank for rank in dead if rank in behind) or dead, started)
            if gave_up:
                raise MismatchError(
                    f"{self.where(src)}: rank {src} aborted this call after an error of its own; see its message"
                )
            if is_current and self.end.withdrawn():
                raise Withdrawn

        patience = deadline
        while not wait_equal(words, index, want, self.words.own_address, patience, check):
            facts = self.where(src, started)
            if not membership.insist(self.behind(want, is_data), facts, self.seq, deadline):
                raise _silent(facts, src, is_data)
            patience = time.monotonic() + RETRY_S

    def behind(self, want: int, is_data: bool = False) -> list[int]:
        """Return the ranks whose row, or payload, of the current call is not here."""
        words, parity = self.words.own, self.seq & 1
        places = {src: self.words.data_at(src) if is_data else self.words.row_at(parity, src) for src in self._peers}
        return [src for src, index in places.items() if words[index] != want and (is_data or src not in self.gone)]

    def _death(self, dead: tuple[int, ...], started: float) -> RankFailedError:
        names = ", ".join(str(rank) for rank in dead)
        remedy = "this buffer cannot go on, make a new one without it"
        if self.config.is_cuda or self.config.is_latency:
            remedy = "call buffer.sync() on all survivors, then the next call runs without it"
        return RankFailedError(
            f"{self.where(dead[0], started)}: rank {names} is dead (its process ended); {remedy}",
            dead,
            self.op,
            self.seq,
            self.epoch,
            "process ended",
        )

    def where(self, peer: int, started: float | None = None) -> str:
        """Return the context of a message about the current call: operation, rank, peer, call number and epoch.

        Args:
            peer: the rank that the message is about.
            started: `time.monotonic()` at the start of the wait, for the seconds that it took; None leaves them out.
        """
        elapsed = {} if started is None else {"elapsed": time.monotonic() - started}
        return context(self.op, rank=self.rank, peer=peer, seq=self.seq, epoch=self.epoch, **elapsed)


def _silent(facts: str, src: int, is_data: bool) -> CommTimeoutError:
    what = "its rows" if is_data else "its call"
    return CommTimeoutError(f"{facts}: rank {src} did not send {what}; {TIMED_OUT}", [src])


def _nothing() -> None:
    pass
