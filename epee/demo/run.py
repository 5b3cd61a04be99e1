"""The whole story in the parent: check, start the ranks, show what they say, write what they found."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

from typer import echo

from ..errors import RankFailedError
from . import report
from .launch import Message, Ranks
from .settings import Settings
from .text import read_text

OK, FAILED, INTERRUPTED = 0, 1, 130
LINE_EVERY_S = 3.0


def run(settings: Settings) -> int:
    """Run the demo and return the exit code: 0, 1 (a rank failed, or the check did), 130 (interrupted).

    Raises:
        InvalidArgument: the settings cannot run. UnsupportedError: matplotlib is missing.
    """
    settings.check()
    report.require()
    text = read_text(settings.text)
    source = settings.text or "the sources of the Python standard library"
    echo(f"{settings.num_ranks} ranks learn from {len(text) / 1e6:.1f} MB of {source}")
    try:
        result = _train(settings, text)
    except KeyboardInterrupt:
        echo("interrupted; all ranks have ended")
        return INTERRUPTED
    except RankFailedError as exc:
        echo(f"{exc}\n{exc.cause}")
        return FAILED
    result["text"] = {"source": source, "bytes": len(text)}
    report.show(result)
    for path in report.save(settings, result):
        echo(f"wrote {path}")
    return OK if result["check"]["passed"] else FAILED


def _train(settings: Settings, text: bytes) -> Message:
    # The ranks' story needs torch, which takes a second or two to import: after the settings were found good.
    from .rank import run_rank

    story, next_line_s = Story(settings), 0.0
    with tempfile.TemporaryDirectory(prefix="epee-demo-") as name, Ranks(run_rank) as ranks:
        folder = Path(name)
        (folder / "text").write_bytes(text)
        echo("starting the ranks ...")
        for rank in range(settings.num_ranks):
            ranks.start(rank, settings, folder, is_mortal=rank == settings.victim)
        for message in ranks.messages():
            if message.pop("kind") == "result":
                result = message
            elif "what" in message:
                echo(message["text"])
                story.hear(message)
            elif time.monotonic() >= next_line_s:
                echo(message["text"])
                next_line_s = time.monotonic() + LINE_EVERY_S
            if settings.victim is not None and story.wants_replacement(message):
                echo(story.start())
                ranks.start(settings.victim, settings, folder, True)
    return {**result, "events": story.told(result.pop("began"))}


class Story:
    """What happens when a rank is lost on purpose: a list of moments, and what to do at some.

    The victim sends an event just before its end, rank 0 after the first step without it and the first with its
    replacement, a stopped victim when it has learned that it was evicted. The clock is the machine's, one for all.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._moments: list[Message] = []
        self._is_owed = False  # somebody was lost, and nobody was started since

    def hear(self, event: Message) -> None:
        """Take note of an event. A stopped victim is woken up once its place is taken."""
        self._moments.append(event)
        self._is_owed |= event["what"] == "went on"
        if event["what"] == "rejoined":
            for stopped in (moment for moment in self._moments if moment["what"] == "stall"):
                os.kill(stopped["pid"], signal.SIGCONT)

    def wants_replacement(self, message: Message) -> bool:
        """True when the others have gone on and the time for a replacement has come; again if that is lost, too."""
        return self._is_owed and message.get("progress", 0.0) >= self._settings.replace_at

    def start(self) -> str:
        """Take note that the replacement is started."""
        self._is_owed = False
        text = f"a new process takes the place of rank {self._settings.victim}"
        self._moments.append({"what": "started", "clock": time.perf_counter(), "text": text})
        return text

    def told(self, began: float) -> list[Message]:
        """Return the moments in order; `seconds` counts from the start of the training."""
        moments = sorted(self._moments, key=lambda moment: moment["clock"])
        return [{"seconds": moment["clock"] - began, **moment} for moment in moments]
