"""The demo's pictures: loss curve, expert load, traffic between ranks. PNG by matplotlib, without a display.

matplotlib is an extra (`pip install 'epee[demo]'`) and is imported here only, when a picture is due.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from .launch import Message
from .settings import Settings

LOSS_FILE, LOAD_FILE, TRAFFIC_FILE = "loss.png", "expert_load.png", "traffic.png"
_INK, _QUIET, _LINE, _ACCENT = "#1f2933", "#7b8794", "#9fb3c8", "#d64545"
_DPI = 160
_SMOOTH_REACH = 12  # steps on either side that the smoothed training loss is a mean of


def require() -> None:
    """Raise `UnsupportedError` when matplotlib is missing; asked before a minute of training, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("the demo's pictures need matplotlib, which is not installed; pip install 'epee[demo]'")


def draw(folder: Path, settings: Settings, result: Message) -> list[Path]:
    """Draw all pictures of a `result` message into `folder` and return their paths."""
    return [
        _draw_loss(folder / LOSS_FILE, settings, result),
        _draw_load(folder / LOAD_FILE, settings, result["expert_load"]),
        _draw_traffic(folder / TRAFFIC_FILE, settings, result["bytes_per_link"]),
    ]


def _figure(width: float, height: float, title: str, subtitle: str) -> tuple[Any, Any]:
    """Return (figure, axes) in the demo's style; Agg by name, so no global state and no display is touched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _note(axes, title, (0, 1), (0, 34), fontsize=13, fontweight="bold", color=_INK)
    _note(axes, subtitle, (0, 1), (0, 18), fontsize=9, color=_QUIET)
    axes.tick_params(colors=_INK, labelsize=9, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure, axes


def _note(axes: Any, text: str, place: tuple[float, float], points: tuple[float, float], **style: Any) -> None:
    """Write `text` at `place` (0 to 1 in the axes), moved by `points`."""
    axes.annotate(text, place, xycoords="axes fraction", xytext=points, textcoords="offset points", **style)


def _draw_loss(path: Path, settings: Settings, result: Message) -> Path:
    figure, axes = _figure(
        7.2,
        4.2,
        "Loss, nats per byte",
        f"{result['num_parameters']:,} parameters, {settings.size.num_experts} experts in each of "
        f"{settings.size.num_layers} layers, over {_ranks(settings)}; {result['tokens']:,} bytes read",
    )
    _, seconds, losses = zip(*result["steps"], strict=True)
    _, valid_s, valid = zip(*result["valid"], strict=True)
    axes.plot(seconds, losses, color=_LINE, linewidth=0.8, alpha=0.6)
    axes.plot(seconds, _smooth(losses), color="#3e6d9c", linewidth=2, label="training, smoothed")
    axes.plot(valid_s, valid, color=_ACCENT, linewidth=1.5, marker="o", markersize=4, label="validation")
    axes.annotate(
        f"{valid[-1]:.2f}", (valid_s[-1], valid[-1]), xytext=(8, 0), textcoords="offset points", va="center",
        color=_ACCENT, fontsize=10, fontweight="bold",
    )  # fmt: skip
    _mark_events(axes, settings, result.get("events", []))
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("seconds of training", color=_QUIET, fontsize=9)
    axes.set_xlim(0, valid_s[-1] * 1.07)
    axes.legend(loc="upper right", frameon=False, fontsize=9, labelcolor=_INK)
    figure.savefig(path)
    return path


def _mark_events(axes: Any, settings: Settings, events: Sequence[Message]) -> None:
    """Draw a line where a rank was lost, and one where its replacement was in."""
    names = {"kill": "killed", "stall": "stopped", "rejoined": "replaced"}
    for event in events:
        if event["what"] in names:
            axes.axvline(event["seconds"], color=_INK, linewidth=1, linestyle=(0, (3, 2)))
            axes.annotate(
                f"rank {settings.victim} {names[event['what']]}", (event["seconds"], 1),
                xycoords=("data", "axes fraction"), xytext=(-4, -4), textcoords="offset points",
                rotation=90, ha="right", va="top", fontsize=8, color=_INK,
            )  # fmt: skip


def _draw_load(path: Path, settings: Settings, expert_load: list[list[int]]) -> Path:
    num_layers, num_experts = len(expert_load), len(expert_load[0])
    shares = [[100 * count / max(1, sum(row)) for count in row] for row in expert_load]
    even = 100 / num_experts
    figure, axes = _figure(
        max(5.0, 1.6 + 0.75 * num_experts),
        1.8 + 0.6 * num_layers,
        "Expert load, percent of a layer's tokens",
        f"an even load is {even:.1f}; each token goes to {settings.size.num_topk} experts",
    )
    _heat_map(figure, axes, shares, "{:.1f}", largest=2 * even, colours="Blues", label="percent")
    axes.set_xticks(range(num_experts), [f"expert {expert}" for expert in range(num_experts)], fontsize=8)
    axes.set_yticks(range(num_layers), [f"layer {layer}" for layer in range(num_layers)])
    per_rank = num_experts // settings.num_ranks
    for rank in range(settings.num_ranks):
        _note(axes, f"rank {rank}", ((rank + 0.5) / settings.num_ranks, 1), (0, 4), ha="center", fontsize=9, color=_INK)
        if rank:
            axes.axvline(rank * per_rank - 0.5, color="white", linewidth=6)
    figure.savefig(path)
    return path


def _draw_traffic(path: Path, settings: Settings, bytes_per_link: list[list[float]]) -> Path:
    num_ranks = len(bytes_per_link)
    megabytes = [[count / 1e6 for count in row] for row in bytes_per_link]
    links = [value for src, row in enumerate(megabytes) for dst, value in enumerate(row) if src != dst]
    total = f"{sum(links) / 1e3:,.2f} GB crossed {len(links)} links" if links else "there is one rank, so no link"
    side = 2.6 + 0.8 * num_ranks
    figure, axes = _figure(side + 1.8, side, "Traffic between ranks, MB", f"{total}; grey stays inside a rank")
    largest = 1.3 * max(links, default=1.0)  # leaves the darkest colours out, so that the numbers stay readable
    text = "{:,.0f}" if largest > 10 else "{:,.2f}"
    _heat_map(figure, axes, megabytes, text, largest=largest, colours="Purples", label="MB", grey_diagonal=True)
    names = [f"rank {rank}" for rank in range(num_ranks)]
    axes.set_xticks(range(num_ranks), [f"to {name}" for name in names])
    axes.set_yticks(range(num_ranks), [f"from {name}" for name in names])
    figure.savefig(path)
    return path


def _heat_map(
    figure: Any,
    axes: Any,
    values: Sequence[Sequence[float]],
    text: str,
    *,
    largest: float,
    colours: str,
    label: str,
    grey_diagonal: bool = False,
) -> None:
    """Draw `values` as cells with numbers, on a scale from 0 to `largest`."""
    from matplotlib.patches import Rectangle

    image = axes.imshow(values, cmap=colours, vmin=0, vmax=largest, aspect="auto")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            color = "white" if value > 0.6 * largest else _INK
            if grey_diagonal and row == column:
                axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="#eef1f4"))
                color = _QUIET
            axes.text(column, row, text.format(value), ha="center", va="center", fontsize=9, color=color)
    for edge in range(1, len(values)):
        axes.axhline(edge - 0.5, color="white", linewidth=2)
    for edge in range(1, len(values[0])):
        axes.axvline(edge - 0.5, color="white", linewidth=2)
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=_QUIET, labelsize=8, length=0)
    bar.set_label(label, color=_QUIET, fontsize=8)


def _ranks(settings: Settings) -> str:
    return "1 rank" if settings.num_ranks == 1 else f"{settings.num_ranks} ranks"


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its neighbours, few of them at the steep start."""
    smoothed = []
    for idx in range(len(values)):
        reach = min(_SMOOTH_REACH, idx // 3)
        near = values[idx - reach : idx + reach + 1]
        smoothed.append(sum(near) / len(near))
    return smoothed
