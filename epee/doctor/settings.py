"""The EPEE_* variables that are set, those that epee does not define, and the folder of compiled kernels."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from .. import env
from ..errors import InvalidArgument
from ..jit.cache import default_folder, why_not_ours
from .finding import Finding, Verdict, outcome


def variables(names: Iterable[str] | None = None) -> list[Finding]:
    """Every EPEE_* variable of the environment: its value, or the error in it."""
    # the environment is read in env.py only; a child would get the present values
    names = env.for_child(Path()) if names is None else names
    known = [variable.name for variable in env.TABLE]
    findings = []
    for name in sorted(name for name in names if name.startswith("EPEE_")):
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {close[0]}?" if close else "unset it; docs list the variables"
            findings.append(Finding("settings", name, Verdict.WARN, "epee knows no such variable", remedy))
            continue
        try:
            findings.append(Finding("settings", name, Verdict.OK, str(env.get(name))))
        except InvalidArgument as exc:
            findings.append(Finding("settings", name, Verdict.NO, str(exc), f"correct or unset {name}"))
    return findings or [Finding("settings", "variables", Verdict.OK, "none set")]


def kernel_cache(folder: Path | None = None) -> list[Finding]:
    """The folder of compiled kernels: whether it is ours alone, and its contents."""
    folder = default_folder() if folder is None else folder
    if not folder.exists() and not folder.is_symlink():
        parent = next(parent for parent in folder.parents if parent.exists())
        is_closed = not os.access(parent, os.W_OK | os.X_OK)
        value = f"{folder} cannot be made: {parent} is not writable" if is_closed else f"{folder}, made at first use"
        remedy = "let EPEE_JIT_CACHE_DIR name a folder of yours, else every process compiles anew"
        return outcome("settings", "kernel cache", value, (is_closed, Verdict.WARN, remedy))
    reason = why_not_ours(folder)
    if not reason and not os.access(folder, os.W_OK):
        reason = "it is not writable"
    if reason:
        remedy = "it is not used; chmod 700 it, or let EPEE_JIT_CACHE_DIR name a folder of yours"
        return [Finding("settings", "kernel cache", Verdict.WARN, f"{folder}: {reason}", remedy)]
    entries = list(folder.glob("*.cubin"))
    total = sum(entry.lstat().st_size for entry in entries)
    mode = stat.S_IMODE(folder.lstat().st_mode)
    value = f"{folder} (mode {mode:04o}), {len(entries)} kernels, {total / (1 << 20):.1f} MiB"
    return outcome("settings", "kernel cache", value)
