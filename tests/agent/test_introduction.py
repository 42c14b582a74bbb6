"""Who is let in, of those that have proven to belong to the job."""

from __future__ import annotations

import msgspec
import pytest

from gradwire.agent.directory import Directory, WorkerInfo
from gradwire.agent.introduction import check, hello
from gradwire.agent.members_state import Member
from gradwire.errors import BadMessage
from gradwire.ids import context_id

MEMBERS = [(WorkerInfo("a", 0), "memory://a"), (WorkerInfo("b", 1), "memory://b")]
A, B = Directory(0, MEMBERS), Directory(1, MEMBERS)


def test_two_workers_of_one_job_know_each_other():
    assert check(hello(A), "a", B, dialled=None).id == 0
    assert check(hello(B), "b", A, dialled=1).id == 1


@pytest.mark.parametrize(
    ("change", "name", "text"),
    [
        ({"worker": 1}, "a", "a claims the number of b"),
        ({}, "b", "b claims the number of a"),
        ({}, "c", "c claims the number of a"),
    ],
)
def test_anyone_else_is_refused_by_name(change, name, text):
    said = msgspec.structs.replace(hello(A), **change)

    with pytest.raises(BadMessage, match=text):
        B.admit(check(said, name, B, dialled=None))


def test_a_number_that_is_somebody_elses_is_noticed():
    with pytest.raises(BadMessage, match="a says that it is not number 0, but 1"):
        check(hello(B), "a", A, dialled=0)


def test_in_an_open_world_a_newcomer_introduces_itself():
    ours = Directory(0, [Member(0, "a", "memory://a", 1)], is_open=True)
    theirs = Directory(3, [Member(3, "c", "memory://c", 2, "a note")], is_open=True)

    assert ours.admit(check(hello(theirs), "c", ours, dialled=None)) == []

    assert (ours.address(3), ours.life(3), ours.note(3)) == ("memory://c", 2, "a note")
    assert ours.find("c") == WorkerInfo("c", 3)


def test_another_life_at_the_same_address_is_noticed():
    knows = [Member(0, "a", "memory://a", 1), Member(1, "b", "memory://b", 2)]
    later = Directory(1, [knows[0], Member(1, "b", "memory://b", 9)], is_open=True)

    with pytest.raises(BadMessage, match="b is in another life than the one that was dialled"):
        check(hello(later), "b", Directory(0, knows, is_open=True), dialled=1)


def test_a_later_life_of_a_known_worker_is_let_in_and_told_where_contexts_begin():
    ours = Directory(0, [Member(0, "a", "memory://a"), Member(1, "b", "memory://b")])
    theirs = Directory(1, [Member(0, "a", "memory://a"), Member(1, "b", "memory://c", 2)])
    ours.contexts_opened = lambda: 7
    first = hello(ours, 1)

    assert ours.admit(check(hello(theirs, 0), "b", ours, dialled=None)) == [1]

    assert (ours.address(1), ours.life(1)) == ("memory://c", 2)
    assert (first.since, hello(ours, 1).since) == (0, 7)


def test_a_life_takes_part_in_what_is_younger_than_itself():
    members = [Member(0, "a", "memory://a"), Member(1, "b", "memory://b", 1), Member(2, "c", "")]
    born, other = Directory(1, members), Directory(2, members)

    assert not born.may_share(context_id(0, 7))  # it does not know yet
    assert born.may_share(context_id(1, 0))
    assert other.may_share(context_id(0, 0))
    born.greeted(0, 0, 7)
    born.greeted(0, 0, 9)
    assert [born.may_share(context_id(0, n)) for n in (6, 7, 8)] == [False, True, True]
    born.greeted(0, 1, 0)
    assert born.may_share(context_id(0, 1))
