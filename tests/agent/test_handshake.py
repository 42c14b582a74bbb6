"""Who is let in."""

from __future__ import annotations

import msgspec
import pytest

from gradwire.agent.directory import Directory, WorkerInfo
from gradwire.agent.handshake import check, hello
from gradwire.agent.members_state import Member
from gradwire.errors import BadMessage

MEMBERS = [(WorkerInfo("a", 0), "memory://a"), (WorkerInfo("b", 1), "memory://b")]
A, B = Directory(0, MEMBERS), Directory(1, MEMBERS)


def test_two_workers_of_one_job_know_each_other():
    assert check(hello(A, "job", "b"), B, "job", dialled=None).id == 0
    assert check(hello(B, "job", "a"), A, "job", dialled=1).id == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"protocol": 99}, "a speaks protocol 99, this worker 1"),
        ({"job": "other"}, "a belongs to another job"),
        ({"to": "c"}, "a looked for c and found b"),
        ({"worker": 1}, "a claims the number of b"),
        ({"name": "b"}, "b claims the number of a"),
    ],
)
def test_anyone_else_is_refused_by_name(change, text):
    said = msgspec.structs.replace(hello(A, "job", "b"), **change)

    with pytest.raises(BadMessage, match=text):
        B.admit(check(said, B, "job", dialled=None))


def test_an_address_that_is_somebody_elses_is_noticed():
    with pytest.raises(BadMessage, match="b answered at the address of a"):
        check(hello(B, "job", "a"), A, "job", dialled=0)


def test_in_an_open_world_a_stranger_introduces_itself():
    ours = Directory(0, [Member(0, "a", "memory://a", 1)], is_open=True)
    theirs = Directory(3, [Member(3, "c", "memory://c", 2, "a note")], is_open=True)

    assert ours.admit(check(hello(theirs, "job", "a"), ours, "job", dialled=None)) == []

    assert (ours.address(3), ours.life(3), ours.note(3)) == ("memory://c", 2, "a note")
    assert ours.find("c") == WorkerInfo("c", 3)


def test_another_life_at_the_same_address_is_noticed():
    knows = [Member(0, "a", "memory://a", 1), Member(1, "b", "memory://b", 2)]
    later = Directory(1, [knows[0], Member(1, "b", "memory://b", 9)], is_open=True)

    with pytest.raises(BadMessage, match="b is in another life than the one that was dialled"):
        check(hello(later, "job", "a"), Directory(0, knows, is_open=True), "job", dialled=1)
