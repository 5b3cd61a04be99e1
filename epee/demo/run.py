"""The whole story in the parent: check, start the ranks, show what they say, write what they found."""

from __future__ import annotations

import os
import signal
import sysconfig
import tempfile
import time
from pathlib import Path

from typer import echo

from ..errors import RankFailedError, UnsupportedError
from .launch import Message, Ranks
from .report import save, show
from .settings import Settings

OK, FAILED, INTERRUPTED = 0, 1, 130
LINE_EVERY_S = 3.0
SMALLEST_BYTES = 81920


def run(settings: Settings) -> int:
    """Run the demo and return the exit code: 0, 1 (a rank failed, or the check did), 130 (interrupted).

    Raises:
        InvalidArgument: the settings cannot run. UnsupportedError: matplotlib is missing, or text to learn.
    """
    settings.check()
    try:
        import matplotlib.figure  # noqa: F401 - an extra: missed before a minute of training, not after
    except ImportError as exc:
        raise UnsupportedError(
            "the demo's pictures need matplotlib, which is not installed; pip install 'epee[demo]'"
        ) from exc
    try:
        result = _train(settings)
    except KeyboardInterrupt:
        echo("interrupted; all ranks have ended")
        return INTERRUPTED
    except RankFailedError as exc:
        echo(f"{exc}\n{exc.cause}")
        return FAILED
    show(result)
    for path in save(settings, result):
        echo(f"wrote {path}")
    return OK if result["check"]["passed"] else FAILED


def _train(settings: Settings) -> Message:
    """Start the ranks and return the result; its `events` are in order."""
    # The ranks' story needs torch, which takes a second or two to import: after the settings were found good.
    from .rank import run_rank

    events: list[Message] = []
    next_line_s = 0.0
    with tempfile.TemporaryDirectory(prefix="epee-demo-") as name, Ranks(run_rank) as ranks:
        num_bytes = (Path(name) / "text").write_bytes(read_text())
        echo(f"{settings.num_ranks} ranks learn from {num_bytes / 1e6:.1f} MB of Python's standard library")
        echo("starting the ranks ...")
        for rank in range(settings.num_ranks):
            ranks.start(rank, settings, Path(name), is_mortal=rank == settings.victim)
        for message in ranks.messages():
            if message["kind"] == "result":
                result = message
            elif message["kind"] == "event":
                echo(f"{message['seconds']:6.2f} s  {message['text']}")
                events.append(message)
                if message["what"] == "started" and settings.victim is not None:
                    ranks.start(settings.victim, settings, Path(name), True)
                if message["what"] == "rejoined":  # a victim that was only stopped finds its place taken
                    for stopped in (event for event in events if event["what"] == "stall"):
                        os.kill(stopped["pid"], signal.SIGCONT)
            elif time.monotonic() >= next_line_s:
                echo(message["text"])
                next_line_s = time.monotonic() + LINE_EVERY_S
    return {**result, "events": sorted(events, key=lambda event: event["seconds"])}


def read_text() -> bytes:
    """Return the text to learn: the modules of the running Python's standard library, always in one order.

    Raises:
        UnsupportedError: this Python came without its sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < SMALLEST_BYTES:
        raise UnsupportedError(f"the demo learns from Python's own modules, and {folder} has none; use another Python")
    return text
