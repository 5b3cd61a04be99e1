"""`jit.driver`: what is missing, too old or not started is said in one sentence with the way out."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from epee.errors import ResourceError, UnsupportedError
from epee.jit import driver as module
from epee.jit.driver import attribute, check, device_architecture, driver, is_not_offered, nvrtc, version_text
from tests.memory.fake_driver import FakeDriver, Status, forget, installed


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    with installed(FakeDriver()) as made:
        yield made


def test_the_driver_is_started_once(fake: FakeDriver) -> None:
    assert driver() is fake
    driver()
    assert fake.calls == ["cuInit", "cuDriverGetVersion"]


def test_a_missing_libcuda_is_said_in_words(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(fake, "cuInit", no_library)
    with pytest.raises(UnsupportedError, match=r"no usable NVIDIA driver here \(Failed to dlopen .*--gpus all, or use"):
        driver()


def test_an_old_driver_is_said_with_both_versions(fake: FakeDriver) -> None:
    fake.version = 11040
    with pytest.raises(UnsupportedError, match=r"serves CUDA 11\.4, epee needs 12\.0 or newer; update the driver"):
        driver()


@pytest.mark.parametrize(
    ("status", "way_out"),
    [
        (Status.CUDA_ERROR_NO_DEVICE, "CUDA_VISIBLE_DEVICES"),
        (Status.CUDA_ERROR_SYSTEM_NOT_READY, "nvidia-fabricmanager"),
        (Status.CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN"),
    ],
)
def test_a_driver_that_does_not_start_says_why(fake: FakeDriver, status: Status, way_out: str) -> None:
    fake.refused["cuInit"] = status
    with pytest.raises(ResourceError, match=rf"start the NVIDIA driver: .*{way_out}"):
        driver()
    fake.refused.clear()
    assert driver() is fake  # a failure is not remembered


@pytest.mark.parametrize(("function", "what"), [(driver, "CUDA tensors need"), (nvrtc, "compiling kernels needs")])
def test_missing_bindings_are_named(function: object, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setitem(sys.modules, "cuda", None)
    forget()
    nvrtc.cache_clear()
    with pytest.raises(UnsupportedError, match=rf"{what} the package cuda-bindings .*pip install cuda-bindings"):
        function()  # type: ignore[operator]


def test_a_missing_nvrtc_library_is_named(fake: FakeDriver) -> None:
    def no_library() -> None:
        raise RuntimeError("libnvrtc.so.13 not found")

    sys.modules["cuda.bindings"].nvrtc = types.SimpleNamespace(nvrtcVersion=no_library)  # type: ignore[attr-defined]
    nvrtc.cache_clear()
    with pytest.raises(UnsupportedError, match=r"needs NVRTC \(libnvrtc.so.13 not found\).*pip install nvidia-cuda"):
        nvrtc()


def test_an_old_gpu_is_refused(fake: FakeDriver) -> None:
    assert device_architecture(1) == "sm_90a"
    fake.attributes["COMPUTE_CAPABILITY_MAJOR"] = 8
    with pytest.raises(UnsupportedError, match=r"9\.0 \(Hopper\) or newer, device 0 has 8\.0; use CPU tensors"):
        device_architecture(0)


def test_attributes_are_read_by_name(fake: FakeDriver) -> None:
    assert attribute("MULTIPROCESSOR_COUNT", 0) == 4
    with pytest.raises(ResourceError, match="read multiprocessor_count of GPU 7"):
        attribute("MULTIPROCESSOR_COUNT", 7)


def test_results_are_unpacked() -> None:
    assert check((Status.CUDA_SUCCESS,), "nothing") is None
    assert check((Status.CUDA_SUCCESS, 5), "one") == 5
    assert check((Status.CUDA_SUCCESS, 5, 6), "two") == (5, 6)
    assert is_not_offered((Status.CUDA_ERROR_NOT_SUPPORTED, None))
    assert not is_not_offered((Status.CUDA_ERROR_OUT_OF_MEMORY, None))
    assert version_text(12080) == "12.8"


def test_the_hints_name_statuses_that_exist() -> None:
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    names = {status.name for status in real.CUresult}
    assert set(module._WAY_OUT) | set(module._NOT_OFFERED) <= names
    assert {status.name for status in Status} <= names
    assert all(int(getattr(real.CUresult, status.name)) == status for status in Status)
