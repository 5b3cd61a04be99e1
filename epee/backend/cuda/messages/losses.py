"""Lost messages: kernel reports, the errors raised for them, and the state of a lost message's work.

Kernels report (`report.py`); the error is raised at the next entry from the cpu: a message, or the `wait` of one. A
pair that has lost a message makes none before its ranks have met (`pairs.py`). A thread reports a death to the kernels
(`gpu/death_notifier.py`); the engine detects it by its own means. If the group reports losses (mode "mask" under
Mooncake's names) a message to or from a dead rank raises nothing: its work reports that it was lost (`work.py`). Only
the survivor decides (`csrc/kernels/message/batch.cuh`), so mode "mask" needs no more here, except that a death is
reported when the dead rank's memory is final.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ....engine import Engine
from ....errors import CommTimeoutError, EpeeError, RankFailedError, named
from ....gpu.report import PEER_GAVE_UP, TIMEOUT, KernelReport
from ...work import is_loss
from .machine import Messages, Queued
from .meetings import Pairs
from .params import MAX_RANKS
from .report import error_of, failed

logger = logging.getLogger("epee")

CLOSE_S = 30.0  # how much longer than the group's timeout the cpu waits for kernels
NEWS_S = 0.1  # how long the cpu waits for the notification of a death that caused a kernel's report
NAP_S = 5e-5


class LostMessages:
    """Errors of lost messages. Any thread.

    Args:
        engine: of the group.
        rank: this process's.
        pairs: of this rank.
        lock: of the pairs.
    """

    def __init__(self, engine: Engine, rank: int, pairs: Pairs, lock: threading.RLock) -> None:
        self._engine, self._rank, self._pairs, self._lock = engine, rank, pairs, lock

    def check(self) -> None:
        """Raise what kernels have reported. Any thread."""
        machine = self._pairs.machine
        if machine is None or not machine.device.has_reports:
            return
        with self._lock:
            errors = [self._error_of(machine, report) for report in machine.reports()]
        for error in errors:
            named(error, self._engine.box.label.text)
        if self._engine.reports_losses:
            for error in filter(is_loss, errors):
                logger.warning("%s", error)
            errors = [error for error in errors if not is_loss(error)]
        for error in errors[1:]:
            logger.info("beside the failure that is raised now: %s", error)
        if errors:
            raise errors[0]

    def _error_of(self, machine: Messages, report: KernelReport) -> EpeeError:
        if report.peer >= MAX_RANKS:
            return error_of(report, self._rank)  # a receive from any source: no pair has lost a message
        self._pairs.lost.add(report.peer)
        if report.code in (TIMEOUT, PEER_GAVE_UP):
            begun = time.monotonic()
            while time.monotonic() - begun < NEWS_S and not machine.device.is_marked(report.peer):
                time.sleep(1e-3)
            if machine.device.is_marked(report.peer):
                return failed(report, self._rank, report.peer)
        return error_of(report, self._rank)

    def lost_by(self, peer: int, is_send: bool, queued: Queued) -> EpeeError | None:
        """Return why a message whose kernel has ended was lost, None if it was not."""
        machine = self._pairs.machine
        if machine is None:
            return None
        is_any = queued.source is not None
        if queued.source is not None and queued.source.words[0]:
            return None
        if not is_any and not machine.is_lost(peer, is_send, queued.ticket):
            return None
        name, who = "send" if is_send else "recv", range(MAX_RANKS) if is_any else (peer,)
        dead = [rank for rank in who if machine.device.is_marked(rank)]
        text = f"{name}: the message {'to' if is_send else 'from'} {'any rank' if is_any else f'rank {peer}'} was lost"
        if dead:
            return RankFailedError(f"{text}; dead: {dead}", dead, name, 0, cause="process ended")
        return CommTimeoutError(f"{text}, or one before it between the two", [] if is_any else [peer], has_job=True)

    def await_end(self, is_done: Callable[[], bool], name: str) -> None:
        """Block the cpu until a message's end, and raise its failure."""
        deadline = time.monotonic() + self._engine.timeout_s + CLOSE_S
        while not is_done():
            if time.monotonic() > deadline:
                told = f"{name}: the GPU has not come to the message within the group's time-out"
                raise CommTimeoutError(told, has_job=True)
            time.sleep(NAP_S)
        self.check()
