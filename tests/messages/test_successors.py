"""Messages of groups in mode "mask" whose ranks die and are replaced, with the kernels' own sources on the CPU."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from epee.backend.cuda.messages import meetings
from epee.memory.claim import process_start_time
from tests.csrc.emulated import has_compiler
from tests.harness import DEAD, run_mortal
from tests.messages import successors

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no g++ here to build the kernels with")
pytestmark = [pytest.mark.timeout(240)]  # the first case builds the kernels


@needs_compiler
@pytest.mark.compiler
@pytest.mark.parametrize("late", [0, 1, 2])
def test_who_looks_late_loses_no_first_message_of_a_newcomer(late: int) -> None:
    *survivors, dead, newcomer = run_mortal(successors.replaced, 4, late, dead={2}, timeout_s=200)
    assert dead == DEAD
    assert survivors == [["_await_end", "disconnect"]] * 2
    assert newcomer == []


@needs_compiler
@pytest.mark.compiler
def test_a_receive_from_any_source_takes_what_the_dead_sent_and_waits_for_the_living() -> None:
    run_mortal(successors.any_source, 3, dead={2}, timeout_s=200)


@pytest.mark.parametrize("is_leaving", [True, False])
def test_memory_is_taken_back_when_a_dying_process_has_ended(is_leaving: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "is_leaving", lambda *process: is_leaving)
    nobody: Any = None
    pairs = meetings.Pairs(nobody, 0, 0, None)
    with subprocess.Popen(["sleep", "0.5" if is_leaving else "30"]) as process:
        pairs._processes[1] = process.pid, process_start_time(process.pid)
        pairs._await_end(1)
        has_ended = process.poll() is not None
        process.kill()
    assert has_ended == is_leaving, "who was put out, and lives, is not waited for"
