"""Run tests while their ranks are stopped at random moments, as a loaded machine does, only harder.

    scripts/shake tests/survive -k buffer        arguments are pytest's
    SHAKE_S=0.3 scripts/shake tests/ep           the longest stop; 0.15 s if nothing is said

Two at a time get SIGSTOP and, some milliseconds later, SIGCONT. It shows races of tests and of the product within
minutes that otherwise take weeks of CI. Tests that look at whether a process is stopped, or compare times, fail by
themselves here: `tests/test_doctor_hang.py`, a heart that stands still in `tests/view`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def checked_of(pid: int) -> tuple[str, int]:
    """Return the state of a process and its parent's number; ("X", 0) when it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return words[0], int(words[1])


def is_fork_of_server(pid: int) -> bool:
    """Return whether a process is a rank: forked by a fork server, which has the same command line."""
    try:
        own, parent = (Path(f"/proc/{who}/cmdline").read_bytes() for who in (pid, checked_of(pid)[1]))
    except OSError:
        return False
    return b"forkserver" in own and b"forkserver" in parent


def ranks_below(root: int) -> list[int]:
    """Return the ranks that a process has started, directly or not."""
    parents = {int(path.name): checked_of(int(path.name))[1] for path in Path("/proc").glob("[0-9]*")}
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return [pid for pid in found if is_fork_of_server(pid)]


def stop_some(root: int, longest_s: float) -> None:
    """Stop one rank after the other until `root` has ended; short stops are more frequent than long ones."""
    while checked_of(root)[0] not in "XZ":
        for pid in random.choices(ranks_below(root) or [0], k=20):
            if not pid or checked_of(pid)[0] in "TXZ":  # stopped by its test, perhaps
                time.sleep(0.002)
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(random.random() ** 3 * longest_s)
                os.kill(pid, signal.SIGCONT)
            time.sleep(random.random() * 0.01)


def main(arguments: list[str]) -> int:
    """Run pytest with `arguments` in one process and shake its ranks; returns what it returns."""
    tests = subprocess.Popen([sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *arguments])
    longest_s = float(os.environ.get("SHAKE_S", "0.15"))
    for _ in range(2):
        threading.Thread(target=stop_some, args=(tests.pid, longest_s), daemon=True).start()
    return tests.wait()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
