"""Meeting at a store, also at one that was used before."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from gradwire.agent.clock import MonotonicClock
from gradwire.agent.directory import check_name
from gradwire.agent.refusals import Refusals
from gradwire.agent.rendezvous import meet, open_store
from gradwire.agent.secret import fresh_secret
from gradwire.agent.signed_store import SignedStore
from gradwire.errors import JoinTimeout, UsageError
from gradwire.options import Options, Timeouts
from gradwire.testing.background import Background

SECRET = fresh_secret()


@pytest.fixture
def options(tmp_path):
    return Options(init_method=f"file://{tmp_path}/meeting", timeouts=Timeouts(join=20))


def join(options, rank, address, world_size=2):
    store = SignedStore(open_store(options, rank, world_size), SECRET, Refusals())
    return meet(store, f"w{rank}", address, rank, world_size, options, MonotonicClock())


def addresses(meeting):
    return [meeting.directory.address(info.id) for info in meeting.directory.all()]


def both(options, first, second):
    with ThreadPoolExecutor(2) as pool:
        joined = [pool.submit(join, options, rank, at) for rank, at in enumerate([first, second])]
        return [future.result() for future in joined]


def test_everyone_learns_names_addresses_and_the_job(options):
    one, other = both(options, "here", "there")

    assert addresses(one) == addresses(other) == ["here", "there"]
    assert one.job == other.job
    assert [info.name for info in one.directory.all()] == ["w0", "w1"]


def test_the_same_place_serves_again_under_another_job(options):
    jobs = set()
    for n in range(3):
        one, other = both(options, f"here {n}", f"there {n}")
        assert addresses(one) == addresses(other) == [f"here {n}", f"there {n}"]
        jobs.add(one.job)

    assert len(jobs) == 3


def test_a_round_in_which_nobody_else_came_is_not_joined_by_a_latecomer(options, tmp_path):
    soon = Options(init_method=options.init_method, timeouts=Timeouts(join=0.05))
    with pytest.raises(JoinTimeout, match="w0 waited in vain for rank 1 to join"):
        join(soon, 0, "a life that is over")

    one, other = both(options, "here", "there")

    assert addresses(one) == addresses(other) == ["here", "there"]


def test_a_worker_that_was_in_the_last_round_waits_for_the_next(options):
    both(options, "old here", "old there")
    early = ThreadPoolExecutor(1)
    joined = early.submit(join, options, 1, "new there")
    one = join(options, 0, "new here")
    early.shutdown()

    assert addresses(one) == addresses(joined.result()) == ["new here", "new there"]


def test_a_rank_0_that_never_comes_is_named(options):
    soon = Options(init_method=options.init_method, timeouts=Timeouts(join=0.05))

    with pytest.raises(JoinTimeout, match="w1 waited in vain for rank 0 to join"):
        join(soon, 1, "there")


@pytest.mark.parametrize("name", ["", "a b", "ü", "x" * 128, "a/b"])
def test_names_that_cannot_be_spoken_are_refused(name):
    with pytest.raises(UsageError, match="Worker name must match"):
        check_name(name)


@pytest.mark.parametrize("name", ["w-0", "trainer:1", "a_b", "x" * 127])
def test_other_names_are_fine(name):
    check_name(name)


def test_a_meeting_place_that_is_none_is_refused():
    with pytest.raises(UsageError, match="no rendezvous at ftp://x"):
        open_store(Options(init_method="ftp://x"), 0, 1)


@pytest.fixture
def taken():
    """A port where somebody else still listens, and the url of the meeting place there."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", 0))
        other.listen()
        yield other, f"tcp://127.0.0.1:{other.getsockname()[1]}"


def test_who_meets_again_waits_for_the_port_that_another_host_still_has(taken):
    other, url = taken
    options = Options(init_method=url, timeouts=Timeouts(join=30))
    opening = Background(lambda: open_store(options, 0, 1, is_again=True))
    assert opening.is_blocked()
    other.close()
    assert opening.result().add("here", 1) == 1


@pytest.mark.parametrize(("is_again", "seconds"), [(False, 60), (True, 0.05)])
def test_a_port_that_stays_taken_is_an_error(taken, is_again, seconds):
    options = Options(init_method=taken[1], timeouts=Timeouts(join=seconds))
    opening = Background(lambda: open_store(options, 0, 1, is_again=is_again))
    text = f"no rendezvous at {taken[1]}: something else listens at its port"
    assert text in str(opening.error(UsageError))
