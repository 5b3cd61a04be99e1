"""`epee demo --device cuda`: it trains on the GPUs present, and one step agrees with the dense process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(110)]


def test_the_demo_learns_on_gpus_and_agrees_with_the_dense_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("matplotlib")
    from epee.demo import run
    from epee.demo.settings import Settings

    monkeypatch.setattr(run.metadata, "version", lambda name: "of this tree")  # which need not be installed
    num_ranks = Settings().most_ranks(torch.cuda.device_count())
    code = run.run(Settings(num_ranks=num_ranks, device="cuda", num_steps=40, out=str(tmp_path)))
    output = capsys.readouterr().out
    print(output)
    assert code == run.OK, output
    assert "PASS" in output
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["check"]["dtype"] == "float32"
    assert found["check"]["tolerance"] < 1e-4
    assert found["valid"] < found["steps"][0][2]
