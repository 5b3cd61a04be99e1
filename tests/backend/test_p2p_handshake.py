"""Both ends of a group in one process: before each line of one end in turn, the other end does all that it has to do.

A send is given up while its message is being taken, at every line of either; then it is made again, and another one
follows. The receiver must get both, each once, whatever the first was told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import epee.backend
import epee.engine
from epee.engine.outbox import PeerRegions, outbox_layout
from epee.engine.p2p import ends
from epee.engine.p2p.channel import Mailroom
from epee.engine.p2p.message import STAYS_OPEN, Message
from epee.engine.signature import OP_CODE, pack
from epee.engine.tensors import Target
from epee.errors import CommTimeoutError, InvalidState, MismatchError
from epee.memory.shared import SharedRegion

_FOLDERS = tuple(str(Path(str(module.__file__)).parent) for module in (epee.backend, epee.engine))
FLOAT32 = 9
LENGTHS = {"whole": 4, "fragments": 300_000, "private": 4, "long and private": 300_000, "collected": 300_000}


class Pair:
    """The mailrooms of two ranks."""

    def __init__(self) -> None:
        layout = outbox_layout(2, 1 << 12)
        self._made = [SharedRegion.create(layout.nbytes, f"outbox{rank}") for rank in range(2)]
        self._epoch_regions = [
            PeerRegions(rank, [SharedRegion.attach(region.blob) for region in self._made], 1 << 12, 1)
            for rank in range(2)
        ]
        self.sender, self.receiver = (Mailroom(peer_regions) for peer_regions in self._epoch_regions)

    def send(self, values: np.ndarray[Any, Any], tag: int = 0) -> Message:
        """Post a send of rank 0."""
        message = Message(True, 1, tag, _signature(len(values)), values)
        self.sender.ends[True].post(message)
        return message

    def receive(self, length: int, tag: int = 0) -> Message:
        """Make a receive of rank 1; it is not posted."""
        array = np.full(length, -1.0, np.float32)
        return Message(False, 0, tag, _signature(length), array, Target(array))

    def take(self, receive: Message) -> None:
        """Post a receive, or move it."""
        if receive in self.receiver.pending() or receive.done:
            self.receiver.step(receive)
        else:
            self.receiver.ends[False].post(receive)

    def give_up(self, send: Message) -> str:
        """Do what a time-out does; returns what the caller is told."""
        is_undecided = self.sender.take_back(send)
        if send.done:
            return "refused" if send.error is not None else "delivered"
        send.fail(CommTimeoutError(STAYS_OPEN if is_undecided else "taken back"))
        self.sender.cancel(send)
        return "open" if is_undecided else "taken back"

    def drive(self, *messages: Message) -> None:
        """Move all until they are done."""
        for _ in range(1000):
            for message in messages:
                self.take(message) if not message.is_send else self.sender.step(message)
            if all(message.done for message in messages):
                return
        raise AssertionError([message.describe(self._epoch_regions[0]) for message in messages if not message.done])

    def close(self) -> None:
        """Give the memory back."""
        for peer_regions in self._epoch_regions:
            peer_regions.close()
        for region in self._made:
            region.close()


@pytest.fixture
def pairs() -> Iterator[Callable[[], Pair]]:
    made: list[Pair] = []

    def make() -> Pair:
        while made:
            made.pop().close()
        made.append(Pair())
        return made[-1]

    yield make
    while made:
        made.pop().close()


class Switch:
    """Runs code, and `action` before its `at`-th line in the backend."""

    def __init__(self, at: int, action: Callable[[], None]) -> None:
        self.left = at
        self._action = action

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_FOLDERS):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self._action()
        return self._trace

    @contextmanager
    def on(self) -> Iterator[None]:
        """Count the lines that run now, until the action has run."""
        if self.left > 0:
            sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)


def _signature(length: int) -> int:
    return pack(OP_CODE["point_to_point"], FLOAT32, count=length)


def numbered(length: int, value: float) -> np.ndarray[Any, Any]:
    return np.full(length, value, np.float32)


def begin(pair: Pair, kind: str) -> tuple[Message, Message]:
    """Return a send that is about to be taken, and the receive that takes it."""
    length = LENGTHS[kind]
    send = pair.send(numbered(length, 1.0))
    if kind.endswith("private"):  # it stands before a message that was wanted first
        other, wanted = pair.send(numbered(3, 9.0), tag=7), pair.receive(3, tag=7)
        pair.drive(other, wanted)
    return send, pair.receive(length)


def finish(pair: Pair, told: str, send: Message, receive: Message) -> None:
    """Make a send that raised again, then another; the receiver gets each once."""
    length = send.nbytes // 4
    todo = [receive]
    if told != "delivered":
        todo.append(pair.send(numbered(length, 1.0)))
    pair.drive(*todo)
    assert all(message.error is None for message in todo)
    last = pair.receive(length)
    pair.drive(pair.send(numbered(length, 2.0)), last)
    assert (np.unique(receive.array).tolist(), np.unique(last.array).tolist()) == ([1.0], [2.0]), told


def sender_amid_receiver(pair: Pair, kind: str, at: int) -> str:
    """Give the send up before a line of the receiver; returns what it was told, "" when there is no such line."""
    send, receive = begin(pair, kind)
    told = [""]
    switch = Switch(at, lambda: told.append(pair.give_up(send)))
    for _ in range(50):
        if receive.done or switch.left <= 0:
            break
        with switch.on():
            pair.take(receive)
        if not send.done:
            pair.sender.step(send)
    if switch.left <= 0:
        finish(pair, told[-1], send, receive)
    return told[-1]


def receiver_amid_sender(pair: Pair, kind: str, at: int) -> str:
    """Let the receiver take the message before a line of the sender that gives it up."""
    send, receive = begin(pair, kind)
    switch = Switch(at, lambda: pair.take(receive))
    with switch.on():
        told = pair.give_up(send)
    finish(pair, told, send, receive)
    return told if switch.left <= 0 else ""


@pytest.mark.parametrize(("kind", "stride"), [(kind, 1 if length < 1000 else 3) for kind, length in LENGTHS.items()])
@pytest.mark.parametrize("run", [sender_amid_receiver, receiver_amid_sender])
def test_a_send_given_up_at_any_line_is_delivered_once(
    pairs: Callable[[], Pair],
    run: Callable[[Pair, str, int], str],
    kind: str,
    stride: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "collected":  # as what is longer than its group
        monkeypatch.setattr(ends, "CHANNEL_BYTES", 1 << 20)
    seen, at = [], 1
    while not seen or seen[-1]:
        seen.append(run(pairs(), kind, at))
        at += stride
    assert len(seen) > 5, "hardly a line was tried"
    if run is sender_amid_receiver:
        assert {"open", "taken back"} <= set(seen), set(seen)


def test_a_send_given_up_before_it_was_refused_does_not_fail_a_receive(pairs: Callable[[], Pair]) -> None:
    """The receive is for another size: it fails only with a send that does, and then both do."""
    at, told = 1, ["begin"]
    while told[-1]:
        pair = pairs()
        send, receive = pair.send(numbered(3, 1.0)), pair.receive(5)
        told.append("")
        switch = Switch(at, lambda pair=pair, send=send: told.append(pair.give_up(send)))  # type: ignore[misc]
        with switch.on():
            pair.take(receive)
        if told[-1] == "taken back":
            assert not receive.done
            pair.drive(pair.send(numbered(5, 2.0)), receive)
            assert receive.error is None
        elif told[-1] == "refused":
            assert isinstance(send.error, MismatchError)
            assert isinstance(receive.error, MismatchError)
        at += 1
    assert {"taken back", "open", "refused"} <= set(told)


def stand_still(pair: Pair, after_look: bool) -> tuple[Message, Message, Callable[[], None]]:
    """Give a send up while the receiver stands in its claim; returns it, the receive, and what lets that go on."""
    send, receive = pair.send(numbered(4, 1.0)), pair.receive(4)
    module: Any = ends
    kept = module.fence, module.Receiver._answer

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    if after_look:
        module.Receiver._answer = stop
    else:
        module.fence = stop
    try:
        pair.take(receive)
    except KeyboardInterrupt:
        pass
    finally:
        module.fence, module.Receiver._answer = kept
    assert pair.give_up(send) == "open"
    return send, receive, pair.receiver.settle


@pytest.mark.parametrize("after_look", [False, True])
def test_the_next_send_of_the_tag_continues_an_open_message(pairs: Callable[[], Pair], after_look: bool) -> None:
    pair = pairs()
    _, receive, go_on = stand_still(pair, after_look)
    other, wanted = pair.send(numbered(4, 5.0), tag=3), pair.receive(4, tag=3)
    again, more = pair.send(numbered(4, 1.0)), pair.send(numbered(4, 2.0))
    for message in (again, more):
        pair.sender.step(message)
        assert not message.done, "nothing passes an open message"
    assert pair.give_up(again) == "open"  # as often as one likes
    again = pair.send(numbered(4, 1.0))
    go_on()
    assert receive.done == after_look
    last = pair.receive(4)
    pair.drive(receive, last, wanted, again, more, other)
    assert [message.array[0] for message in (receive, last, wanted)] == (
        [1.0, 2.0, 5.0] if after_look else [2.0, 1.0, 5.0]
    )


@pytest.mark.parametrize("after_look", [False, True])
@pytest.mark.parametrize("length", [4, 3])
def test_another_message_does_not_pass_for_an_open_one(
    pairs: Callable[[], Pair], after_look: bool, length: int
) -> None:
    pair = pairs()
    _, receive, go_on = stand_still(pair, after_look)
    go_on()
    assert receive.done == after_look
    other = pair.send(numbered(length, 3.0))
    pair.sender.step(other)
    if after_look:  # the sender had not been told yet that its message has come
        assert isinstance(other.error, InvalidState)
        assert "has been delivered after all" in str(other.error)
        other = pair.send(numbered(length, 3.0))
        receive = pair.receive(length)
    pair.drive(other, receive)
    if not after_look and length == 3:
        assert isinstance(receive.error, MismatchError)
    else:
        assert receive.array.tolist() == [3.0] * length


def test_messages_that_were_given_up_do_not_fill_the_window(pairs: Callable[[], Pair]) -> None:
    """They wait in private memory, in front of others; more of them than may be without a verdict."""
    pair = pairs()
    for i in range(700):
        given_up, send = pair.send(numbered(3, -5.0), tag=9), pair.send(numbered(3, float(i)))
        receive = pair.receive(3)
        pair.drive(send, receive)
        assert receive.array.tolist() == [i] * 3
        assert pair.give_up(given_up) == "taken back"
    assert not ends.Sender.is_open(pair.sender._sender, given_up)


def test_what_an_interrupted_receive_had_got_waits_for_one_that_fits(pairs: Callable[[], Pair]) -> None:
    pair = pairs()
    send, receive = pair.send(numbered(4, 1.0)), pair.receive(4)
    pair.drive(send, receive)
    for _ in range(2):  # may be repeated
        pair.receiver.break_off(receive, KeyboardInterrupt())
    more = pair.send(numbered(4, 2.0))
    wrong = pair.receive(3)
    pair.take(wrong)
    assert isinstance(wrong.error, MismatchError)
    first, second = pair.receive(4), pair.receive(4)
    pair.drive(first, second, more)
    assert [message.array[0] for message in (first, second)] == [1.0, 2.0]
