"""Histories under faults: each is exact, or has an error that names the worker it hit."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
import time

import pytest
import torch

import gradwire
from tests import strength
from tests.simulate import Faults, Stuck, play, primitives, setting_of, simulate
from tests.simulate.batch import run, run_on_cores
from tests.simulate.scheduler import Process, Scheduler
from tests.testing import own

FOUND_BY_SAFETY = [
    16, 57, 125, 267, 282, 443, 538, 1062, 1203, 1252, 1294, 1663, 1785, 2235, 5333, 6334,
    100598, 101050, 101090, 101114, 121205, 141151, 142981, 183340,
]  # fmt: skip
FOUND_BY_LIVENESS = [58, 66, 83, 205, 214, 389, 461, 466, 712, 874, 3019, 5359]


@pytest.fixture(autouse=True)
def one_thread_for_torch():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def told(failed):
    return "\n".join("\n".join([*t.setting.lines(), *t.violations]) for t in failed[:3])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("liveness", [False, True], ids=["safety", "liveness"])
def test_many_seeds_keep_every_promise(liveness):
    seeds = strength.seeds(1000, 120)
    summary = run_on_cores(seeds, os.cpu_count() or 1, liveness=liveness)

    assert summary.seeds == len(seeds)
    assert not summary.failed, told(summary.failed)
    assert not (strength.IS_LONG and summary.missing())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("liveness", "seeds"), [(False, FOUND_BY_SAFETY), (True, FOUND_BY_LIVENESS)]
)
def test_what_once_broke_a_promise_keeps_it(liveness, seeds):
    summary = run(seeds, liveness=liveness)

    assert not summary.failed, told(summary.failed)


@pytest.mark.parametrize("seed", [3, 267, 1062])
def test_one_seed_is_one_history(seed):
    first = play(setting_of(seed))
    second = play(setting_of(seed))

    assert first.trace == second.trace
    assert first.switches == second.switches
    assert setting_of(seed) == first.setting


@pytest.mark.slow
def test_one_seed_is_one_history_in_another_process():
    command = [sys.executable, "-m", "tests.simulate", "--seed", "267", "--trace"]

    first, second = (
        subprocess.run(command, capture_output=True, text=True, timeout=60) for _ in range(2)
    )

    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert "seed 267: 3 workers" in first.stdout
    assert "*** " in first.stdout
    assert "1 seeds (safety), 0 with violations" in first.stdout


@pytest.mark.slow
def test_seeds_add_up_to_the_same_wherever_they_are_played_until_it_is_enough():
    here = run(range(50))
    on_cores = run_on_cores(range(75), 2, on_some=lambda summary: summary.seeds < 50)

    assert on_cores.lines() == here.lines()
    assert on_cores.counts == here.counts


def test_another_seed_is_another_history():
    assert play(setting_of(1)).trace != play(setting_of(2)).trace


# -- programs of one's own


def step():
    x = torch.ones(2, requires_grad=True)
    gradwire.rpc_sync("w1", torch.mul, args=(x, 3)).sum().backward()
    return x.grad.tolist()


def step_in_a_context():
    with gradwire.context():
        return step()


@pytest.mark.parametrize("program", [step, step_in_a_context])
def test_a_program_runs_as_it_would_on_real_workers(program):
    outcome = simulate(program, workers=2, seed=1)

    assert outcome.result == [3.0, 3.0]
    assert outcome.error is None
    assert any("Gradients" in line for line in outcome.trace)


def test_a_program_meets_a_crash():
    outcome = simulate(step, workers=2, seed=3, faults=Faults(crashes=1, within=5))

    assert isinstance(outcome.error, gradwire.PeerLost)
    assert "w1 was lost" in str(outcome.error)
    assert outcome.counts["crash"] + outcome.counts["silent crash"] == 1


def test_time_passes_for_functions_that_wait():
    outcome = simulate(own.patient, workers=2, expose=[own])

    assert outcome.result == "waited"
    assert 100 < outcome.seconds < 101


def test_a_timer_calls_at_its_time_unless_it_is_cancelled():
    outcome = simulate(own.timers, workers=2, expose=[own])

    assert outcome.result == ["kept"]
    assert 50 <= outcome.seconds < 51


def test_a_timeout_comes_at_its_time():
    options = gradwire.Options(timeouts=gradwire.Timeouts(call=7.0, backward=7.0))
    faults = Faults(stalls=1, within=1, heal=False)

    outcome = simulate(step, workers=2, faults=faults, options=options)

    assert isinstance(outcome.error, gradwire.DeadlinePassed)
    assert 7.0 <= outcome.seconds < 17.5  # and ten for the others to confirm a failed pass


def test_a_program_that_never_ends_is_told_where_it_waits():
    with pytest.raises(Stuck, match=r"waiting: .*w0 program"):
        simulate(own.for_ever, workers=2, expose=[own], seconds=10.0)


@pytest.mark.parametrize("kind", [primitives.Lock, primitives.RLock])
def test_a_look_from_aside_frees_no_lock(kind):
    scheduler = Scheduler(0)
    lock, seen = kind(scheduler), []

    def hold():
        with lock:
            scheduler.block([], 2.0)

    def look():
        with scheduler.aside(), lock:
            seen.append(lock.locked())
        return False

    scheduler.spawn("holds it", Process("w0"), hold)
    scheduler.run(1.0, look)
    assert seen
    assert lock.locked()
    scheduler.run(3.0)
    assert not lock.locked()
    scheduler.close()


def test_threads_that_are_not_simulated_are_left_alone():
    with gradwire.testing.cluster(2) as workers:
        simulate(step, workers=2)

        assert workers[0].run(step) == [3.0, 3.0]


def test_threads_that_are_not_simulated_read_the_real_clocks():
    with primitives.simulated([own], lambda record: False):
        for clock in ("time", "monotonic", "perf_counter"):
            assert 0 <= getattr(own.time, clock)() - getattr(time, clock)() + 1 < 60
        assert own.time is not time


def test_the_example_in_the_documentation_is_true():
    names = {"gradwire": gradwire, "torch": torch, "simulate": simulate, "Faults": Faults}
    example = doctest.DocTestParser().get_doctest(simulate.__doc__, names, "simulate", None, None)

    assert doctest.DocTestRunner().run(example).failed == 0
