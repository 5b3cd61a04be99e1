"""What remains of a run: lines on the screen, numbers as JSON, pictures as PNG.

matplotlib is an extra (`pip install 'epee[demo]'`) and is imported here only, when a picture is due.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
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
    for layer, shares in enumerate(_shares(result)):
        echo(f"  layer {layer}  " + "".join(f"{share:7.1f}" for share in shares))
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
    traffic = [[count / 1e6 for count in row] for row in result["bytes_per_link"]]
    figures = {
        "loss.png": _loss(settings, result),
        "expert_load.png": _heat_map("Expert load, percent of a layer's tokens", _shares(result), "layer", "expert"),
        "traffic.png": _heat_map("Traffic, MB (the diagonal stays inside)", traffic, "from rank", "to rank"),
    }
    for name, figure in figures.items():
        figure.savefig(folder / name)
    versions = {name: metadata.version(name) for name in ("epee", "torch")}
    numbers = {"settings": dataclasses.asdict(settings), "versions": versions, **result}
    (folder / "demo.json").write_text(json.dumps(numbers, indent=1))
    return [folder / name for name in (*figures, "demo.json")]


def _shares(result: Message) -> list[list[float]]:
    return [[100 * count / max(1, sum(counts)) for count in counts] for counts in result["expert_load"]]


def _figure(title: str) -> tuple[Any, Any]:
    """Return (figure, axes); a `Figure` of its own touches neither global state nor a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    return figure, axes


def _loss(settings: Settings, result: Message) -> Any:
    """Draw the losses, with a line where a rank was lost, and one where its replacement was in."""
    figure, axes = _figure("Loss, nats per byte")
    for name, label in (("steps", "training"), ("valid", "validation")):
        _, seconds, losses = zip(*result[name], strict=True)
        axes.plot(seconds, losses, label=label, marker="o" if name == "valid" else None)
    axes.annotate(f"{losses[-1]:.2f}", (seconds[-1], losses[-1]), xytext=(6, 6), textcoords="offset points")
    names = {"kill": "killed", "stall": "stopped", "rejoined": "replaced"}
    for event in (event for event in result["events"] if event["what"] in names):
        axes.axvline(event["seconds"], color="black", linewidth=1, linestyle="--")
        text, top = f"rank {settings.victim} {names[event['what']]} ", axes.get_ylim()[1]
        axes.text(event["seconds"], top, text, rotation=90, ha="right", va="top", fontsize=8)
    axes.set_xlabel("seconds of training")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    return figure


def _heat_map(title: str, values: list[list[float]], row_name: str, column_name: str) -> Any:
    """Draw `values` as cells with numbers."""
    figure, axes = _figure(title)
    axes.imshow(
        values, cmap="Blues", vmin=0, vmax=1.5 * max(map(max, values)), aspect="auto"
    )  # 1.5: text stays legible
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            axes.text(column, row, f"{value:,.1f}", ha="center", va="center", fontsize=8)
    axes.set(ylabel=row_name, yticks=range(len(values)), xlabel=column_name, xticks=range(len(values[0])))
    return figure
