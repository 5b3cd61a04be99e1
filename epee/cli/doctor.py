"""`epee doctor`: capabilities of this machine for epee, the cause of a hanging job, the memory of buffers, or whether
another host is reached; everything else is `epee.doctor`."""

from __future__ import annotations

import contextlib
import json

import typer


def doctor(
    port: int | None = typer.Argument(None, min=1, max=65535, help="With --listen: the port; by default a free one."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a table."),
    pid: int | None = typer.Option(None, min=1, help="Explain instead why the job of this process hangs."),
    peer: str | None = typer.Option(None, metavar="HOST:PORT", help="Test instead whether this address is reached."),
    listen: bool = typer.Option(False, "--listen", help="Wait instead for `epee doctor --peer` on another host."),
    sizes: str | None = typer.Option(
        None, metavar="RANKS,EXPERTS,HIDDEN,TOPK,TOKENS", help="Compute instead the memory of buffers for such calls."
    ),
    seconds: float = typer.Option(60.0, min=0.1, max=86400, help="How long to listen."),
) -> None:
    """Report whether epee works on this machine, and what to do where it does not.

    Checks versions, cores, memory, limits, what processes may share, what groups over several hosts would use,
    settings, GPUs with their driver and links. Tests instead of guessing; changes nothing. Exit code 0 when epee works
    on CPU tensors here, else 1.

    With --pid of any rank of a job that hangs: the operation of each rank, the ranks that it waits for and since when,
    and whether it runs, is stopped or dead. Read from outside: no rank has to answer.

    With --sizes: the bytes of a rank's buffers for calls of this many ranks, experts over all ranks, elements of a row,
    experts of a token, and tokens of a rank, with reasons.

    With --listen [PORT] here and --peer on another host: whether that one reaches this one, at the address that groups
    over several hosts would use. Exit code 0 when it does, on both.
    """
    _check(port, pid, peer, listen, sizes, as_json)
    if sizes is not None:
        _sizes(sizes, as_json)
    elif pid is not None:
        _hang(pid, as_json)
    elif peer is not None:
        _peer(peer, as_json)
    elif listen:
        _listen(port or 0, seconds)
    else:
        _machine(as_json)


def _check(port: int | None, pid: int | None, peer: str | None, listen: bool, sizes: str | None, as_json: bool) -> None:
    from ..errors import InvalidArgument

    ways = (("--pid", pid), ("--peer", peer), ("--listen", listen or None), ("--sizes", sizes))
    given = [name for name, value in ways if value is not None]
    if len(given) > 1:
        raise InvalidArgument(f"{' and '.join(given)} exclude each other; give one of them")
    if port is not None and not listen:
        raise InvalidArgument(f"a port belongs to --listen, got {port} without; `epee doctor --listen {port}`")
    if listen and as_json:
        raise InvalidArgument("--listen reports line by line and has no --json; leave it out")


def _sizes(sizes: str, as_json: bool) -> None:
    from rich.console import Console

    from ..doctor import buffers, report

    found = buffers.needed(buffers.parse_sizes(sizes))
    if as_json:
        typer.echo(json.dumps([finding.as_dict() for finding in found]))
    else:
        Console().print(report.as_table(found))


def _hang(pid: int, as_json: bool) -> None:
    from ..doctor import hang

    found = hang.look_everywhere(pid)
    typer.echo(hang.all_as_json(*found) if as_json else hang.all_as_text(*found))


def _peer(peer: str, as_json: bool) -> None:
    from rich.console import Console

    from ..doctor import report
    from ..doctor.finding import Verdict
    from ..doctor.hosts import reach

    found = reach.reach(*reach.parse_peer(peer))
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
    else:
        Console().print(report.as_table([found]))
    raise typer.Exit(1 if found.verdict is Verdict.NO else 0)


def _listen(port: int, seconds: float) -> None:
    from ..doctor.hosts import network, reach
    from ..link.address import choose_address, listen

    choice = choose_address()
    num_doctors = 0
    with contextlib.closing(listen(choice.address, port)) as listener, contextlib.suppress(KeyboardInterrupt):
        place = reach.shown(*listener.getsockname()[:2])
        typer.echo(f"listening for {seconds:g} s at {network.where(choice.address)}, chosen by {choice.reason}")
        typer.echo(f"run on another host:  epee doctor --peer {place}")
        for visit in reach.visits(listener, seconds):
            num_doctors += visit.is_doctor
            why = "all of its bytes came" if visit.is_doctor else "no `epee doctor --peer`, or its bytes did not come"
            typer.echo(f"reached from {visit.address}: {why}")
    if not num_doctors:
        typer.echo("no connection came; if `epee doctor --peer` there times out, a firewall is in between")
    raise typer.Exit(0 if num_doctors else 1)


def _machine(as_json: bool) -> None:
    from rich.console import Console

    from ..doctor import report

    findings = report.run_all()
    if as_json:
        typer.echo(report.as_json(findings))
    else:
        Console().print(report.as_table(findings), report.conclusion(findings), sep="\n")
    raise typer.Exit(0 if report.works_on_cpu(findings) else 1)
