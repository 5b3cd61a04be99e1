"""One attempt of one rank to make a group: its records in the store, and the report of its failure to the others.

A rank that cannot make its part (bad options, no memory, a timeout) puts an error record under the key of every rank:
its own, and those that others may be waiting for. Then it sets LIFE_FAILED in its outbox, if it has one, for ranks that
have read all records and wait for words. So all ranks fail at once and name the rank and its reason, wherever they
wait. Errors that all ranks find in the records by themselves (another version, another host) are not reported again.

An error record is JSON of three fields, of bounded length, checked before use; a fourth one names the ranks that have
died, or that did not come in time, where that is the error, so that ranks which cannot see it (those of other hosts),
or whose time is not up yet, raise the same. Writers race and
may overwrite each other's error or a good record of the same attempt; that is harmless, because this attempt is lost on
all ranks. It needs no proof (`proof.py`), for a rank may fail before it has a token, and nothing is opened because of
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...errors import (
    CommTimeoutError,
    EpeeError,
    InvalidArgument,
    MismatchError,
    NoQuorumError,
    PeerError,
    ProtocolError,
    RankFailedError,
    SlotTakenError,
    UnsupportedError,
    context,
    expected,
    ignored,
)
from ...memory.claim import OwnerEndedError
from ...memory.shared import SharedRegion
from ...view.job import told_fields
from ...view.process.detector import DeathWatch
from ..outbox import LIFE, LIFE_FAILED, STATE_WORDS, has_left
from .bounded_store import BoundedStore

MAX_RECORD_BYTES = 16 << 10
WHATS = (
    "",
    "/hello",
    "/folder",
    "/token",
)  # the records of one rank, see `creation.py`, `replication/creation_over_hosts.py`
MAX_REASON_CHARS = 500  # 6 bytes each at worst, as JSON writes them
MAX_KIND_CHARS = 60
# Of one operation, between checks for another process with this rank. Exceptions of signal handlers come at once; only
# the next operation waits.
WAIT_S = 0.5
EVERY_RANKS = ("", "/hello")  # records that every rank writes
TWIN_GRACE_S = 5.0  # a process that leaves its group is given this time, so that another one can have its rank
MAX_TWINS = 8
REASON_WAIT_S = 2.0  # for what a rank that fails reads and reports: a store may be slower than shared memory

_REFUSALS = (InvalidArgument.__name__, UnsupportedError.__name__)


class BootstrapAttempt:
    """One rank's attempt to make a group: its records, and its failure.

    Attributes:
        number: how often this rank began in this store; the same on all ranks of one creation.
        region: this rank's outbox, once there is one.
        others_know: an error that is raised now is found by every rank in the same records.
    """

    def __init__(self, store: BoundedStore, rank: int, num_ranks: int) -> None:
        self.store = store
        self.rank = rank
        self.num_ranks = num_ranks
        self.region: SharedRegion | None = None
        self.others_know = False
        self._over = False
        self._twin = 0  # the process that has this rank, at the last check; 0 for none
        self.number = store.add(_counter(rank), 1)

    def key(self, rank: int) -> str:
        """Return the key of a rank's record."""
        return f"epee/{self.number}/{rank}"

    def read(self, peer: int, what: str, deadline: float) -> bytes:
        """Return a record of `peer`; raise the error that it reports instead if it has failed."""
        try:
            raw = self._await(self.key(peer) + what, deadline)
        except expected(SlotTakenError, CommTimeoutError):
            raise
        except expected(dist.DistStoreError, dist.DistNetworkError, RuntimeError) as exc:
            if self._twin:
                raise self._twice() from exc
            again = (
                ""
                if self.number == 1
                else (
                    f"; this is start {self.number} of rank {self.rank} with this rendezvous: does another process "
                    "have the rank as well?"
                )
            )
            late = self._late(peer, what)
            raise CommTimeoutError(
                f"init (rank={self.rank}, peer={peer}): rank {', '.join(map(str, late))} did not come to the "
                f"rendezvous: {str(exc).splitlines()[0]}; "
                f"start all ranks with the same rendezvous, and rank numbers that differ{again}; if the job runs "
                "already, a replacement needs BackendOptions(is_extension=True)",
                late,
                has_job=False,
            ) from exc
        self.others_know = True
        fields = read_fields(raw, peer)
        if "failed" in fields:
            raise failure(fields, self.rank, self.num_ranks)
        self.others_know = False
        return raw

    def _await(self, key: str, deadline: float) -> bytes:
        """Wait for a record. If this rank was begun before in this store, check for a process that has it already.

        Raises:
            SlotTakenError: there is one, in a group that runs, which this process has no part in.
            DistStoreError: no process has written the record by the deadline.
            CommTimeoutError: the store does not answer.
        """
        began = time.monotonic()
        while (raw := self.store.find(key, min(WAIT_S, deadline - time.monotonic()))) is None:
            now = time.monotonic()
            if now >= deadline:
                raise dist.DistStoreError(f"the key {key} was not set within {now - began:.1f} s")
            if self.number > 1:
                self._twin = self._find_twin()
                if self._twin and now - began > TWIN_GRACE_S:
                    raise self._twice()
        return raw

    def _late(self, peer: int, what: str) -> list[int]:
        """Return `peer`, whose record is missing, and the ranks behind it of which the same is known."""
        behind = range(peer + 1, self.num_ranks if what in EVERY_RANKS else 0)
        late = [peer]
        with ignored(RuntimeError):  # the store no longer exists
            late += [rank for rank in behind if not self.store.check([self.key(rank) + what])]
        return late

    def _find_twin(self) -> int:
        """Return the process that has this rank in the group that was made before in this store; 0: it is over.

        It is valid that a process leaves a group and another one takes its rank, and that ranks are numbered anew: then
        this process, or none, is in the group that was made before.
        """
        try:
            for number in range(self.number - 1, max(0, self.number - 1 - MAX_TWINS), -1):
                keys = [f"epee/{number}/{rank}" for rank in range(self.num_ranks)]
                if not self.store.check(keys):
                    continue  # a twin of the twin, for example
                found = [json.loads(read_fields(self.store.get(key), 0)["record"]) for key in keys]
                pids = [(fields["boot_id"], fields["namespace"], fields["pid"]) for fields in found]
                here = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
                boot_id, namespace, pid = pids[self.rank]
                if (*here, os.getpid()) in pids or (boot_id, namespace) != here:
                    return 0
                region = SharedRegion.attach(bytes.fromhex(found[self.rank]["blob"]), is_writable=False)
                words = region.words(0, STATE_WORDS)
                is_over = has_left(words)
                words.release()
                region.close()
                return 0 if is_over else int(pid)
        except expected(
            EpeeError, OSError, ValueError, TypeError, KeyError, RecursionError
        ):  # it has ended, for example
            return 0
        except expected(RuntimeError):  # the store no longer exists
            return self._twin
        return 0

    def _twice(self) -> SlotTakenError:
        """Return the error of a process whose rank another one has, and let that one's group be made again later."""
        self.others_know = True  # they have a group, and wait for no rank
        self.store.hasten(REASON_WAIT_S)
        with ignored(RuntimeError):
            if self.store.add(_counter(self.rank), 0) == self.number:
                for what in WHATS:
                    self.store.delete_key(self.key(self.rank) + what)
                self.store.add(_counter(self.rank), -1)
        return SlotTakenError(
            f"init (rank={self.rank}): rank {self.rank} is used twice: process {self._twin} of this host has it, in a "
            "group that runs; start every process with a RANK of its own"
        )

    def explain(self, error: BaseException, watch: DeathWatch) -> BaseException:
        """Return the error to raise for `error`: the result of `heard` if that has more information.

        A rank that fails removes its memory, its folder and its part in the job, and its process may end: each of these
        is an error of its own here. A rank that ends while its memory is opened here is dead.
        """
        if isinstance(error, OwnerEndedError):
            watch.note_end(error.pid, error.start_time)
        if isinstance(error, NoQuorumError):  # of those whose death or report is the reason
            return self.heard(watch) or error
        if not isinstance(error, EpeeError) or self.others_know or _of_a_peer(error):
            return error
        return self.heard(watch) or error

    def fail(self, error: BaseException) -> None:
        """Report `error` to the peers, unless they know it or it is their own. The first error counts."""
        if not (self._over or self.others_know or _of_a_peer(error)):
            self._tell(error)
        self._over = True

    def settle(self, error: EpeeError | None, watch: DeathWatch) -> None:
        """Agree with the other ranks whether a group over several hosts is made: the first to write counts for all.

        Called when this rank has set LIFE_READY and has found that of all others, or an error; return if it is made.

        Raises:
            EpeeError: it is not; that of the first rank where it names ranks that died or did not come, else `error`.
            CommTimeoutError: the store does not answer, so that another rank's finding may count.
        """
        mine = found = json.dumps({} if error is None else self._record_of(error)).encode()
        try:
            found = self.store.compare_set(f"epee/{self.number}/made", "", mine.decode())
        except expected(CommTimeoutError) as exc:
            error = error or exc
        except expected(RuntimeError):  # the store no longer exists, or cannot do it: this rank's own finding counts
            pass
        if found != mine:
            fields = read_fields(found, self.rank)
            first = failure(fields, self.rank, self.num_ranks) if fields else None
            is_first = first is None or "dead" in fields or "late" in fields
            error = first if is_first else error or self.heard(watch) or first
        if error is not None:
            raise error

    def _record_of(self, error: BaseException) -> dict[str, Any]:
        record: dict[str, Any] = {
            "failed": self.rank,
            "kind": _plain(type(error).__name__, MAX_KIND_CHARS),
            "reason": _plain(str(error), MAX_REASON_CHARS),
        }
        if isinstance(error, RankFailedError):
            record["dead"] = list(error.ranks)
        elif isinstance(error, CommTimeoutError):
            record["late"] = list(error.ranks)
        return record

    def _tell(self, error: BaseException) -> None:
        """Put an error record under the keys that the ranks read next."""
        record = self._record_of(error)
        self.store.hasten(REASON_WAIT_S)
        with ignored(RuntimeError):  # the store no longer exists, or does not answer: the error itself counts
            for rank in range(self.num_ranks):
                for what in WHATS:
                    self.store.set(self.key(rank) + what, json.dumps(record))
            self.store.check([self.key(self.rank)])  # a round trip: the store has them before this process can end
        if self.region is not None:
            words = self.region.words(0, STATE_WORDS)
            words[LIFE] = LIFE_FAILED
            words.release()

    def told_by(self, peer: int) -> EpeeError | None:
        """Return the error to raise when an error record lies under `peer`'s key, else None.

        Raises:
            CommTimeoutError: the store does not answer.
        """
        try:
            raw = self.store.find(self.key(peer), 0.0)
            fields = {} if raw is None else read_fields(raw, peer)
        except expected(ProtocolError) as exc:
            return exc
        except expected(CommTimeoutError):
            raise
        except expected(RuntimeError):  # the store no longer exists
            return None
        return failure(fields, self.rank, self.num_ranks) if "failed" in fields else None

    def reported(self, watch: DeathWatch) -> EpeeError | None:
        """Return the first error record under any key, or else the death of a peer; None where there is neither.

        A rank that fails writes its record before it ends, so the dead are asked for first: the record of one that has
        ended since is the reason, its end is not.

        Raises:
            CommTimeoutError: the store does not answer, and no peer has died.
        """
        dead = watch.dead()
        try:
            every = (self.told_by(peer) for peer in range(self.num_ranks))
            told = next((error for error in every if error is not None), None)
        except expected(CommTimeoutError):
            if not dead:
                raise
            told = None
        return died(self.rank, dead) if told is None and dead else told

    def heard(self, watch: DeathWatch) -> EpeeError | None:
        """Return the same, soon, for a rank that has an error of its own; None if the store does not answer."""
        self.store.hasten(REASON_WAIT_S)
        with ignored(CommTimeoutError):
            return self.reported(watch)
        return None

    def failure_of(self, peer: int, watch: DeathWatch) -> EpeeError:
        """Return the error to raise now that `peer` has failed."""
        until = time.monotonic() + REASON_WAIT_S
        while (error := self.heard(watch)) is None and time.monotonic() < until:
            time.sleep(0.01)
        text = f"init (rank={self.rank}, peer={peer}): rank {peer} failed without a word"
        return error or PeerError(text, [peer], "init")


def _counter(rank: int) -> str:
    """Return the key that counts how often a rank was begun in a store."""
    return f"epee/births/{rank}"


def _of_a_peer(error: BaseException) -> bool:
    """Return whether `error` is a peer's report, so that all know it. No rank reports its own death."""
    return isinstance(error, (MismatchError, PeerError)) and not isinstance(error, RankFailedError)


@contextlib.contextmanager
def attempt(store: BoundedStore, rank: int, num_ranks: int) -> Iterator[BootstrapAttempt]:
    """Report every failure inside to the peers: the check of the options, and `create_engine`."""
    this = BootstrapAttempt(store, rank, num_ranks)
    try:
        yield this
    except BaseException as exc:
        this.fail(exc)
        if this.region is not None:
            this.region.close()
        raise


def _plain(text: str, limit: int) -> str:
    return "".join(char if char.isprintable() else " " for char in text[:limit])


def read_fields(raw: bytes, peer: int) -> dict[str, Any]:
    """Return the fields of a record, any record.

    Raises:
        ProtocolError: it is too long, or no JSON object.
    """
    try:
        return told_fields(raw, MAX_RECORD_BYTES)
    except expected(ValueError) as exc:
        raise ProtocolError(
            f"rank {peer}'s record in the store cannot be read ({exc}); does another job use this store?"
        ) from exc


def failure(fields: dict[str, Any], rank: int, num_ranks: int) -> EpeeError:
    """Return the error to raise on `rank` for a peer's error record."""
    failed, kind, reason = (fields.get(name) for name in ("failed", "kind", "reason"))
    dead, late = fields.get("dead", []), fields.get("late", [])
    good = type(failed) is int and 0 <= failed < num_ranks and isinstance(kind, str) and isinstance(reason, str)
    for ranks in (dead, late):
        good = good and isinstance(ranks, list) and all(type(one) is int and 0 <= one < num_ranks for one in ranks)
    if not good or len(fields) != 3 + len({"dead", "late"} & fields.keys()):
        return ProtocolError(
            f"an error record in the store cannot be read (fields {list(fields)[:9]}); does another program use this "
            "store?"
        )
    assert isinstance(failed, int)
    assert isinstance(kind, str)
    assert isinstance(reason, str)
    cause = f"{_plain(kind, MAX_KIND_CHARS)}: {_plain(reason, MAX_REASON_CHARS)}"
    where = context("init", rank=rank, peer=failed)
    if kind in _REFUSALS:
        return MismatchError(f"{where}: rank {failed} refused its options, so no group was made: {cause}")
    if dead and rank not in dead:
        return RankFailedError(
            f"{where}: no group was made, as rank {failed} reports: {cause}", dead, "init", cause=cause
        )
    if late and rank not in late:
        return CommTimeoutError(f"{where}: no group was made, as rank {failed} reports: {cause}", late, has_job=False)
    told = f"{where}: rank {failed} could not make its part, so no group was made: {cause}"
    return PeerError(told, [failed], "init", cause=cause)


def died(rank: int, peers: tuple[int, ...]) -> RankFailedError:
    """Return the error to raise on `rank` when peers have died on the way."""
    names = ", ".join(map(str, peers))
    return RankFailedError(
        f"init (rank={rank}): rank {names} died while the group was made; see its own output, then start all ranks",
        peers,
        "init",
        cause="its process has ended",
    )
