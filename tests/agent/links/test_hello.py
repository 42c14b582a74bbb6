"""Who is let in, of those that have proven to belong to the job."""

from __future__ import annotations

import msgspec
import pytest

from gradwire.agent.links.handshake import check_hello
from gradwire.agent.messages import Hello
from gradwire.agent.peers.directory import Directory, Member, WorkerInfo
from gradwire.errors import BadMessage
from gradwire.ids import context_id, first_of

MEMBERS = [Member(0, "a", "memory://a"), Member(1, "b", "memory://b")]
A, B = Directory(0, MEMBERS), Directory(1, MEMBERS)


def hello(directory):
    me = directory.myself
    return Hello(me.id, me.incarnation, me.address, me.note)


def test_two_workers_of_one_job_know_each_other():
    assert check_hello(hello(A), "a", B, dialled=None).id == 0
    assert check_hello(hello(B), "b", A, dialled=1).id == 1


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
        B.admit(check_hello(said, name, B, dialled=None))


def test_a_number_that_is_somebody_elses_is_noticed():
    with pytest.raises(BadMessage, match="a says that it is not number 0, but 1"):
        check_hello(hello(B), "a", A, dialled=0)


def test_in_an_open_world_a_newcomer_introduces_itself():
    ours = Directory(0, [Member(0, "a", "memory://a", 1)], is_open=True)
    theirs = Directory(3, [Member(3, "c", "memory://c", 2, "a note")], is_open=True)

    assert ours.admit(check_hello(hello(theirs), "c", ours, dialled=None)) == []

    assert (ours.address(3), ours.incarnation(3), ours.note(3)) == ("memory://c", 2, "a note")
    assert ours.find("c") == WorkerInfo("c", 3)


def test_another_incarnation_at_the_same_address_is_noticed():
    knows = [Member(0, "a", "memory://a", 1), Member(1, "b", "memory://b", 2)]
    later = Directory(1, [knows[0], Member(1, "b", "memory://b", 9)], is_open=True)

    with pytest.raises(BadMessage, match="b is another incarnation than the one that was dialled"):
        check_hello(hello(later), "b", Directory(0, knows, is_open=True), dialled=1)


def test_a_later_incarnation_of_a_known_worker_is_let_in():
    ours = Directory(0, [Member(0, "a", "memory://a"), Member(1, "b", "memory://b")])
    theirs = Directory(1, [Member(0, "a", "memory://a"), Member(1, "b", "memory://c", 2)])
    assert not ours.had_earlier(1)

    assert ours.admit(check_hello(hello(theirs), "b", ours, dialled=None)) == [1]

    assert (ours.address(1), ours.incarnation(1)) == ("memory://c", 2)
    assert ours.had_earlier(1)


BEGAN = "was opened before this incarnation of b began"
EARLIER = "belongs to an earlier incarnation of a"


def test_an_incarnation_takes_part_in_what_is_younger_than_itself():
    members = [Member(0, "a", "memory://a"), Member(1, "b", "memory://b", 1), Member(2, "c", "")]
    born, other = Directory(1, members), Directory(2, members)

    def of_a(*counts):
        return [born.maybe_too_old(context_id(0, n)) for n in counts]

    assert of_a(7) == [BEGAN]  # it does not know yet
    assert born.maybe_too_old(context_id(1, 0)) is None
    assert other.maybe_too_old(context_id(0, 0)) is None
    born.greeted(0, 0, 7)
    born.greeted(0, 0, 9)
    assert of_a(6, 7, 8) == [BEGAN, None, None]


def test_what_an_earlier_incarnation_has_opened_is_over_for_all():
    members = [Member(0, "a", "memory://a"), Member(1, "b", "memory://b")]
    directory = Directory(1, members)
    directory.greeted(0, 0, 0)
    assert directory.maybe_too_old(context_id(0, 5)) is None

    directory.admit(Member(0, "a", "memory://c", 1))
    directory.greeted(0, 1, 0)

    assert directory.maybe_too_old(context_id(0, 5)) == EARLIER
    assert directory.maybe_too_old(context_id(0, first_of(1))) is None
