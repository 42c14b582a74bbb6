"""The events of a profile as data, and the clock that they are shown on."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gradwire.compat.profiles.events import (
    LONGEST_NAME,
    MOST_EVENTS,
    CallBounds,
    RemoteEvent,
    ahead,
    moved,
    named_after,
    pack_events,
    unpack_events,
)
from gradwire.errors import BadMessage

EVENT = RemoteEvent("aten::add", 1, 7, 10, 20, shapes=[[2, 3], []], memory=-8)


def test_events_arrive_as_they_left():
    assert unpack_events(pack_events([EVENT])) == [EVENT]
    assert unpack_events(pack_events([])) == []


def test_of_too_many_events_the_first_ones_are_sent_and_the_rest_is_counted():
    *kept, last = unpack_events(pack_events([EVENT] * (MOST_EVENTS + 5)))

    assert (len(kept), last.name) == (MOST_EVENTS, "5 more events were left out")


@pytest.mark.parametrize(
    "said",
    [
        [replace(EVENT, name="x" * (LONGEST_NAME + 1))],
        [replace(EVENT, node=-1)],
        [replace(EVENT, start=-1)],
        [replace(EVENT, end=1 << 62)],
        [replace(EVENT, start=21)],
        [replace(EVENT, shapes=[[1] * 65])],
        [["aten::add", 1, 7, 1.5, 20]],
        [EVENT] * (MOST_EVENTS + 2),
        {"name": 1},
    ],
    ids=["name", "node", "start", "end", "backwards", "shape", "kind", "number", "form"],
)
def test_what_a_peer_must_not_say_is_refused(said):
    with pytest.raises(BadMessage, match="event"):
        unpack_events(msgspec.msgpack.encode(said))


@pytest.mark.parametrize("said", [b"\xff", b"", None, "text"])
def test_what_is_no_list_of_events_is_refused(said):
    with pytest.raises(BadMessage, match="events of a profile are not as agreed"):
        unpack_events(said)


def test_an_event_is_named_after_the_call_as_torch_names_it():
    named = named_after("rpc_sync#f(w0 -> w1)", EVENT)

    assert named.name == "rpc_sync#f(w0 -> w1)#remote_op: aten::add"
    assert replace(named, name=EVENT.name) == EVENT


def test_a_name_cannot_break_the_file_that_torch_writes_it_to():
    said = replace(EVENT, name='a"},\n{"\\' + "x" * LONGEST_NAME)
    name = named_after("call", said).name

    assert json.loads(f'{{"name": "{name}"}}') == {"name": name}
    assert len(name) == LONGEST_NAME


def test_on_one_clock_times_stay_as_they_are():
    assert ahead([CallBounds(100, 200, 130, 170), CallBounds(300, 400, 301, 399)]) == 0


def test_on_two_clocks_each_function_runs_between_its_call_and_its_answer():
    # 30 around the second call leave the least room: between 1010 and 1030 ahead.
    assert ahead([CallBounds(100, 200, 1120, 1150), CallBounds(300, 340, 1310, 1330)]) == -1000
    assert ahead([CallBounds(0, 9, 50, 80)]) is None


@given(st.integers(0, 1 << 40), st.lists(st.tuples(*[st.integers(1, 1 << 20)] * 4), min_size=1))
def test_any_offset_of_a_clock_is_found_within_what_the_calls_tell(offset, pieces):
    spans, now = [], 0
    for wait, way, work, back in pieces:
        began = now + wait
        first, last = began + way, began + way + work
        now = last + back
        spans.append(CallBounds(began, now, first + offset, last + offset))
    found = ahead(spans)

    assert found is not None
    for span in spans:
        assert span.began <= span.first + found <= span.last + found <= span.ended


def test_an_event_is_moved_but_not_before_the_beginning_of_time():
    assert (moved(EVENT, 5).start, moved(EVENT, 5).end) == (15, 25)
    assert (moved(EVENT, -15).start, moved(EVENT, -15).end) == (0, 5)
