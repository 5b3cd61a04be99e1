"""`epee doctor`: what this machine can do for epee, or why a job hangs; everything else is `epee.doctor`."""

from __future__ import annotations

import typer


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a table."),
    pid: int | None = typer.Option(None, min=1, help="Say instead what the ranks of this process's job are doing."),
) -> None:
    """Say what this machine can do for epee, what not, and what to do about it.

    Looks at versions, cores, memory, limits, what processes may share, settings, GPUs with their driver and links.
    Tries things rather than guessing; changes nothing. Exit code 0 when epee works on CPU tensors here, else 1.

    With --pid of any rank of a job that hangs: per rank which operation it is in, for whom it waits and since when, and
    whether it runs, is stopped or dead. Read from outside: no rank has to answer.
    """
    if pid is not None:
        from ..doctor import hang

        report_of_job = hang.look(pid)
        typer.echo(hang.as_json(report_of_job) if as_json else hang.as_text(report_of_job))
        raise typer.Exit(0)
    from rich.console import Console

    from ..doctor import report

    findings = report.run_all()
    if as_json:
        typer.echo(report.as_json(findings))
    else:
        console = Console()
        console.print(report.as_table(findings))
        on_gpu = "works" if report.works_on_gpu(findings) else "does not work"
        on_cpu = "works" if report.works_on_cpu(findings) else "does not work"
        console.print(f"\nepee {on_cpu} on CPU tensors here, and {on_gpu} on GPUs")
    raise typer.Exit(0 if report.works_on_cpu(findings) else 1)
