"""What remains of a run: lines on the screen, numbers as JSON, a picture as PNG.

matplotlib is an extra (`pip install 'epee[demo]'`) and is imported by a run of the demo only.
"""

from __future__ import annotations

import dataclasses
import json
from importlib import metadata
from pathlib import Path

from typer import echo

from .launch import Message
from .settings import Settings


def show(result: Message) -> None:
    """Print text sample, traffic, loss, and the check."""
    sample = "".join(one if one.isprintable() or one == "\n" else "?" for one in result["sample"])
    echo("the model writes\n  | " + sample.replace("\n", "\n  | "))
    echo(f"sent {links(result['bytes_per_link'])}")
    echo(
        f"loss {result['steps'][0][2]:.3f} -> {result['valid']:.3f} nats per byte (validation), "
        f"{result['tokens']:,} tokens in {len(result['steps'])} steps"
    )
    check = result["check"]
    echo(
        f"one step through epee against one dense process: max deviation {check['max_deviation']:.1e} (allowed "
        f"{check['tolerance']:.0e}, {check['dtype']})  {'PASS' if check['passed'] else 'FAIL'}"
    )


def links(traffic: list[list[float]]) -> str:
    """Return the bytes of each link between two ranks as text, `0→1 12.3 MB`; a sum if they are many."""
    ranks = range(len(traffic))
    pairs = [(traffic[src][dst] / 1e6, f"{src}→{dst}") for src in ranks for dst in ranks if src != dst]
    if len(pairs) > 6:
        total, (most, link) = sum(count for count, _ in pairs), max(pairs)
        return f"{total:,.1f} MB over {len(pairs)} links, most {link} {most:,.1f} MB"
    return "  ".join(f"{link} {count:,.1f} MB" for count, link in pairs) or "nothing between ranks: there is one"


def save(settings: Settings, result: Message) -> list[Path]:
    """Write the picture and the numbers into the settings' folder; return the files' paths."""
    picture, numbers = (Path(settings.out) / name for name in ("demo.png", "demo.json"))
    picture.parent.mkdir(parents=True, exist_ok=True)
    _draw(settings, result, picture)
    versions = {name: metadata.version(name) for name in ("epee", "torch")}
    numbers.write_text(json.dumps({"settings": dataclasses.asdict(settings), "versions": versions, **result}, indent=1))
    return [picture, numbers]


def _draw(settings: Settings, result: Message, path: Path) -> None:
    """Draw the losses, with a line where a rank was lost, and one where its replacement was in."""
    from matplotlib.figure import Figure

    figure = Figure(dpi=160, layout="constrained")  # one of its own touches neither global state nor a display
    axes = figure.subplots()
    _, seconds, losses = zip(*result["steps"], strict=True)
    axes.plot(seconds, losses)
    names = {"kill": "killed", "stall": "stopped", "rejoined": "replaced"}
    for event in (event for event in result["events"] if event["what"] in names):
        axes.axvline(event["seconds"], color="black", linewidth=1, linestyle="--")
        text, top = f"rank {settings.victim} {names[event['what']]} ", axes.get_ylim()[1]
        axes.text(event["seconds"], top, text, rotation=90, ha="right", va="top", fontsize=8)
    axes.set(title=f"Loss, nats per byte; validation {result['valid']:.2f}", xlabel="seconds of training")
    figure.savefig(path)
