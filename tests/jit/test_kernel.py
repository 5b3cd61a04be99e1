"""`jit.kernel.Kernel`: launchers of one kernel have arguments and a launch of their own."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from epee.jit import kernel as module
from epee.jit.kernel import Kernel

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")


class _Params(ctypes.Structure):
    _fields_ = (("first", ctypes.c_uint64), ("second", ctypes.c_int32))


class _Launches:
    """Stands for the driver's launch: notes what it is given, as the driver would copy it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Any, ...]] = []
        monkeypatch.setattr(module, "driver", lambda: driver)
        monkeypatch.setattr(driver, "cuLaunchKernelEx", self._launch)
        module._attributes.cache_clear()

    def _launch(self, config: Any, function: object, argv: int, extra: int) -> tuple[int]:
        where = ctypes.c_void_p.from_address(argv).value
        assert where is not None
        params = _Params.from_address(where)
        shape = config.gridDimX, config.blockDimX, config.sharedMemBytes
        self.seen.append((shape, int(config.hStream), config.numAttrs, (params.first, params.second)))
        return (0,)


def test_a_bound_launcher_begins_with_the_arguments_and_goes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = _Launches(monkeypatch)
    kernel = Kernel(None, _Params(5, 1))
    bound = kernel.bind()
    kernel.args.second, bound.args.second = 2, 3
    bound.bind().args.first = 9
    for launcher in (kernel, bound, kernel):
        launcher(1, 32, 0, 0)
    assert [arguments for *_, arguments in launches.seen] == [(5, 2), (5, 3), (5, 2)]


def test_a_launch_is_written_again_where_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = _Launches(monkeypatch)
    kernel = Kernel(None, _Params())
    wanted: list[tuple[int, int, int, int, str]] = [
        (1, 32, 0, 0, "plain"),
        (1, 32, 0, 0, "plain"),
        (2, 32, 0, 0, "early"),
        (2, 64, 0, 7, "early"),
        (2, 64, 8, 7, "together"),
        (2, 64, 8, 0, "plain"),
    ]
    for launch in wanted:
        kernel(*launch)
    got = [(*shape, stream, num_attributes) for shape, stream, num_attributes, _ in launches.seen]
    assert got == [(*launch[:4], int(launch[4] != "plain")) for launch in wanted]
