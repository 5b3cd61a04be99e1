"""What the compiler writes into is nobody else's memory."""

from __future__ import annotations

import pytest

from epee.jit import compile as compile_module


class _Nvrtc:
    """A compiler that has nothing to say, and says so with a NUL. Notes what it is given to write into."""

    def __init__(self) -> None:
        self.rooms: list[bytes] = []

    def nvrtcCreateProgram(self, *_: object) -> tuple[int, str]:
        return 0, "program"

    def nvrtcCompileProgram(self, *_: object) -> tuple[int]:
        return (0,)

    def nvrtcGetProgramLogSize(self, _: object) -> tuple[int, int]:
        return 0, 1

    nvrtcGetCUBINSize = nvrtcGetProgramLogSize

    def nvrtcGetProgramLog(self, _: object, room: bytes) -> None:
        self.rooms.append(room)

    nvrtcGetCUBIN = nvrtcGetProgramLog

    def nvrtcDestroyProgram(self, _: object) -> None:
        pass


def test_an_empty_log_is_not_written_into_an_object_that_all_share(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _Nvrtc()
    monkeypatch.setattr(compile_module, "nvrtc", lambda: fake)
    assert compile_module.compile_source("", "sm_90a", "empty").log == ""
    assert len(fake.rooms) == 2
    shared = [bytes([value]) for value in range(256)]  # Python makes none of these twice
    for room in fake.rooms:
        assert not any(room is one for one in shared)
