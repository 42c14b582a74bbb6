"""Finding workers by name, number and info."""

from __future__ import annotations

import pytest

from gradwire.agent.peers.directory import Directory, Member, WorkerInfo
from gradwire.errors import PeerLost, UnknownWorker, UsageError

MEMBERS = [Member(0, "ps", "x"), Member(1, "trainer", "y")]


@pytest.mark.parametrize("to", ["trainer", 1, WorkerInfo("trainer", 1)])
def test_a_worker_is_found_by_name_number_and_info(to):
    assert Directory(0, MEMBERS).find(to) == WorkerInfo("trainer", 1)


@pytest.mark.parametrize(
    ("to", "text"), [("nope", "destination name nope"), (7, "destination id 7")]
)
def test_an_unknown_one_is_named_with_those_that_are_known(to, text):
    with pytest.raises(UnknownWorker, match=text) as caught:
        Directory(0, MEMBERS).find(to)
    assert "the workers are: ps, trainer" in str(caught.value)


def test_two_workers_may_not_share_a_name():
    with pytest.raises(UsageError, match=r"ps is not unique\. Workers 0 and 1 share"):
        Directory(0, [Member(0, "ps", "x"), Member(1, "ps", "y")])


def test_an_info_prints_as_in_torch():
    assert repr(WorkerInfo("ps", 0)) == "WorkerInfo(id=0, name=ps)"


def test_one_that_left_is_not_found_and_still_has_a_name():
    directory = Directory(0, MEMBERS, is_open=True)

    assert directory.left(1, 0)
    assert not directory.left(1, 0)
    with pytest.raises(UnknownWorker, match="ps could not find destination name trainer"):
        directory.find("trainer")
    with pytest.raises(PeerLost, match="trainer has left, or never joined"):
        directory.address(1)
    assert (directory.name(1), directory.name(7)) == ("trainer", "worker 7")
