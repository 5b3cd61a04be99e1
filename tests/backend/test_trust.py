"""What a rank believes of what it reads in a store, and of memory that a record names (review A9, A13, B2)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from epee.engine.bootstrap import creation, joining
from epee.engine.bootstrap.attempt import BootstrapAttempt
from epee.engine.bootstrap.group_note import FOLDER_KEY
from epee.engine.bootstrap.proof import prove, proved, transcript
from epee.engine.outbox import OutboxOwner, open_outbox, outbox_layout
from epee.errors import AuthError, InvalidState, PeerError, ProtocolError, RankFailedError, ResourceError
from epee.memory.shared import SharedRegion
from epee.view.job import parse_member
from epee.view.transport.auth import Token
from epee.view.transport.directory import JobDirectory
from tests.harness import run_mortal, run_ranks
from tests.survive import stages

from . import cases

TOKEN = Token(b"t" * 32)
NONCE = bytes(range(16))


# ---- records


def check(record: str, token: Token = TOKEN, purpose: bytes = b"here") -> str:
    return proved(token, json.loads(record), purpose, "rank 1's")


def test_a_record_holds_for_its_purpose_its_token_and_its_text_only() -> None:
    record = prove(TOKEN, "text \u00e4", b"here")
    assert check(record) == "text \u00e4"
    changed = json.dumps({**json.loads(record), "record": "text"})
    for attempt in (
        lambda: check(record, purpose=b"elsewhere"),
        lambda: check(record, token=Token(b"u" * 32)),
        lambda: check(changed),
        lambda: check(json.dumps({**json.loads(record), "mac": "\u00e4" * 64})),
        lambda: check(json.dumps({**json.loads(record), "record": "\ud800"})),
    ):
        with pytest.raises(AuthError, match="rank 1's record in the store does not fit the job's token"):
            attempt()


@pytest.mark.parametrize("fields", [{}, {"record": "x"}, {"record": 5, "mac": "0" * 64}, {"record": "x", "mac": "0"}])
def test_what_is_no_record_is_a_protocol_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="rank 1's record in the store cannot be read"):
        proved(TOKEN, fields, b"", "rank 1's")


def test_a_transcript_stands_for_the_attempt_and_for_each_thing_told() -> None:
    told = {
        transcript(1, [b"ab", b"c"]),
        transcript(2, [b"ab", b"c"]),
        transcript(1, [b"a", b"bc"]),
        transcript(1, [b"c", b"ab"]),
        transcript(1, [b"abc"]),
    }
    assert len(told) == 5


def test_a_member_with_an_endpoint_that_cannot_be_is_refused_at_birth() -> None:
    for endpoint in ("ab" * 1500, "", "00" * 200):
        with pytest.raises(ProtocolError, match="rank 1's record names a member that cannot be right"):
            parse_member(json.dumps([1, NONCE.hex(), endpoint, "0" * 16]), 1)


# ---- outboxes


@pytest.fixture
def outbox() -> Iterator[SharedRegion]:
    region = SharedRegion.create(outbox_layout(2, 4096).nbytes, "outbox1", only_owner_writes=True)
    OutboxOwner(NONCE, 77, 1).sign(region)
    yield region
    region.close()


def test_an_outbox_says_whose_it_is(outbox: SharedRegion) -> None:
    open_outbox(outbox.blob, OutboxOwner(NONCE, 77, 1)).close()
    for other in (OutboxOwner(NONCE, 77, 2), OutboxOwner(NONCE, 78, 1), OutboxOwner(bytes(16), 77, 1)):
        with pytest.raises(ProtocolError, match=f"slot {other.slot}'s outbox, and is another's"):
            open_outbox(outbox.blob, other)


def test_memory_that_is_too_small_is_no_outbox() -> None:
    region = SharedRegion.create(1, "small")
    with pytest.raises(ProtocolError, match="is another's"):
        open_outbox(region.blob, OutboxOwner(NONCE, 0, 0))
    region.close()


def pry(rank: int, num_ranks: int) -> list[str]:
    """Try to write the other's outbox in all ways that are at hand."""
    peer_regions = dist.group.WORLD._engine.members
    region = peer_regions.regions[1 - rank]
    told = []
    for attempt in (
        lambda: peer_regions.words[1 - rank].__setitem__(5, 1),
        lambda: peer_regions.views[np.dtype(np.float32)][1 - rank].__setitem__(5, 1),
        lambda: SharedRegion.attach(region.blob),
    ):
        try:
            attempt()
            told.append("written")
        except (TypeError, ValueError, ResourceError) as exc:
            told.append(type(exc).__name__)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.ones(70_000, dtype=dtype)
        dist.all_reduce(x)
        assert x.unique().tolist() == [num_ranks]
    return told


def test_a_rank_cannot_write_anothers_outbox() -> None:
    for told in run_ranks(pry, 2, backend="epee"):
        assert told == ["TypeError", "ValueError", "ResourceError"]


# ---- a store into which somebody else writes


def in_advance(rank: int, num_ranks: int, folder: str) -> str:
    """Before rank 1 puts its record there somebody puts another one under its key, which can be guessed."""
    real = creation.exchange  # type: ignore[attr-defined]

    def exchange(this: BootstrapAttempt, mine: Any, *rest: Any) -> Any:
        if rank == 0:
            decoy = SharedRegion.create(outbox_layout(64, mine.staging_bytes).nbytes, "decoy")
            record = replace(mine, blob=decoy.blob.hex(), member=mine.member.replace("[0,", "[1,", 1))
            this.store.set(this.key(1), prove(Token(bytes(32)), json.dumps(asdict(record)), b""))
        else:
            stages.wait_for(folder, "refused")
        return real(this, mine, *rest)

    creation.exchange = exchange  # type: ignore[attr-defined,assignment]
    try:
        with pytest.raises(PeerError if rank else AuthError) as caught:
            cases.init(rank, num_ranks, folder, timeout_s=20)
        return str(caught.value)
    finally:
        if rank == 0:
            stages.reach(folder, "refused")


def test_a_record_that_was_set_in_advance_is_refused_in_words(tmp_path: Path) -> None:
    first, second = run_ranks(in_advance, 2, str(tmp_path), backend=None)
    assert "rank 1's record in the store does not fit the job's token" in first
    assert "rank 0 could not make its part" in second
    assert "AuthError" in second


def changed_greeting(rank: int, num_ranks: int, folder: str) -> str:
    """Rank 0 reads another greeting of rank 1 than rank 1 has written."""
    real = BootstrapAttempt.read

    def read(this: BootstrapAttempt, peer: int, what: str, deadline: float) -> bytes:
        raw = real(this, peer, what, deadline)
        if rank == 0 and peer == 1 and what == "/hello":
            return json.dumps({**json.loads(raw), "nonce": "0" * 32}).encode()
        return raw

    BootstrapAttempt.read = read  # type: ignore[assignment,method-assign]
    with pytest.raises((AuthError, PeerError)) as caught:
        cases.init(rank, num_ranks, folder, timeout_s=20)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_greeting_that_was_changed_on_the_way_is_found_out(tmp_path: Path) -> None:
    told = run_ranks(changed_greeting, 2, str(tmp_path), backend=None)
    assert any("does not fit the job's token" in text for text in told)
    assert all("AuthError" in text for text in told), told


def test_a_folder_named_by_somebody_else_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPEE_RUNTIME_DIR", str(tmp_path / "run"))
    ours, other = JobDirectory.create("a:1"), JobDirectory.create("b:2")
    good = prove(ours.token, str(ours.path), FOLDER_KEY.encode())
    with pytest.raises(InvalidState, match="no group that could be joined yet"):  # it is proved, and nobody is there
        joining._open_told(good.encode(), dist.HashStore())
    wrong = json.dumps({**json.loads(good), "record": str(other.path)})
    with pytest.raises(AuthError, match="the job's record"):
        joining._open_told(wrong.encode(), dist.HashStore())
    for job in (ours, other):
        job.leave()
    assert not list((tmp_path / "run").iterdir())


# ---- the folder vanishes (review A5)


def log_out(rank: int, num_ranks: int, folder: str) -> list[Any]:
    cases.init(rank, num_ranks, folder, op_timeout=20.0)
    group: Any = dist.group.WORLD
    path = group._engine.membership.runtime._job.path
    dist.all_reduce(torch.ones(1))
    stages.meet(folder, "born", rank, range(num_ranks))
    if rank == 0:
        shutil.rmtree(path)
    stages.meet(folder, "removed", rank, range(num_ranks))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    told: list[Any] = []
    deadline = time.monotonic() + 20
    while len(told) < 4 and time.monotonic() < deadline:
        x = torch.ones(1)
        try:
            dist.all_reduce(x)
            told.append(x.item())
        except RankFailedError as exc:
            told.append(exc.ranks)
    stages.meet(folder, "over", rank, (0, 1))
    return told


def test_a_job_goes_on_after_a_death_when_its_folder_is_gone() -> None:
    first, second, _ = run_mortal(log_out, 3, dead={2})
    assert first == second == [(2,), 2.0, 2.0, 2.0]
