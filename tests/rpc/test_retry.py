"""Trying again: steps as a unit, calls that may run twice, and everything else at most once."""

from __future__ import annotations

import threading

import pytest
import torch

import gradwire
from gradwire import DeadlinePassed, NotTrusted, PeerLost, StaleIncarnation, StepFailed, UsageError
from gradwire.rpc.retry import is_loss
from gradwire.testing import cluster, faults
from tests.background import Background
from tests.leftovers import eventually
from tests.rpc import far_incarnations as far


@pytest.fixture
def workers():
    far.CALLS.clear()
    with cluster(3, expose=[far]) as workers:
        yield workers


@pytest.fixture
def w0(workers):
    with workers[0].worker.scope():
        yield workers[0].worker


def test_a_step_in_which_nobody_is_lost_is_tried_once(w0):
    tries = []
    for attempt in gradwire.retrying(restore=lambda _: pytest.fail("nothing was lost")):
        with attempt:
            tries.append((attempt.number, attempt.error))

    assert tries == [(0, None)]
    assert attempt.is_done


def test_a_step_is_tried_again_from_what_it_began_with(workers, w0):
    state, story = {"x": 1}, []

    def restore(attempt):
        story.append((attempt.number, type(attempt.error).__name__, gradwire.incarnation("w1")))
        state["x"] = 1

    for attempt in gradwire.retrying(restore=restore):
        with attempt:
            state["x"] *= gradwire.rpc_sync("w2", far.kept, args=(10,))
            if attempt.number == 0:
                workers[1].worker.close()
                restarting = Background(lambda: workers.restart(1))
            state["x"] *= gradwire.rpc_sync("w1", far.kept, args=(10,))

    restarting.result()
    assert state["x"] == 100
    assert story == [(1, "PeerLost", 1)]


def test_a_connection_found_broken_by_a_call_costs_one_try_however_late_its_reader_is(w0):
    """Not all tries, one after the other, by the same broken connection. The reader may be late."""
    assert gradwire.rpc_sync("w1", far.kept, args=(1,)) == 1
    for _ in range(50):
        with faults.armed("close before-send Call"):
            for attempt in gradwire.retrying(times=2):
                with attempt:
                    assert gradwire.rpc_sync("w1", far.kept, args=(1,)) == 1
        assert attempt.number == 1


def test_a_connection_found_broken_by_a_pass_costs_one_try(w0):
    """Its gradients are told, not asked for: nobody waits for an answer to them."""
    for _ in range(50):
        x = torch.ones(2, requires_grad=True)
        with faults.armed("close before-send Start"):
            for attempt in gradwire.retrying(times=2):
                with attempt, gradwire.context() as context:
                    y = gradwire.rpc_sync("w1", torch.mul, args=(x, 3))
                    gradwire.backward(context, [y.sum()])
                    assert gradwire.get_gradients(context)[x].tolist() == [3, 3]
        assert attempt.number == 1


class _Trained:
    """Two weights on two workers and their optimizer, and what the next step begins with."""

    def __init__(self) -> None:
        self.saved = None
        self.make()

    def make(self, attempt=None) -> None:
        self.refs = [gradwire.remote(name, far.weight) for name in ("w1", "w2")]
        self.optimizer = gradwire.DistributedOptimizer(torch.optim.Adam, self.refs, lr=0.1)
        if self.saved is not None:
            self.optimizer.restore(self.saved)

    def step(self) -> None:
        with gradwire.context() as context:
            x = torch.tensor(2.0, dtype=torch.float64)
            for ref in self.refs:
                x = gradwire.rpc_sync(ref.owner(), far.product, args=(ref, x))
            gradwire.backward(context, [x])
            self.optimizer.step(context)


def _train(lose) -> list[torch.Tensor]:
    trained = _Trained()
    for n in range(6):
        for attempt in gradwire.retrying(restore=trained.make):
            with attempt:
                if attempt.number == 0:
                    lose(n)
                trained.step()
                saved = trained.optimizer.checkpoint()
        trained.saved = saved
    return saved["parameters"]


def test_training_goes_on_bit_for_bit(workers, w0):
    undisturbed = _train(lambda n: None)
    assert gradwire.incarnation("w1") == 0

    assert _train(lambda n: n in (2, 4) and workers.restart(n // 2)) == undisturbed

    assert (gradwire.incarnation("w1"), gradwire.incarnation("w2")) == (1, 1)


def _try(step, **options) -> list[int]:
    """Try a step; the numbers of the tries."""
    tries = []
    for attempt in gradwire.retrying(**options):
        with attempt:
            tries.append(attempt.number)
            step()
    return tries


def _raise(error):
    raise error


def test_the_last_try_raises(workers, w0):
    errors = iter([PeerLost("first"), PeerLost("second"), PeerLost("third"), PeerLost("fourth")])
    with pytest.raises(PeerLost, match="third"):
        _try(lambda: _raise(next(errors)), times=3)


def test_what_is_lost_while_it_is_restored_was_a_try_too(w0):
    story = []

    def restore(attempt):
        story.append(attempt.number)
        if attempt.number == 1:
            raise PeerLost("again")

    for attempt in gradwire.retrying(times=4, restore=restore):
        with attempt:
            story.append("step")
            if attempt.number == 0:
                raise PeerLost("at first")

    assert story == ["step", 1, 2, "step"]
    assert str(attempt.error) == "again"


def test_other_errors_are_raised_at_once(w0):
    errors = iter([ValueError("mine"), AssertionError("tried again")])
    with pytest.raises(ValueError, match="mine"):
        _try(lambda: _raise(next(errors)))


def test_a_worker_that_does_not_come_back_is_named(workers, w0):
    workers[1].worker.close()
    with pytest.raises(DeadlinePassed, match="w1 was lost and did not come back in time") as caught:
        _try(lambda: gradwire.rpc_sync("w1", far.here), wait=0.05)

    assert isinstance(caught.value.__cause__, PeerLost)


def test_only_those_that_are_named_must_come_back(workers, w0):
    workers[1].worker.close()
    names = iter(["w1", "w2"])
    for attempt in gradwire.retrying(workers=["w2"]):
        with attempt:
            found = gradwire.rpc_sync(next(names), far.here)

    assert found == ("w2", 0)


def test_a_loss_is_recognized_by_its_cause():
    failed, busy = StepFailed("one was lost"), StepFailed("one was busy")
    failed.__cause__, busy.__cause__ = PeerLost("w1"), ValueError()

    assert all(map(is_loss, [failed, StaleIncarnation("r0.1")]))
    assert not any(map(is_loss, [busy, NotTrusted("w1"), ValueError()]))
    busy.__cause__ = busy
    assert not is_loss(busy)


def test_retrying_needs_a_try(w0):
    with pytest.raises(UsageError, match=r"retrying\(times=0\) would never try"):
        gradwire.retrying(times=0)


# -- calls

HOW = {"before": (0, 1), "after": (1, 2)}
"""When the worker ends, seen from its function: how often it has run; and if it may run twice."""


def _dying(workers, how):
    """Let w1 end around the next call of its function, and start it again."""
    far.HOOKS[how] = _Ending(workers)
    return far.HOOKS[how]


class _Ending:
    def __init__(self, workers) -> None:
        self._workers, self._begun = workers, False
        self._is_back = threading.Event()

    def __call__(self) -> None:
        """On the thread of the function; when it returns, no answer of it gets through."""
        if self._begun:
            return
        self._begun, worker = True, self._workers[1].worker
        threading.Thread(target=self._restart, daemon=True).start()
        assert eventually(lambda: not any(worker.agent._connections.channels.values()))

    def _restart(self) -> None:
        self._workers.restart(1)
        self._is_back.set()

    def wait(self) -> None:
        assert self._is_back.wait(10)


@pytest.mark.parametrize("how", HOW)
def test_a_call_runs_at_most_once(workers, w0, how):
    ending = _dying(workers, how)
    with pytest.raises(PeerLost, match="w1 was lost before answering"):
        gradwire.rpc_sync("w1", getattr(far, f"ends_{how}"))

    ending.wait()
    assert len(far.CALLS) == HOW[how][0]
    assert gradwire.rpc_sync("w1", far.here) == ("w1", 1)
    assert len(far.CALLS) == HOW[how][0]


@pytest.mark.parametrize("how", HOW)
def test_an_idempotent_call_is_made_again(workers, w0, how):
    ending = _dying(workers, how)

    assert gradwire.rpc_sync("w1", getattr(far, f"again_{how}")) == ("w1", 1)

    ending.wait()
    assert len(far.CALLS) == HOW[how][1]


def test_an_idempotent_call_is_not_made_again_in_a_context(workers, w0):
    ending = _dying(workers, "after")
    with gradwire.context(), pytest.raises(PeerLost):
        gradwire.rpc_sync("w1", far.again_after)

    ending.wait()
    assert len(far.CALLS) == 1


def test_an_idempotent_call_ends_at_its_deadline(workers, w0):
    workers[1].worker.close()

    with pytest.raises(DeadlinePassed, match="w1 was lost and did not come back in time"):
        gradwire.rpc_sync("w1", far.again_after, timeout=0.1)


def test_an_old_reference_is_no_better_the_second_time(workers, w0):
    value = gradwire.remote("w1", far.kept, args=(1,))
    value.to_here()
    workers.restart(1)

    with pytest.raises(StaleIncarnation):
        gradwire.rpc_sync("w1", far.again_with, args=(value,))
