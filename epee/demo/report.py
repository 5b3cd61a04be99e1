"""What remains of a run: tables on the screen, numbers as JSON, pictures."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from . import plots
from .launch import Message
from .machine import describe
from .settings import Settings

NUMBERS_FILE = "demo.json"


def show(console: Console, result: Message) -> None:
    """Print expert load, text sample and the check."""
    console.print(_load_table(result["expert_load"]))
    console.print(Panel(Text(result["sample"]), title="the model writes", title_align="left", border_style="dim"))
    first, last = result["steps"][0][2], result["valid"][-1][2]
    console.print(
        f"loss {first:.3f} -> [bold]{last:.3f}[/] nats per byte (validation), {result['tokens']:,} tokens in "
        f"{len(result['steps'])} steps, {result['tokens_per_s']:,.0f} tokens/s, "
        f"{result['num_parameters']:,} parameters",
        highlight=False,
    )
    if result.get("events"):
        console.print(_event_table(result["events"]))
    console.print(check_line(result["check"]), highlight=False)


def check_line(check: Message) -> str:
    """Return the outcome of the check in one line of rich markup."""
    verdict = "[bold green]PASS[/]" if check["passed"] else "[bold red]FAIL[/]"
    return (
        f"one step through epee against one dense process: max deviation {check['max_deviation']:.1e} "
        f"(loss {check['loss']:.1e}, gradients {check['gradients']:.1e}, weights {check['weights']:.1e}; "
        f"allowed {check['tolerance']:.0e}, {check['dtype']})  {verdict}"
    )


def save(settings: Settings, result: Message) -> list[Path]:
    """Write the pictures and the numbers into the settings' folder; return the files' paths."""
    folder = Path(settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {"settings": settings.as_dict(), "machine": describe(), **result}
    path = folder / NUMBERS_FILE
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    return [*plots.draw(folder, settings, result), path]


def _load_table(expert_load: list[list[int]]) -> Table:
    table = Table(title="expert load: share of each layer's tokens, in percent", title_justify="left", title_style="")
    table.add_column("layer", justify="right", style="dim")
    for expert in range(len(expert_load[0])):
        table.add_column(f"e{expert}", justify="right")
    even = 1 / len(expert_load[0])
    for layer, row in enumerate(expert_load):
        total = max(1, sum(row))
        table.add_row(str(layer), *(_cell(count / total, even) for count in row))
    return table


def _event_table(events: list[Message]) -> Table:
    table = Table(title="what happened to the ranks", title_justify="left", title_style="")
    table.add_column("seconds", justify="right", style="dim")
    table.add_column("what", overflow="fold")
    for event in events:
        table.add_row(f"{event['seconds']:.2f}", Text(event["text"]))
    return table


def _cell(share: float, even: float) -> str:
    """Colour the experts that have much more or much less than their share."""
    text = f"{100 * share:.1f}"
    if share > 1.5 * even:
        return f"[yellow]{text}[/]"
    return f"[blue]{text}[/]" if share < even / 1.5 else text
