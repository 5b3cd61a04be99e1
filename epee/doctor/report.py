"""All checks in order, and their findings for people (80 columns suffice) or as JSON.

The process that checks GPUs is started first, so that it works while the other checks run.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Group
from rich.padding import Padding
from rich.table import Table

from .. import env
from ..errors import ProtocolError
from . import buffers, machine, settings, sharing
from .finding import Finding, Verdict, examine, from_dict
from .hosts import network

GPU_TIMEOUT_S = 90.0
TITLES = {
    "versions": "Versions",
    "machine": "Machine",
    "sharing": "Memory and waiting between processes of this machine",
    "buffers": "Memory of buffers",
    "hosts": "Groups over several hosts",
    "settings": "Settings",
    "gpu": "GPUs",
    "peer": "Another host",
}
CPU_SECTIONS = ("versions", "machine", "sharing", "buffers", "hosts", "settings")
_COLOURS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.NO: "red"}

CHECKS: tuple[tuple[str, str, Callable[[], list[Finding]]], ...] = (
    ("versions", "python", machine.python_version),
    ("versions", "torch", machine.torch_version),
    ("versions", "epee", machine.epee_version),
    ("machine", "system", machine.operating_system),
    ("machine", "cores", machine.cores),
    ("machine", "memory", machine.memory),
    ("machine", "/dev/shm", machine.shm_room),
    ("machine", "limits", machine.limits),
    ("sharing", "shared memory", sharing.own_region),
    ("sharing", "futex", sharing.futex),
    ("sharing", "between processes", sharing.between_children),
    ("sharing", "descriptors by socket", sharing.over_socket),
    ("sharing", "ptrace", sharing.ptrace_scope),
    ("buffers", "in use", buffers.in_use),
    ("hosts", "host", network.host),
    ("hosts", "address", network.address),
    ("hosts", "links", network.engine),
    ("hosts", "token", network.token),
    ("settings", "variables", settings.variables),
    ("settings", "kernel cache", settings.kernel_cache),
)


def run_all() -> list[Finding]:
    """Run every check, bounded; return all findings in order."""
    command = [sys.executable, "-m", "epee.doctor.gpu"]
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env.for_child(root)
    )
    try:
        findings = [finding for section, name, check in CHECKS for finding in examine(section, name, check)]
        findings += gpu_findings(child)
    finally:
        child.kill()
        child.wait()
    return findings


def gpu_findings(child: subprocess.Popen[str], timeout_s: float = GPU_TIMEOUT_S) -> list[Finding]:
    """Read the findings of the process that checks GPUs; that it hung or crashed is a finding, too."""
    try:
        out, err = child.communicate(timeout=timeout_s)
        trouble = _death(child.returncode, err)
    except subprocess.TimeoutExpired:
        child.kill()
        out, _ = child.communicate()
        trouble = f"no answer within {timeout_s:.0f} s"
    findings = []
    for line in out.splitlines():
        try:
            findings.append(from_dict(json.loads(line)))
        except (ValueError, ProtocolError) as exc:
            findings.append(Finding("gpu", "output", Verdict.WARN, str(exc), "something else printed into it"))
    if trouble:
        remedy = "the driver hangs or crashed: see `dmesg` and `nvidia-smi`"
        findings.append(Finding("gpu", "survey", Verdict.NO, trouble, remedy))
    return findings


def _death(code: int, err: str) -> str:
    if code == 0:
        return ""
    lines = err.strip().splitlines()
    reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"ended by {reason}" + (f": {lines[-1]}" if lines else "")


def works_on_cpu(findings: Sequence[Finding]) -> bool:
    """Whether no finding prevents epee on CPU tensors."""
    return not any(finding.verdict is Verdict.NO for finding in findings if finding.section in CPU_SECTIONS)


def works_on_gpu(findings: Sequence[Finding]) -> bool:
    """Whether no finding prevents epee's kernels, and there is a GPU that was checked."""
    gpu = [finding for finding in findings if finding.section == "gpu"]
    has_any = any(finding.name.startswith("GPU ") for finding in gpu)
    return works_on_cpu(findings) and has_any and not any(finding.verdict is Verdict.NO for finding in gpu)


def as_json(findings: Sequence[Finding]) -> str:
    """Return the report as one JSON object."""
    report = {
        "works_on_cpu": works_on_cpu(findings),
        "works_on_gpu": works_on_gpu(findings),
        "findings": [finding.as_dict() for finding in findings],
    }
    return json.dumps(report, indent=2)


def as_table(findings: Sequence[Finding]) -> Group:
    """Return the report: the findings of each section under its title, a remedy below what does not work."""
    width = max((len(finding.name) for finding in findings), default=0)
    parts: list[str | Padding] = []
    for section, found in itertools.groupby(findings, key=lambda finding: finding.section):
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column("name", no_wrap=True, min_width=width)
        table.add_column("verdict", no_wrap=True, min_width=len(Verdict.WARN.value))
        table.add_column("found", overflow="fold")
        for finding in found:
            text = finding.value + (f"\n-> {finding.remedy}" if finding.remedy else "")
            colour = _COLOURS[finding.verdict]
            table.add_row(finding.name, f"[{colour}]{finding.verdict.value}[/{colour}]", text.replace("[", r"\["))
        parts += [f"[bold]{TITLES[section]}[/bold]", Padding(table, (0, 0, 1, 2))]
    return Group(*parts)


def conclusion(findings: Sequence[Finding]) -> str:
    """Return the report's last lines: whether epee works here, and the names of the findings that prevent it."""
    lines = []
    for tensors, works, sections in (
        ("CPU tensors", works_on_cpu(findings), CPU_SECTIONS),
        ("GPUs", works_on_gpu(findings), ("gpu",)),
    ):
        failed = [one.name for one in findings if one.verdict is Verdict.NO and one.section in sections]
        why = f": see {', '.join(failed)}" if failed else ""
        lines.append(f"epee works on {tensors} here" if works else f"epee does not work on {tensors} here{why}")
    return "\n".join(lines)
