"""The exchange of rows between the CPU sides of a buffer of GPUs: every rank learns in one step what all give it.

Each rank lends an inbox. A call starts when a rank writes its **row** (operation, free bytes) into every inbox, its own
included, and ends its announcement by storing the row's tag. It then waits until its own inbox holds all rows of this
call. Since all ranks have the same rows, all reach the same result: continue, or raise the same error. `words.py` has
the layout of an inbox.

Order: a rank publishes row s only after it has seen all rows s-1. So when row s of a peer is seen, that peer has
finished every call before s, and no row s+1 can overwrite a row s-1 that is still needed: two parities suffice. A call
that was refused or aborted leaves its rows unread; `settle` waits for them before the next row is published: no rank is
more than one call ahead. A rank that aborts a call in the wait for rows does so together with all others
(`withdrawal.py`), so after an error all ranks are before the same call.

A crash leaves a row without its tag, which no rank reads. No state needs repair: each epoch has inboxes of its own, of
its members only; a wait ends when the view changes, and the call is made again in the next epoch (`Moved`). A rank
stores its row into its own inbox first: its row is read there if it has not arrived here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from ...errors import (
    CommTimeoutError,
    EpeeError,
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
    OP_NAMES,
    TIMED_OUT,
    ExchangedRows,
    Header,
    Moved,
    check_agreed,
    limits_of,
    parse_header,
)
from .membership import Membership
from .words import InboxWords


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
        reduced_members: the members if these are not all ranks, else None.
        pids: the ranks' processes.
        settled: the rows of all calls up to this one have been seen, so all peers have finished the calls before it.
        gathered: the last call whose rows were seen, or that is over for another reason.
        began: when the last call was published, a `time.monotonic()` value.
        end: how the last call ends.
        membership: defines what a new view does to a call.
        is_dropped: the buffer ends without having been closed.
    """

    part = "call"
    gone: Collection[int] = ()
    absent: Collection[int] = ()  # the members of an epoch do not change
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
        self._row = (0, b"")
        self.membership = Membership(inboxes[rank].mapped_bytes if inboxes else 0)
        self.end = CallEnd(self)
        self._watch = watch
        self._interrupt = interrupt
        self._limits = limits_of(config)
        self.op = "none"
        self._inboxes = dict(enumerate(inboxes))
        self.begin(0, self._inboxes)

    def begin(self, epoch: int, inboxes: Mapping[int, SharedRegion], missing: Collection[int] = ()) -> None:
        """Begin an epoch with its members' inboxes. The last store begins it.

        Args:
            epoch: its number.
            inboxes: by rank.
            missing: ranks that were lost on their way into it. Others may have their inboxes, so no call completes.
        """
        self.settled = self.gathered = 0
        self.began = 0.0
        self._is_left = False  # its caller has left the last call
        self._row = (0, b"")  # number and bytes of the last call's row
        self._stored = 0  # the last call whose row has been stored into every inbox
        self.members = tuple(sorted(inboxes))
        self.reduced_members = self.members if len(self.members) < self.config.num_ranks else None
        self._peers = tuple(rank for rank in self.members if rank != self.rank)
        self._missing = tuple(sorted(missing))
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
        if self.membership.has_turned:
            raise Moved
        self._is_left = False
        if not header.refused:
            self.end.open(seq)
        self.began = time.monotonic()
        # one assignment, so that an interrupt leaves either no call or one that `settle` can finish storing
        self._row = (seq, row)
        self._store_own_row()
        self._store_row()
        if header.refused:
            self.end.refuse()

    @property
    def seq(self) -> int:
        """Number of the last published call of the epoch, from 1."""
        return self._row[0]

    def dead(self) -> Collection[int]:
        """Return the ranks that decide nothing more: they are dead."""
        return self._watch.dead()

    is_pull = True  # the others complete the call without anything more from this rank

    @property
    def header(self) -> Header:
        """The header that this rank has published last."""
        return Header(*HEADER.unpack_from(self._row[1]))

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
        are_here = self._await_members(deadline)
        if are_here and len(self.members) == self.config.num_ranks:
            copy = self.words.copy_all(self.seq & 1)
        else:
            copy = self._copy_rows(self.members)
        self.gathered = self.seq
        try:
            return self._checked(copy, self.members)
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

    def _await_members(self, deadline: float) -> bool:
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
                cause = self._leave_epoch()

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

    def _leave_epoch(self) -> Moved:
        """Leave a call that the view has overtaken: it is made again in the next epoch. Raised if it was gathered."""
        error = Moved()
        if self.gathered >= self.seq:
            self.end.close()
            raise error
        self._is_left = True
        return error

    def _copy_rows(self, parties: tuple[int, ...]) -> bytes:
        """Return the rows of the current call, `num_ranks` of them.

        A row that did not arrive here is read in its writer's own inbox. A rank without a part gets an empty row.
        """
        parity, mark = self.seq & 1, tag(self.epoch, self.seq)
        return b"".join(
            self.words.copy(parity, mark, src) if src in parties else self.words.blank(self.header.of_absent(src))
            for src in range(self.config.num_ranks)
        )

    def waits_in_next(self, src: int) -> bool:
        """Return whether a rank has announced the call after this rank's last one, and has not refused or aborted
        it.
        """
        mark = tag(self.epoch, self.seq + 1)
        header = self.words.header_if_here((self.seq + 1) & 1, mark, src)
        return header is not None and not header.refused and src not in self.end.given_up_by(mark)

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
            if self.membership.has_turned:
                raise Moved
            self._store_own_row()
            self._store_row()
        if self.end.is_open:
            self.end.settle()
        if self.settled < self.seq:
            try:
                self._wait_rows(deadline)
            except Turned:
                raise Moved from None
            if self.gathered < self.seq and self.membership.has_turned:
                raise Moved
            self.gathered = self.seq

    def _wait_rows(self, deadline: float, is_current: bool = False) -> None:
        """Wait for all rows of the last call; `is_current`: its caller waits, and a peer's abort ends the wait."""
        want = tag(self.epoch, self.seq)
        if self._missing:
            self.membership.check(self._missing[0])
            raise self._death(self._missing[:1], time.monotonic())
        for src in self._peers:
            self._wait(self.words.row_at(self.seq & 1, src), want, src, deadline, is_current=is_current)
        self.settled = self.seq

    def _wait(self, index: int, want: int, src: int, deadline: float, is_current: bool = False) -> None:
        words = self.words.own
        if words[index] == want:
            return
        started = time.monotonic()
        membership = self.membership

        def check() -> None:
            """Raise what ends the wait before the word has arrived."""
            self._interrupt()
            membership.show(self.op, self.seq, self.behind(want))
            dead = self._watch.dead()
            if words[index] == want:
                return
            membership.check(src)
            dead = tuple(rank for rank in dead if rank in self.members)
            if src in dead:
                behind = self.behind(want)
                raise self._death(tuple(rank for rank in dead if rank in behind) or dead, started)
            if is_current and self.end.withdrawn():
                raise Withdrawn

        if not wait_equal(words, index, want, self.words.own_address, deadline, check):
            raise CommTimeoutError(f"{self.where(src, started)}: rank {src} did not send its call; {TIMED_OUT}", [src])

    def behind(self, want: int) -> list[int]:
        """Return the ranks whose row of the current call is not here."""
        words, parity = self.words.own, self.seq & 1
        return [src for src in self._peers if words[self.words.row_at(parity, src)] != want]

    def _death(self, dead: tuple[int, ...], started: float) -> RankFailedError:
        names = ", ".join(str(rank) for rank in dead)
        return RankFailedError(
            f"{self.where(dead[0], started)}: rank {names} is dead (its process ended); call buffer.sync() on all "
            "survivors, then the next call runs without it",
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
