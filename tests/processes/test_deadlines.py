"""Deadlines of calls within calls, between real processes."""

from __future__ import annotations

import pytest

import gradwire
from gradwire.errors import CallTimeout, RemoteError
from tests.processes import far


def test_many_instant_calls_within_calls_are_no_reason_to_give_up(workers):
    assert gradwire.rpc_sync("w1", far.recursive, args=(300,), timeout=60) == "w1"


def test_calls_within_calls_may_use_nearly_all_of_the_time(workers):
    """Four fifths of it, at the eighth level; a tenth less at each level would be four tenths."""
    assert gradwire.rpc_sync("w1", far.recursive, args=(8, 8.0), timeout=10) == "w1"


def test_the_worker_that_is_late_is_named(workers):
    """The innermost of three calls, from w2 to w1, was to answer within 60 s; it takes 12.

    Each level has a third of a second to tell the next, also where the cores are busy. Deeper ones
    are tested with a clock.
    """
    with pytest.raises(
        CallTimeout, match=r"w1 did not answer w2#\d+ .*had left \(60 s were asked for\)"
    ) as raised:
        gradwire.rpc_sync("w1", far.recursive, args=(2, 12.0), timeout=10)

    assert (raised.value.peer, raised.value.worker) == ("w1", "w2")


@pytest.mark.parametrize("timeout", [None, float("inf")])
def test_without_a_deadline_the_answer_is_waited_for(workers, timeout):
    assert gradwire.rpc_sync("w1", far.recursive, args=(2, 0.1), timeout=timeout) == "w1"


def test_an_error_that_came_a_long_way_is_short_and_names_where_it_began(workers):
    with pytest.raises(RemoteError, match=r"^Refused on w1: the culprit") as raised:
        gradwire.rpc_sync("w1", far.raises_below, args=(200,))

    assert len(str(raised.value)) < 20_000
    assert str(raised.value).rstrip().endswith("far.Refused: the culprit")
