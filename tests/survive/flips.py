"""Bit flips in the headers that a rank publishes: its peers get the right result or an error, never a wrong one.

In each call one rank flips one bit of one word, just before its tag appears (so that every peer reads it), or of the
tag itself. All ranks know from the number of the call who flips what. State words (`STATE_WORDS`) can be flipped as
well, for as long as a call lasts; a flip there changes no result, at most it delays one.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch.distributed as dist

from epee.engine.outbox import BELL, CONSUMED, CONSUMED_TOO, CORE, LIFE, SLEEPERS, TAG, NoExports, publish_word

from .histories import COLLECTIVES, before, expected
from .rounds import LONG, begin, one_call

CELL_WORD_NAMES = ("TAG", "SIGNATURE", "DETAIL", "OFFSET", "FILLED", "MERGED", "DRAINED", "GAVE_UP")
STATE_WORDS = {
    "CONSUMED": CONSUMED,
    "CONSUMED_TOO": CONSUMED_TOO,
    "SLEEPERS": SLEEPERS,
    "LIFE": LIFE,
    "CORE": CORE,
    "BELL": BELL,
}
TIMEOUT_S = 0.05
CLEAN_ERRORS = ("ProtocolError", "MismatchError", "CommTimeoutError", "PeerError")
NUM_CLEAN_CALLS = 150  # at the end, without flips: more than there are cells


class Flip(NamedTuple):
    """What happens in one call: which bit of which word of `rank`'s outbox; the call's operation and length."""

    rank: int
    word: str
    bit: int
    op: str
    length: int


def flip_of(seq: int, seed: int, num_ranks: int, lengths: tuple[int, ...], states: bool = False) -> Flip:
    """Return the flip of call `seq`: in the cell's header, or with `states` in a state word."""
    dice = random.Random(seed * 1_000_003 + seq)
    words = tuple(STATE_WORDS) if states else CELL_WORD_NAMES
    return Flip(
        dice.randrange(num_ranks),
        dice.choice(words),
        dice.randrange(64),
        dice.choice(COLLECTIVES),
        dice.choice(lengths),
    )


def flip_round(
    rank: int,
    folder: str,
    num_ranks: int,
    num_calls: int,
    seed: int,
    states: bool = False,
    lengths: tuple[int, ...] = (1, 1, 1, LONG // 4),
) -> dict[str, Any]:
    """Make `num_calls` calls with flips and some without. Return how they ended and the wrong ones."""
    group = begin(rank, num_ranks, folder, "raise", TIMEOUT_S)
    flipper = Flipper()
    counts: dict[str, int] = {}
    wrong: list[str] = []
    for i in range(num_calls + NUM_CLEAN_CALLS):
        seq = group._engine.seq + 1
        flip = flip_of(seq, seed, num_ranks, lengths, states)
        is_on = i < num_calls and rank == flip.rank
        if is_on:
            flipper.begin(group, seq, flip)
        entry = one_call(group, flip.op, flip.length)
        group._engine.unclaimed.clear()  # this program goes on instead of repeating a call whose end is open
        if is_on:
            flipper.end()
        if entry.status == "ok":
            is_right = entry.value == expected(entry.op, seq, entry.contributors, num_ranks, rank, entry.root)
        else:
            is_right = entry.status in CLEAN_ERRORS and all(value in before(entry) for value in entry.value)
        if not is_right:
            wrong.append(f"{entry} after {flip}")
        if i < num_calls:
            counts[entry.status] = counts.get(entry.status, 0) + 1
    num_members = len(group._engine.members.members)
    dist.destroy_process_group()
    return {"counts": counts, "wrong": wrong, "members": num_members}


class Flipper:
    """Changes what this process publishes in one call."""

    def __init__(self) -> None:
        self._seq = -1
        self._flip: Any = None
        self._undo: Any = None
        NoExports.publish_call = staticmethod(self._publish_call)  # type: ignore[method-assign]

    def begin(self, group: Any, seq: int, flip: Flip) -> None:
        """Flip in call `seq`; a state word at once."""
        if flip.word in STATE_WORDS:
            words, index = group._engine.peer_regions.own, STATE_WORDS[flip.word]
            self._undo = (words, index, words[index])
            words[index] ^= 1 << flip.bit
        else:
            self._seq, self._flip = seq, flip

    def end(self) -> None:
        """The call is over: state words are as they must be. CONSUMED was stored anew by the call itself."""
        self._seq = -1
        if self._undo is not None:
            words, index, value = self._undo
            if index not in (CONSUMED, CONSUMED_TOO):
                words[index] = value
            self._undo = None

    def _publish_call(self, peer_regions: Any, index: int, value: int, *moved: Any) -> None:
        if value == peer_regions.epoch_bits | self._seq:
            word, bit = CELL_WORD_NAMES.index(self._flip.word), 1 << self._flip.bit
            self._seq = -1
            if word == TAG:
                value ^= bit
            else:
                peer_regions.own[index + word] ^= bit
        publish_word(peer_regions, index, value)
