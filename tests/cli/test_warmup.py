"""`epee warmup` fills the kernel cache, or says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from epee.cli.main import app
from epee.errors import InvalidArgument
from epee.jit import kernel
from tests.csrc.compiled import compile_once


def test_a_warm_cache_holds_every_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'epee[cuda]'")
    monkeypatch.setenv("EPEE_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel, "compile_source", compile_once)
    result = CliRunner().invoke(app, ["warmup", "--ranks", "2", "--arch", "sm_90a"])
    assert result.exit_code == 0, result.output
    cubins = list((tmp_path / "cache").rglob("*.cubin"))
    assert len(cubins) == int(result.output.split()[0]) > 0


def test_a_size_that_no_kernel_serves_is_refused() -> None:
    result = CliRunner().invoke(app, ["warmup", "--ranks", "17"])
    assert isinstance(result.exception, InvalidArgument)
    assert "num_ranks" in str(result.exception)
