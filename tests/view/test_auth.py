"""The handshake and the frames: what is wrong, absent, replayed, reflected or garbage gets nowhere."""

from __future__ import annotations

import pickle
import random
import secrets

import pytest

from epee.errors import AuthError, EpeeError, InvalidArgument, ProtocolError
from epee.view.transport import auth
from epee.view.transport.wire import MAX_FRAME_BYTES

JOB = bytes(range(16))
A = auth.Identity(0, 1, b"a" * 16)
B = auth.Identity(3, 2, b"b" * 16)


def token() -> auth.Token:
    return auth.Token(b"t" * 32)


def connect(
    initiator: auth.Initiator | None = None, responder: auth.Responder | None = None
) -> tuple[auth.Sealer, auth.Opener, auth.Responder]:
    initiator = initiator or auth.Initiator(token(), JOB, A, B)
    responder = responder or auth.Responder(token(), JOB, B)
    proof, sealer = initiator.answer(responder.challenge(initiator.hello()))
    return sealer, responder.finish(proof), responder


def test_holders_of_the_token_agree_on_frames_and_on_who_they_are() -> None:
    sealer, opener, responder = connect()
    assert responder.peer == A
    payloads = [secrets.token_bytes(size) for size in (1, 2, 1000, 70_000)]
    assert opener.feed(b"".join(map(sealer.seal, payloads))) == payloads
    assert opener._pending == b""


def test_frames_may_come_in_any_pieces() -> None:
    sealer, opener, _ = connect()
    payloads = [secrets.token_bytes(size) for size in (5, 300, 1)]
    stream = b"".join(map(sealer.seal, payloads))
    got = [payload for at in range(len(stream)) for payload in opener.feed(stream[at : at + 1])]
    assert got == payloads


def test_messages_of_the_handshake_have_their_sizes() -> None:
    initiator, responder = auth.Initiator(token(), JOB, A, B), auth.Responder(token(), JOB, B)
    challenge = responder.challenge(initiator.hello())
    assert len(initiator.hello()) == auth.HELLO_BYTES
    assert len(challenge) == len(auth.refusal()) == auth.CHALLENGE_BYTES
    assert len(initiator.answer(challenge)[0]) == auth.PROOF_BYTES
    assert auth.HELLO_BYTES + auth.CHALLENGE_BYTES + auth.PROOF_BYTES < 1024


def test_neither_side_believes_a_peer_with_another_token() -> None:
    other = auth.Token(b"u" * 32)
    initiator = auth.Initiator(other, JOB, A, B)
    responder = auth.Responder(token(), JOB, B)
    challenge = responder.challenge(initiator.hello())
    with pytest.raises(AuthError, match="does not hold the job's token"):
        initiator.answer(challenge)
    with pytest.raises(AuthError, match="does not hold the job's token"):
        responder.finish(other.derive(b"initiator", initiator.hello() + challenge[: -auth.PROOF_BYTES]))


def test_a_replayed_handshake_is_worthless() -> None:
    initiator, responder = auth.Initiator(token(), JOB, A, B), auth.Responder(token(), JOB, B)
    proof, _ = initiator.answer(responder.challenge(initiator.hello()))
    again = auth.Responder(token(), JOB, B)
    again.challenge(initiator.hello())
    with pytest.raises(AuthError):
        again.finish(proof)


def test_a_replayed_challenge_is_worthless() -> None:
    first = auth.Initiator(token(), JOB, A, B)
    challenge = auth.Responder(token(), JOB, B).challenge(first.hello())
    with pytest.raises(AuthError):
        auth.Initiator(token(), JOB, A, B).answer(challenge)


def test_a_hello_that_is_reflected_is_refused() -> None:
    with pytest.raises(ProtocolError, match="wants another"):
        auth.Responder(token(), JOB, A).challenge(auth.Initiator(token(), JOB, A, B).hello())
    with pytest.raises(ProtocolError, match="reflected"):
        auth.Responder(token(), JOB, B).challenge(auth.Initiator(token(), JOB, B, B).hello())


def test_a_proof_that_is_reflected_is_refused() -> None:
    initiator, responder = auth.Initiator(token(), JOB, A, B), auth.Responder(token(), JOB, B)
    challenge = responder.challenge(initiator.hello())
    with pytest.raises(AuthError):
        responder.finish(challenge[-auth.PROOF_BYTES :])


@pytest.mark.parametrize(
    ("initiator", "words"),
    [
        (auth.Initiator(token(), b"j" * 16, A, B), "another job"),
        (auth.Initiator(token(), JOB, A, B._replace(slot=2)), "wants another"),
        (auth.Initiator(token(), JOB, A, B._replace(nonce=b"c" * 16)), "wants another"),
    ],
    ids=["job", "slot", "process"],
)
def test_a_hello_for_somebody_else_is_refused(initiator: auth.Initiator, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        auth.Responder(token(), JOB, B).challenge(initiator.hello())


def test_another_process_of_the_job_cannot_answer_for_the_one_wanted() -> None:
    initiator = auth.Initiator(token(), JOB, A, B)
    impostor = auth.Responder(token(), JOB, B)
    impostor._me = B._replace(nonce=b"i" * 16)
    with pytest.raises(ProtocolError):
        impostor.challenge(initiator.hello())
    hello = initiator.hello()
    answer = auth._HEAD.pack(auth._MAGIC, auth.PROTOCOL) + auth._ANSWER.pack(3, 2, b"i" * 16, bytes(32))
    with pytest.raises(AuthError, match="another one"):
        initiator.answer(answer + token().derive(b"responder", hello + answer))


def test_another_version_is_named_on_both_sides() -> None:
    initiator = auth.Initiator(token(), JOB, A, B)
    hello = bytearray(initiator.hello())
    hello[8] = 9
    with pytest.raises(ProtocolError, match=f"version 9 of the control plane, this process {auth.PROTOCOL}"):
        auth.Responder(token(), JOB, B).challenge(bytes(hello))
    answer = bytearray(auth.refusal())
    answer[8] = 7
    with pytest.raises(ProtocolError, match="version 7"):
        initiator.answer(bytes(answer))
    with pytest.raises(AuthError):
        initiator.answer(auth.refusal())


def test_changed_handshakes_never_succeed() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        initiator, responder = auth.Initiator(token(), JOB, A, B), auth.Responder(token(), JOB, B)
        step, bit = rng.randrange(3), rng.randrange(8 * auth.PROOF_BYTES)
        with pytest.raises(EpeeError):  # noqa: PT012 - any of the three messages may be the one that is refused
            hello = _flip(initiator.hello(), rng) if step == 0 else initiator.hello()
            challenge = responder.challenge(hello)
            proof, _ = initiator.answer(_flip(challenge, rng) if step == 1 else challenge)
            assert step == 2
            responder.finish((int.from_bytes(proof, "little") ^ 1 << bit).to_bytes(32, "little"))


def _flip(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def test_frames_that_are_changed_repeated_swapped_or_left_out_are_refused() -> None:
    for broken in (
        lambda a, b: _flip(a, random.Random(len(a))),
        lambda a, b: a + a,
        lambda a, b: b + a,
        lambda a, b: b,
        lambda a, b: a[:-16] + b[-16:],
    ):
        sealer, opener, _ = connect()
        with pytest.raises((AuthError, ProtocolError)):
            opener.feed(broken(sealer.seal(b"first frame"), sealer.seal(b"other frame")) + bytes(MAX_FRAME_BYTES))


def test_frames_of_one_connection_are_worthless_in_another() -> None:
    sealer, _, _ = connect()
    _, opener, _ = connect()
    with pytest.raises(AuthError):
        opener.feed(sealer.seal(b"hello"))


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 1 << 31, (1 << 32) - 1])
def test_a_length_that_cannot_be_right_is_refused_before_anything_is_stored(length: int) -> None:
    _, opener, _ = connect()
    with pytest.raises(ProtocolError, match="a frame has"):
        opener.feed(length.to_bytes(4, "little"))


def test_the_token_does_not_show_itself() -> None:
    secret = secrets.token_bytes(32)
    hidden = auth.Token(secret)
    assert repr(secret) not in f"{hidden} {hidden!r} {[hidden]}"
    with pytest.raises(TypeError):
        pickle.dumps(hidden)
    assert not hasattr(hidden, "__dict__")


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_token_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(InvalidArgument, match="32 bytes"):
        auth.Token(bytes(size))
