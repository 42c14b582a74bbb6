"""Values of several workers, gathered on all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from gradwire.agent.requests.timer import MonotonicClock
from gradwire.compat.rpc import api as rpc
from gradwire.compat.rpc.all_gather import all_gather
from gradwire.compat.rpc.behavior import TORCH
from gradwire.errors import CallTimeout, PeerLost, UsageError
from gradwire.rpc.groups.all_gather import AllGather
from gradwire.rpc.groups.all_gather_state import Rounds
from gradwire.testing import cluster
from tests.leftovers import eventually

NAMES = ["a", "b", "c"]


def test_rounds_of_one_set_are_numbered_whatever_its_order():
    rounds = Rounds()

    assert [rounds.entered(names) for names in (["b", "a"], {"a", "b"}, ["a"])] == [
        "a,b#0",
        "a,b#1",
        "a#0",
    ]


def test_a_leader_hears_values_before_it_enters():
    rounds = Rounds()
    rounds.contributed("a,b#0", "b", 2, ["a", "b"])
    assert rounds.missing("a,b#0", ["a", "b"]) == ["a"]
    assert rounds.whole("a,b#0") is None
    rounds.contributed(rounds.entered(["a", "b"]), "a", 1, ["a", "b"])

    assert rounds.whole("a,b#0") == {"a": 1, "b": 2}


def test_nobody_contributes_twice_or_uninvited():
    rounds = Rounds()
    rounds.contributed("a,b#0", "b", 2, ["a", "b"])

    with pytest.raises(UsageError, match="b has contributed to all-gather a,b#0 twice"):
        rounds.contributed("a,b#0", "b", 2, ["a", "b"])
    with pytest.raises(UsageError, match="c is not expected in the all-gather of a, b"):
        rounds.contributed("a,b#0", "c", 2, ["a", "b"])
    rounds.concluded("a#0", {"a": 1})
    with pytest.raises(UsageError, match="all-gather a#0 has ended twice"):
        rounds.concluded("a#0", {"a": 1})


def test_sets_with_workers_that_are_gone_are_not_counted_for_ever():
    rounds = Rounds()
    for n in range(1000):
        names = ["a", f"guest{n}"]
        rounds.lost(f"guest{n}")
        rounds.over(rounds.entered(names))
        rounds.forget_without(["a", "b", f"guest{n}"])

    assert rounds.sets == 1
    assert rounds.entered(["a", "guest999"]) == "a,guest999#1"


def test_a_round_that_goes_on_keeps_its_number_when_others_are_gone():
    rounds = Rounds()
    round = rounds.entered(["a", "b"])
    rounds.contributed(round, "a", 1, ["a", "b"])

    rounds.forget_without(["a"])
    assert rounds.missing(round, ["a", "b"]) == ["b"]
    rounds.over(round)
    rounds.forget_without(["a"])
    assert (len(rounds), rounds.sets) == (0, 0)


def test_what_comes_when_a_round_is_over_is_not_kept():
    rounds = Rounds()
    round = rounds.entered(["a", "b"])
    rounds.over(round)
    rounds.contributed(round, "b", 2, ["a", "b"])
    rounds.concluded(round, {})

    assert len(rounds) == 0


def gather(everyone, me, value, seconds=20.0):
    """As `_all_gather` does, with calls of the others' methods in the place of messages."""
    gathers = everyone[me]
    with gathers.round(NAMES) as round:
        everyone["a"].note(Rounds.contributed, round, me, value, NAMES)
        values = gathers.wait(round, NAMES, seconds)
        for name in NAMES[1:] if me == "a" else ():
            everyone[name].note(Rounds.concluded, round, values)
        return values


def gone(name):
    raise PeerLost(f"{name} does not listen")


@pytest.fixture
def everyone():
    return {name: AllGather(name, MonotonicClock(), gone, lambda: NAMES) for name in NAMES}


def test_all_receive_all_also_by_many_threads(everyone):
    with ThreadPoolExecutor(12) as pool:
        called = [pool.submit(gather, everyone, name, name * 2) for name in NAMES * 4]
        heard = [future.result() for future in called]

    assert heard == [{"a": "aa", "b": "bb", "c": "cc"}] * 12


def test_who_is_missing_is_named(everyone):
    with pytest.raises(CallTimeout, match=r"a waited 0\.01 s in .* a, b, c: no value of b, c"):
        gather(everyone, "a", 1, seconds=0.01)


def test_a_leader_does_not_wait_for_one_that_is_lost(everyone):
    everyone["a"].note(Rounds.contributed, "a,b,c#0", "b", 1, NAMES)
    everyone["a"].note(Rounds.lost, "b")  # it has spoken: that does not matter
    everyone["a"].note(Rounds.lost, "c")

    with pytest.raises(PeerLost, match="a waits in an all-gather of a, b, c for c, which was lost"):
        gather(everyone, "a", 1)


def test_a_follower_does_not_wait_for_a_leader_that_is_lost(everyone):
    with everyone["b"].round(NAMES) as round:
        everyone["b"].note(Rounds.lost, "c")  # the leader may have heard of it
        everyone["b"].note(Rounds.lost, "a")
        with pytest.raises(PeerLost, match="b waits in an all-gather of a, b, c for a, which was"):
            everyone["b"].wait(round, NAMES, 20.0)


def test_followers_hear_that_their_leader_has_given_up(monkeypatch):
    monkeypatch.setattr(rpc, "FOREVER", 0.01)  # of a wait without a timeout

    def follow():
        with pytest.raises(RuntimeError, match=r"an all-gather of w1 failed: w0 waited .* of w2"):
            rpc._all_gather(1, timeout=20)

    def lead():
        with pytest.raises(CallTimeout, match=r"w0 waited .* no value of w2"):
            rpc._all_gather(1)

    with cluster(3, behavior=TORCH) as workers, ThreadPoolExecutor(1) as pool:
        follows = pool.submit(workers[1].run, follow)
        heard = workers[0].worker.part(all_gather)._rounds
        assert eventually(lambda: not heard.missing("w0,w1,w2#0", ["w1"]))
        workers[0].run(lead)
        follows.result()


def test_one_that_can_be_reached_again_is_waited_for():
    def reach(name):
        everyone["a"].note(Rounds.contributed, "a,b,c#0", name, name * 2, NAMES)

    everyone = {name: AllGather(name, MonotonicClock(), reach, lambda: NAMES) for name in NAMES}
    for name in ("b", "c"):
        everyone["a"].note(Rounds.lost, name)

    assert gather(everyone, "a", "aa") == {"a": "aa", "b": "bb", "c": "cc"}
