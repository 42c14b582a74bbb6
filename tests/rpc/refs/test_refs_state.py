"""Nothing is forgotten too early, nothing is kept for ever: by example, then in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gradwire.errors import BadMessage, PeerLost, UsageError
from gradwire.ids import ForkId, RefId
from gradwire.rpc.refs.handles_state import (
    Action,
    AskMaker,
    Confirmed,
    ForgetValue,
    RefHandle,
    RefStatistics,
    SendAccept,
    SendDrop,
    SendFork,
    Unreachable,
    Verdict,
)
from gradwire.rpc.refs.state import RefTable

A, B, C, D = range(4)
EMPTY = RefStatistics(
    owned=0,
    shared=0,
    forks=0,
    tombstones=0,
    held=0,
    pending_users=0,
    pending_children=0,
    unacknowledged=0,
)


def fork_of(handle: RefHandle) -> ForkId:
    assert handle.fork is not None
    return handle.fork


def created(creator: RefTable, owner: RefTable, number: int = B) -> RefHandle:
    """A value that `creator` made on `owner`, everything about it said."""
    handle = creator.create(number)
    assert owner.owned.creation_arrived(handle.ref, fork_of(handle)) == []
    assert creator.creation_answered(fork_of(handle)) == [Confirmed(handle.ref, fork_of(handle))]
    return handle


def passed(
    giver: RefTable, handle: RefHandle, taker: RefTable, to: int
) -> tuple[RefHandle, list[Action]]:
    """The reference travels, nothing else does."""
    return taker.arrived(handle.ref, handle.owner, giver.pack(handle, to))


# 1. Creation on another worker.


def test_a_value_created_elsewhere_is_counted_on_arrival_and_forgotten_after_the_drop():
    a, b = RefTable(A), RefTable(B)
    handle = a.create(B)
    ref, fork = handle.ref, fork_of(handle)

    assert not a.is_confirmed(fork)
    assert b.owned.creation_arrived(ref, fork) == []
    assert b.owned.leaks() == [(ref, fork, A)]
    assert a.creation_answered(fork) == [Confirmed(ref, fork)]
    assert a.is_confirmed(fork)
    assert a.handle_ended(handle) == [SendDrop(ref, fork, B)]
    assert b.owned.drop_arrived(ref, fork) == [ForgetValue(ref)]
    a.acknowledged(SendDrop(ref, fork, B))
    assert a.statistics() == b.statistics() == EMPTY


def test_a_hold_that_ends_before_its_creation_is_answered_is_dropped_after_the_answer():
    a, b = RefTable(A), RefTable(B)
    handle = a.create(B)
    b.owned.creation_arrived(handle.ref, fork_of(handle))

    assert a.handle_ended(handle) == []
    assert a.pending()
    assert a.creation_answered(fork_of(handle)) == [SendDrop(handle.ref, fork_of(handle), B)]


def test_a_creating_call_that_never_left_leaves_nothing_behind():
    a = RefTable(A)
    handle = a.create(B)

    a.creation_undone(fork_of(handle))
    assert a.handle_ended(handle) == []
    assert a.statistics() == EMPTY


def test_a_creation_that_timed_out_is_asked_about_until_its_late_call_is_counted():
    a, b = RefTable(A), RefTable(B)
    handle = a.create(B)
    ref, fork = handle.ref, fork_of(handle)

    assert a.creation_timed_out(fork) == [SendFork(ref, fork, B, 0)]
    assert a.handle_ended(handle) == []
    assert b.owned.fork_arrived(ref, fork, A) is Verdict.NOT_YET
    assert a.fork_answered(fork, Verdict.NOT_YET) == []
    assert a.unacknowledged() == [SendFork(ref, fork, B, 0)]
    assert b.owned.creation_arrived(ref, fork) == []
    assert b.owned.fork_arrived(ref, fork, A) is Verdict.COUNTED
    assert a.fork_answered(fork, Verdict.COUNTED) == [SendDrop(ref, fork, B)]
    assert b.owned.drop_arrived(ref, fork) == [ForgetValue(ref)]


def test_the_answer_of_a_creation_that_timed_out_does_not_overtake_its_fork():
    a, b = RefTable(A), RefTable(B)
    handle = a.create(B)
    b.owned.creation_arrived(handle.ref, fork_of(handle))
    a.creation_timed_out(fork_of(handle))
    a.handle_ended(handle)

    assert a.creation_answered(fork_of(handle)) == []
    assert a.pending()


def test_a_creation_answered_in_time_does_not_time_out():
    a, b = RefTable(A), RefTable(B)
    handle = created(a, b)

    assert a.creation_timed_out(fork_of(handle)) == []


def test_a_creating_call_of_a_lost_worker_is_forgotten_as_it_arrives():
    a, b = RefTable(A), RefTable(B)
    handle = a.create(B)
    b.peer_lost(A)

    assert b.owned.creation_arrived(handle.ref, fork_of(handle)) == [ForgetValue(handle.ref)]
    assert b.statistics() == EMPTY


def test_a_creating_call_that_leaves_only_after_its_owner_was_lost_and_is_back_is_counted():
    a, b = RefTable(A), RefTable(B)
    handle = a.create(B)

    assert a.peer_lost(B) == []
    a.peer_joined(B)
    b.owned.creation_arrived(handle.ref, fork_of(handle))
    assert a.creation_answered(fork_of(handle)) == [Confirmed(handle.ref, fork_of(handle))]
    assert a.handle_ended(handle) == [SendDrop(handle.ref, fork_of(handle), B)]


def test_a_creating_call_that_was_lost_breaks_its_reference():
    a = RefTable(A)
    handle, gone = a.create(B), a.create(B)
    a.handle_ended(gone)

    assert a.creation_lost(fork_of(handle)) == [Unreachable(handle.ref, fork_of(handle), B)]
    assert a.creation_lost(fork_of(gone)) == []
    assert a.peer_lost(B) == []
    assert a.handle_ended(handle) == []
    assert a.statistics() == EMPTY


# 2. The owner's own holds.


def test_a_value_of_ones_own_lives_as_long_as_its_last_hold():
    b = RefTable(B)
    handle = b.create(B)
    again, _ = passed(b, handle, b, B)

    assert again == handle == RefHandle(handle.ref, B, None)
    assert b.handle_ended(handle) == []
    assert b.handle_ended(again) == [ForgetValue(handle.ref)]


def test_a_value_on_its_way_to_ourselves_is_kept():
    b = RefTable(B)
    handle = b.create(B)
    fork = b.pack(handle, B)

    assert b.handle_ended(handle) == []
    again, actions = b.arrived(handle.ref, B, fork)
    assert actions == []
    assert b.handle_ended(again) == [ForgetValue(handle.ref)]


# 3. The owner passes it on.


def test_what_the_owner_passes_on_is_counted_at_packing_and_confirmed_on_arrival():
    b, c = RefTable(B), RefTable(C)
    handle = b.create(B)
    fork = b.pack(handle, C)

    assert b.handle_ended(handle) == []
    assert b.owned.leaks() == [(handle.ref, fork, C)]
    theirs, actions = c.arrived(handle.ref, B, fork)
    assert actions == []
    assert c.is_confirmed(fork)
    assert c.handle_ended(theirs) == [SendDrop(handle.ref, fork, B)]
    assert b.owned.drop_arrived(handle.ref, fork) == [ForgetValue(handle.ref)]


def test_a_packing_that_is_undone_is_not_counted():
    a, b = RefTable(A), RefTable(B)
    own = b.create(B)
    fork = b.pack(own, C)
    assert b.handle_ended(own) == []
    assert b.pack_undone(own.ref, fork) == [ForgetValue(own.ref)]

    handle = created(a, b)
    child = a.pack(handle, C)
    assert a.handle_ended(handle) == []
    assert a.pack_undone(handle.ref, child) == [SendDrop(handle.ref, fork_of(handle), B)]


# 4. A user passes it to a third worker.


def test_a_third_worker_asks_the_owner_then_releases_the_one_who_passed_it():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    theirs, actions = passed(a, handle, c, C)
    ref, fork = handle.ref, fork_of(theirs)

    assert actions == [SendFork(ref, fork, B, 0)]
    assert a.handle_ended(handle) == []
    assert b.owned.fork_arrived(ref, fork, C) is Verdict.COUNTED
    assert c.fork_answered(fork, Verdict.COUNTED) == [Confirmed(ref, fork), SendAccept(fork, A)]
    assert a.accept_arrived(fork) == [SendDrop(ref, fork_of(handle), B)]
    assert a.accept_arrived(fork) == []
    c.acknowledged(SendAccept(fork, A))
    assert not c.pending()
    assert b.owned.drop_arrived(ref, fork_of(handle)) == []
    assert b.owned.leaks() == [(ref, fork, C)]


def test_a_third_worker_that_ends_its_hold_early_drops_only_what_was_counted():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    theirs, _ = passed(a, handle, c, C)
    fork = fork_of(theirs)

    assert c.handle_ended(theirs) == []
    assert c.unacknowledged() == [SendFork(handle.ref, fork, B, 0)]
    assert c.fork_answered(fork, Verdict.COUNTED) == [
        SendAccept(fork, A),
        SendDrop(handle.ref, fork, B),
    ]
    assert c.unacknowledged() == [SendAccept(fork, A), SendDrop(handle.ref, fork, B)]


def test_only_what_is_counted_may_be_passed_on():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    theirs, _ = passed(a, handle, c, C)

    with pytest.raises(UsageError, match=r"r0\.0 cannot be passed on before w1 has counted f0\.2"):
        c.pack(theirs, D)


# 5. and 6. Back to the owner, and to oneself.


def test_a_reference_that_comes_home_is_a_hold_and_accepted_at_once():
    a, b = RefTable(A), RefTable(B)
    handle = created(a, b)
    home, actions = passed(a, handle, b, B)

    assert home == RefHandle(handle.ref, B, None)
    (accept,) = actions
    assert isinstance(accept, SendAccept)
    assert accept.to == A
    assert a.handle_ended(handle) == []
    assert a.accept_arrived(accept.fork) == [SendDrop(handle.ref, fork_of(handle), B)]
    assert b.owned.drop_arrived(handle.ref, fork_of(handle)) == []
    assert b.handle_ended(home) == [ForgetValue(handle.ref)]


def test_a_reference_passed_to_oneself_is_a_fork_of_its_own_that_needs_no_accept():
    a, b = RefTable(A), RefTable(B)
    handle = created(a, b)
    again, actions = passed(a, handle, a, A)

    assert actions == [SendFork(handle.ref, fork_of(again), B, 0)]
    assert a.handle_ended(handle) == []
    assert b.owned.fork_arrived(handle.ref, fork_of(again), A) is Verdict.COUNTED
    assert a.fork_answered(fork_of(again), Verdict.COUNTED) == [
        Confirmed(handle.ref, fork_of(again)),
        SendDrop(handle.ref, fork_of(handle), B),
    ]


# 7. Several holds of one worker.


def test_each_arrival_is_a_fork_of_its_own():
    b, c = RefTable(B), RefTable(C)
    handle = b.create(B)
    one, _ = passed(b, handle, c, C)
    two, _ = passed(b, handle, c, C)

    assert one.fork != two.fork
    assert c.handle_ended(one) == [SendDrop(handle.ref, fork_of(one), B)]
    assert c.is_confirmed(fork_of(two))


# 8. Lost peers.


def test_what_a_lost_worker_held_is_dropped():
    a, b = RefTable(A), RefTable(B)
    handle = created(a, b)

    assert b.peer_lost(A) == [ForgetValue(handle.ref)]


def test_a_fork_of_a_lost_worker_is_not_counted():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    theirs, _ = passed(a, handle, c, C)
    b.peer_lost(C)

    assert b.owned.fork_arrived(handle.ref, fork_of(theirs), C) is Verdict.NEVER
    assert b.owned.leaks() == [(handle.ref, fork_of(handle), A)]


def test_a_reference_to_a_lost_owner_breaks_and_owes_nothing():
    a, b = RefTable(A), RefTable(B)
    handle = created(a, b)
    gone = created(a, b)
    a.handle_ended(gone)

    assert a.peer_lost(B) == [Unreachable(handle.ref, fork_of(handle), B)]
    assert a.peer_lost(B) == []
    assert not a.is_confirmed(fork_of(handle))
    assert not a.pending()
    with pytest.raises(
        PeerLost, match=r"r0\.0 cannot be passed on: w1 or the connection to it was"
    ):
        a.pack(handle, C)
    assert a.handle_ended(handle) == []
    assert a.statistics() == EMPTY


def test_a_fork_that_is_counted_after_its_holder_gave_it_up_is_dropped():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    theirs, actions = passed(a, handle, c, C)
    (asked,) = actions
    c.peer_lost(B)
    assert c.fork_unwanted(asked, Verdict.COUNTED) == []  # nothing is said to who is lost
    c.peer_joined(B)
    assert b.owned.fork_arrived(handle.ref, fork_of(theirs), C, asked.n) is Verdict.COUNTED

    assert c.fork_answered(fork_of(theirs), Verdict.COUNTED) == []
    assert c.fork_unwanted(asked, Verdict.COUNTED) == [SendDrop(handle.ref, fork_of(theirs), B)]
    b.owned.drop_arrived(handle.ref, fork_of(theirs))
    assert b.owned.leaks() == [(handle.ref, fork_of(handle), A)]


def test_a_fork_that_is_held_on_is_not_dropped_when_it_is_counted():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    theirs, (asked,) = passed(a, handle, c, C)
    c.fork_answered(fork_of(theirs), Verdict.COUNTED)

    assert c.fork_unwanted(asked, Verdict.COUNTED) == []


def test_a_reference_that_arrives_after_its_owner_was_lost_is_unreachable_and_frees_its_maker():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    c.peer_lost(B)
    theirs, actions = passed(a, handle, c, C)

    assert actions == [Unreachable(handle.ref, fork_of(theirs), B), SendAccept(fork_of(theirs), A)]


def test_a_waiting_reference_frees_its_maker_when_the_owner_is_lost():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    theirs, _ = passed(a, handle, c, C)
    c.handle_ended(theirs)

    assert c.peer_lost(B) == [SendAccept(fork_of(theirs), A)]
    assert c.peer_lost(A) == []
    assert c.statistics() == EMPTY


def test_children_with_a_lost_worker_are_waited_for_no_longer():
    a, b = RefTable(A), RefTable(B)
    handle = created(a, b)
    a.pack(handle, C)
    a.handle_ended(handle)

    assert a.peer_lost(C) == [SendDrop(handle.ref, fork_of(handle), B)]


def test_an_unreachable_reference_forgets_its_children():
    a, b = RefTable(A), RefTable(B)
    handle = created(a, b)
    child = a.pack(handle, C)
    a.peer_lost(B)

    assert a.statistics().pending_children == 0
    assert a.accept_arrived(child) == []


def test_a_reference_breaks_when_its_maker_was_lost_before_the_owner_counted_it():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    theirs, _ = passed(a, handle, c, C)
    ref, fork = handle.ref, fork_of(theirs)

    assert b.peer_lost(A) == [ForgetValue(ref)]
    assert b.owned.fork_arrived(ref, fork, C) is Verdict.NEVER
    c.peer_lost(A)
    assert c.fork_answered(fork, Verdict.NEVER) == [Unreachable(ref, fork, A)]
    assert c.handle_ended(theirs) == []
    assert c.statistics() == EMPTY


def test_a_number_that_joins_again_is_counted_again():
    b = RefTable(B)
    b.peer_lost(A)
    b.peer_joined(A)
    handle = created(RefTable(A, first=100), b)

    assert handle.ref == RefId(A, 100)
    assert b.owned.leaks() == [(handle.ref, fork_of(handle), A)]


# 9. Late and repeated messages.


def test_a_repeated_fork_does_not_revive_what_was_dropped():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    theirs, _ = passed(a, handle, c, C)
    ref, fork = handle.ref, fork_of(theirs)
    b.owned.fork_arrived(ref, fork, C)
    b.owned.drop_arrived(ref, fork)

    assert b.owned.fork_arrived(ref, fork, C) is Verdict.COUNTED
    assert b.owned.leaks() == [(ref, fork_of(handle), A)]
    assert b.statistics().tombstones == 1
    b.owned.forget_acked(C, 1)
    assert b.statistics().tombstones == 0
    assert b.owned.fork_arrived(ref, fork, C) is Verdict.NEVER
    assert b.owned.leaks() == [(ref, fork_of(handle), A)]
    assert b.owned.drop_arrived(ref, fork_of(handle)) == [ForgetValue(ref)]
    assert b.statistics() == EMPTY


def test_nothing_is_remembered_of_forks_that_were_counted_and_dropped():
    """However many there were of one value."""
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    for _ in range(10_000):
        theirs, (ask,) = passed(a, handle, c, C)
        b.owned.forget_acked(C, c.acked_below(B))
        assert b.owned.fork_arrived(ask.ref, ask.fork, C, ask.n) is Verdict.COUNTED
        c.fork_answered(ask.fork, Verdict.COUNTED)
        a.accept_arrived(ask.fork)
        c.acknowledged(SendAccept(ask.fork, A))
        c.handle_ended(theirs)
        b.owned.forget_acked(C, c.acked_below(B))
        b.owned.drop_arrived(ask.ref, ask.fork)
        c.acknowledged(SendDrop(ask.ref, ask.fork, B))

    assert b.statistics() == replace(EMPTY, owned=1, shared=1, forks=1)
    assert b.owned.leaks() == [(handle.ref, fork_of(handle), A)]
    assert (len(b.owned.values[handle.ref].requested), len(b.owned.requests)) == (0, 0)
    assert c.statistics() == EMPTY


def test_what_was_asked_before_an_open_question_may_still_be_repeated():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    asks = [passed(a, handle, c, C)[1][0] for _ in range(3)]
    for ask in asks[1:]:
        b.owned.fork_arrived(ask.ref, ask.fork, C, ask.n)
        c.fork_answered(ask.fork, Verdict.COUNTED)
    assert c.acked_below(B) == asks[0].n == 0
    assert c.acked_below(A) == 3

    c.fork_answered(asks[0].fork, Verdict.NEVER)

    assert c.acked_below(B) == 3


def test_a_worker_that_never_says_what_it_has_heard_pays_for_what_is_remembered():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    for _ in range(5):
        _, (ask,) = passed(a, handle, c, C)
        b.owned.fork_arrived(ask.ref, ask.fork, C, ask.n)
        b.owned.drop_arrived(ask.ref, ask.fork)

    assert (b.owned.forks_of(C), b.owned.forks_of(A)) == (5, 1)
    b.peer_lost(C)
    assert (b.owned.forks_of(C), b.statistics().tombstones) == (0, 0)


def test_the_owners_own_forks_leave_no_tombstones():
    b, c = RefTable(B), RefTable(C)
    handle = b.create(B)
    theirs, _ = passed(b, handle, c, C)
    b.owned.drop_arrived(handle.ref, fork_of(theirs))

    assert b.statistics().tombstones == 0


def test_messages_about_what_is_forgotten_change_nothing():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    home, _ = passed(a, handle, b, B)
    theirs, _ = passed(b, home, c, C)
    ref, fork = handle.ref, fork_of(theirs)
    b.handle_ended(home)
    b.owned.drop_arrived(ref, fork_of(handle))
    assert b.owned.drop_arrived(ref, fork) == [ForgetValue(ref)]

    assert b.owned.drop_arrived(ref, fork) == []
    assert b.owned.fork_arrived(ref, fork, C) is Verdict.NEVER
    assert b.accept_arrived(fork) == []
    b.acknowledged(SendAccept(fork, A))
    b.acknowledged(SendDrop(ref, fork, B))
    b.peer_lost(A)
    assert b.statistics() == EMPTY


def test_verdicts_on_what_is_no_longer_asked_change_nothing():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    theirs, _ = passed(a, handle, c, C)
    fork = fork_of(theirs)
    c.fork_answered(fork, Verdict.COUNTED)

    for verdict in Verdict:
        assert c.fork_answered(fork, verdict) == []
    assert c.is_confirmed(fork)
    assert a.fork_answered(fork, Verdict.COUNTED) == []
    assert a.creation_answered(fork) == []
    assert a.creation_timed_out(fork) == []


def test_a_fork_that_comes_before_its_value_is_asked_again():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = a.create(B)
    theirs, _ = passed(a, handle, c, C)
    ref, fork = handle.ref, fork_of(theirs)

    assert b.owned.fork_arrived(ref, fork, C) is Verdict.NOT_YET
    assert b.statistics() == EMPTY
    assert c.fork_answered(fork, Verdict.NOT_YET) == [AskMaker(fork, A)]
    assert c.maker_answered(fork, a.may_come(fork, C)) == []
    b.owned.creation_arrived(ref, fork_of(handle))
    assert b.owned.fork_arrived(ref, fork, C) is Verdict.COUNTED


def test_a_fork_whose_creating_call_went_with_its_connection_never_comes():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = a.create(B)
    theirs, _ = passed(a, handle, c, C)
    fork = fork_of(theirs)
    a.creation_lost(fork_of(handle))

    assert b.owned.fork_arrived(handle.ref, fork, C) is Verdict.NOT_YET
    assert a.may_come(fork, C) is Verdict.NEVER
    assert c.maker_answered(fork, Verdict.NEVER) == [
        Unreachable(handle.ref, fork, B),
        SendAccept(fork, A),
    ]
    assert c.maker_answered(fork, Verdict.NEVER) == []
    with pytest.raises(PeerLost, match="w1 or the connection to it was lost"):
        c.pack(theirs, D)


def test_a_maker_answers_only_who_has_its_fork():
    a, c = RefTable(A), RefTable(C)
    theirs, _ = passed(a, a.create(B), c, C)

    assert a.may_come(fork_of(theirs), C) is Verdict.NOT_YET
    assert a.may_come(fork_of(theirs), D) is Verdict.NEVER


def test_a_fork_whose_value_was_lost_on_the_way_never_comes():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = a.create(B)
    theirs, _ = passed(a, handle, c, C)
    b.peer_lost(A)

    assert b.owned.fork_arrived(handle.ref, fork_of(theirs), C) is Verdict.NEVER


def test_a_reference_that_comes_home_before_its_value_awaits_it():
    a, b = RefTable(A), RefTable(B)
    handle = a.create(B)
    home, actions = passed(a, handle, b, B)

    assert [type(action) for action in actions] == [SendAccept]
    assert b.handle_ended(home) == []
    assert b.owned.creation_arrived(handle.ref, fork_of(handle)) == []
    assert b.owned.drop_arrived(handle.ref, fork_of(handle)) == [ForgetValue(handle.ref)]


def test_a_fork_dropped_before_its_creation_arrives_is_not_counted_by_it():
    a, b = RefTable(A), RefTable(B)
    handle = a.create(B)
    home, _ = passed(a, handle, b, B)
    a.creation_timed_out(fork_of(handle))
    assert b.owned.fork_arrived(handle.ref, fork_of(handle), A) is Verdict.COUNTED
    assert b.owned.drop_arrived(handle.ref, fork_of(handle)) == []

    assert b.owned.creation_arrived(handle.ref, fork_of(handle)) == []
    assert b.owned.leaks() == []
    assert b.handle_ended(home) == [ForgetValue(handle.ref)]


def test_an_awaited_value_breaks_when_its_creator_is_lost():
    a, b = RefTable(A), RefTable(B)
    handle = a.create(B)
    home, _ = passed(a, handle, b, B)

    assert b.peer_lost(A) == [Unreachable(handle.ref, None, A)]
    with pytest.raises(PeerLost, match=r"r0\.0 cannot be passed on: w0 was lost before creating"):
        b.pack(home, C)
    assert b.handle_ended(home) == [ForgetValue(handle.ref)]
    assert b.statistics() == EMPTY


def test_a_fork_of_an_awaited_value_is_counted_even_when_its_creator_is_lost():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = a.create(B)
    home, _ = passed(a, handle, b, B)
    theirs, _ = passed(b, home, c, C)
    b.handle_ended(home)

    assert b.peer_lost(A) == [Unreachable(handle.ref, None, A)]
    again, _ = passed(c, theirs, c, C)
    assert b.owned.fork_arrived(handle.ref, fork_of(again), C) is Verdict.COUNTED


def test_a_reference_returned_by_a_lost_worker_is_unreachable():
    a, b = RefTable(A), RefTable(B)
    handle = a.create(B)
    b.peer_lost(A)
    home, actions = passed(a, handle, b, B)

    assert actions == [Unreachable(handle.ref, None, A)]
    assert b.handle_ended(home) == [ForgetValue(handle.ref)]


def test_a_repeated_fork_does_not_revive_a_value_that_was_returned_unreachable():
    a, b, c = RefTable(A), RefTable(B), RefTable(C)
    handle = created(a, b)
    theirs, _ = passed(a, handle, c, C)
    b.owned.fork_arrived(handle.ref, fork_of(theirs), C)
    b.owned.drop_arrived(handle.ref, fork_of(theirs))
    assert b.peer_lost(A) == [ForgetValue(handle.ref)]
    home, actions = passed(a, handle, b, B)
    assert actions == [Unreachable(handle.ref, None, A)]

    assert b.owned.fork_arrived(handle.ref, fork_of(theirs), C) is Verdict.NEVER
    assert b.owned.leaks() == []
    assert b.handle_ended(home) == [ForgetValue(handle.ref)]


def test_a_peer_that_passes_us_a_value_we_never_owned_is_told_so():
    b = RefTable(B)

    with pytest.raises(BadMessage, match=r"w2 passed r0\.7 to w1, which does not own it"):
        b.arrived(RefId(A, 7), B, ForkId(C, 8))


# 10. Shutting down, and looking in.


def test_abandoning_drops_what_is_counted_at_once_and_the_rest_when_it_is():
    a, b = RefTable(A), RefTable(B)
    handle = created(a, b)
    waiting = a.create(B)

    assert a.abandon() == [SendDrop(handle.ref, fork_of(handle), B)]
    a.acknowledged(SendDrop(handle.ref, fork_of(handle), B))
    assert a.pending()
    assert a.creation_answered(fork_of(waiting)) == [SendDrop(waiting.ref, fork_of(waiting), B)]
    a.acknowledged(SendDrop(waiting.ref, fork_of(waiting), B))
    assert not a.pending()
    assert a.handle_ended(handle) == []


def test_what_was_abandoned_cannot_be_passed_on():
    a, b = RefTable(A), RefTable(B)
    handle = created(a, b)
    a.abandon()

    with pytest.raises(
        UsageError, match=r"r0\.0 was dropped by w0 and cannot be passed on"
    ) as said:
        a.pack(handle, C)
    assert said.value.hint == "pass references on before shutdown()"


def test_a_table_prints_what_it_remembers():
    a, b = RefTable(A), RefTable(B)
    created(a, b)

    assert repr(b).startswith("<RefTable of w1: RefStatistics(owned=1, shared=1, forks=1, ")


# In any order: four workers, a network that repeats, loses and reorders, workers that die.


@dataclass(frozen=True)
class Message:
    """Something on its way; the fields not needed are None."""

    kind: str
    src: int
    dst: int
    ref: RefId | None = None
    fork: ForkId | None = None
    owner: int | None = None
    verdict: Verdict | None = None
    n: int = 0
    acked_below: int = 0

    @property
    def is_control(self) -> bool:
        return self.kind not in {"create", "answer", "passage", "loss"}


class Cluster:
    """Four tables, driven as a careful driver would, over a network that is told what to do."""

    def __init__(self) -> None:
        self.tables = {worker: RefTable(worker) for worker in (A, B, C, D)}
        self.dead: set[int] = set()
        self.knows_lost: set[tuple[int, int]] = set()
        self.net: list[Message] = []
        self.heard: list[Message] = []
        self.unsent: list[tuple[RefHandle, Message]] = []
        self.handles: list[tuple[int, RefHandle]] = []
        self.creating: list[tuple[int, ForkId]] = []
        self.calls: dict[ForkId, int] = {}
        self.unreachable: set[tuple[int, ForkId | RefId]] = set()

    # What users do.

    def create(self, worker: int, owner: int) -> None:
        handle = self.tables[worker].create(owner)
        if handle.fork is not None and (worker, owner) in self.knows_lost:
            return self.tables[worker].creation_undone(handle.fork)
        self.handles.append((worker, handle))
        if handle.fork is not None:
            self.creating.append((worker, handle.fork))
            self.calls[handle.fork] = owner
            self.send(Message("create", worker, owner, handle.ref, handle.fork))
        return None

    def pack(self, worker: int, handle: RefHandle, to: int) -> None:
        try:
            fork = self.tables[worker].pack(handle, to)
        except UsageError:
            assert handle.fork is not None
            assert not self.tables[worker].is_confirmed(handle.fork)
        except PeerLost:
            assert (worker, handle.fork or handle.ref) in self.unreachable
        else:
            passage = Message("passage", worker, to, handle.ref, fork, handle.owner)
            self.unsent.append((handle, passage))

    def unsend(self, pick: int) -> None:
        handle, passage = self.unsent.pop(pick % len(self.unsent))
        assert passage.fork is not None
        self.perform(passage.src, self.tables[passage.src].pack_undone(handle.ref, passage.fork))

    def send_packed(self, pick: int) -> None:
        _, passage = self.unsent[pick % len(self.unsent)]
        if (passage.src, passage.dst) in self.knows_lost:
            return self.unsend(pick)
        self.unsent.pop(pick % len(self.unsent))
        return self.send(passage)

    def end(self, pick: int) -> None:
        worker, handle = self.handles.pop(pick % len(self.handles))
        self.perform(worker, self.tables[worker].handle_ended(handle))

    def abandon(self, worker: int) -> None:
        mine = [handle for at, handle in self.handles if at == worker and handle.fork is not None]
        self.handles = [
            (at, handle) for at, handle in self.handles if at != worker or handle.fork is None
        ]
        self.perform(worker, self.tables[worker].abandon())
        for handle in mine:
            self.perform(worker, self.tables[worker].handle_ended(handle))

    def time_out(self, pick: int) -> None:
        worker, fork = self.creating.pop(pick % len(self.creating))
        self.perform(worker, self.tables[worker].creation_timed_out(fork))

    # What the network does.

    def send(self, message: Message) -> None:
        if message.dst not in self.dead:
            self.net.append(message)

    def deliver(self, message: Message) -> None:
        self.net.remove(message)
        if message.is_control:
            self.heard.append(message)
        table = self.tables[message.dst]
        serve = getattr(self, f"serve_{message.kind}")
        self.perform(message.dst, serve(table, message) or [])

    def serve_create(self, table: RefTable, got: Message) -> list[Action]:
        self.send(Message("answer", got.dst, got.src, fork=got.fork))
        return table.owned.creation_arrived(got.ref, got.fork)

    def serve_answer(self, table: RefTable, got: Message) -> list[Action]:
        return table.creation_answered(got.fork)

    def serve_passage(self, table: RefTable, got: Message) -> list[Action]:
        handle, actions = table.arrived(got.ref, got.owner, got.fork)
        self.handles.append((got.dst, handle))
        return actions

    def serve_loss(self, table: RefTable, got: Message) -> list[Action]:
        self.knows_lost.add((got.dst, got.src))
        for fork, owner in self.calls.items():
            if (fork.worker, owner) == (got.dst, got.src):
                self.perform(got.dst, table.creation_lost(fork))
        return table.peer_lost(got.src)

    def serve_fork(self, table: RefTable, got: Message) -> None:
        table.owned.forget_acked(got.src, got.acked_below)
        verdict = table.owned.fork_arrived(got.ref, got.fork, got.src, got.n)
        self.send(Message("verdict", got.dst, got.src, got.ref, got.fork, None, verdict, got.n))

    def serve_verdict(self, table: RefTable, got: Message) -> list[Action]:
        asked = SendFork(got.ref, got.fork, got.src, got.n)
        actions = table.fork_answered(got.fork, got.verdict)
        return actions + table.fork_unwanted(asked, got.verdict)

    def serve_expected(self, table: RefTable, got: Message) -> None:
        verdict = table.may_come(got.fork, got.src)
        self.send(Message("maker_verdict", got.dst, got.src, fork=got.fork, verdict=verdict))

    def serve_maker_verdict(self, table: RefTable, got: Message) -> list[Action]:
        return table.maker_answered(got.fork, got.verdict)

    def serve_accept(self, table: RefTable, got: Message) -> list[Action]:
        self.send(Message("accept_ack", got.dst, got.src, fork=got.fork))
        return table.accept_arrived(got.fork)

    def serve_accept_ack(self, table: RefTable, got: Message) -> None:
        table.acknowledged(SendAccept(got.fork, got.src))

    def serve_drop(self, table: RefTable, got: Message) -> list[Action]:
        self.send(Message("drop_ack", got.dst, got.src, got.ref, got.fork))
        table.owned.forget_acked(got.src, got.acked_below)
        return table.owned.drop_arrived(got.ref, got.fork)

    def serve_drop_ack(self, table: RefTable, got: Message) -> None:
        table.acknowledged(SendDrop(got.ref, got.fork, got.src))

    def perform(self, worker: int, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendFork(ref, fork, to, n):
                    acked_below = self.tables[worker].acked_below(to)
                    self.send(Message("fork", worker, to, ref, fork, n=n, acked_below=acked_below))
                case SendDrop(ref, fork, to):
                    acked_below = self.tables[worker].acked_below(to)
                    self.send(Message("drop", worker, to, ref, fork, acked_below=acked_below))
                case AskMaker(fork, to):
                    self.send(Message("expected", worker, to, fork=fork))
                case SendAccept(fork, to):
                    self.send(Message("accept", worker, to, fork=fork))
                case Unreachable(ref, fork, lost):
                    assert lost in self.dead, f"{action} though nobody died"
                    self.unreachable.add((worker, fork or ref))
                case ForgetValue(ref):
                    self.check_nobody_needs(ref)
                case Confirmed(_, fork):
                    assert any(handle.fork == fork for _, handle in self.handles)

    def repeat(self, pick: int) -> None:
        """The network finds an old copy of something it has delivered before."""
        self.send(self.heard[pick % len(self.heard)])

    def lose(self, pick: int) -> None:
        losable = [
            message
            for message in self.net
            if message.is_control or (message.src in self.dead and message.kind != "loss")
        ]
        if losable:
            self.net.remove(losable[pick % len(losable)])

    def resend(self, worker: int) -> None:
        self.perform(worker, self.tables[worker].unacknowledged())

    def kill(self, worker: int) -> None:
        self.dead.add(worker)
        self.net = [message for message in self.net if message.dst != worker]
        self.unsent = [(handle, packed) for handle, packed in self.unsent if packed.src != worker]
        self.handles = [(at, handle) for at, handle in self.handles if at != worker]
        self.creating = [(at, fork) for at, fork in self.creating if at != worker]
        for survivor in self.tables.keys() - self.dead:
            self.send(Message("loss", worker, survivor))

    # What must hold.

    def check_nobody_needs(self, ref: RefId) -> None:
        on_the_way = [*self.net, *(passage for _, passage in self.unsent)]
        for message in on_the_way:
            carried = message.kind in {"create", "passage"} and message.ref == ref
            excused = {message.src, message.dst} & self.dead
            assert not carried or excused, f"{ref} is forgotten before {message}"
        for worker, handle in self.handles:
            assert handle.ref != ref or self.is_excused(worker, handle), (
                f"w{worker} still has {handle}"
            )

    def is_excused(self, worker: int, handle: RefHandle) -> bool:
        """Unreachable, or soon so: its maker died before the owner had counted it."""
        if (worker, handle.fork or handle.ref) in self.unreachable:
            return True
        if handle.fork is None or self.tables[worker].is_confirmed(handle.fork):
            return False
        return handle.fork.worker in self.dead

    def drain(self) -> None:
        """A fair network: everything sent arrives, what is not heard is sent again."""
        while self.unsent:
            self.send_packed(0)
        for _ in range(20):
            while self.net:
                self.deliver(self.net[0])
            for worker in self.alive():
                self.resend(worker)
            if not self.net:
                return
        raise AssertionError(f"never quiet: {self.net}")

    def alive(self) -> list[int]:
        return sorted(self.tables.keys() - self.dead)

    def check_end(self) -> None:
        """Old copies of everything change nothing, neither while holds live nor after."""
        for check in (self.check_settled, self.check_empty):
            self.drain()
            check()
            for old in self.heard.copy():
                self.send(old)
            self.drain()
            check()
            while self.handles:
                self.end(0)

    def check_settled(self) -> None:
        for worker in self.alive():
            assert not self.tables[worker].pending()
        counted = Counter(
            (fork, holder)
            for worker in self.alive()
            for _, fork, holder in self.tables[worker].owned.leaks()
        )
        for worker, handle in self.handles:
            if handle.fork is not None and (worker, handle.fork) not in self.unreachable:
                assert self.tables[worker].is_confirmed(handle.fork)
                assert counted.pop((handle.fork, worker)) == 1
        assert not counted, "counted, but nobody holds it"

    def check_empty(self) -> None:
        for worker in self.alive():
            assert self.tables[worker].statistics() == EMPTY
            assert self.tables[worker].owned.leaks() == []


picks = st.integers(0, 1 << 16)


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in any order: nothing needed is forgotten, in the end nothing is left."""

    @initialize()
    def start(self) -> None:
        self.cluster = Cluster()

    def some(self, pick: int) -> int:
        alive = self.cluster.alive()
        return alive[pick % len(alive)]

    @rule(at=picks, owner=st.sampled_from((A, B, C, D)))
    def create(self, at: int, owner: int) -> None:
        self.cluster.create(self.some(at), owner)

    @precondition(lambda self: self.cluster.handles)
    @rule(pick=picks, to=st.sampled_from((A, B, C, D)), sent=st.booleans())
    def pass_on(self, pick: int, to: int, sent: bool) -> None:
        worker, handle = self.cluster.handles[pick % len(self.cluster.handles)]
        self.cluster.pack(worker, handle, to)
        if sent and self.cluster.unsent:
            self.cluster.send_packed(-1)

    @precondition(lambda self: self.cluster.unsent)
    @rule(pick=picks)
    def send_packed(self, pick: int) -> None:
        self.cluster.send_packed(pick)

    @precondition(lambda self: self.cluster.unsent)
    @rule(pick=picks)
    def unsend(self, pick: int) -> None:
        self.cluster.unsend(pick)

    @precondition(lambda self: self.cluster.handles)
    @rule(pick=picks)
    def end(self, pick: int) -> None:
        self.cluster.end(pick)

    @precondition(lambda self: self.cluster.creating)
    @rule(pick=picks)
    def time_out(self, pick: int) -> None:
        self.cluster.time_out(pick)

    @rule(at=picks)
    def abandon(self, at: int) -> None:
        self.cluster.abandon(self.some(at))

    @precondition(lambda self: self.cluster.net)
    @rule(some=st.lists(picks, min_size=1, max_size=6))
    def deliver(self, some: list[int]) -> None:
        for pick in some:
            if self.cluster.net:
                self.cluster.deliver(self.cluster.net[pick % len(self.cluster.net)])

    @precondition(lambda self: self.cluster.heard)
    @rule(pick=picks)
    def repeat(self, pick: int) -> None:
        self.cluster.repeat(pick)

    @precondition(lambda self: self.cluster.net)
    @rule(pick=picks)
    def lose(self, pick: int) -> None:
        self.cluster.lose(pick)

    @rule(at=picks)
    def resend(self, at: int) -> None:
        self.cluster.resend(self.some(at))

    @precondition(lambda self: len(self.cluster.dead) < 2)
    @rule(at=picks)
    def kill(self, at: int) -> None:
        self.cluster.kill(self.some(at))

    def teardown(self) -> None:
        self.cluster.check_end()


@pytest.mark.slow
class TestAnyOrder(AnyOrder.TestCase):
    settings = settings(
        max_examples=300,
        stateful_step_count=60,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# The same moves by chance: no shrinking, but far more of them, and they die where it hurts.


def someone(cluster: Cluster, chance: Random) -> int:
    return chance.choice(cluster.alive())


def pass_on(cluster: Cluster, chance: Random) -> None:
    if cluster.handles:
        cluster.pack(*chance.choice(cluster.handles[-4:]), chance.randrange(4))
    if cluster.unsent and chance.random() < 0.8:
        cluster.send_packed(chance.randrange(1 << 16))


def kill(cluster: Cluster, chance: Random) -> None:
    if len(cluster.dead) < 2:
        cluster.kill(someone(cluster, chance))


MOVES = {  # what, and how often
    lambda c, chance: c.create(someone(c, chance), chance.randrange(4)): 3,
    pass_on: 6,
    lambda c, chance: c.unsent and c.unsend(chance.randrange(1 << 16)): 1,
    lambda c, chance: c.handles and c.end(chance.randrange(1 << 16)): 5,
    lambda c, chance: c.creating and c.time_out(chance.randrange(1 << 16)): 1,
    lambda c, chance: c.net and c.deliver(chance.choice(c.net)): 14,
    lambda c, chance: c.heard and c.repeat(chance.randrange(1 << 16)): 2,
    lambda c, chance: c.lose(chance.randrange(1 << 16)): 2,
    lambda c, chance: c.resend(someone(c, chance)): 2,
    lambda c, chance: c.abandon(someone(c, chance)): 0.3,
    kill: 0.5,
}


def walk(seed: int) -> None:
    cluster, chance = Cluster(), Random(seed)
    moves = chance.choices(list(MOVES), list(MOVES.values()), k=chance.randrange(10, 100))
    for move in moves:
        move(cluster, chance)
    cluster.check_end()


@pytest.mark.slow
def test_nothing_is_lost_or_left_on_many_random_walks():
    for seed in range(4000):
        try:
            walk(seed)
        except BaseException as error:
            error.add_note(f"on the walk of seed {seed}")
            raise
