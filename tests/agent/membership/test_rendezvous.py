"""Meeting at a store, also at one that was used before."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import DistNetworkError, HashStore

from gradwire.agent.membership.rendezvous import meet, open_store
from gradwire.agent.peers.directory import Member, check_name
from gradwire.agent.peers.refusals import Refusals
from gradwire.agent.peers.secret import SignedStore, fresh_secret
from gradwire.agent.requests.timer import MonotonicClock
from gradwire.errors import GradwireError, JoinTimeout, PeerLost, UsageError
from gradwire.options import Options, Timeouts
from tests.background import Background

SECRET = fresh_secret()


@pytest.fixture
def options(tmp_path):
    return Options(init_method=f"file://{tmp_path}/meeting", timeouts=Timeouts(join=20))


def met(store, me, world_size, options):
    clock = MonotonicClock()
    return meet(store, me, world_size, clock.now() + options.timeouts.join, clock)


def join(options, rank, address, world_size=2):
    store = SignedStore(open_store(options, rank, world_size), SECRET, Refusals())
    return met(store, Member(rank, f"w{rank}", address), world_size, options)


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
    with pytest.raises(JoinTimeout, match="w0 timed out waiting for rank 1 to join"):
        join(soon, 0, "an incarnation that is over")

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

    with pytest.raises(JoinTimeout, match="w1 timed out waiting for rank 0 to join"):
        join(soon, 1, "there")


# -- workers that were told different things


def told(options, *workers):
    """What each of these (name, rank, world size) gets, that join at once: an error, or None."""

    def error_of(worker):
        name, rank, world_size = worker
        store = SignedStore(open_store(options, rank, world_size), SECRET, Refusals())
        try:
            met(store, Member(rank, name, "there"), world_size, options)
        except GradwireError as error:
            return error
        return None

    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(error_of, workers))


def test_world_sizes_that_differ_are_named_with_who_was_told_which(options):
    first, second = told(options, ("w0", 0, 2), ("w1", 1, 3))

    assert isinstance(first, UsageError)
    assert first.message == "w0 was given world_size=2, w1 was given world_size=3"
    assert second.message == "w1 was given world_size=3, w0 was given world_size=2"
    assert second.hint == "give every worker the same world_size, or the same WORLD_SIZE"


def test_a_worker_that_was_told_less_does_not_begin_alone(options):
    first, second = told(options, ("w0", 0, 3), ("w1", 1, 2))  # at once: it would take 20 s

    assert isinstance(first, UsageError)
    assert first.message == "w0 was given world_size=3, w1 was given world_size=2"
    assert second.message == "w1 was given world_size=2, w0 was given world_size=3"


def test_two_processes_of_one_rank_are_told_so(tmp_path):
    options = Options(init_method=f"file://{tmp_path}/meeting", timeouts=Timeouts(join=2))

    errors = told(options, ("w0", 0, 2), ("a", 1, 2), ("b", 1, 2))

    joined, late = ("a", "b") if errors[1] is None else ("b", "a")
    assert errors[0] is None
    (error,) = [error for error in errors if error is not None]
    assert error.message == (
        f"{late} timed out: {joined} has joined as rank 1 before it, and rank 0 opens no "
        "other round"
    )
    assert error.hint == "give every process a rank of its own"


def test_two_processes_of_rank_0_are_told_so(tmp_path):
    options = Options(init_method=f"file://{tmp_path}/meeting", timeouts=Timeouts(join=1))

    texts = [error.message for error in told(options, ("a", 0, 2), ("b", 0, 2))]

    assert any(
        "timed out: another process has opened a round here as rank 0" in text for text in texts
    )


def test_the_loss_of_the_meeting_place_is_an_error_of_ours(options):
    class Gone:
        def check(self, names):
            raise DistNetworkError("Failed to recv, got 0 bytes")

        add = check

    store = SignedStore(Gone(), SECRET, Refusals())
    with pytest.raises(
        PeerLost, match="the rendezvous store was lost before every worker had joined"
    ) as lost:
        met(store, Member(1, "w1", "there"), 2, options)
    assert "see that process's output" in lost.value.hint


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


# -- a store that a launcher keeps while it restarts the workers


def dead(store, rank, world_size=2, *, until):
    """What a process of this rank leaves in the store that is killed while it joins."""

    class Killed(Exception):
        pass

    class Dying(SignedStore):
        def _did(self, what, name):
            if until in f"{what} {name}":
                raise Killed

        def set(self, name, *rest):
            super().set(name, *rest)
            self._did("set", name)

        def add(self, name, amount):
            found = super().add(name, amount)
            self._did("add", name)
            return found

        def has(self, names):
            if until == "wait" and not super().has(names):
                raise Killed
            return super().has(names)

    with pytest.raises(Killed):
        met(Dying(store, SECRET, Refusals()), Member(rank, f"w{rank}", "dead"), world_size, SOON)


SOON = Options(timeouts=Timeouts(join=20))


@pytest.fixture
def kept():
    return HashStore()


def restarted(store, ranks=(0, 1, 2)):
    """All ranks join at once, or in this order; what each has found."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        joining = [
            pool.submit(
                met, SignedStore(store, SECRET, Refusals()), Member(n, f"w{n}", "new"), 3, SOON
            )
            for n in ranks
        ]
        return [future.result() for future in joining]


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize(
    "until", ["import", "add gradwire/round 1/claimed/2", "set gradwire/round 1/2", "wait"]
)
def test_restarted_workers_do_not_join_a_round_of_dead_ones(kept, until, ranks):
    dead(kept, 0, 3, until="wait")
    dead(kept, 1, 3, until="wait")
    if until != "import":
        dead(kept, 2, 3, until=until)

    meetings = restarted(kept, ranks)

    assert all(addresses(meeting) == ["new"] * 3 for meeting in meetings)
    assert len({meeting.job for meeting in meetings}) == 1


def test_a_worker_that_enters_a_round_of_dead_ones_moves_on(kept):
    dead(kept, 0, 3, until="wait")
    dead(kept, 1, 3, until="wait")
    early = Background(lambda: restarted(kept, (2,)))  # finds two entries, and writes the third
    assert early.is_blocked()

    meetings = restarted(kept, (0, 1))

    assert all(addresses(meeting) == ["new"] * 3 for meeting in meetings + early.result())


def test_restarted_workers_meet_after_a_world_that_was_complete(kept):
    restarted(kept)
    assert all(addresses(meeting) == ["new"] * 3 for meeting in restarted(kept, (2, 0, 1)))
