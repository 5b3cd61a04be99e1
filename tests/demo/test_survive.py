"""`epee demo --kill` and `--stall`: ranks are really lost, nothing of their experts is, and replacements take over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from epee.cli.main import app
from epee.demo import placement, rank, snapshot
from epee.demo.model import Transformer, is_expert
from epee.demo.settings import ModelSize, Settings
from epee.demo.story import Story
from epee.demo.train import make_optimizer
from epee.errors import InvalidArgument, InvalidState
from epee.nn import DenseMoELayer
from tests.demo import witness
from tests.demo.test_demo import check_png, run_here, small

SIZE = ModelSize(hidden=16, num_heads=2, num_layers=2, ffn_hidden=8, num_experts=4, context=12)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"def function_{n}(a, b):\n    return a + {n} * b\n\n" for n in range(4000)))
    return path


# the whole


@pytest.mark.timeout(120)  # half a minute on a machine with ten times more work than cores
@pytest.mark.parametrize(("fault", "num_ranks", "victim"), [("kill", 4, 1), ("kill", 2, 1), ("stall", 4, 3)])
def test_training_survives(
    fault: str, num_ranks: int, victim: int, tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "run_rank", witness.run_rank)
    settings = small(
        num_steps=60, num_ranks=num_ranks, victim=victim, fault=fault, out=str(tmp_path), text=str(text_file)
    )  # fmt: skip
    code, output = run_here(settings)
    assert code == 0, output
    assert "PASS" in output
    check_png(tmp_path / "loss.png")
    numbers = json.loads((tmp_path / "demo.json").read_text())
    events = check_events(numbers["events"], fault, settings)
    check_losses(numbers["steps"], events)
    check_nothing_lost(tmp_path / "witness", events, settings)


def check_events(told: list[dict[str, Any]], fault: str, settings: Settings) -> dict[str, dict[str, Any]]:
    wanted = [fault, "went on", "started", "rejoined"] + (["evicted"] if fault == "stall" else [])
    told = [event for event in told if event["what"] != "delayed"]  # on a machine that crawls
    assert [event["what"] for event in told] == wanted
    assert [event["seconds"] for event in told] == sorted(event["seconds"] for event in told)
    events = {event["what"]: event for event in told}
    assert events["went on"]["members"] == [r for r in range(settings.num_ranks) if r != settings.victim]
    assert events[fault]["step"] >= settings.fault_at * 60
    assert 0 <= events["went on"]["again"] <= settings.snapshot_every
    assert events["rejoined"]["step"] > events["went on"]["step"]
    if fault == "stall":
        assert "voted out" in events["evicted"]["text"]
    return events


def check_losses(steps: list[list[float]], events: dict[str, dict[str, Any]]) -> None:
    """The curve goes on where it was: neither the loss nor the return makes the model forget."""
    assert [step[0] for step in steps] == list(range(1, len(steps) + 1))
    losses = [loss for _, _, loss in steps]
    went_on, rejoined = events["went on"]["step"], events["rejoined"]["step"]
    for at in (went_on, rejoined):
        before, after = losses[at - 6 : at - 1], losses[at - 1 : at + 4]
        assert min(after) < max(before) + 0.3 < losses[0]
    assert losses[-1] < losses[went_on - 2]


def check_nothing_lost(folder: Path, events: dict[str, dict[str, Any]], settings: Settings) -> None:
    """The holder serves exactly what the victim had at the snapshot; the new process has what the holder had."""
    (after,) = folder.glob("after-*.npy")
    step = int(after.stem.partition("-")[2])
    held, had = np.load(after), np.load(folder / f"before-{step}.npy")
    assert step > 0
    assert np.array_equal(held, had)
    assert (held[:, 0] != 0).all()
    assert held[:, 2].any(), "the moments of the optimiser come along"
    given, taken = np.load(folder / "given.npy"), np.load(folder / "taken.npy")
    assert np.array_equal(given, taken)
    assert not np.array_equal(given, held), "the holder has trained them meanwhile"
    for pattern in (f"shared-{step}-*.npy", "united-*.npy"):
        shared = [np.load(path) for path in folder.glob(pattern)]
        assert len(shared) == settings.num_ranks - pattern.startswith("shared")
        assert all(np.array_equal(shared[0], other) for other in shared[1:])


# parts


def test_a_lost_ranks_experts_go_to_the_next_of_the_ring() -> None:
    start = placement.even(4, 8)
    assert start.experts == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert [start.holder(r) for r in range(4)] == [1, 2, 3, 0]
    without = start.without(3)
    assert without.experts == ((0, 1, 6, 7), (2, 3), (4, 5), ())
    assert (without.members, without.num_places) == ((0, 1, 2), 4)
    assert [without.holder(r) for r in range(4)] == [1, 2, 0, 0]
    assert without.place_of().tolist() == [0, 1, 4, 5, 8, 9, 2, 3]
    alone = without.without(2).without(1)
    assert alone.experts == ((0, 1, 2, 3, 4, 5, 6, 7), (), (), ())
    with pytest.raises(InvalidState, match="rank 0 was the last one"):
        alone.without(0)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_every_expert_has_one_place_whoever_is_lost(num_ranks: int) -> None:
    for lost in range(num_ranks):
        now = placement.even(num_ranks, 8).without(lost)
        places = now.place_of()
        assert len(places.unique()) == 8
        assert places.min() >= 0
        assert places.max() < now.num_places * len(now.members)
        for position, member in enumerate(now.members):
            its = ((places // now.num_places) == position).nonzero().flatten().tolist()
            assert tuple(its) == now.experts[member]


def make_model(seed: int) -> Transformer:
    def make_moe(layer: int) -> DenseMoELayer:
        return DenseMoELayer(SIZE.hidden, SIZE.ffn_hidden, SIZE.num_experts, SIZE.num_topk, seed=10 * seed + layer)

    return Transformer(SIZE, make_moe, seed=seed)


def train(model: Transformer, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    tokens = torch.arange(48).view(4, 12) % 7
    for _ in range(num_steps):
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()


def test_a_restored_model_trains_on_exactly_as_the_first() -> None:
    model, other = make_model(1), make_model(2)
    optimizers = [make_optimizer(one, 1e-2) for one in (model, other)]
    train(model, optimizers[0], 3)
    state = snapshot.capture(model, optimizers[0])
    snapshot.restore(other, optimizers[1], state)
    train(model, optimizers[0], 2)
    train(other, optimizers[1], 2)
    for (name, value), same in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, same), name
    assert state.num_updates == 3
    after = snapshot.capture(model, optimizers[0])
    assert not torch.equal(state.shared, after.shared), "a state is a copy"


def test_a_state_has_a_row_per_expert_and_a_fresh_one_has_no_moments() -> None:
    model = make_model(1)
    state = snapshot.capture(model, make_optimizer(model, 1e-2))
    assert state.num_updates == 0
    assert state.experts.shape == (4, 3, 2 * 3 * 16 * 8)
    assert not state.experts[:, 1:].any()
    assert not state.shared[1:].any()
    shared = sum(value.numel() for name, value in model.named_parameters() if not is_expert(name))
    assert state.shared.shape == (3, shared)


def test_the_holder_adds_the_copies_in_order_of_the_experts() -> None:
    before = placement.even(4, 8)
    rows = torch.arange(8.0).view(8, 1, 1).expand(8, 3, 2)
    kept = snapshot.Snapshot(5, before, snapshot.State(5, torch.zeros(3, 1), rows[:2]), rows[6:])
    after = snapshot.experts_after_loss(kept, 0, lost=3)
    assert after[:, 0, 0].tolist() == [0, 1, 6, 7]
    kept = kept._replace(state=kept.state._replace(experts=rows[4:6]), copy=rows[2:4])
    assert snapshot.experts_after_loss(kept, 2, lost=1)[:, 0, 0].tolist() == [2, 3, 4, 5]
    assert snapshot.experts_after_loss(kept, 2, lost=0)[:, 0, 0].tolist() == [4, 5]


# options and story


@pytest.mark.parametrize("victim", [0, 2, -1])
def test_a_victim_must_be_another_rank(victim: int) -> None:
    with pytest.raises(InvalidArgument, match=f"--kill must be a rank from 1 to 1, got {victim}"):
        Settings(victim=victim).check()


def test_other_backends_do_not_survive() -> None:
    with pytest.raises(InvalidArgument, match="--stall needs --backend epee, got gloo"):
        Settings(victim=1, fault="stall", backend="gloo").check()


def test_one_rank_is_lost_at_a_time() -> None:
    done = CliRunner().invoke(app, ["demo", "--kill", "1", "--stall", "1"])
    assert isinstance(done.exception, InvalidArgument)
    assert "exclude each other" in str(done.exception)


def test_a_replacement_is_wanted_once_and_not_too_early() -> None:
    story = Story(Settings(num_ranks=4, victim=2))
    assert not story.wants_replacement("progress", {"progress": 0.9})
    assert "rank 2 gets SIGKILL in the midst of step 8" in story.hear(
        {"what": "kill", "clock": 101.0, "step": 7, "pid": 1}
    )
    told = story.hear({"what": "went on", "clock": 101.5, "step": 6, "members": [0, 1, 3], "again": 2, "cause": ""})
    assert told.startswith("ranks 0, 1, 3 have done step 6 without rank 2 0.50 s later (2 steps are done again")
    assert not story.wants_replacement("progress", {"progress": 0.5})
    assert not story.wants_replacement("event", {"what": "kill"})
    slow = {"what": "delayed", "clock": 102.0, "step": 8, "members": [0, 1, 3], "again": 1, "cause": "too slow"}
    assert story.hear(slow) == "nobody was lost, but a step had to be done again: too slow"
    assert story.wants_replacement("progress", {"progress": 0.7})
    story.start()
    assert not story.wants_replacement("progress", {"progress": 0.7})
    assert [event["what"] for event in story.told(0.0)][-1] == "started"
    assert [event["seconds"] for event in story.told(100.0)][:2] == [1.0, 1.5]
