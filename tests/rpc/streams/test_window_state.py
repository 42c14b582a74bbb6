"""How far a generator may be ahead of its reader: decided without threads or messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import BadMessage, UsageError
from gradwire.rpc.streams.window_state import ProductionState, ReaderState, check_ahead


def test_it_makes_what_may_be_ahead_and_stops():
    state = ProductionState(ahead=2)

    assert state.begins()
    assert not state.begins(), "one thread at a time"
    state.made = 2
    assert not state.may_make()
    assert not state.goes_on()
    state.asked(1)
    assert state.begins()


def test_to_close_is_work_until_it_has_ended():
    state = ProductionState(ahead=1)
    state.made, state.is_closing = 1, True

    assert not state.may_make()
    assert state.begins()
    assert state.goes_on()
    state.has_ended = True
    assert not state.goes_on()
    assert not state.begins()


@pytest.mark.parametrize("read", [1, 4])
def test_a_reader_cannot_have_read_what_was_not_made_nor_less_than_before(read):
    state = ProductionState(ahead=4)
    state.made = 3
    state.asked(2)

    with pytest.raises(BadMessage, match=f"of 3 items of a stream, {read} were read"):
        state.asked(read)


def test_more_than_was_asked_for_is_refused_and_so_is_nothing():
    state = ReaderState(ahead=2)

    with pytest.raises(BadMessage, match="3 items, which is more than may be ahead"):
        state.came(3, is_last=False)
    with pytest.raises(BadMessage, match="no item, though it goes on"):
        state.came(0, is_last=False)
    state.came(2, is_last=False)
    assert not state.should_ask()
    state.read = 1
    assert state.should_ask()


@pytest.mark.parametrize("ahead", [0, -1, True, 1.0, None, 1 << 17])
def test_ahead_is_a_number_of_items(ahead):
    with pytest.raises(UsageError, match=r"ahead="):
        check_ahead(ahead)


@given(st.integers(1, 9), st.lists(st.integers(1, 9), max_size=50))
def test_whatever_the_batches_nothing_is_stuck_and_no_more_is_ahead(ahead, batches):
    """The reader asks when it may; then at least one item can be made."""
    reader, production = ReaderState(ahead), ProductionState(ahead)
    sent = 0
    for most in batches:
        while not reader.should_ask():
            reader.read += 1
        production.asked(reader.read)
        if production.begins():
            while production.may_make():
                production.made += 1
            assert not production.goes_on()
        assert production.made - reader.read <= ahead
        count = min(most, production.made - sent)
        assert count > 0
        reader.came(count, is_last=False)
        sent += count
