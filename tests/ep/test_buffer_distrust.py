"""A Buffer among peers that it cannot trust: corrupt words, other versions, exhausted resources.

Rank 1 misbehaves by way of a patched method or a lowered limit; rank 0 must end with one of epee's own errors, quickly,
and the buffer must work once rank 1 behaves again.
"""

from __future__ import annotations

import copy
import os
import random
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epee
from epee.ep.members import bootstrap
from epee.ep.members.header import Header
from epee.ep.members.notices import MAX_NOTICES
from tests.ep.buffer_cases import until_all_succeed
from tests.harness import run_ranks

HIDDEN, NUM_TOPK, NUM_TOKENS = 64, 2, 6


def _buffer(**changes: Any) -> epee.Buffer:
    os.environ["EPEE_POISON"] = "1"
    options = {"num_experts": 4, "hidden": HIDDEN, "num_topk": NUM_TOPK, "max_tokens_per_rank": 8}
    return epee.Buffer(dist.group.WORLD, **{**options, **changes})


def _tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.full((NUM_TOKENS, HIDDEN), float(rank + 1), dtype=torch.bfloat16)
    return x, torch.tensor([[0, 2], [1, 3], [0, 1], [2, 3], [3, -1], [-1, -1]])


def _is_right(received: epee.Dispatched) -> bool:
    """Every row says which rank it came from."""
    assert isinstance(received.x, torch.Tensor)
    real = received.handle.src_rank >= 0
    return torch.equal(
        received.x[real], (received.handle.src_rank[real, None] + 1).expand(-1, HIDDEN).to(torch.bfloat16)
    )


def _attempt(call: Callable[[], Any]) -> str:
    """Return "right", or the name and text of epee's error; anything else is a failure of the test."""
    try:
        received = call()
    except epee.EpeeError as exc:
        return f"{type(exc).__name__}: {exc}"
    assert _is_right(received)
    return "right"


def _recover(buffer: epee.Buffer) -> None:
    """The buffer works again, and its rows are right."""
    x, idx = _tokens(buffer.rank)
    until_all_succeed(buffer, lambda: buffer.dispatch(x, idx, timeout=2))
    assert _is_right(buffer.dispatch(x, idx, timeout=20))


WORDS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "an unknown operation": ("op", 77, ("op", "77")),
    "an unknown layout": ("layout", 2, ("layout", "2")),
    "an unknown dtype": ("dtype", 99, ("dtype", "99")),
    "a slot outside the arena": ("slot", 1 << 40, ("slot", str(1 << 40))),
    "too many tokens": ("num_tokens", 9, ("num_tokens", "8", "9")),
    "another rank's name": ("rank", 0, ("rank", "0")),
    "scales that do not fit": ("scale_words", 1024, ("scale_words", "1024")),
    "an absurd arena": ("arena_alignment", 1 << 50, ("arena_alignment", str(1 << 50))),
    "a refusal of 3": ("refused", 3, ("refused", "3")),
}


class Liar:
    """Lets rank 1 write something else into its row than it means to.

    Args:
        change: header field -> value to write.
        counts: index -> value to write.
        text: index of the bit to flip in the row's text (the blob of the arena).
    """

    def __init__(self, buffer: epee.Buffer) -> None:
        self._exchange: Any = buffer._exchange
        self._make_row = self._exchange._row

    def tell(
        self,
        change: Callable[[Any], dict[str, int]] | None = None,
        count: tuple[int, int] | None = None,
        text_bit: int = -1,
    ) -> None:
        """Lie from now on."""

        def lied(counts: Any, text: bytes) -> tuple[Any, bytes]:
            if count is not None and counts is not None:
                counts = copy.deepcopy(counts)
                counts[count[0]] = count[1]
            if text_bit >= 0 and text:
                damaged = bytearray(text)
                damaged[text_bit // 8 % len(text)] ^= 1 << (text_bit % 8)
                text = bytes(damaged)
            return counts, text

        def make_row(header: Any, counts: Any, text: bytes, *mark: int) -> Any:
            lie = header._replace(**(change(header) if change is not None else {}))
            return self._make_row(lie, *lied(counts, text), *mark)

        self._exchange._row = make_row

    def stop(self) -> None:
        """Be honest again."""
        self._exchange._row = self._make_row


def _corrupt_words(rank: int, num_ranks: int) -> dict[str, str]:
    seen = {}
    x, idx = _tokens(rank)
    with _buffer() as buffer:
        _recover(buffer)
        liar = Liar(buffer)
        for name, (field, value, _) in WORDS.items():
            if rank == 1:
                liar.tell(change=lambda header, field=field, value=value: {field: value})  # type: ignore[misc]
            seen[name] = _attempt(lambda: buffer.dispatch(x, idx, timeout=2))
            liar.stop()
            _recover(buffer)
    return seen


@pytest.fixture(scope="module")
def corrupted() -> dict[str, str]:
    """What rank 0 saw of each lie."""
    return run_ranks(_corrupt_words, 2)[0]


@pytest.mark.parametrize("name", WORDS)
def test_an_impossible_word_is_a_protocol_error(corrupted: dict[str, str], name: str) -> None:
    message = corrupted[name]
    assert message.startswith("ProtocolError"), message
    assert "rank 1" in message
    missing = [words for words in WORDS[name][2] if words not in message]
    assert not missing, f"{missing} not in: {message}"


def _corrupt_counts(rank: int, num_ranks: int) -> list[str]:
    seen = []
    x, idx = _tokens(rank)
    with _buffer() as buffer:
        _recover(buffer)
        liar = Liar(buffer)
        for layout in ("rank", "expert"):
            for index in (0, 1, num_ranks, num_ranks + 3):
                for value in (-1, NUM_TOKENS * NUM_TOPK + 1, 10**6, 2**62, -(2**63)):
                    if rank == 1:
                        liar.tell(count=(index, value))
                    seen.append(_attempt(lambda at=layout: buffer.dispatch(x, idx, layout=at, timeout=2)))  # type: ignore[misc]
                    liar.stop()
        _recover(buffer)
    return seen


def test_impossible_counts_are_never_used() -> None:
    for message in run_ranks(_corrupt_counts, 2)[0]:
        assert message.startswith(("ProtocolError", "InvalidArgument")), message


def _random_lies(rank: int, num_ranks: int, seed: int) -> dict[str, int]:
    """Rank 1 flips one random bit of its row (header, or blob of its arena) in 60 calls.

    Not of the slot: another slot of its own arena is a wish that nobody else can see to be wrong.
    """
    names = [name for name in Header._fields if name != "slot"]
    kinds: dict[str, int] = {}
    draw = random.Random(seed)
    x, idx = _tokens(rank)
    with _buffer() as buffer:
        _recover(buffer)
        liar = Liar(buffer)
        for number in range(60):
            word, bit, in_text = draw.randrange(len(names)), draw.randrange(64), draw.random() < 0.4
            if rank == 1 and in_text:
                liar.tell(text_bit=64 * word + bit)
            elif rank == 1:

                def flip(header: Any, name: str = names[word], mask: int = 1 << bit) -> dict[str, int]:
                    return {name: getattr(header, name) ^ mask}

                liar.tell(change=flip)
            layout = ("rank", "expert")[number % 2]
            outcome = _attempt(lambda at=layout: buffer.dispatch(x, idx, layout=at, timeout=0.5))  # type: ignore[misc]
            liar.stop()
            kinds[outcome.split(":")[0]] = kinds.get(outcome.split(":")[0], 0) + 1
        _recover(buffer)
    return kinds


@pytest.mark.parametrize("seed", [1, 2])
def test_a_flipped_bit_never_crashes_hangs_or_gives_wrong_rows(seed: int) -> None:
    """`_attempt` checks the rows of every call that succeeds all the same (an unused bit, a harmless slot)."""
    honest, liar = run_ranks(_random_lies, 2, seed)
    assert sum(honest.values()) == sum(liar.values()) == 60
    assert honest.get("ProtocolError", 0) > 10, honest


def _other_version(rank: int, num_ranks: int) -> str:
    if rank == 1:
        bootstrap.PROTOCOL_VERSION += 41
    try:
        _buffer().close()
    except epee.EpeeError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "nothing"


def test_another_version_of_the_library_is_named() -> None:
    for message in run_ranks(_other_version, 2):
        assert message.startswith("ProtocolError"), message
        assert f"version {bootstrap.PROTOCOL_VERSION} " in message
        assert f"version {bootstrap.PROTOCOL_VERSION + 41}" in message


def _no_descriptors() -> Callable[[], None]:
    """Leave this process no free file descriptor; returns what gives them back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
    plugs = []
    while True:
        try:
            plugs.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            break

    def restore() -> None:
        for plug in plugs:
            os.close(plug)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return restore


def _starved(rank: int, num_ranks: int, when: str) -> str:
    x, idx = _tokens(rank)
    if when == "construction":
        restore = _no_descriptors() if rank == 1 else lambda: None
        try:
            _buffer().close()
            seen = "nothing"
        except epee.EpeeError as exc:
            seen = f"{type(exc).__name__}: {exc}"
        restore()
        with _buffer() as buffer:
            _recover(buffer)
        return seen
    with _buffer() as buffer:
        if when == "second layout":
            _recover(buffer)
        restore = _no_descriptors() if rank == 1 else lambda: None
        seen = _attempt(lambda: buffer.dispatch(x, idx, layout="expert", timeout=5))
        restore()
        _recover(buffer)
        seen_after = _attempt(lambda: buffer.dispatch(x, idx, layout="expert", timeout=5))
        assert seen_after == "right", seen_after
    return seen


@pytest.mark.parametrize("when", ["construction", "first dispatch", "second layout"])
def test_without_descriptors_there_is_a_resource_error_and_peers_hear_of_it(when: str) -> None:
    peer, starved = run_ranks(_starved, 2, when)
    assert starved.startswith("ResourceError"), starved
    assert "descriptor" in starved or "Too many open files" in starved, starved
    assert peer.startswith(("MismatchError", "ResourceError")), peer
    assert "rank 1" in peer
    assert "disagree" not in peer, "the peers must hear of the failure itself, not of a later call"


def _too_many(rank: int, num_ranks: int) -> None:
    made = [_buffer() for _ in range(MAX_NOTICES)]
    for _ in range(2):
        with pytest.raises(epee.ResourceError, match=f"at most {MAX_NOTICES} buffers of one group .* close some"):
            _buffer()
    made.pop().close()
    made.append(_buffer())
    received = made[-1].dispatch(*_tokens(rank))
    assert _is_right(received)
    for buffer in made:
        buffer.close()


def test_one_buffer_of_a_group_too_many_is_a_resource_error_until_another_is_closed() -> None:
    run_ranks(_too_many, 2, backend="epee")
