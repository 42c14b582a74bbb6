"""Who is let in."""

from __future__ import annotations

import msgspec
import pytest

from gradwire.agent.directory import Directory, WorkerInfo
from gradwire.agent.handshake import check, hello
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
