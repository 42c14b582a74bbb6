"""Requests in flight, in any order of answers, deadlines and losses."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from gradwire.agent.requests.promise import Pending, RequestTable


def pending(deadline=10.0, peer=1, promise=None, via=None):
    return Pending(peer, "torch.sin", 0.0, deadline, promise, via=via)


def numbers(taken):
    return [pending.n for pending in taken]


def test_an_answer_finds_its_request_once():
    table = RequestTable()
    n = table.opened(pending(promise="mine"))

    assert table.answered(n).promise == "mine"
    assert table.answered(n) is None
    assert len(table) == 0


def test_a_deadline_takes_only_the_late_requests_out():
    table = RequestTable()
    early, late = table.opened(pending(deadline=1.0)), table.opened(pending(deadline=2.0))

    taken, following = table.expire(1.5)
    assert (numbers(taken), following) == ([early], 2.0)
    taken, following = table.expire(2.0)
    assert (numbers(taken), following) == ([late], None)


def test_a_lost_channel_fails_what_went_over_it_and_nothing_else():
    table, one, other = RequestTable(), object(), object()
    first, second = table.opened(pending(via=one)), table.opened(pending(via=other))
    unsent = table.opened(pending())

    assert numbers(table.channel_lost(one)) == [first]
    assert table.answered(second) is not None
    assert table.answered(unsent) is not None


def test_what_was_made_for_an_inbound_request_ends_with_it():
    table, inbound = RequestTable(), object()
    made = table.opened(replace(pending(), inbound=inbound))
    free = table.opened(pending())

    assert numbers(table.made_for({inbound})) == [made]
    assert table.made_for({inbound}) == []
    assert table.answered(free) is not None


def test_an_answer_is_late_if_nobody_had_one_and_only_then():
    table, inbound = RequestTable(), object()
    expired, answered = table.opened(pending(deadline=1.0)), table.opened(pending())
    made, cancelled = table.opened(replace(pending(), inbound=inbound)), table.opened(pending())
    table.expire(1.0)
    table.answered(answered)
    table.made_for({inbound})

    assert [pending.n for pending in table.cancelled(cancelled)] == [cancelled]
    assert table.cancelled(answered) == []
    assert [table.is_late(n) for n in (expired, made, cancelled)] == [True] * 3
    assert not any(table.is_late(n) for n in (expired, answered, made, cancelled))


def test_what_was_given_up_and_never_answered_does_not_pile_up():
    table = RequestTable()
    for _ in range(100_000):
        table.cancelled(table.opened(pending()))

    assert len(table._given_up) <= 1 << 14
    assert table.is_late(100_000)


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
        via = channel if sent else None
        self.open.add(self.table.opened(pending(deadline=self.now + seconds, via=via)))

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
        late, following = self.table.expire(self.now)
        self.end(numbers(late))
        assert following is None or following > self.now

    @rule(channel=st.sampled_from("abc"))
    def loses(self, channel):
        self.end(numbers(self.table.channel_lost(channel)))

    @invariant()
    def the_table_holds_what_is_open(self):
        assert len(self.table) == len(self.open)


TestEveryRequestEndsOnce = EveryRequestEndsOnce.TestCase
