"""Every interleaving of the steps by which a message is taken back or claimed (`p2p/channel.py`), store buffers
included.

One message, its sender and its receiver. Stores go into a buffer of the process and are seen by the other one when they
leave it, at any later moment, in order; a fence waits for an empty buffer: x86-64's rules. The sender may lose timeouts
at any moment, in its wait and in the grace after it, and repeats the call that raised, which is message 2 unless the
repetition continues message 1. The receiver may fail once after its claim, and takes the message again then.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

NONE, DECLINED, MATCHED = range(3)  # the verdict
MARK, CLAIM, VERDICT, SECOND = range(4)  # words that both see; the last one: whether message 2 is written
NOBODY, THIS, ANOTHER = range(3)  # the claim
# the sender
WAIT, STORE_MARK, FENCE, LOOK, LOOK_SECOND, GRACE, REPEAT, CONTINUE, CONTINUE_SECOND, SENT_FIRST, SENT_SECOND = range(
    11
)
# the receiver
TAKE, TAKE_FENCE, SEARCH, DELIVER, ANSWER, DECLINE, GO_BACK, GO_ON, NEXT, TOOK_SECOND = range(10)


class Protocol(NamedTuple):
    """What may be left out, to see that it matters."""

    sender_fence: bool = True
    sender_looks: bool = True
    claim_first: bool = True
    receiver_fence: bool = True
    receiver_looks: bool = True
    receiver_looks_again: bool = True
    repetition_continues: bool = True


class State(NamedTuple):
    """Where both are, the words, the stores on their way, and what has happened."""

    sender: int = WAIT
    seen: int = 0  # what the sender's first look of two has found
    receiver: int = TAKE
    words: tuple[int, ...] = (0, NOBODY, NONE, 0)
    buffers: tuple[tuple[tuple[int, int], ...], ...] = ((), ())
    failures: int = 0
    is_certain: bool = False  # the sender's call has raised, and said that the message will not be delivered
    first: int = 0  # how often message 1 was delivered
    second: int = 0


def load(state: State, me: int, word: int) -> int:
    """What a process reads: its own latest store, else what has left the buffers."""
    own = [value for at, value in state.buffers[me] if at == word]
    return own[-1] if own else state.words[word]


def store(state: State, me: int, word: int, value: int) -> State:
    """Put a store into the buffer of a process."""
    buffers = list(state.buffers)
    buffers[me] = (*buffers[me], (word, value))
    return state._replace(buffers=tuple(buffers))


def drained(state: State, me: int) -> State:
    """Let the oldest store of a process be seen."""
    (word, value), *rest = state.buffers[me]
    words = list(state.words)
    words[word] = value
    buffers = list(state.buffers)
    buffers[me] = tuple(rest)
    return state._replace(words=tuple(words), buffers=tuple(buffers))


def sender_steps(state: State, protocol: Protocol) -> list[State]:
    """What the sender may do next."""
    here = state.sender
    if here == WAIT:
        return [state._replace(sender=SENT_FIRST if load(state, 0, VERDICT) == MATCHED else STORE_MARK)]
    if here == STORE_MARK:
        return [store(state, 0, MARK, 1)._replace(sender=FENCE)]
    if here == FENCE:
        if not protocol.sender_looks:
            return [state._replace(sender=REPEAT, is_certain=True)]
        return [state._replace(sender=LOOK)] if not protocol.sender_fence or not state.buffers[0] else []
    if here == GRACE:  # look again, or raise and say that the message stays open
        return [state._replace(sender=LOOK), state._replace(sender=CONTINUE)]
    if here in (LOOK, CONTINUE) and (here == LOOK or protocol.repetition_continues):
        word = CLAIM if protocol.claim_first else VERDICT
        return [state._replace(sender=here + 1, seen=load(state, 0, word))]
    if here in (LOOK_SECOND, CONTINUE_SECOND):
        other = load(state, 0, VERDICT if protocol.claim_first else CLAIM)
        claim, verdict = (state.seen, other) if protocol.claim_first else (other, state.seen)
        return [after_look(state._replace(seen=0), claim, verdict)]
    if here in (REPEAT, CONTINUE):
        return [store(state, 0, SECOND, 1)._replace(sender=SENT_SECOND)]
    return []


def after_look(state: State, claim: int, verdict: int) -> State:
    """What a sender does that has taken its message back, or repeats an open one, and has seen this."""
    is_repetition = state.sender == CONTINUE_SECOND
    if verdict == MATCHED:
        return state._replace(sender=SENT_FIRST)
    if verdict == NONE and claim == THIS:
        return state._replace(sender=CONTINUE if is_repetition else GRACE)
    return state._replace(sender=REPEAT, is_certain=not is_repetition)


def receiver_steps(state: State, protocol: Protocol) -> list[State]:
    """What the receiver may do next."""
    here = state.receiver
    if here == TAKE:
        return [store(state, 1, CLAIM, THIS)._replace(receiver=TAKE_FENCE)]
    if here == TAKE_FENCE:
        looks = protocol.receiver_looks and (protocol.receiver_looks_again or not state.failures)
        if protocol.receiver_fence and state.buffers[1]:
            return []
        return [state._replace(receiver=SEARCH if looks else DELIVER)]
    if here == SEARCH:
        return [state._replace(receiver=DECLINE if load(state, 1, MARK) else DELIVER)]
    if here == DELIVER:
        done = state._replace(receiver=ANSWER, first=state.first + 1)
        return [done] if state.failures else [done, state._replace(receiver=GO_BACK, failures=1)]
    if here == GO_BACK:
        return [store(state, 1, CLAIM, NOBODY)._replace(receiver=TAKE)]
    if here in (ANSWER, DECLINE):
        return [store(state, 1, VERDICT, MATCHED if here == ANSWER else DECLINED)._replace(receiver=GO_ON)]
    if here == GO_ON:  # to a message of another tag
        return [store(state, 1, CLAIM, ANOTHER)._replace(receiver=NEXT)]
    if here == NEXT and load(state, 1, SECOND):
        return [state._replace(receiver=TOOK_SECOND, second=1)]
    return []


def ends(protocol: Protocol) -> tuple[set[State], int]:
    """Return the states in which nothing can happen any more, and how many states there are."""
    found, todo, ended = {State()}, [State()], set()
    while todo:
        state = todo.pop()
        after = sender_steps(state, protocol) + receiver_steps(state, protocol)
        after += [drained(state, me) for me in range(2) if state.buffers[me]]
        if not after:
            ended.add(state)
        for following in after:
            if following not in found:
                found.add(following)
                todo.append(following)
    return ended, len(found)


def is_right(state: State) -> bool:
    """The message came once, the sender's last call has returned, and a call that raised for good delivered nothing."""
    returned = state.sender in (SENT_FIRST, SENT_SECOND)
    return returned and state.first + state.second == 1 and not (state.is_certain and state.first)


def test_a_send_is_delivered_or_raises_and_its_repetition_is_delivered_once() -> None:
    ended, num_states = ends(Protocol())
    assert all(is_right(state) for state in ended)
    assert {(state.sender, state.first, state.is_certain) for state in ended} == {
        (SENT_FIRST, 1, False),
        (SENT_SECOND, 0, True),
        (SENT_SECOND, 0, False),  # it was open, and then declined
    }
    assert num_states > 100


@pytest.mark.parametrize("fault", Protocol._fields)
def test_each_fence_and_each_look_is_needed(fault: str) -> None:
    ended, _ = ends(Protocol()._replace(**{fault: False}))
    assert not all(is_right(state) for state in ended)
