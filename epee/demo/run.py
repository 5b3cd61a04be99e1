"""The whole story in the parent: check, start the ranks, show what they say, write what they found."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from ..errors import EpeeError, RankFailedError
from . import plots, report
from .display import Display
from .launch import Message, Replacement, run_ranks
from .settings import Settings
from .story import Story
from .text import read_text

OK, FAILED, INTERRUPTED = 0, 1, 130


def run(settings: Settings, console: Console) -> int:
    """Run the demo and return the exit code: 0, 1 (a rank failed, or the check did), 130 (Ctrl-C, SIGTERM, SIGHUP).

    Raises:
        InvalidArgument: the settings cannot run. UnsupportedError: matplotlib is missing.
    """
    settings.check()
    plots.require()
    text = read_text(settings.text)
    console.print(
        f"{settings.num_ranks} ranks learn from {len(text) / 1e6:.1f} MB of "
        f"{settings.text or 'the sources of the Python standard library'}",
        highlight=False,
    )
    try:
        with _ended_by(signal.SIGTERM, signal.SIGHUP):
            result = _train(settings, text, console)
    except KeyboardInterrupt:
        console.print("interrupted; all ranks have ended")
        return INTERRUPTED
    except RankFailedError as exc:
        console.print(f"[bold red]{escape(str(exc))}[/]", highlight=False)
        console.print(exc.cause, markup=False, highlight=False, soft_wrap=True)
        return FAILED
    result["text"] = {"source": settings.text or "Python standard library", "bytes": len(text)}
    report.show(console, result)
    for path in report.save(settings, result):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    return OK if result["check"]["passed"] else FAILED


@contextmanager
def _ended_by(*signals: signal.Signals) -> Iterator[None]:
    """Let these signals end the demo as Ctrl-C does, so that its temporary folder goes too."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    old = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _train(settings: Settings, text: bytes, console: Console) -> Message:
    # The ranks' story needs torch, which takes a second or two to import: after the settings were found good.
    from .rank import Job, run_rank

    results: list[Message] = []
    with tempfile.TemporaryDirectory(prefix="epee-demo-") as folder, Display(console) as display:
        text_path, store_path = Path(folder) / "text", Path(folder) / "store"
        text_path.write_bytes(text)

        job, story = Job(settings, str(text_path), str(store_path)), Story(settings)

        def on_message(rank: int, message: Message) -> Replacement | None:
            kind = message.pop("kind")
            if kind == "progress":
                display.progress(message)
            elif kind == "phase":
                display.phase(message["text"])
            elif kind == "event":
                display.note(story.hear(message))
            else:
                results.append(message)
            if story.wants_replacement(kind, message):
                display.note(story.start())
                return Replacement(story.victim, replace(job, joins=True))
            return None

        run_ranks(run_rank, settings.num_ranks, job, on_message, mortal=settings.victim)
    if not results:
        raise EpeeError("the ranks ended without a result; this is a bug in the demo")
    return {**results[0], "events": story.told(results[0].pop("began"))}
