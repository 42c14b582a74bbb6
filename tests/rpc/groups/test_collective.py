"""barrier and all_gather among the members of a group."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gradwire as gw
from gradwire.errors import CallTimeout, OverLimit, PeerLost, StaleIncarnation, UsageError
from gradwire.options import Options
from gradwire.rpc.groups.all_gather_state import MOST_AHEAD, Rounds
from gradwire.rpc.groups.collective import Collectives, contribute
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]


@pytest.fixture(scope="module")
def workers():
    with cluster(3, expose=[HERE], options=Options(threads=1)) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_left(workers):
    yield
    assert_nothing_left(workers)


def on_each(members, function, *args, **kwargs):
    """What a function returns or raises on each of these, which run it at the same time."""

    def outcome(member):
        try:
            return member.run(function, *args, **kwargs)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(outcome, members))


def number():
    return int(gw.get_worker_info().name[1:])


def gather(group=None, timeout=20):
    return gw.all_gather(number() * 10, group, timeout)


def rounds_of(member):
    return member.worker.part(Collectives)._gathers._rounds


# -- values


def test_all_members_receive_the_values_of_all(workers):
    assert on_each(workers, gather) == [[0, 10, 20]] * 3


def test_values_come_in_the_order_of_the_group(workers):
    assert on_each(workers[1:3], gather, gw.group("two", ["w2", "w1"])) == [[20, 10]] * 2
    assert on_each(workers[1:3], gather, ["w1", "w2"]) == [[10, 20]] * 2


def test_rounds_follow_each_other_and_groups_do_not_mix(workers):
    def program():
        here = number()
        two = gw.group("two", ["w0", "w1"])
        heard = []
        for n in range(20):
            heard.append(gw.all_gather(here + n))
            if here < 2:
                heard.append(gw.all_gather(-n, two))
            gw.barrier()
        return heard

    first, second, third = on_each(workers, program)

    assert first == second
    assert third == [[n, n + 1, n + 2] for n in range(20)]
    assert first[1::2] == [[-n, -n] for n in range(20)]


def test_gradients_go_back_to_each_member(workers):
    leaves = {n: torch.full((2,), n + 1.0, requires_grad=True) for n in range(3)}

    def program():
        here = number()
        values = gw.all_gather(leaves[here] * 2)
        gw.barrier()
        if here == 0:
            torch.stack(values).prod(0).sum().backward()
        gw.barrier()
        return [value[0].item() for value in values]

    assert on_each(workers, program) == [[2.0, 4.0, 6.0]] * 3
    # d(8 abc)/da = 8 bc
    assert [leaves[n].grad.tolist() for n in range(3)] == [[48.0] * 2, [24.0] * 2, [16.0] * 2]


def test_functions_that_were_called_take_part_on_one_thread(workers):
    assert workers[0].run(gw.rpc_sync, ["w0", "w1", "w2"], gather) == [[0, 10, 20]] * 3


def test_a_barrier_waits_for_the_last(workers):
    came = []

    def program():
        gw.barrier(timeout=20)
        came.append(number())

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(member.run, program) for member in workers[:2]]
        heard = rounds_of(workers[0])
        assert eventually(lambda: any("w1" in r.values for r in [*heard._rounds.values()]))
        assert came == []
        workers[2].run(program)
        for future in waiting:
            future.result()
    assert sorted(came) == [0, 1, 2]


# -- errors


def contributed(worker, round):
    """A worker's value is at w0, as if it had entered the round."""
    worker.run(gw.rpc_sync, "w0", contribute, (round, None))


def test_a_deadline_names_who_is_missing(workers):
    contributed(workers[1], "barrier/late/w0,w1,w2#0")

    with pytest.raises(CallTimeout) as caught:
        workers[0].run(gw.barrier, gw.group("late", ["w0", "w1", "w2"]), timeout=0.05)

    assert "s in barrier late of w0, w1, w2: no value of w2\n" in str(caught.value)
    assert caught.value.hint == "each of them must take part, the same number of times"


def test_a_deadline_tells_of_members_that_mean_another_group(workers):
    contributed(workers[1], "barrier/odd/w0,w1,w2#0")

    with pytest.raises(CallTimeout, match=r"no value of w1\n.* barrier/odd/w0,w1,w2#0"):
        workers[0].run(gw.barrier, gw.group("odd", ["w0", "w1"]), timeout=0.05)


@pytest.mark.parametrize("names", [["w1", "w2"], ["w0", "w1", "w0"]])
def test_only_a_member_may_call_it(workers, names):
    with pytest.raises(UsageError, match=r"w0 called barrier of w.*, which does not have it once"):
        workers[0].run(gw.barrier, names)


def test_a_value_that_cannot_be_sent_does_not_count(workers):
    group = gw.group("values", ["w0", "w1"])

    with pytest.raises(gw.NotSerializable):
        workers[0].run(gw.all_gather, object(), group)

    assert on_each(workers[:2], gather, group) == [[0, 10]] * 2


@pytest.mark.slow
def test_a_lost_member_is_named_on_all_others():
    with cluster(3, expose=[HERE]) as workers, ThreadPoolExecutor(2) as pool:
        assert on_each(workers, gather) == [[0, 10, 20]] * 3
        waiting = [pool.submit(on_each, [member], gather) for member in workers[:2]]
        heard = [rounds_of(member) for member in workers[:2]]
        assert eventually(lambda: all(len(each) for each in heard))
        workers[2].worker.close()

        for name, future in zip(("w0", "w1"), waiting, strict=True):
            (error,) = future.result()
            assert type(error) is PeerLost
            assert f"{name} waits in all_gather of w0, w1, w2 for w2, which was lost" in str(error)
            assert error.peer == "w2"


@pytest.mark.slow
def test_members_count_from_the_start_with_one_that_was_started_again():
    with cluster(3, expose=[HERE]) as workers:
        for _ in range(3):
            assert on_each(workers, gather) == [[0, 10, 20]] * 3
        workers.restart(2)

        assert on_each(list(workers), gather) == [[0, 10, 20]] * 3
        assert rounds_of(workers[0]).sets == 1


# -- what a peer may send


def test_a_peer_speaks_for_itself_and_of_rounds_only(workers):
    def told(round, match, error=UsageError):
        with pytest.raises(error, match=match):
            workers[0].run(gw.rpc_sync, "w1", contribute, (round, 1))

    told("w1,w2#0", "w0 is not expected in the all-gather")
    told("w0,w2#0", "w1 is no member of w0,w2#0")
    told("w0,w1.7#0", "w1 was started again since", StaleIncarnation)
    for bad in ("w0,w1", "w0,w1#x", "", None):
        told(bad, "is no round of a group")


def test_a_peer_may_be_ahead_by_so_many_rounds_only():
    def program():
        for n in range(MOST_AHEAD + 1):
            gw.rpc_sync("w1", contribute, (f"ahead/w0,w1#{n}", n))

    with cluster(2) as workers:  # of its own: the values stay with w1
        with pytest.raises(OverLimit, match="w0 has values in 64 all-gathers that have not begun"):
            workers[0].run(program)
        assert len(rounds_of(workers[1])) == MOST_AHEAD


def test_a_round_that_nobody_was_told_of_is_entered_again():
    rounds = Rounds()
    first = rounds.entered(["a", "b"], "x")
    rounds.withdrawn(first)
    rounds.over(first)

    assert rounds.entered(["a", "b"], "x") == first == "x/a,b#0"
    rounds.entered(["a", "b"], "x")
    rounds.withdrawn(first)
    assert rounds.entered(["a", "b"], "x") == "x/a,b#2"


def test_sets_of_an_earlier_incarnation_are_forgotten():
    rounds = Rounds()
    rounds.over(rounds.entered(["a", "b"], "x"))
    rounds.lost("b")
    rounds.over(rounds.entered(["a", "b.1"], "x"))
    rounds.forget_without(["a", "b.1"])

    assert rounds.sets == 1
    assert rounds.waits_in_vain(rounds.entered(["a", "b.1"], "x"), ["b.1"]) == ["b.1"]


def test_many_threads_gather_at_once(workers):
    barrier = threading.Barrier(6)

    def program(group):
        barrier.wait(20)
        return [gather(gw.group(group, ["w0", "w1", "w2"])) for _ in range(5)]

    with ThreadPoolExecutor(6) as pool:
        called = [pool.submit(w.run, program, g) for g in ("one", "two") for w in workers]
        assert [f.result() for f in called] == [[[0, 10, 20]] * 5] * 6
