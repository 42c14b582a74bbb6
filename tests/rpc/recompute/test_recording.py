"""Which call of a recomputation repeats which of the forward."""

from __future__ import annotations

import pytest

from gradwire.errors import UsageError
from gradwire.rpc.recompute.recording import UNKNOWN_CALL, RecordedCall, Recording

F, G = (1, "m:f"), (2, "m:g")


def recording_of(*calls):
    recording = Recording((b"s",), (b"s",))
    recording.calls = list(calls)
    return recording


def test_calls_are_repeated_in_order():
    calls = [
        RecordedCall(F, known=True, drawn=b"1"),
        RecordedCall(F, known=True),
        RecordedCall(G, known=True),
    ]
    recording = recording_of(*calls)

    assert [recording.repeated(n, call.key) for n, call in enumerate(calls)] == calls


def test_more_calls_than_there_were_are_not_known():
    assert recording_of(RecordedCall(F, known=True)).repeated(1, F) is UNKNOWN_CALL


def test_a_call_that_was_not_known_is_not_known_again():
    """In the forward of a checkpoint that ran inside the recomputation of another one."""
    known = RecordedCall(F, known=True, drawn=b"1")

    assert recording_of(known, UNKNOWN_CALL).repeated(1, G) is UNKNOWN_CALL


def test_a_call_that_was_lost_and_made_again_counts_once():
    lost, made = RecordedCall(F), RecordedCall(F)
    lost.failed()
    made.answered(b"1")

    assert recording_of(lost, made).repeated(0, F) is made


def test_an_answer_after_which_it_is_lost_stays():
    call = RecordedCall(F)
    call.answered(b"1")
    call.failed()
    call.answered(b"2")

    assert (call.known, call.lost, call.drawn) == (True, False, b"1")


def test_another_call_is_refused_where_numbers_were_drawn():
    with pytest.raises(UsageError, match="calls m:g on w2 where its forward called m:f on w1"):
        recording_of(RecordedCall(F, known=True, drawn=b"1")).repeated(0, G)


def test_another_call_is_none_of_our_business_where_none_were():
    assert recording_of(RecordedCall(F, known=True)).repeated(0, G).drawn == b""


@pytest.mark.parametrize("has", ["moved", "nested", "moved by others"])
def test_what_has_drawn(has):
    recording = Recording((b"s",), (b"e",) if has == "moved" else (b"s",))
    if has == "nested":
        recording.calls.append(RecordedCall(F, known=True, drawn=b"1"))
    if has == "moved by others":
        recording.after_waits[0] = (b"t",)

    assert recording.has_drawn
    assert not recording_of(RecordedCall(F, known=True)).has_drawn


def test_who_repeats_waits_for_an_answer_that_is_on_its_way():
    call, waited = RecordedCall(F), []

    def poll(wait):
        waited.append(wait)
        if wait:
            call.answered(b"1")

    call.poll = poll
    recording = recording_of(call)
    recording.answered_calls()

    assert not call.known
    assert recording.repeated(0, F).drawn == b"1"
    assert waited == [False, True]
