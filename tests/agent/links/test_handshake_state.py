"""Who is there, and every way not to be: bytes in, bytes out."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.agent.links.handshake_state import (
    HEAD_BYTES,
    MOST_BYTES,
    NONCE_BYTES,
    VERSION,
    Dialling,
    Listening,
    Reason,
    Refusal,
    body_length,
    refused,
)

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
ONE, TWO, THREE = (bytes([n]) * NONCE_BYTES for n in (1, 2, 3))
KIND_AT = len(b"gradwire") + 2


def dialling(key=KEY, job="job", me="a", peer="b", nonce=ONE, binding=b""):
    return Dialling(key, job, me, peer, nonce=nonce, binding=binding)


def listening(key=KEY, job="job", me="b", nonce=TWO, binding=b""):
    return Listening(key, job, me, nonce=nonce, binding=binding)


def shake(dialler, listener):
    """The whole of it; Refusal from whoever refuses first."""
    proof = dialler.proof(listener.challenge(dialler.opening()))
    dialler.check(listener.proof(proof))
    return listener.peer


def refusal(function, *args, **kwargs):
    with pytest.raises(Refusal) as refused_with:
        function(*args, **kwargs)
    return refused_with.value


def with_kind(message, kind):
    return message[:KIND_AT] + bytes([kind]) + message[KIND_AT + 1 :]


def test_two_that_know_the_secret_believe_each_other():
    assert shake(dialling(), listening()) == "a"


def test_nobody_has_a_name_before_the_proof():
    listener = listening()
    listener.challenge(dialling().opening())

    assert listener.peer == ""


def test_no_message_is_longer_than_the_limit():
    long = "x" * 127
    dialler = dialling(job="j" * 64, me=long, peer="y" + long[1:])
    listener = listening(job="j" * 64, me="y" + long[1:])
    said = [opening := dialler.opening(), challenge := listener.challenge(opening)]
    said += [proof := dialler.proof(challenge), listener.proof(proof), refused(Reason.JOB)]

    assert max(map(len, said)) < MOST_BYTES
    assert [body_length(words[:HEAD_BYTES]) + HEAD_BYTES for words in said] == [*map(len, said)]


@pytest.mark.parametrize(
    ("dialler", "reason"),
    [
        ({"key": OTHER_KEY}, Reason.SECRET),
        ({"job": "other"}, Reason.JOB),
        ({"peer": "c"}, Reason.NAME),
        ({"me": "b"}, Reason.NAME),
        ({"binding": b"another channel"}, Reason.SECRET),
    ],
)
def test_anyone_else_is_refused(dialler, reason):
    assert refusal(shake, dialling(**dialler), listening()).reason is reason


def test_a_stranger_learns_nothing_that_depends_on_the_secret():
    opening = dialling(key=OTHER_KEY).opening()

    challenges = {listening(key=key).challenge(opening) for key in (KEY, OTHER_KEY)}

    assert len(challenges) == 1


def test_a_recorded_handshake_is_worth_nothing_later():
    dialler, listener = dialling(), listening()
    opening = dialler.opening()
    proof = dialler.proof(listener.challenge(opening))
    theirs = listener.proof(proof)

    later = listening(nonce=THREE)
    later.challenge(opening)
    again = dialling(nonce=THREE)
    again.proof(listening().challenge(again.opening()))

    assert refusal(later.proof, proof).reason is Reason.SECRET
    assert refusal(again.check, theirs).reason is Reason.SECRET


def test_a_dialler_does_not_take_its_own_proof_for_the_listeners():
    dialler = dialling()
    proof = dialler.proof(listening().challenge(dialler.opening()))

    assert refusal(dialler.check, proof).reason is Reason.SECRET


def test_a_dialler_does_not_take_its_own_nonce_for_a_challenge():
    dialler = dialling()
    challenge = listening(nonce=ONE).challenge(dialling(nonce=THREE).opening())

    assert refusal(dialler.proof, challenge).reason is Reason.STRANGER


def test_a_worker_that_dials_does_not_answer_for_one_that_dials_it():
    """Reflection: b's challenge is put to b itself, which happens to dial a stranger's listener."""
    victim = listening(me="b")
    challenge = victim.challenge(dialling(key=OTHER_KEY, me="a", peer="b").opening())
    for names in ({"me": "b", "peer": "a"}, {"me": "b", "peer": "c"}):
        lured = dialling(**names)
        lured.opening()

        assert refusal(victim.proof, lured.proof(challenge)).reason is Reason.SECRET


def test_the_roles_do_not_stand_for_each_other():
    """What a listener proves is no proof of a dialler with the same names and nonces."""
    dialler, listener = dialling(), listening()
    opening = dialler.opening()
    proof = dialler.proof(listener.challenge(opening))
    of_listener = listener.proof(proof)
    same = listening()
    same.challenge(opening)

    assert refusal(same.proof, of_listener).reason is Reason.SECRET
    assert of_listener != proof


def test_a_name_is_under_the_proof():
    """A member's proof, with another name put over it on the way."""
    dialler, listener = dialling(me="a"), listening()
    claimed = dialling(key=OTHER_KEY, me="z").opening()
    proof = dialler.proof(listener.challenge(claimed))

    assert refusal(listener.proof, proof).reason is Reason.SECRET


def test_who_is_in_the_middle_cannot_pass_on_a_proof_over_tls():
    dialler, listener = dialling(binding=b"to the middle"), listening(binding=b"from the middle")

    assert refusal(shake, dialler, listener).reason is Reason.SECRET


def test_a_certificate_must_hold_the_name():
    dialler, listener = dialling(), listening()

    assert refusal(dialler.opening, ("c",)).reason is Reason.CERTIFICATE
    opening = dialler.opening(("b", "c"))
    assert refusal(listener.challenge, opening, ("c",)).reason is Reason.CERTIFICATE
    assert refusal(listener.challenge, opening, ()).reason is Reason.CERTIFICATE
    assert listener.challenge(opening, ("a",))


@pytest.mark.parametrize("version", [0, 1, VERSION + 1, 65535])
def test_another_version_is_refused_by_either_side(version):
    def spoken(words):
        return words[:8] + struct.pack(">H", version) + words[10:]

    dialler, listener = dialling(), listening()
    opening = dialler.opening()
    challenge = listener.challenge(opening)

    assert refusal(listening().challenge, spoken(opening)).reason is Reason.VERSION
    story = refusal(dialler.proof, spoken(challenge))
    assert story.message == f"it speaks protocol {version}, this worker {VERSION}"
    assert refusal(body_length, spoken(refused(Reason.VERSION))[:HEAD_BYTES]).reason is (
        Reason.VERSION
    )


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (Reason.STRANGER, "b does not take a for a worker"),
        (Reason.VERSION, f"b does not speak protocol {VERSION}"),
        (Reason.JOB, "b belongs to another job"),
        (Reason.NAME, "another worker than b listens there"),
        (Reason.CERTIFICATE, "b does not find the name a in the certificate of a"),
        (Reason.SECRET, "b has another secret than a"),
    ],
)
def test_a_dialler_that_is_refused_says_why(reason, text):
    told = refusal(dialling().proof, refused(reason))

    assert (told.reason, told.message) == (reason, text)


def test_a_reason_that_nobody_knows_is_none():
    assert refusal(dialling().proof, refused(Reason.JOB)[:-1] + b"\xff").reason is Reason.STRANGER


def test_an_oversize_message_is_refused_by_its_first_bytes():
    head = struct.pack(">8sHBH", b"gradwire", VERSION, 1, MOST_BYTES - HEAD_BYTES + 1)

    assert "more than 512 bytes" in refusal(body_length, head).message


@pytest.mark.parametrize("kind", [0, 2, 3, 4, 255])
def test_nobody_speaks_out_of_turn(kind):
    opening = with_kind(dialling().opening(), kind)

    assert refusal(listening().challenge, opening).reason is Reason.STRANGER


@pytest.mark.parametrize("name", ["", "a b", "x" * 128, "a\nb", "ü"])
def test_what_is_no_name_is_refused_before_anything_is_made_of_it(name):
    for opening in (dialling(me=name).opening(), dialling(peer=name).opening()):
        assert refusal(listening().challenge, opening).reason is Reason.STRANGER


@given(st.binary(max_size=600))
def test_any_bytes_are_refused(words):
    dialler, listener = dialling(), listening()
    challenge = listener.challenge(dialler.opening())
    dialler.proof(challenge)
    for function in (listening().challenge, listener.proof, dialling().proof, dialler.check):
        refusal(function, words)
    if len(words) >= HEAD_BYTES:
        refusal(body_length, words[:HEAD_BYTES])


@given(st.data())
def test_a_change_of_any_byte_is_noticed(data):
    dialler, listener = dialling(), listening()
    messages = [opening := dialler.opening(), challenge := listener.challenge(opening)]
    messages += [proof := dialler.proof(challenge), listener.proof(proof)]
    which = data.draw(st.integers(0, 3))
    at = data.draw(st.integers(0, len(messages[which]) - 1))
    change = data.draw(st.integers(1, 255))
    spoiled = bytearray(messages[which])
    spoiled[at] ^= change

    def passed_on(n, words):
        return bytes(spoiled) if n == which else words

    def disturbed():
        dialler, listener = dialling(), listening()
        challenge = listener.challenge(passed_on(0, dialler.opening()))
        proof = dialler.proof(passed_on(1, challenge))
        dialler.check(passed_on(3, listener.proof(passed_on(2, proof))))

    refusal(disturbed)
