"""`epee demo --kill` and `--stall`: ranks are really lost, nothing of their experts is, and replacements take over."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from epee.cli.main import app
from epee.demo import rank, run, survive
from epee.demo.launch import Message
from epee.demo.model import Transformer, is_expert
from epee.demo.settings import Settings
from epee.demo.survive import Survivor, restore
from epee.demo.train import make_optimizer
from epee.errors import EpeeError, InvalidArgument, MismatchError, ProtocolError, RankFailedError
from epee.nn.experts import Experts
from tests.demo import witness
from tests.demo.test_demo import check_png, run_here, small

NUM_EXPERTS = 4
NUM_STEPS = 40


# the whole


@pytest.mark.timeout(120)  # half a minute on a machine with ten times more work than cores
@pytest.mark.parametrize(
    ("fault", "num_ranks", "victim", "num_hosts"),
    [("kill", 4, 1, 1), ("kill", 2, 1, 1), ("stall", 4, 3, 1), ("kill", 4, 2, 2)],
)
def test_training_survives(
    fault: str, num_ranks: int, victim: int, num_hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "run_rank", witness.run_rank)
    monkeypatch.setattr(run, "LINE_EVERY_S", 0.0)
    settings = small(
        num_steps=NUM_STEPS, num_ranks=num_ranks, victim=victim, fault=fault, num_hosts=num_hosts, out=str(tmp_path)
    )  # fmt: skip
    code, output = run_here(settings)
    assert code == 0, output
    assert "PASS" in output
    check_png(tmp_path / "demo.png")
    numbers = json.loads((tmp_path / "demo.json").read_text())
    events = check_events(numbers["events"], fault, settings)
    check_losses(numbers["steps"], events)
    check_nothing_lost(tmp_path / "witness", settings)
    sent = [megabytes_of(line) for line in output.splitlines() if line.startswith("step")]
    assert 0 < sent[0] < sent[-1]
    assert sent == sorted(sent), "a lost rank takes what it has sent out of the sum"


def megabytes_of(line: str) -> float:
    """Return the sum over the links that the line of a step shows."""
    shown = line.split(" sent ")[1].split(";")[0].split(" over ")[0]
    return sum(float(text.replace(",", "")) for text in re.findall(r"([\d,.]+) MB", shown))


@pytest.mark.timeout(120)
def test_the_end_waits_for_the_replacement_and_for_a_step_with_it(tmp_path: Path) -> None:
    settings = small(num_steps=20, victim=1, replace_at=1.0, out=str(tmp_path))
    code, output = run_here(settings)
    assert code == 0, output
    numbers = json.loads((tmp_path / "demo.json").read_text())
    rejoined = [event for event in numbers["events"] if event["what"] == "rejoined"]
    assert len(rejoined) == 1
    assert 20 < rejoined[0]["step"] == numbers["steps"][-1][0]


def check_events(told: list[dict[str, Any]], fault: str, settings: Settings) -> dict[str, dict[str, Any]]:
    wanted = [fault, "went on", "started", "rejoined"] + (["evicted"] if fault == "stall" else [])
    told = [event for event in told if event["what"] != "delayed"]  # on a machine that crawls
    assert [event["what"] for event in told] == wanted
    assert [event["seconds"] for event in told] == sorted(event["seconds"] for event in told)
    events = {event["what"]: event for event in told}
    assert events["went on"]["members"] == [r for r in range(settings.num_ranks) if r != settings.victim]
    assert events[fault]["step"] >= settings.fault_at * NUM_STEPS
    assert events["started"]["step"] >= settings.replace_at * NUM_STEPS
    assert 0 <= events["went on"]["again"] <= settings.snapshot_every
    assert events["rejoined"]["step"] > events["went on"]["step"]
    if fault == "stall":
        assert "voted out" in events["evicted"]["text"]
    return events


def check_losses(steps: list[list[float]], events: dict[str, dict[str, Any]]) -> None:
    """The curve goes on where it was: neither the loss nor the return makes the model forget."""
    assert [step[0] for step in steps] == list(range(1, len(steps) + 1))
    losses = [loss for _, _, loss, _ in steps]
    went_on, rejoined = events["went on"]["step"], events["rejoined"]["step"]
    for at in (went_on, rejoined):
        before, after = losses[at - 6 : at - 1], losses[at - 1 : at + 4]
        assert min(after) < max(before) + 0.3 < losses[0]
    assert losses[-1] < losses[went_on - 2]


def check_nothing_lost(folder: Path, settings: Settings) -> None:
    """Those left serve exactly what all had at the copy, the victim's; all go on with exactly what those left had."""
    everybody = list(range(settings.num_ranks))
    left = [r for r in everybody if r != settings.victim]
    steps = {int(path.stem.split("-")[1]) for path in folder.glob("after-*.npz")}
    assert steps
    for step in steps:  # one, unless the machine crawls
        before, after = whole(folder, f"before-{step}", everybody), whole(folder, f"after-{step}", left)
        assert step > 0
        check_same(before, after)
    given, united = whole(folder, "given", left), whole(folder, "united", everybody)
    check_same(given, united)
    for name in given:
        assert not np.array_equal(given[name], after[name]), "those left have trained meanwhile"


def whole(folder: Path, name: str, ranks: list[int]) -> dict[str, Any]:
    """Put the parts of these ranks together: experts one after the other, and the rest, which is the same on all."""
    parts = [np.load(folder / f"{name}-{r}.npz") for r in ranks]
    state = {}
    for key in parts[0]:
        if is_expert(key):
            state[key] = np.concatenate([part[key] for part in parts])[:8]
        else:
            assert all(np.array_equal(parts[0][key], part[key]) for part in parts), key
            state[key] = parts[0][key]
    return state


def check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert np.array_equal(value, other[name]), name


# parts


def make_model(seed: int) -> Transformer:
    small = Settings(seed=seed, hidden=16, num_heads=2, num_layers=2, ffn_hidden=8, num_experts=NUM_EXPERTS, context=12)
    return Transformer(small, None)


def train(model: Transformer, num_steps: int) -> None:
    optimizer = make_optimizer(model)
    tokens = torch.arange(48).view(4, 12) % 7
    for _ in range(num_steps):
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()


def test_a_restored_model_trains_on_exactly_as_the_first() -> None:
    model, other = make_model(1), make_model(2)
    train(model, 3)
    state = copy.deepcopy(model.state_dict())
    kept = copy.deepcopy(state)
    restore(other, state)
    train(model, 2)
    train(other, 2)
    assert state.keys() == dict(model.named_parameters()).keys(), "a parameter without a row would not be restored"
    for (name, value), same in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, same), name
        assert torch.equal(state[name], kept[name]), "a model is a copy of the state"


@pytest.mark.parametrize("num_members", [1, 2, 3, 4, 7])
def test_every_expert_is_dealt_out_however_many_are_left(num_members: int) -> None:
    model = make_model(1)
    train(model, 2)
    state = model.state_dict()
    num_places = -(-NUM_EXPERTS // num_members)
    parts = []
    for position in range(num_members):
        member = make_model(2)
        for layer in member.layers():
            layer.experts = Experts(16, 8, position * num_places, num_places, seed=3, dtype=torch.float32)
        restore(member, state)
        parts.append(member.state_dict())
    for name, value in state.items():
        if is_expert(name):
            assert torch.equal(torch.cat([part[name] for part in parts])[:NUM_EXPERTS], value), name
        else:
            assert all(torch.equal(part[name], value) for part in parts), name


# options and story


@pytest.mark.parametrize("victim", [0, 2, -1])
def test_a_victim_must_be_another_rank(victim: int) -> None:
    with pytest.raises(InvalidArgument, match=f"--kill must be a rank from 1 to 1, got {victim}"):
        Settings(victim=victim).check()


def test_one_rank_is_lost_at_a_time() -> None:
    done = CliRunner().invoke(app, ["demo", "--kill", "1", "--stall", "1"])
    assert isinstance(done.exception, InvalidArgument)
    assert "exclude each other" in str(done.exception)


def attempts(error: EpeeError) -> int:
    """How often a survivor trains when each step ends with this error, which it raises at last."""
    recovered: list[None] = []

    class Tired(Survivor):
        def _recover(self) -> None:
            recovered.append(None)

    def step(call: float) -> float:
        raise error

    settings = Settings(num_ranks=4, victim=2)
    trainer: Any = SimpleNamespace(rank=1, settings=settings, members=(0, 1, 2, 3), num_steps=7, progress=0.5)
    trainer.step = step
    survivor = Tired(trainer, Path("state"), joins=False)
    survivor.group = SimpleNamespace(waiting_ranks=list)
    with pytest.raises(type(error)) as caught:
        survivor.train()
    assert caught.value is error
    return 1 + len(recovered)


@pytest.mark.parametrize("error", [InvalidArgument("x"), ProtocolError("x"), EpeeError("x")])
def test_what_is_no_loss_is_raised_at_once(error: EpeeError) -> None:
    assert attempts(error) == 1


@pytest.mark.parametrize("error", [RankFailedError("x"), MismatchError("x")])
def test_a_loss_is_tried_again_but_not_for_ever(error: EpeeError) -> None:
    assert attempts(error) == survive._ATTEMPTS > 1


def test_a_replacement_is_wanted_once_and_not_too_early() -> None:
    told: list[Message] = []
    trainer: Any = SimpleNamespace(rank=0, settings=Settings(num_ranks=4, victim=2), members=(0, 1, 3), num_steps=7)
    trainer.send, trainer.began = told.append, 0.0
    survivor = Survivor(trainer, Path("state"), joins=False)

    def wanted_at(progress: float) -> list[str]:
        told.clear()
        trainer.progress = progress
        survivor.order_replacement()
        return [event["what"] for event in told]

    assert wanted_at(0.9) == []
    survivor.is_owed = True
    assert wanted_at(0.5) == []
    assert wanted_at(0.7) == ["started"]
    assert told[0]["text"] == "a new process is started for rank 2"
    assert wanted_at(0.7) == []
    survivor.is_owed = True
    assert wanted_at(0.7) == ["started"], "the replacement was lost, too"
