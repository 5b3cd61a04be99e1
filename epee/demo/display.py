"""What a person sees while the ranks train: a live panel on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from .launch import Message

LINE_EVERY_S = 3.0
_LINKS_SHOWN = 12  # more would not fit a terminal; the picture and the JSON have all


class Display:
    """Shows phases and progress; a context manager. `console` decides whether it is live."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_live = console.is_terminal
        self._live = Live(console=console, refresh_per_second=8, transient=True) if self._is_live else None
        self._last: Message | None = None
        self._last_line_s = float("-inf")
        self._phase = ""

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        self.phase("starting the ranks")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._last is not None:
            self._console.print(progress_line(self._last), highlight=False, soft_wrap=True)

    def phase(self, name: str) -> None:
        """Say what the ranks are doing now."""
        self._phase = name
        if self._live is not None:
            self._live.update(self._panel())
        else:
            self._console.print(f"{name} ...", highlight=False)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def progress(self, message: Message) -> None:
        """Show a `progress` message of rank 0."""
        self._last = message
        if self._live is not None:
            self._live.update(self._panel())
        elif time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self._console.print(progress_line(message), highlight=False, soft_wrap=True)

    def _panel(self) -> RenderableType:
        head = Spinner("dots", text=f" {self._phase}", style="cyan")
        if self._last is None:
            return head
        numbers = Table.grid(padding=(0, 2))
        for name, value in _numbers(self._last):
            numbers.add_row(f"[dim]{name}", value)
        bar = ProgressBar(total=1.0, completed=self._last["progress"], width=60)
        return Group(head, Padding(bar, (0, 0, 0, 2)), Padding(numbers, (0, 0, 0, 2)))


def _numbers(message: Message) -> list[tuple[str, str]]:
    valid = message["valid"]
    return [
        ("step", f"{message['step']}   {message['seconds']:.0f} s"),
        ("loss", f"{message['loss']:.3f} nats per byte"),
        ("validation", f"{valid:.3f} nats per byte" if valid is not None else "not yet"),
        ("speed", f"{message['tokens_per_s']:,.0f} tokens/s"),
        ("sent", links(message["bytes_per_link"])),
    ]


def progress_line(message: Message) -> str:
    """Return one line with everything a `progress` message says."""
    valid = f"  valid {message['valid']:.3f}" if message["valid"] is not None else ""
    return (
        f"step {message['step']:>4}  {message['seconds']:5.1f} s  loss {message['loss']:.3f}{valid}  "
        f"{message['tokens_per_s']:,.0f} tokens/s  sent {links(message['bytes_per_link'])}"
    )


def links(bytes_per_link: list[list[float]]) -> str:
    """Return the bytes of each link between two ranks as text, `0→1 12.3 MB`; the busiest ones if there are many."""
    pairs = [(count, src, dst) for src, row in enumerate(bytes_per_link) for dst, count in enumerate(row) if src != dst]
    if not pairs:
        return "nothing between ranks: there is one"
    if len(pairs) > _LINKS_SHOWN:
        count, src, dst = max(pairs)
        total = sum(pair[0] for pair in pairs)
        return f"{total / 1e6:,.1f} MB over {len(pairs)} links, most {src}→{dst} {count / 1e6:,.1f} MB"
    return "  ".join(f"{src}→{dst} {count / 1e6:,.1f} MB" for count, src, dst in pairs)
