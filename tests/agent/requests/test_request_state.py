"""Requests in flight, in any order of answers, deadlines and losses."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gradwire.agent.requests.state import Pending, RequestTable


def pending(deadline=10.0, peer=1, slot=None):
    return Pending(peer, "torch.sin", 0.0, deadline, slot)


def test_an_answer_finds_its_request_once():
    table = RequestTable()
    n = table.opened(pending(slot="mine"))

    assert table.answered(n).slot == "mine"
    assert table.answered(n) is None
    assert len(table) == 0


def test_a_deadline_takes_only_the_late_requests_out():
    table = RequestTable()
    early, late = table.opened(pending(deadline=1.0)), table.opened(pending(deadline=2.0))

    assert [n for n, *_ in table.passed(1.5)] == [early]
    assert table.next_deadline() == 2.0
    assert [n for n, *_ in table.passed(2.0)] == [late]
    assert table.next_deadline() is None


def test_a_lost_channel_fails_what_went_over_it_and_nothing_else():
    table, one, other = RequestTable(), object(), object()
    first, second, unsent = (table.opened(pending()) for _ in range(3))
    table.left(first, one)
    table.left(second, other)

    assert [n for n, *_ in table.channel_lost(one)] == [first]
    assert table.answered(second) is not None
    assert table.answered(unsent) is not None


def test_a_request_answered_before_it_was_noted_as_sent_leaves_nothing_behind():
    table, channel = RequestTable(), object()
    n = table.opened(pending())
    table.answered(n)
    table.left(n, channel)

    assert table.channel_lost(channel) == []


def test_a_request_that_nobody_wants_is_taken_out_once_with_the_channel_it_went_over():
    table, slot, channel = RequestTable(), object(), object()
    n = table.opened(pending(slot=slot))
    other = table.opened(pending(slot=object()))
    table.left(n, channel)

    (taken,) = table.withdrawn(slot)
    assert (taken.n, taken.pending.slot, taken.via) == (n, slot, channel)
    assert table.withdrawn(slot) == []
    assert table.answered(n) is None
    assert table.answered(other) is not None


def test_what_was_made_for_an_errand_ends_with_it():
    table, inbound = RequestTable(), object()
    made = table.opened(replace(pending(), inbound=inbound))
    free = table.opened(pending())

    assert [n for n, *_ in table.made_for(inbound)] == [made]
    assert table.made_for(inbound) == []
    assert table.answered(free) is not None


class EveryRequestEndsOnce(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table, self.now, self.open, self.ended = RequestTable(), 0.0, set(), set()
        self.channels = ["a", "b", "c"]

    def end(self, numbers):
        for n in numbers:
            assert n in self.open, "ended without being open"
            self.open.remove(n)
            self.ended.add(n)

    @rule(seconds=st.floats(0.1, 5), channel=st.sampled_from("abc"), sent=st.booleans())
    def opens(self, seconds, channel, sent):
        n = self.table.opened(pending(deadline=self.now + seconds))
        self.open.add(n)
        if sent:
            self.table.left(n, channel)

    @rule(data=st.data())
    def answers(self, data):
        numbers = sorted(self.open | self.ended)
        if numbers:
            n = data.draw(st.sampled_from(numbers))
            found = self.table.answered(n)
            assert (found is not None) == (n in self.open)
            self.end([n] if found is not None else [])

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds):
        self.now += seconds
        self.end(n for n, *_ in self.table.passed(self.now))
        following = self.table.next_deadline()
        assert following is None or following > self.now

    @rule(channel=st.sampled_from("abc"))
    def loses(self, channel):
        self.end(n for n, *_ in self.table.channel_lost(channel))

    @invariant()
    def the_table_holds_what_is_open(self):
        assert len(self.table) == len(self.open)


TestEveryRequestEndsOnce = EveryRequestEndsOnce.TestCase
