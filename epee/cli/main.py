"""`epee demo | bench | doctor | warmup`: the entry point.

Commands import what they need when they run, so `--help` is quick.
"""

from __future__ import annotations

import sys
from importlib import metadata

import typer

from ..errors import EpeeError
from . import bench, demo, doctor, warmup

app = typer.Typer(
    name="epee",
    help="Communication for Mixture-of-Experts models in PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("warmup")(warmup.warmup)
app.command("bench", context_settings=bench.PASS_ON)(bench.bench)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"epee {metadata.version('epee')}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line; epee's own errors are shown as one line, without a traceback, and exit with 1."""
    try:
        app()
    except EpeeError as exc:
        typer.echo(f"epee: {exc}", err=True)
        sys.exit(1)
