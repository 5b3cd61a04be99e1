"""What remains of a run: lines on the screen, numbers as JSON, pictures as PNG.

matplotlib is an extra (`pip install 'epee[demo]'`) and is imported here only, when a picture is due.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from typer import echo

from ..errors import UnsupportedError
from .launch import Message
from .settings import Settings


def require() -> None:
    """Raise `UnsupportedError` when matplotlib is missing; asked before a minute of training, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("the demo's pictures need matplotlib, which is not installed; pip install 'epee[demo]'")


def show(result: Message) -> None:
    """Print expert load, text sample, what happened to the ranks, and the check."""
    echo("expert load, percent of a layer's tokens")
    for layer, counts in enumerate(result["expert_load"]):
        echo(f"  layer {layer}  " + "".join(f"{100 * count / max(1, sum(counts)):7.1f}" for count in counts))
    sample = "".join(one if one.isprintable() or one == "\n" else "?" for one in result["sample"])
    echo("the model writes\n  | " + sample.replace("\n", "\n  | "))
    for event in result["events"]:
        echo(f"{event['seconds']:6.2f} s  {event['text']}")
    echo(
        f"loss {result['steps'][0][2]:.3f} -> {result['valid'][-1][2]:.3f} nats per byte (validation), "
        f"{result['tokens']:,} tokens in {len(result['steps'])} steps, {result['tokens_per_s']:,.0f} tokens/s, "
        f"{result['num_parameters']:,} parameters"
    )
    check = result["check"]
    echo(
        f"one step through epee against one dense process: max deviation {check['max_deviation']:.1e} (allowed "
        f"{check['tolerance']:.0e}, {check['dtype']})  {'PASS' if check['passed'] else 'FAIL'}"
    )


def save(settings: Settings, result: Message) -> list[Path]:
    """Write the pictures and the numbers into the settings' folder; return the files' paths."""
    folder = Path(settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    machine = {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("epee", "torch", "numpy", "matplotlib")},
    }
    path = folder / "demo.json"
    path.write_text(json.dumps({"settings": dataclasses.asdict(settings), "machine": machine, **result}, indent=1))
    return [*_draw(folder, settings, result), path]


def _draw(folder: Path, settings: Settings, result: Message) -> list[Path]:
    """Draw all pictures of a `result` message into `folder` and return their paths."""
    load = [[100 * count / max(1, sum(row)) for count in row] for row in result["expert_load"]]
    traffic = [[count / 1e6 for count in row] for row in result["bytes_per_link"]]
    figures = {
        "loss.png": _loss(settings, result),
        "expert_load.png": _heat_map("Expert load, percent of a layer's tokens", load, ("layer", "expert")),
        "traffic.png": _heat_map(
            "Traffic between ranks, MB (the diagonal stays inside)", traffic, ("from rank", "to rank")
        ),
    }
    for name, figure in figures.items():
        figure.savefig(folder / name)
    return [folder / name for name in figures]


def _figure(width: float, height: float, title: str) -> tuple[Any, Any]:
    """Return (figure, axes); a `Figure` of its own touches neither global state nor a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    return figure, axes


def _loss(settings: Settings, result: Message) -> Any:
    """Draw the losses, with a line where a rank was lost, and one where its replacement was in."""
    figure, axes = _figure(7.2, 4.2, "Loss, nats per byte")
    axes.plot(*zip(*((seconds, loss) for _, seconds, loss in result["steps"]), strict=True), label="training")
    valid = [(seconds, loss) for _, seconds, loss in result["valid"]]
    axes.plot(*zip(*valid, strict=True), marker="o", label="validation")
    axes.annotate(f"{valid[-1][1]:.2f}", valid[-1], xytext=(6, 6), textcoords="offset points")
    names = {"kill": "killed", "stall": "stopped", "rejoined": "replaced"}
    for event in (event for event in result["events"] if event["what"] in names):
        axes.axvline(event["seconds"], color="black", linewidth=1, linestyle="--")
        text, top = f"rank {settings.victim} {names[event['what']]} ", axes.get_ylim()[1]
        axes.text(event["seconds"], top, text, rotation=90, ha="right", va="top", fontsize=8)
    axes.set_xlabel("seconds of training")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    return figure


def _heat_map(title: str, values: Sequence[Sequence[float]], names: tuple[str, str]) -> Any:
    """Draw `values` as cells with numbers; `names` are those of the rows and the columns."""
    rows, columns = len(values), len(values[0])
    figure, axes = _figure(max(4.0, 1.6 + 0.75 * columns), max(2.6, 1.4 + 0.6 * rows), title)
    largest = max(map(max, values))
    axes.imshow(values, cmap="Blues", vmin=0, vmax=1.5 * largest, aspect="auto")  # 1.5: dark numbers stay readable
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            axes.text(column, row, f"{value:,.1f}", ha="center", va="center", fontsize=8)
    axes.set_yticks(range(rows), [f"{names[0]} {row}" for row in range(rows)], fontsize=8)
    axes.set_xticks(range(columns), [f"{names[1]} {column}" for column in range(columns)], fontsize=8, rotation=20)
    return figure
