"""One line of the doctor's report, and the runner of a check, which always returns one.

A check is called in a thread of its own and waited for; an error, or no result in time, becomes a finding. A check that
hangs leaves its thread behind: the command is about to end, and a daemon thread does not stop it.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ..errors import ProtocolError

DEFAULT_TIMEOUT_S = 10.0


class Verdict(str, enum.Enum):
    """The meaning of a finding: works, works less well, does not work."""

    OK = "ok"
    WARN = "warn"
    NO = "no"


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        section: "versions", "machine", "sharing", "buffers", "hosts", "settings", "gpu" or "peer".
        name: subject of the check.
        verdict: its outcome.
        value: what was found.
        remedy: what to do about it; empty if nothing.
    """

    section: str
    name: str
    verdict: Verdict
    value: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the fields as plain strings."""
        return {**asdict(self), "verdict": self.verdict.value}


def outcome(section: str, name: str, value: str, *flaws: tuple[object, Verdict, str]) -> list[Finding]:
    """Return the finding of a check: verdict and remedy are those of the first flaw that is true, else it is OK.

    Args:
        section, name, value: of the finding.
        flaws: whether there is one, with its verdict and remedy.
    """
    for is_there, verdict, remedy in flaws:
        if is_there:
            return [Finding(section, name, verdict, value, remedy)]
    return [Finding(section, name, Verdict.OK, value)]


def from_dict(raw: object) -> Finding:
    """Make a finding from the output of another process.

    Raises:
        ProtocolError: it is no finding.
    """
    names = {"section", "name", "verdict", "value", "remedy"}
    if not isinstance(raw, dict) or set(raw) != names or not all(isinstance(value, str) for value in raw.values()):
        raise ProtocolError(f"a finding has the texts {sorted(names)}, got {str(raw)[:200]}")
    try:
        verdict = Verdict(raw["verdict"])
    except ValueError as exc:
        raise ProtocolError(f"a verdict is ok, warn or no, got {raw['verdict'][:40]!r}") from exc
    return Finding(raw["section"], raw["name"], verdict, raw["value"], raw["remedy"])


def examine(
    section: str, name: str, check: Callable[[], list[Finding]], timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Finding]:
    """Run a check and return its findings; an error or silence is a finding, too."""
    found: list[Finding] = []

    def run() -> None:
        """Run the check in its thread, so that one that hangs delays nothing else."""
        try:
            found.extend(check())
        except Exception as exc:  # noqa: BLE001 - whatever goes wrong is what the user wants to read
            value, remedy = f"{type(exc).__name__}: {exc}", "the check itself failed: please report it"
            found.append(Finding(section, name, Verdict.NO, value, remedy))

    thread = threading.Thread(target=run, name=f"epee-doctor-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        remedy = "the system hangs below it: check `dmesg`, network file systems and name servers"
        return [Finding(section, name, Verdict.NO, f"no answer within {timeout_s:.0f} s", remedy)]
    return found
