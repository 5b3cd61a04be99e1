"""`epee demo`: options in, exit code out; everything else is `epee.demo`."""

from __future__ import annotations

import signal

import typer


def demo(
    ranks: int | None = typer.Option(
        None,
        help="Processes to train on; must divide the 8 experts.",
        show_default="2; 4 with --kill, --stall or --hosts; one per GPU with --device cuda",
    ),
    device: str = typer.Option("cpu", help="cpu, or cuda to train on the GPUs of this machine."),
    seconds: float = typer.Option(55.0, min=1, max=86400, help="How long to train."),
    steps: int | None = typer.Option(None, min=1, help="Train exactly this many steps instead."),
    out: str = typer.Option("epee-demo", help="Folder for the picture and the numbers."),
    kill: int | None = typer.Option(
        None, help="Kill this rank after a third of the training; a new process replaces it after three fifths."
    ),
    stall: int | None = typer.Option(None, help="Stop this rank (SIGSTOP) instead; the others evict it after 5 s."),
    hosts: int = typer.Option(
        1, min=1, help="Simulate this many hosts on this machine: ranks of different hosts share no memory, only TCP."
    ),
    kill_host: int | None = typer.Option(
        None, help="Kill all ranks of this host after a third of the training; the others end without it."
    ),
) -> None:
    """Train a small Mixture-of-Experts language model over local processes, whose tokens are sent through epee.

    Shows loss, speed and bytes per link while it trains; then the proof that one step through epee equals the same step
    in one dense process. Exit code 1 when a rank or the proof fails.

    With --kill or --stall a rank is lost on purpose: the others continue with copies of its experts, and a new process
    replaces it with its experts, with --hosts on the same host. The picture shows both moments. After --kill-host
    the others end without that host.
    """
    from ..demo.run import num_gpus, run
    from ..demo.settings import Settings
    from ..errors import InvalidArgument

    if kill is not None and stall is not None:
        raise InvalidArgument(f"--kill and --stall exclude each other, got {kill} and {stall}; lose one rank at a time")
    if kill_host is not None and (kill is not None or stall is not None):
        raise InvalidArgument(
            f"--kill-host excludes --kill and --stall, got host {kill_host} and a rank; lose one of them"
        )
    fault, victim = ("stall", stall) if stall is not None else ("kill", kill)
    num_ranks = ranks if ranks is not None else 4 if victim is not None or hosts > 1 else 2
    if ranks is None and device == "cuda":
        num_ranks = Settings().most_ranks(num_gpus())
    settings = Settings(
        num_ranks=num_ranks,
        device=device,
        num_hosts=hosts,
        seconds=seconds,
        num_steps=steps,
        out=out,
        victim=victim,
        fault=fault,
        killed_host=kill_host,
    )
    for number in (signal.SIGTERM, signal.SIGHUP):  # end as Ctrl-C does, so that the temporary folder is removed too
        signal.signal(number, signal.default_int_handler)
    raise typer.Exit(run(settings))
