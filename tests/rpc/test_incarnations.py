"""A worker that is started again under its name: what the earlier incarnation takes with it.

In one process; tests/processes/test_restarts.py has the same over real ones.
"""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch
from torch.distributed import HashStore

import gradwire
from gradwire import Options, PeerLost, StaleIncarnation, Timeouts, UsageError
from gradwire.rpc.join import join
from gradwire.testing import cluster
from tests.background import Background
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually
from tests.rpc import far_incarnations as far

BEGAN = r"was opened before this incarnation of w1 began"
LOST = r"e\d\.\d+ (was dropped here: .*was lost|came from w1, which was lost)"


@pytest.fixture
def workers():
    with cluster(3, expose=[far]) as workers:
        yield workers


@pytest.fixture
def w0(workers):
    with workers[0].worker.scope():
        yield workers[0].worker


def number() -> torch.Tensor:
    return torch.tensor(2.0, dtype=torch.float64, requires_grad=True)


def test_new_calls_reach_the_new_incarnation(workers, w0):
    assert gradwire.rpc_sync("w1", far.here) == ("w1", 0)

    workers.restart(1)

    assert gradwire.rpc_sync("w1", far.here) == ("w1", 1)
    assert (gradwire.incarnation("w1"), gradwire.incarnation(1), gradwire.incarnation()) == (
        1,
        1,
        0,
    )
    assert workers[2].run(gradwire.rpc_sync, "w1", far.here) == ("w1", 1)
    assert workers[1].run(gradwire.rpc_sync, "w0", far.here) == ("w0", 0)


def test_what_waited_for_the_earlier_incarnation_fails_at_once(workers, w0):
    GATES["lives"] = gate = threading.Event()
    waiting = gradwire.rpc_async("w1", far.gated, args=("lives",))
    restarting = Background(lambda: workers.restart(1))

    error = Background(waiting.wait).error(PeerLost)

    assert "w1 was lost before answering" in str(error)
    gate.set()
    restarting.result()
    assert gradwire.rpc_sync("w1", far.here) == ("w1", 1)


def test_old_references_name_worker_reference_and_incarnation(workers, w0):
    value, function = gradwire.remote("w1", far.kept, args=(5,)), far.fetched
    assert value.to_here() == 5
    again = gradwire.rpc_sync("w2", far.kept, args=(value,))
    name = str(value.handle.ref).replace(".", r"\.")
    story = rf"{name} belongs to incarnation 0 of w1, which was restarted as incarnation 1"

    workers.restart(1)

    for use in (
        value.to_here,
        again.to_here,
        value.rpc_sync().bit_length,
        lambda: gradwire.rpc_sync("w2", function, args=(value,)),
        lambda: gradwire.rpc_sync("w1", function, args=(value,)),
        lambda: gradwire.remote("w1", function, args=(value,)),
    ):
        with pytest.raises(StaleIncarnation, match=story):
            use()
    assert gradwire.remote("w1", far.kept, args=(6,)).to_here() == 6
    value = again = use = None
    assert_nothing_left(workers)


def test_a_reference_that_a_third_worker_held_is_stale_where_it_arrives(workers, w0):
    """Whoever passes it has not heard of the new incarnation yet; who receives it has."""
    value = gradwire.remote("w1", far.kept, args=(5,))
    value.to_here()
    handle = value.handle
    workers.restart(1)

    w2 = workers[2].worker.refs
    stale = w2.arrived(
        [gradwire.rpc.messages.Reference(handle.ref, 1, handle.fork, handle.incarnation)]
    )[0]

    with pytest.raises(StaleIncarnation, match="belongs to incarnation 0 of w1"):
        w2.wait_until_counted(stale, 1e9)
    w2.ended(stale)
    del value
    assert_nothing_left(workers)


def test_values_of_survivors_stay(workers, w0):
    value = gradwire.remote("w2", far.kept, args=(5,))
    ours = gradwire.RRef(7)
    assert gradwire.rpc_sync("w1", far.fetched, args=(value,)) == 5

    workers.restart(1)

    assert value.to_here() == 5
    assert gradwire.rpc_sync("w1", far.fetched, args=(value,)) == 5
    assert gradwire.rpc_sync("w1", far.fetched, args=(ours,)) == 7
    del value, ours
    assert_nothing_left(workers)


def test_contexts_and_passes_of_the_earlier_incarnation_fail_clearly(workers, w0):
    x = number()
    with gradwire.context() as context:
        y = gradwire.rpc_sync("w1", far.doubled, args=(x,))
        z = gradwire.rpc_sync("w2", far.relayed, args=("w1", x))
        workers.restart(1)

        for call in (
            lambda: gradwire.rpc_sync("w1", far.doubled, args=(x,)),
            lambda: gradwire.rpc_sync("w2", far.relayed, args=("w1", x)),
        ):
            with pytest.raises(StaleIncarnation, match=BEGAN):
                call()
        for call in (
            lambda: gradwire.backward(context, [y], retain_graph=True),
            lambda: gradwire.backward(context, [z], retain_graph=True),
            lambda: y.backward(retain_graph=True),
            lambda: z.backward(retain_graph=True),
        ):
            with pytest.raises(PeerLost, match=f"{LOST}|{BEGAN}"):
                call()
        assert x.grad is None
        assert gradwire.get_gradients(context) == {}
    with gradwire.context() as context:
        y = gradwire.rpc_sync("w1", far.doubled, (x,)) * gradwire.rpc_sync("w2", far.doubled, (x,))
        gradwire.backward(context, [y])
        assert gradwire.get_gradients(context)[x] == 16
    y = z = call = None
    assert_nothing_left(workers)


def test_a_graph_without_a_context_does_not_reach_the_next_incarnation(workers, w0):
    """Its edges are never taken for those of the next one, which numbers its own above them."""
    x = number()
    y = gradwire.rpc_sync("w1", far.doubled, args=(x,))
    z = gradwire.rpc_sync("w2", far.relayed, args=("w1", x))
    workers.restart(1)
    new = gradwire.rpc_sync("w1", far.doubled, args=(x,))

    for root in (y, z, y * new, z + new):
        with pytest.raises(PeerLost, match=LOST):
            root.backward(retain_graph=True)
    assert x.grad is None
    new.backward()
    assert x.grad == 2
    y = z = new = root = None
    assert_nothing_left(workers)


def test_what_does_not_lead_through_the_lost_worker_goes_on(workers, w0):
    x = number()
    with gradwire.context() as context:
        y = gradwire.rpc_sync("w2", far.doubled, args=(x,))
        gradwire.rpc_sync("w1", far.doubled, args=(x,))
        workers.restart(1)

        gradwire.backward(context, [y])

        assert gradwire.get_gradients(context)[x] == 2


def test_an_old_context_reaches_no_new_incarnation_by_a_worker_that_never_knew_it(workers, w0):
    """w2 hears of the context after the restart, so it has nothing to be careful about."""
    x = number()
    with gradwire.context():
        gradwire.rpc_sync("w1", far.doubled, args=(x,))
        workers.restart(1)

        with pytest.raises(StaleIncarnation, match=BEGAN):
            gradwire.rpc_sync("w2", far.relayed, args=("w1", x))


def test_an_opener_that_is_started_again_loses_its_contexts_everywhere(workers, w0):
    left_open = gradwire.context()

    def leave_open():
        left_open.__enter__()
        gradwire.rpc_sync("w2", far.relayed, args=("w0", number()))

    workers[1].run(lambda: contextvars.copy_context().run(leave_open))
    assert len(workers[2].worker.engine.contexts) == len(w0.engine.contexts) == 1

    workers.restart(1)

    assert eventually(lambda: not len(workers[2].worker.engine.contexts))
    assert eventually(lambda: not len(w0.engine.contexts))
    with workers[1].worker.scope(), gradwire.context() as context:
        assert context & ((1 << 48) - 1) == 1 << 32
        x = number()
        gradwire.rpc_sync("w2", far.relayed, args=("w0", x)).backward()
        assert x.grad == 2


def test_a_context_of_an_earlier_incarnation_is_not_opened_by_what_is_late_of_it(workers, w0):
    """w2 has not heard of the context before its opener was started again."""
    left_open = gradwire.context()
    id = workers[1].run(lambda: contextvars.copy_context().run(left_open.__enter__))
    workers.restart(1)

    with pytest.raises(StaleIncarnation, match="belongs to an earlier incarnation of w1"):
        workers[2].worker.engine.contexts.heard_of(id, 0)

    assert not len(workers[2].worker.engine.contexts)


def test_two_that_are_started_again_know_each_other(workers, w0):
    for n in (1, 2, 1):
        workers.restart(n)

    assert workers[1].run(gradwire.rpc_sync, "w2", far.here) == ("w2", 1)
    assert workers[2].run(gradwire.rpc_sync, "w1", far.here) == ("w1", 2)


def test_a_step_of_an_optimizer_over_lost_parameters_says_so(workers, w0):
    lost = gradwire.remote("w1", far.weight)
    there = gradwire.remote("w2", far.weight)
    optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, [lost, there], lr=1.0)
    workers.restart(1)

    with pytest.raises(gradwire.StepFailed, match=r"no worker has stepped.*incarnation 0 of w1"):
        optimizer.step()

    assert gradwire.rpc_sync("w2", far.value_of, args=(there,)) == 3


def test_all_leave_together_also_with_one_that_came_back(workers):
    workers.restart(1)

    leaving = [
        Background(lambda worker=member.worker: worker.shutdown(graceful=True, timeout=20))
        for member in workers
    ]

    assert [one.result() for one in leaving] == [[], [], []]


def _leaving(member):
    return Background(lambda: member.worker.leave(1e9, lambda: None))


def test_one_that_comes_back_while_others_leave_is_told_how_far_they_are(workers):
    leaving = [_leaving(workers[2])]
    assert eventually(lambda: workers[2].worker._graceful_shutdown._phase)

    leaving += [_leaving(workers.restart(1)), _leaving(workers[0])]

    assert [one.result() for one in leaving] == [([], [], [])] * 3


def test_who_serves_a_worker_that_died_waits_for_its_next_incarnation(workers):
    serving = Background(lambda: workers[2].worker.serve_until_over(0, 1e9))
    workers.restart(0)
    assert serving.is_blocked()

    leaving = [_leaving(workers[n]) for n in (0, 1)]
    serving.result()
    leaving.append(_leaving(workers[2]))
    assert [one.result() for one in leaving] == [([], [], [])] * 3


# -- joining again at a store

OPTIONS = Options(listen="unix", timeouts=Timeouts(join=20, call=20))


@pytest.fixture
def world():
    """come(rank, incarnation) at one store; all are closed at the end."""
    store, workers = HashStore(), []

    def come(rank, incarnation=0, size=2):
        options = Options(listen="unix", timeouts=OPTIONS.timeouts, incarnation=incarnation)
        worker = join(f"w{rank}", rank, size, options, expose=[far], store=store)
        workers.append(worker)
        return worker

    yield come
    for worker in workers:
        worker.close()


def ask(worker, to):
    with worker.scope():
        return gradwire.rpc_sync(to, far.here)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_closed_world_is_joined_again_without_meeting(world, rank):
    first = [Background(lambda n=n: world(n)) for n in (0, 1)]
    workers = [one.result() for one in first]
    survivor = workers[1 - rank]
    workers[rank].close()
    with pytest.raises(PeerLost):
        ask(survivor, rank)

    back = world(rank, incarnation=1)

    assert ask(survivor, rank) == (f"w{rank}", 1)
    assert ask(back, survivor.name) == (survivor.name, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_died_before_the_first_meeting_is_met_as_its_next_incarnation(world, rank):
    first = [Background(lambda n=n: world(n, incarnation=int(n == rank))) for n in (0, 1)]
    one, two = (each.result() for each in first)

    assert ask(one, "w1") == ("w1", int(rank == 1))
    assert ask(two, "w0") == ("w0", int(rank == 0))


def test_an_incarnation_is_a_small_number():
    with pytest.raises(UsageError, match="incarnation=-1 is not between 0 and 65535"):
        Options(incarnation=-1)
