"""Workers that come and go: several in this process, which meet at a store in memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

import gradwire
from gradwire import (
    JoinTimeout,
    Options,
    PeerLost,
    RefLeakWarning,
    Timeouts,
    UnknownWorker,
    UsageError,
)
from gradwire.agent.membership.rendezvous import put_roster, roster_in
from gradwire.agent.peers.refusals import Refusals
from gradwire.agent.peers.secret import SignedStore, find_secret
from gradwire.rpc.join import join
from tests.gates import GATES
from tests.leftovers import eventually
from tests.rpc import far_open as far

OPTIONS = Options(listen="unix", timeouts=Timeouts(join=30, call=20))


@pytest.fixture
def world():
    """join(name, rank) at one store; workers that have not left are closed at the end."""
    store, workers = HashStore(), []

    def come(name, rank, world_size=None, options=OPTIONS):
        worker = join(name, rank, world_size, options, expose=[far], store=store)
        workers.append(worker)
        return worker

    come.store, come.signed = store, SignedStore(store, find_secret(OPTIONS), Refusals())
    yield come
    for worker in workers:
        worker.close()


def names(worker):
    return [info.name for info in worker.directory.all()]


def unregister(worker):
    mine = {worker.directory.myself.incarnation}
    worker._graceful_shutdown._roster.unregister(mine, worker.agent.clock.now() + 5)


def ask(worker, to, function, *args):
    with worker.scope():
        return gradwire.rpc_sync(to, function, args=args)


def leave(worker, timeout=20.0):
    assert worker.shutdown(graceful=True, timeout=timeout) == []


def test_members_learn_of_joins_and_leaves_at_once(world):
    a = world("a", 0)
    b = world("b", 5)
    assert names(a) == names(b) == ["a", "b"]
    c = world("c", 2)
    assert names(a) == names(b) == names(c) == ["a", "c", "b"]

    for one in (a, b, c):
        assert [ask(one, to, far.here) for to in "abc"] == ["a", "b", "c"]

    leave(b)
    assert names(a) == names(c) == ["a", "c"]
    assert ask(c, "a", far.here) == "a"


def test_a_call_to_one_that_left_cannot_find_it(world):
    a, b = world("a", 0), world("b", 1)
    leave(b)

    with pytest.raises(UnknownWorker, match="a could not find destination name b"):
        ask(a, "b", far.here)
    with pytest.raises(UnknownWorker, match="a could not find destination id 1"):
        ask(a, 1, far.here)


def test_all_legal_names_join_and_come_back(world):
    a = world("a-b:c_d-9", 0)
    for n in range(3):
        b = world("-", 1)
        assert ask(b, "a-b:c_d-9", far.here) == "a-b:c_d-9"
        assert ask(a, "-", far.here) == "-", n
        leave(b)
    assert names(a) == ["a-b:c_d-9"]


@pytest.mark.parametrize(("name", "rank"), [("b", 1), ("b", 7), ("other", 1)])
def test_a_name_or_a_number_of_one_that_left_is_free(world, name, rank):
    a, b = world("a", 0), world("b", 1)
    assert ask(a, "b", far.here) == "b"
    leave(b)
    again = world(name, rank)

    assert ask(a, name, far.here) == ask(a, rank, far.here) == name
    assert ask(again, "a", far.here) == "a"


@pytest.mark.parametrize(("name", "rank"), [("b", 1), ("b", 7), ("other", 1)])
def test_so_is_that_of_one_that_died(world, name, rank):
    a, b = world("a", 0), world("b", 1)
    ask(a, "b", far.here)
    b.close()
    world(name, rank)

    assert names(a) == ["a", name]
    assert ask(a, name, far.here) == name


def test_one_that_is_alive_keeps_its_name_and_number(world):
    world("a", 0)

    with pytest.raises(UsageError, match=r"name a is not unique\. Workers 0 and 1 share"):
        world("a", 1)
    with pytest.raises(UsageError, match="b cannot join as number 0: that is a, which is alive"):
        world("b", 0)
    assert names(world("b", 1)) == ["a", "b"]


def test_contexts_and_references_of_two_incarnations_are_not_mistaken_for_each_other(world):
    a = world("a", 0)
    seen = set()
    for _ in range(3):
        b = world("b", 1)
        with b.scope():
            x = torch.ones(2, requires_grad=True)
            with gradwire.context() as id:
                gradwire.rpc_sync("a", torch.mul, args=(x, 3)).sum().backward()
            assert x.grad.tolist() == [3, 3]
            kept = gradwire.remote("a", far.Kept)
            assert gradwire.rpc_sync("a", far.value_of, args=(kept,)) == 1
            seen |= {id, str(kept.handle.ref)}
            del kept
        leave(b)
    assert len(seen) == 6
    assert eventually(lambda: a.refs.statistics().owned == 0)


def test_what_one_that_left_held_and_owned_is_let_go(world, caplog):
    a, b = world("a", 0), world("b", 1)
    with b.scope():
        held = gradwire.remote("a", far.here)
        assert held.to_here() == "a"
    with a.scope():
        broken = gradwire.remote("b", far.here)
        assert broken.to_here() == "b"
    with pytest.warns(RefLeakWarning, match="b shut down while references"):
        leave(b)

    assert eventually(lambda: a.refs.statistics().owned == 0)
    with a.scope(), pytest.raises((PeerLost, UnknownWorker)):
        broken.to_here()
    assert [r for r in caplog.records if r.levelname == "ERROR"] == []


def test_leaving_waits_for_what_is_served_and_not_for_the_others(world):
    gate = GATES["open world"] = threading.Event()
    a, b = world("a", 0), world("b", 1)
    with a.scope():
        slow = gradwire.rpc_async("b", far.passes, args=("open world",))
    assert eventually(lambda: b.agent.dispatch.active == 1)
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(leave, b)
        gate.set()
        leaving.result()

    assert slow.wait() == "passed"
    assert names(a) == ["a"]


def test_many_that_join_at_once_all_know_each_other(world):
    with ThreadPoolExecutor(8) as pool:
        joined = list(pool.map(lambda n: world(f"w-{n}", n), range(8)))

    everyone = [f"w-{n}" for n in range(8)]
    assert [names(worker) for worker in joined] == [everyone] * 8
    assert ask(joined[3], "w-6", far.through, ["w-1", "w-5", "w-0"]) == "w-0"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, joined[1:]))
    assert names(joined[0]) == ["w-0"]


def test_a_joiner_that_died_halfway_is_passed_over(world):
    a = world("a", 0)
    roster, text = roster_in(world.signed)
    half = roster.with_member("dead", 1, "unix:///nowhere/at/all")
    assert put_roster(world.signed, half, text)

    b = world("b", 2)

    assert names(a) == names(b) == ["a", "b"]
    assert names(world("dead", 1)) == ["a", "dead", "b"]


@pytest.mark.slow
def test_a_joiner_that_hangs_halfway_is_given_up_and_told_so(world):
    a = world("a", 0)
    roster, text = roster_in(world.signed)
    half = roster.with_member("slow", 1, a.directory.myself.address)  # somebody listens there
    slow = half.entries[-1].member
    assert put_roster(world.signed, half, text)

    world("b", 2, options=Options(listen="unix", timeouts=Timeouts(join=2)))

    assert names(a) == ["a", "b"]
    assert not roster_in(world.signed)[0].has(slow.incarnation)


def test_one_that_lost_its_seat_does_not_believe_it_has_joined(world):
    a = world("a", 0)
    unregister(a)

    with pytest.raises(JoinTimeout, match="a took so long to join that it was given up"):
        a.announce(a.agent.clock.now() + 5)


def test_worlds_with_and_without_a_size_do_not_mix(world):
    text = "RPC group mixes statically and dynamically initialized members which is not supported."
    alone = world("alone", 0, 1)
    with pytest.raises(UsageError, match=text):
        world("late", 1)
    assert roster_in(world.signed)[0].entries == ()
    alone.close()


def test_nor_the_other_way_round(world):
    text = "RPC group mixes statically and dynamically initialized members which is not supported."
    a = world("a", 0)
    for rank in range(2):
        with pytest.raises(UsageError, match=text):
            world("late", rank, 2)
    leave(a)
    assert names(world("alone", 0, 1)) == ["alone"]


def test_a_rank_that_no_context_could_name_is_refused(world):
    with pytest.raises(UsageError, match="rank 40000 of a is not between 0 and 32767"):
        world("a", 40000)


def test_an_earlier_incarnation_that_goes_on_is_not_heard_any_more(world):
    a, b = world("a", 0), world("b", 1)
    assert ask(a, "b", far.here) == ask(b, "b", far.here) == "b"
    unregister(b)  # as if all thought that it was dead
    with b.scope():
        kept = gradwire.remote("a", far.here)
        assert kept.to_here() == "a"

    again = world("b", 1)

    assert ask(a, "b", far.incarnation) == again.directory.myself.incarnation
    assert eventually(lambda: a.refs.statistics().owned == 0)
    with pytest.raises(PeerLost, match="a was lost before"):
        ask(b, "a", far.here)
    assert ask(again, "a", far.here) == "a"
    del kept
