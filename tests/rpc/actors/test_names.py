"""Names: values that every worker finds."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch

import gradwire
from gradwire import CallTimeout, PeerLost, UnknownWorker, UsageError
from gradwire.rpc.actors.names import Names, find_name, give_name
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left, eventually


@pytest.fixture
def workers():
    with cluster(3, expose=[sys.modules[__name__]]) as made:
        yield made
        assert_nothing_left(made)
        every = [member.worker.part(Names) for member in made]
        assert eventually(lambda: not any(names._waiting for names in every))


class Counter:
    def __init__(self):
        self.value = 0

    def add(self, n):
        self.value += n
        return self.value


def found_here(name):
    return gradwire.lookup(name, timeout=10).rpc_sync().add(1)


@pytest.mark.parametrize("asked", ["ps", "w1:ps"])
def test_every_worker_finds_a_value_by_its_name(workers, asked):
    def call():
        rref = gradwire.remote("w1", Counter, name="ps")
        assert rref.owner_name() == "w1"
        return [gradwire.rpc_sync(f"w{n}", found_here, args=(asked,)) for n in range(3)]

    assert workers[0].run(call) == [1, 2, 3]


def test_a_named_actor_is_found_as_an_actor(workers):
    def call():
        counter = gradwire.actor("w2", Counter, name="ps")
        found = gradwire.lookup("ps", timeout=10)
        assert isinstance(found, gradwire.Actor)
        return counter.add(1).wait(), found.add(1).wait()

    assert workers[0].run(call) == (1, 2)


@pytest.mark.parametrize("asked", ["later", "w1:later"])
def test_a_lookup_waits_until_something_has_the_name(workers, asked):
    found = []
    thread = threading.Thread(target=lambda: found.append(workers[2].run(found_here, asked)))
    thread.start()
    names = workers[1].worker.part(Names)
    assert eventually(lambda: names._waiting)

    rref = workers[0].run(gradwire.remote, "w1", Counter, name="later")
    thread.join()

    assert found == [1]
    assert rref.owner_name() == "w1"


@pytest.mark.parametrize("asked", ["nobody", "w1:nobody"])
def test_a_name_that_nothing_has_is_not_found_in_time(workers, asked):
    def call():
        with pytest.raises(CallTimeout, match="nobody"):
            gradwire.lookup(asked, timeout=0.05)

    workers[0].run(call)


def test_a_name_ends_with_the_last_reference(workers):
    def call():
        rref = gradwire.remote("w1", Counter, name="ps")
        with pytest.raises(UsageError, match="w1 has a value named 'ps' already"):
            gradwire.remote("w1", Counter, name="ps")
        del rref
        gc.collect()
        names = workers[1].worker.part(Names)
        assert eventually(lambda: names.maybe("ps") is None)
        again = gradwire.remote("w1", Counter, name="ps")
        return again.rpc_sync().add(5)

    assert workers[0].run(call) == 5


def test_a_name_does_not_keep_its_value_while_lookups_do(workers):
    def call():
        rref = gradwire.remote("w1", torch.ones, args=(2,), name="ones")
        found = gradwire.lookup("ones", timeout=10)
        del rref
        gc.collect()
        return found.to_here()

    assert torch.equal(workers[0].run(call), torch.ones(2))


def test_the_others_answer_when_one_is_lost():
    with cluster(3, expose=[sys.modules[__name__]]) as workers:
        look_beside_a_lost_worker(workers)


def look_beside_a_lost_worker(workers):
    def call():
        rref = gradwire.remote("w1", Counter, name="ps")
        workers[2].worker.close()
        value = gradwire.lookup("ps", timeout=10).rpc_sync().add(1)
        with pytest.raises(PeerLost):
            gradwire.lookup("w2:ps", timeout=10)
        assert rref.owner_name() == "w1"
        return value

    assert workers[0].run(call) == 1


@pytest.mark.parametrize("name", ["", "a:b", 3, "x" * 201])
def test_what_is_no_name_is_refused_before_anything_is_made(workers, name):
    def call():
        with pytest.raises(UsageError, match="cannot be the name of a value"):
            gradwire.remote("w1", Counter, name=name)

    workers[0].run(call)


def test_a_lookup_at_an_unknown_worker_says_so(workers):
    def call():
        with pytest.raises(UnknownWorker):
            gradwire.lookup("w7:ps")

    workers[0].run(call)


def test_a_peer_cannot_name_what_is_no_reference_nor_by_what_is_no_name(workers):
    def call():
        with pytest.raises(UsageError, match="is no reference"):
            gradwire.rpc_sync("w1", give_name, args=("x", 3, 0))
        with pytest.raises(UsageError, match="cannot be the name"):
            gradwire.rpc_sync("w1", find_name, args=("a:b",))
        with pytest.raises(UsageError, match="does not own"):
            gradwire.rpc_sync("w1", give_name, args=("x", gradwire.RRef(1), 0))

    workers[0].run(call)
