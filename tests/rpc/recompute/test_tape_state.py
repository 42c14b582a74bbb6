"""Which call of a recomputation repeats which of the forward."""

from __future__ import annotations

import pytest

from gradwire.errors import UsageError
from gradwire.rpc.recompute.tape_state import UNKNOWN, Place, Tape

F, G = (1, "m:f"), (2, "m:g")


def tape_of(*places):
    tape = Tape((b"s",), (b"s",))
    tape.places = list(places)
    return tape


def test_calls_are_repeated_in_order():
    places = [Place(F, known=True, drawn=b"1"), Place(F, known=True), Place(G, known=True)]
    tape = tape_of(*places)

    assert [tape.repeated(n, place.key) for n, place in enumerate(places)] == places


def test_more_calls_than_there_were_are_not_known():
    assert tape_of(Place(F, known=True)).repeated(1, F) is UNKNOWN


def test_a_call_that_was_not_known_is_not_known_again():
    """In the forward of a checkpoint that ran inside the recomputation of another one."""
    known = Place(F, known=True, drawn=b"1")

    assert tape_of(known, UNKNOWN).repeated(1, G) is UNKNOWN


def test_a_call_that_was_lost_and_made_again_counts_once():
    lost, made = Place(F), Place(F)
    lost.failed()
    made.answered(b"1")

    assert tape_of(lost, made).repeated(0, F) is made


def test_an_answer_after_which_it_is_lost_stays():
    place = Place(F)
    place.answered(b"1")
    place.failed()
    place.answered(b"2")

    assert (place.known, place.lost, place.drawn) == (True, False, b"1")


def test_another_call_is_refused_where_numbers_were_drawn():
    with pytest.raises(UsageError, match="calls m:g on w2 where its forward called m:f on w1"):
        tape_of(Place(F, known=True, drawn=b"1")).repeated(0, G)


def test_another_call_is_none_of_our_business_where_none_were():
    assert tape_of(Place(F, known=True)).repeated(0, G).drawn == b""


@pytest.mark.parametrize("has", ["moved", "nested", "moved by others"])
def test_what_has_drawn(has):
    tape = Tape((b"s",), (b"e",) if has == "moved" else (b"s",))
    if has == "nested":
        tape.places.append(Place(F, known=True, drawn=b"1"))
    if has == "moved by others":
        tape.after[0] = (b"t",)

    assert tape.has_drawn
    assert not tape_of(Place(F, known=True)).has_drawn


def test_who_repeats_waits_for_an_answer_that_is_on_its_way():
    place, waited = Place(F), []

    def look(wait):
        waited.append(wait)
        if wait:
            place.answered(b"1")

    place.look = look
    tape = tape_of(place)
    tape.answered_places()

    assert not place.known
    assert tape.repeated(0, F).drawn == b"1"
    assert waited == [False, True]
