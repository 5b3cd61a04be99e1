"""`epee demo`: options in, exit code out; everything else is `epee.demo`."""

from __future__ import annotations

import typer


def demo(
    ranks: int = typer.Option(2, help="Processes to train on; must divide the 8 experts."),
    seconds: float = typer.Option(55.0, help="How long to train."),
    steps: int | None = typer.Option(None, help="Train exactly this many steps instead."),
    out: str = typer.Option("epee-demo", help="Folder for pictures and numbers."),
    text: str | None = typer.Option(
        None, help="File to learn from; default: the sources of Python's standard library."
    ),
    seed: int = typer.Option(0, help="Seed of weights, batches and the text sample."),
    backend: str = typer.Option(
        "epee", help="torch.distributed backend that sums the shared gradients (gloo works as well)."
    ),
) -> None:
    """Train a small Mixture-of-Experts language model over local processes, its tokens travelling through epee.

    Shows loss, speed and bytes per link while it trains; then expert load, a text sample, and the proof that one step
    through epee equals the same step in one dense process. Exit code 1 when a rank or the proof fails.
    """
    from rich.console import Console

    from ..demo.run import run
    from ..demo.settings import Settings

    settings = Settings(
        num_ranks=ranks, seconds=seconds, num_steps=steps, out=out, text=text, seed=seed, backend=backend
    )
    raise typer.Exit(run(settings, Console()))
