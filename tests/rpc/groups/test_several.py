"""One call to several workers: results in their order, errors that name them, exact gradients."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import gradwire as gw
from gradwire.errors import Cancelled, PeerLost, RemoteError, UnknownWorker, UsageError
from gradwire.rpc.codec.codec import Codec
from gradwire.rpc.retry import is_loss
from gradwire.testing import cluster
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
OTHERS = ["w3", "w1", "w2"]


@pytest.fixture(scope="module")
def workers():
    with cluster(4, expose=[HERE]) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_left(workers):
    yield
    assert_nothing_left(workers)


# -- what runs on the workers


def name():
    return gw.get_worker_info().name


def tagged(value, more=0):
    return name(), value, more


def scaled(x):
    return x * float(name()[1:])


def change(x):
    x += float(name()[1:])
    return x


def nap(gate):
    GATES[gate].wait(30)
    return name()


def fail_on(*names):
    if name() in names:
        raise ValueError(f"{name()} is in {names}")
    return name()


def lose(*names):
    if name() in names:
        raise PeerLost(f"{name()} lost somebody")


def members_of(group):
    return group.name, list(group), len(group)


def where(ref):
    return ref.owner_name()


# -- who is meant


@pytest.mark.parametrize("to", [OTHERS, tuple(OTHERS), gw.group(OTHERS), gw.group("all", OTHERS)])
def test_results_come_in_the_order_of_the_workers(workers, to):
    assert workers[0].run(gw.rpc_sync, to, name) == OTHERS
    assert workers[0].run(lambda: gw.rpc_async(to, name).wait()) == OTHERS
    assert workers[0].run(lambda: [ref.to_here() for ref in gw.remote(to, name)]) == OTHERS


def test_workers_may_be_numbers_and_infos_and_named_twice(workers):
    def program():
        return gw.rpc_sync([1, gw.get_worker_info("w2"), "w0", "w1"], name)

    assert workers[0].run(program) == ["w1", "w2", "w0", "w1"]


def test_one_that_is_unknown_is_found_before_anything_is_sent(workers):
    with workers.trace() as lines, pytest.raises(UnknownWorker, match="destination name w9"):
        workers[0].run(gw.rpc_sync, ["w1", "w9"], name)
    with pytest.raises(UsageError, match="a call was given an empty list of workers"):
        workers[0].run(gw.rpc_async, [], name)

    assert lines == []


def test_a_group_has_a_name_an_order_and_a_length():
    trainers = gw.group("trainers", ["w2", "w1"])

    assert (trainers.name, list(trainers), len(trainers)) == ("trainers", ["w2", "w1"], 2)
    assert "w1" in trainers
    assert "w3" not in trainers
    assert str(trainers) == "trainers"
    assert str(gw.group(["w1", "w2"])) == "w1, w2"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((["w1", "w2", "w1"],), "names w1 more than once"),
        (([],), "has no workers"),
        (("trainers",), "names of workers, and perhaps"),
        (("trainers", "w1"), "names of workers, and perhaps"),
        (([1],), "names of workers, not a int"),
        (("a,b", ["w1"]), "Worker name must match"),
    ],
)
def test_a_group_of_something_else_is_refused(args, text):
    with pytest.raises(UsageError, match=text):
        gw.group(*args)


def test_a_group_may_be_an_argument(workers):
    group = gw.group("trainers", ["w1", "w2"])

    assert workers[0].run(gw.rpc_sync, "w1", members_of, (group,)) == ("trainers", ["w1", "w2"], 2)


# -- what is sent


def test_arguments_are_encoded_once(workers, monkeypatch):
    encoded = []
    encode = Codec.encode
    monkeypatch.setattr(
        Codec, "encode", lambda self, *args: encoded.append(args) or encode(self, *args)
    )
    value = {"a": [torch.ones(2), 3]}

    heard = workers[0].run(gw.rpc_sync, OTHERS, tagged, (value,), {"more": 1})

    assert [(who, more) for who, _, more in heard] == [(each, 1) for each in OTHERS]
    assert all(torch.equal(got["a"][0], torch.ones(2)) for _, got, _ in heard)
    assert len([args for args in encoded if args[1] != "result"]) == 1


def test_each_has_a_copy_of_its_own(workers):
    x = torch.zeros(1 << 16)

    heard = workers[0].run(gw.rpc_sync, OTHERS, change, (x,))

    assert [y[0].item() for y in heard] == [3, 1, 2]
    assert x[0] == 0


def test_arguments_are_a_snapshot(workers, gate):
    x = torch.zeros(3, 2).t()  # not contiguous

    def program():
        sent = gw.rpc_async(OTHERS, tagged, (x,))
        x.add_(1)
        return sent.wait()

    assert [y.sum().item() for _, y, _ in workers[0].run(program)] == [0, 0, 0]


def test_references_are_counted_for_each(workers):
    def program():
        ref = gw.remote("w1", name)
        return gw.rpc_sync(OTHERS, where, (ref,))

    assert workers[0].run(program) == ["w1"] * 3


# -- errors


def test_errors_are_a_group_that_names_each_worker(workers):
    with pytest.raises(ExceptionGroup) as caught:
        workers[0].run(gw.rpc_sync, OTHERS, fail_on, ("w3", "w2"))

    assert "fail_on failed on 2 of 3 workers: w3 (ValueError), w2 (ValueError)" in str(caught.value)
    assert [error.worker for error in caught.value.exceptions] == ["w3", "w2"]
    assert all(isinstance(error, ValueError) for error in caught.value.exceptions)


def test_if_all_fail_it_is_the_same(workers):
    future = workers[0].run(gw.rpc_async, gw.group(OTHERS), fail_on, tuple(OTHERS))

    for _ in range(2):
        with pytest.raises(ExceptionGroup, match=r"on 3 of 3 workers: w3 .*, w1 .*, w2") as caught:
            future.wait()
    assert caught.group_contains(ValueError, match="w1 is in")


def test_errors_of_gradwire_keep_their_types(workers):
    with pytest.raises(ExceptionGroup, match=r"2 of 3 workers: w1 \(PeerLost\), w2") as caught:
        workers[0].run(gw.rpc_sync, OTHERS, lose, ("w1", "w2"))

    assert all(isinstance(error, PeerLost) for error in caught.value.exceptions)
    assert is_loss(caught.value)


def test_a_group_with_another_error_is_no_loss():
    assert not is_loss(ExceptionGroup("", [PeerLost("w1"), ValueError()]))


def test_what_cannot_be_sent_is_raised_as_it_is(workers):
    with pytest.raises(gw.NotSerializable, match="args"):
        workers[0].run(gw.rpc_sync, OTHERS, tagged, (object(),))


def test_a_group_crosses_workers(workers):
    def inner():
        return gw.rpc_sync("w1", ask_others, (OTHERS[1:],))

    with pytest.raises(ExceptionGroup, match=r"1 of 2 workers: w2 \(ValueError\)") as caught:
        workers[0].run(inner)
    assert isinstance(caught.value, RemoteError)
    assert caught.group_contains(ValueError)


def ask_others(names):
    return gw.rpc_sync(names, fail_on, ("w2",))


def test_a_lost_worker_fails_its_call_only():
    with cluster(3, expose=[HERE]) as workers:
        workers[0].run(gw.rpc_sync, ["w1", "w2"], name)
        workers[2].worker.close()

        for call in (gw.rpc_sync, gw.remote):
            with pytest.raises(ExceptionGroup, match=r"1 of 2 workers: w2 \(PeerLost\)") as caught:
                workers[0].run(call, ["w1", "w2"], name)
            (lost,) = caught.value.exceptions
            assert type(lost) is PeerLost
            assert lost.peer == "w2"


@gw.idempotent
def ask(where):
    return name()


def test_an_idempotent_function_is_called_again_where_it_was_lost():
    with cluster(3, expose=[HERE]) as workers:
        workers[0].run(gw.rpc_sync, ["w1", "w2"], ask, (1,))
        workers[2].worker.close()
        again = threading.Thread(target=workers.restart, args=(2,))
        again.start()
        try:
            assert workers[0].run(gw.rpc_sync, ["w1", "w2"], ask, (1,)) == ["w1", "w2"]
        finally:
            again.join()


# -- futures


def test_a_future_of_several_is_done_when_all_are(workers, gate):
    future = workers[0].run(gw.rpc_async, ["w1", "w2"], nap, (gate,))
    assert not future.done()

    lengths = future.then(lambda done: len(done.value()))
    GATES[gate].set()

    assert torch.futures.wait_all([future, lengths]) == [["w1", "w2"], 2]


def test_cancelling_it_cancels_each_call(workers, gate):
    future = workers[0].run(gw.rpc_async, ["w1", "w2"], nap, (gate,))

    assert future.cancel()
    with pytest.raises(ExceptionGroup, match=r"w1 \(Cancelled\), w2 \(Cancelled\)") as caught:
        future.wait()
    assert not future.cancel()
    assert caught.group_contains(Cancelled)
    GATES[gate].set()
    assert eventually(lambda: not workers[1].worker.agent.dispatch.active)


def test_a_deadline_is_that_of_all(workers, gate):
    with pytest.raises(ExceptionGroup, match=r"w1 \(CallTimeout\), w2 \(CallTimeout\)"):
        workers[0].run(gw.rpc_sync, ["w1", "w2"], nap, (gate,), timeout=0.01)


# -- gradients


def spread():
    """A leaf whose gradients have such sizes that the order of their sum matters."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(1 << 10, generator=generator).requires_grad_()


FACTORS = [1.0, 1e-4, 1e4]


def weighted(ys):
    return sum((y * factor).exp().sum() * factor for y, factor in zip(ys, FACTORS, strict=True))


@pytest.mark.parametrize("of", ["sync", "async", "remote"])
def test_gradients_are_summed_as_in_one_process_bit_for_bit(workers, of):
    def alone():
        x = spread()
        weighted([(x * 3e-5).sin(), (x * 1e-5).sin(), (x * 2e-5).sin()]).backward()
        return x.grad

    def program():
        x = spread()
        if of == "sync":
            ys = gw.rpc_sync(OTHERS, little, (x,))
        elif of == "async":
            ys = gw.rpc_async(OTHERS, little, (x,)).wait()
        else:
            ys = [ref.to_here() for ref in gw.remote(OTHERS, little, (x,))]
        weighted(ys).backward()
        return x.grad

    there = workers[0].run(program)

    assert torch.equal(there, alone())


def little(x):
    return (x * (float(name()[1:]) * 1e-5)).sin()


def test_the_sum_begins_with_the_last_worker(workers):
    def program():
        x = torch.zeros(1, requires_grad=True)
        ys = gw.rpc_sync(["w1", "w2", "w3"], scaled, (x,))
        (ys[0] * 1.0 + ys[1] * 5e7 + ys[2] * (-1e8 / 3)).backward()
        return x.grad.item()

    ones = torch.tensor([1.0, 1e8, -1e8])

    assert workers[0].run(program) == ((ones[2] + ones[1]) + ones[0]).item() == 1.0
    assert (ones[0] + ones[1]) + ones[2] == 0.0


def test_each_receiver_has_an_edge_of_its_own(workers):
    def program():
        x = torch.ones(2, requires_grad=True)
        ys = gw.rpc_sync(OTHERS, scaled, (x,))
        edges = gw.live_edges()
        ys[0].sum().backward()  # the others get no gradient, and nobody waits for one
        return ({edge.to for edge in edges} >= {*OTHERS}), x.grad.tolist()

    have_edges, grad = workers[0].run(program)

    assert have_edges
    assert grad == [3.0, 3.0]


def test_a_context_records_them_all(workers):
    def program():
        with gw.context() as context:
            x = torch.ones(2, requires_grad=True)
            ys = gw.rpc_sync(OTHERS, scaled, (x,))
            gw.backward(context, [torch.stack(ys).sum()])
            return gw.get_gradients(context)[x].tolist()

    assert workers[0].run(program) == [6.0, 6.0]
