"""Values in the rendezvous store are accepted only if a member has signed them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from gradwire.agent.membership.rendezvous import meet, put_roster, roster_in
from gradwire.agent.peers.directory import Member, Roster
from gradwire.agent.peers.refusals import Refusals
from gradwire.agent.peers.secret import SignedStore, fresh_secret, signed, verified
from gradwire.agent.requests.timer import MonotonicClock
from gradwire.errors import NotTrusted
from gradwire.options import Options, Timeouts

SECRET, OTHER = fresh_secret(), fresh_secret()
KEY = b"k" * 32
SOON = Options(timeouts=Timeouts(join=5))


@pytest.fixture
def place():
    return SignedStore(HashStore(), SECRET, Refusals())


def stranger_at(place, secret=OTHER):
    return SignedStore(place.inner, secret, Refusals())


def join(place, rank=0, size=1):
    clock = MonotonicClock()
    deadline = clock.now() + SOON.timeouts.join
    return meet(place, Member(rank, f"w{rank}", "here"), size, deadline, clock)


def test_what_was_written_can_be_read(place):
    place.set("name", "välue", "round")

    assert place.get("name", "round") == place.maybe_get("name", "round") == "välue"
    assert place.maybe_get("another name") is None


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"value",
        b"0" * 64 + b"value",
        signed(KEY, "name", "value").encode(),
        b"\xff" * 80,
        "ü".encode() * 64,
    ],
)
def test_what_a_stranger_wrote_is_refused_and_counted(forged):
    refusals = Refusals()
    place = SignedStore(HashStore(), SECRET, refusals)
    place.inner.set("name", forged)

    for _ in range(2):
        with pytest.raises(NotTrusted, match="the value of 'name' in the rendezvous store") as no:
            place.get("name")
    assert "the same secret" in no.value.hint
    assert refusals.seen() == {"rendezvous": 2}


def test_a_value_stands_for_its_own_name_and_round_only(place):
    place.set("name", "value", "round")
    moved = place.inner.get("name")
    place.inner.set("other", moved)

    for name, round in (("other", "round"), ("name", "another"), ("name", "")):
        with pytest.raises(NotTrusted):
            place.get(name, round)


@given(st.tuples(st.text(), st.text(), st.text()), st.tuples(st.text(), st.text(), st.text()))
def test_a_signature_is_for_one_name_round_and_value(those, others):
    name, value, round = those
    text = signed(KEY, name, value, round).encode()

    assert verified(KEY, name, text, round) == value
    other_name, other_value, other_round = others
    if (other_name, other_round) != (name, round):
        assert verified(KEY, other_name, text, other_round) is None
    if other_value != value:
        spoiled = text[:64] + other_value.encode()
        assert verified(KEY, name, spoiled, round) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_nothing(text):
    assert verified(KEY, "name", text) is None


def test_a_worker_with_another_secret_is_named_as_such(place):
    join(place)

    with pytest.raises(NotTrusted, match="'gradwire/round 1' in the rendezvous store was not"):
        join(stranger_at(place), rank=1, size=2)


@pytest.mark.parametrize("what", ["unsigned", "another secret", "another rank", "an older round"])
def test_a_forged_entry_is_not_parsed(place, what):
    entry = '{"name": "w1", "address": "tcp://192.0.2.1:1", "note": ""}'
    here = "gradwire/round 2/1"
    place.add("gradwire/rounds", 1)
    match what:
        case "unsigned":
            place.inner.set(here, entry)
        case "another secret":
            stranger_at(place).set(here, entry)
        case "another rank":
            place.set("gradwire/round 2/2", entry, "job")
            place.inner.set(here, place.inner.get("gradwire/round 2/2"))
        case "an older round":
            place.set(here, entry, "the job of another day")

    with pytest.raises(NotTrusted, match="'gradwire/round 2/1'"):
        join(place, size=2)


def test_a_round_is_not_given_up_on_a_strangers_word(place):
    join(place)
    place.inner.set("gradwire/round 1/given up", "")

    with pytest.raises(NotTrusted, match="given up"):
        join(place, rank=1, size=2)


def test_a_forged_roster_is_not_parsed(place):
    roster, text = roster_in(place)
    assert put_roster(place, roster, text)
    assert roster_in(place)[0] == roster

    place.inner.set("gradwire/roster", '{"job": "x", "last_incarnation": 1, "entries": []}')

    with pytest.raises(NotTrusted, match="'gradwire/roster'"):
        roster_in(place)
    with pytest.raises(NotTrusted, match="'gradwire/roster'"):
        join(place)


def test_a_roster_is_replaced_only_if_it_is_still_the_one_that_was_read(place):
    first, nothing = Roster("job"), None
    assert put_roster(place, first, nothing)
    _, text = roster_in(place)
    second = first.with_member("a", 0, "here")
    assert put_roster(place, second, text)

    assert not put_roster(place, first.with_member("b", 1, "there"), text)
    assert not put_roster(place, first, nothing)
    assert roster_in(place)[0] == second
