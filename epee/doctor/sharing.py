"""Memory that processes of one user may share here: tested with real memory and children, not assumed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import torch

from ..errors import EpeeError, ProtocolError
from ..memory.claim import make_claim
from ..memory.cuda_share import yama_scope
from ..memory.passing import DescriptorServer, fetch_descriptor
from ..memory.shared import SharedRegion
from ..memory.signals import futex_error
from .finding import Finding, Verdict, outcome

CHILD_TIMEOUT_S = 8.0
_PROBE = Path(__file__).with_name("probe.py")
_MIB = 1 << 20


def own_region(nbytes: int = 64 * _MIB) -> list[Finding]:
    """A region as lent by ranks: sealed memfd, mapped twice, written and read."""
    try:
        region = SharedRegion.create(nbytes, "doctor")
    except EpeeError as exc:
        none = True, Verdict.NO, "free memory, or raise the container's limit"
        return outcome("sharing", "shared memory", str(exc), none)
    with contextlib.closing(region), contextlib.closing(SharedRegion.attach(region.blob)) as other:
        region.words(nbytes - 4096, 1)[0] = 77
        is_same = other.words(nbytes - 4096, 1)[0] == 77 and int(other.tensor(torch.int64, 0, (1,))[0]) == 0
    value = (
        f"works ({nbytes // _MIB} MiB of sealed memory, mapped twice)"
        if is_same
        else "two mappings of one memfd differ"
    )
    return outcome("sharing", "shared memory", value, (not is_same, Verdict.NO, "please report it"))


def futex(error: str | None = None) -> list[Finding]:
    """Waiting without spinning."""
    error = futex_error() if error is None else error
    remedy = "allow the system call futex (seccomp profile)"
    return outcome("sharing", "futex", error or "works (waits without using a core)", (error, Verdict.NO, remedy))


def between_children(answers: dict[str, str] | None = None) -> list[Finding]:
    """The methods by which one child of this process can access another, as two ranks would."""
    answers = ask_children() if answers is None else answers
    one_user = "run the ranks as one user, dumpable, in one PID namespace"
    rows = [
        ("proc", "memory by /proc/PID/fd", Verdict.NO, one_user),
        ("pidfd_open", "pidfd_open", Verdict.NO, "Linux 5.3 or newer; allow it in the container's seccomp profile"),
        ("pidfd_getfd", "pidfd_getfd", Verdict.WARN,
         "GPU memory goes over a unix socket instead (EPEE_CUDA_SHARE=scm on all ranks forces it); to allow it: Linux "
         "5.6, the seccomp profile, kernel.yama.ptrace_scope=0"),
    ]  # fmt: skip
    findings: list[Finding] = []
    for key, name, verdict, remedy in rows:
        said = answers.get(key, "no answer from the children")
        value = "works between two processes" if said == "ok" else said
        findings += outcome("sharing", name, value, (said != "ok", verdict, remedy))
    return findings


def ask_children(python: str = sys.executable, timeout_s: float = CHILD_TIMEOUT_S) -> dict[str, str]:
    """Start a lender and a borrower; return the borrower's result by method, empty if they could not be started."""
    command = [python, "-S", "-E", "-B", str(_PROBE)]
    answers = {}
    with contextlib.ExitStack() as stack:
        lender = subprocess.Popen(
            [*command, "lend"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        stack.enter_context(lender)
        stack.callback(lender.kill)
        assert lender.stdout is not None
        place = lender.stdout.readline().split()  # bounded by `examine`, which waits for this check
        if len(place) == 2:
            done = subprocess.run(
                [*command, "borrow", *place], capture_output=True, text=True, timeout=timeout_s, check=False
            )
            for line in done.stdout.splitlines():
                name, _, said = line.partition(" ")
                answers[name] = said
    return answers


def over_socket() -> list[Finding]:
    """A descriptor passed over a unix socket, by the code that does it for GPU memory."""
    fd = os.memfd_create("epee-doctor", os.MFD_CLOEXEC)
    try:
        os.write(fd, b"epee")
        claim = make_claim(b"epeedoct", fd, 4096)
        with contextlib.closing(DescriptorServer(fd, claim.cookie)) as server:
            copied = fetch_descriptor(claim, server.socket_fd)
        try:
            if os.pread(copied, 10, 0) != b"epee":
                raise ProtocolError("another descriptor came")
        finally:
            os.close(copied)
    except EpeeError as exc:
        remedy = "GPU memory then needs pidfd_getfd; let TMPDIR name a folder on a local disk"
        return [Finding("sharing", "descriptors by socket", Verdict.WARN, str(exc), remedy)]
    finally:
        os.close(fd)
    return [Finding("sharing", "descriptors by socket", Verdict.OK, "works")]


def ptrace_scope(scope: int | None = None) -> list[Finding]:
    """Yama's rule about which processes may trace others, on which pidfd_getfd depends."""
    scope = yama_scope() if scope is None else scope
    words = {0: "any process of the user", 1: "ancestors only", 2: "administrators only", 3: "no process"}
    value = f"kernel.yama.ptrace_scope={scope}: {words.get(scope, 'unknown')} may copy descriptors"
    remedy = "GPU memory goes over a unix socket; nothing to do"
    return outcome("sharing", "ptrace", value, (scope, Verdict.WARN, remedy))
