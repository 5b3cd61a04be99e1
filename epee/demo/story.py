"""What happens when a rank is lost on purpose, as the parent sees it: a list of moments, and what to do at some.

Ranks send `event` messages: the victim just before its end, rank 0 when the first step without it, and the first with
its replacement, are done; a victim that was stopped, when it has learned that it was evicted. Clocks are the
machine's, so moments of several processes can be compared.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from .launch import Message
from .settings import Settings


class Story:
    """The moments of one run; empty when nobody is lost."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._moments: list[dict[str, Any]] = []
        self._stopped: list[int] = []  # pid of the victim until it is woken up
        self._is_owed = False  # somebody was lost, and nobody was started since

    @property
    def victim(self) -> int:
        """The rank that is lost."""
        assert self._settings.victim is not None
        return self._settings.victim

    def hear(self, message: Message) -> str:
        """Take note of an event; return it as a line. A stopped victim is woken up once its place is taken."""
        what, victim, fault = message["what"], self._settings.victim, self._settings.fault
        moment = {name: value for name, value in message.items() if name not in ("pid", "told")}
        if what == fault:
            self._stopped = [message["pid"]]
            number = "SIGKILL" if fault == "kill" else "SIGSTOP"
            text = f"rank {victim} gets {number} in the midst of step {message['step'] + 1}"
        elif what == "went on":
            self._is_owed = True
            lost = self._clock_of(fault)
            members = ", ".join(map(str, message["members"]))
            members = f"ranks {members} have" if len(message["members"]) > 1 else f"rank {members} has"
            since = "" if lost is None else f" {message['clock'] - lost:.2f} s later"
            text = f"{members} done step {message['step']} without rank {victim}{since}"
            if message["again"]:
                text += f" ({message['again']} steps are done again, from a snapshot)"
        elif what == "delayed":
            text = f"nobody was lost, but a step had to be done again: {message['cause']}"
        elif what == "rejoined":
            started = self._clock_of("started")
            since = "" if started is None else f" {message['clock'] - started:.2f} s after its start"
            text = f"the new rank {victim} has done step {message['step']} with the others{since}"
            if fault == "stall" and self._stopped:
                os.kill(self._stopped.pop(), signal.SIGCONT)
        else:
            text = f"the old rank {victim} woke up and was told that it is out: {message['told']}"
        self._moments.append({**moment, "text": text})
        return text

    def wants_replacement(self, kind: str, message: Message) -> bool:
        """True when the others have gone on and the time for a replacement has come; again if that is lost, too."""
        return kind == "progress" and self._is_owed and message["progress"] >= self._settings.replace_at

    def start(self) -> str:
        """Take note that the replacement is started."""
        self._is_owed = False
        text = f"a new process takes the place of rank {self.victim}"
        self._moments.append({"what": "started", "clock": time.perf_counter(), "step": None, "text": text})
        return text

    def told(self, began: float) -> list[dict[str, Any]]:
        """Return the moments in order; `seconds` counts from the start of the training."""
        moments = sorted(self._moments, key=lambda moment: moment["clock"])
        return [
            {"seconds": moment["clock"] - began, **{name: value for name, value in moment.items() if name != "clock"}}
            for moment in moments
        ]

    def _clock_of(self, what: str) -> float | None:
        return next((moment["clock"] for moment in self._moments if moment["what"] == what), None)
