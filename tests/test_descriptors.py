"""`descriptors`: an exception between any two lines leaves no descriptor open."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from epee import descriptors
from epee.descriptors import Descriptor
from epee.memory.shared import SharedRegion
from epee.view.process.detector import DeathWatch, open_process
from epee.view.transport import directory

FOLDER = str(Path(descriptors.__file__).parent)


class Interrupt(TimeoutError):
    """What a watchdog may raise."""


def num_open() -> int:
    """Return the number of open descriptors."""
    return len(os.listdir("/proc/self/fd"))


def interrupted_at(line: int, step: Callable[[], Any]) -> bool:
    """Run `step` with an exception before its line number `line` of epee; return whether there was one."""
    left = line

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        name = frame.f_code.co_filename
        if not name.startswith(FOLDER) or name == descriptors.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        step()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return left <= 0


def swept(step: Callable[[], Any]) -> None:
    """Interrupt `step` before each of its lines; what it returns is closed."""
    step()
    before = num_open()
    for line in range(1, 2000):
        if not interrupted_at(line, step):
            assert line > 3, "nothing was interrupted"
            break
        assert num_open() == before, f"left open before line {line}"
    assert num_open() == before


def test_a_descriptor_is_closed_with_its_object_and_kept_where_it_is_handed_on() -> None:
    before = num_open()
    with contextlib.suppress(Interrupt), Descriptor(os.open("/dev/null", os.O_RDONLY)) as held:
        assert num_open() == before + 1
        raise Interrupt
    assert num_open() == before
    held.close()
    assert num_open() == before
    dropped = Descriptor(os.open("/dev/null", os.O_RDONLY))
    del dropped
    assert num_open() == before
    with Descriptor(os.open("/dev/null", os.O_RDONLY)) as held:
        kept = held.keep()
    assert num_open() == before + 1
    os.close(kept)


def test_attaching_a_region_leaves_no_descriptor_open_wherever_it_is_interrupted() -> None:
    region = SharedRegion.create(4096, "swept")
    swept(lambda: SharedRegion.attach(region.blob).close())
    swept(lambda: region.written(0, 64))
    attached = SharedRegion.attach(region.blob)
    swept(lambda: attached.written(0, 64))
    attached.close()
    region.close()


def test_looking_at_processes_and_folders_leaves_no_descriptor_open(tmp_path: Path) -> None:
    pid = os.getpid()
    start_time = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    folder_fd = directory._open_private(folder)
    numbers = iter(range(10_000))

    def watched() -> None:
        Descriptor(open_process(pid, start_time)).close()

    def made() -> None:
        Descriptor(directory._make(folder_fd, f"file{next(numbers)}", b"content")).close()

    swept(watched)
    swept(made)
    swept(lambda: Descriptor(directory._open_private(folder)).close())
    watch = DeathWatch()
    watch.watch(0, pid, start_time)
    watch.close()
    os.close(folder_fd)
