"""What is armed happens, once and where it was said; what never happens fails who wanted it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import gradwire
from gradwire.errors import CallTimeout, PeerLost, RemoteError, UsageError
from gradwire.testing import cluster, faults
from gradwire.testing.clock import ManualClock
from gradwire.testing.failpoints import ACTIONS, POINTS, Fault
from tests.background import Background
from tests.injection.processes import frozen, kill, state
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
RUNS: list[str] = []


def run():
    RUNS.append(gradwire.get_worker_info().name)
    return len(RUNS)


@pytest.fixture
def workers():
    RUNS.clear()
    with cluster(3, expose=[HERE, faults]) as made:
        yield made
        for member in made:
            member.run(faults.disarm)
        assert_nothing_left(made)


def _call(to="w1"):
    return gradwire.rpc_sync(to, run)


# -- the words


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("point", POINTS)
def test_a_fault_prints_as_the_words_it_is_read_from(action, point):
    words = f"{action} {point} Call on w1 with w0 nth 2 for 0.5"

    assert str(Fault.parse(words)) == words
    assert Fault.parse(words) == Fault(action, point, "Call", "w1", "w0", 2, 0.5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill",
        "kill before-send",
        "burn before-send Call",
        "kill at-noon Call",
        "kill before-send Call nth",
        "kill before-send Call nth two",
        "kill before-send Call because why",
    ],
)
def test_what_is_no_fault_is_refused_with_the_grammar(text):
    with pytest.raises(UsageError, match="not a fault") as caught:
        Fault.parse(text)

    assert "ACTION POINT KIND" in caught.value.hint


def test_only_the_action_call_takes_something_to_call(workers):
    with pytest.raises(UsageError, match="needs what to call"):
        workers[0].run(faults.arm, "kill before-send Call", print)
    with pytest.raises(UsageError, match="needs what to call"):
        workers[0].run(faults.arm, "call before-send Call")


# -- where and when


def test_a_fault_happens_at_its_occurrence_and_no_other(workers):
    with workers[1].worker.scope():
        faults.arm("raise before-handle Call nth 2")

    assert workers[0].run(_call) == 1
    with pytest.raises(RemoteError, match="InjectedFault on w1: a fault was injected: raise bef"):
        workers[0].run(_call)
    assert workers[0].run(_call) == 2
    assert workers[1].run(faults.fired) == {"raise before-handle Call nth 2": True}


def test_a_fault_can_be_for_one_worker_and_one_peer(workers):
    workers[1].run(faults.arm, "raise before-handle Call on w2; raise before-handle Call with w2")

    assert workers[0].run(_call) == 1
    with pytest.raises(RemoteError, match="InjectedFault on w1"):
        workers[2].run(_call)
    assert workers[1].run(faults.fired) == {"raise before-handle Call with w2": True}


@pytest.mark.parametrize(
    ("point", "runs"),
    [("before-handle", 0), ("before-reply", 1)],
)
def test_a_request_fails_before_or_after_its_handler_has_run(workers, point, runs):
    workers[1].run(faults.arm, f"raise {point} Call")

    with pytest.raises(RemoteError, match="InjectedFault on w1"):
        workers[0].run(_call)

    assert len(RUNS) == runs


@pytest.mark.parametrize(("point", "runs"), [("before-send", 0), ("after-send", 1)])
def test_a_request_fails_before_or_after_it_has_left(workers, point, runs):
    workers[0].run(faults.arm, f"raise {point} Call")

    with pytest.raises(faults.InjectedFault, match=f"raise {point} Call"):
        workers[0].run(_call)

    assert eventually(lambda: len(RUNS) == runs)


def test_a_closed_channel_loses_the_answer_and_the_next_call_gets_through(workers):
    workers[1].run(faults.arm, "close before-send Result")

    with pytest.raises(PeerLost, match="w1 was lost before answering w0#1"):
        workers[0].run(_call)

    assert workers[0].run(_call) == 2


def test_what_is_called_back_finds_the_point_where_it_is(workers):
    met = []
    workers[1].run(faults.arm, "call before-reply Call", lambda: met.append(list(RUNS)))

    workers[0].run(_call)

    assert met == [["w1"]]


def test_a_delay_lasts_until_it_is_released(workers):
    workers[1].run(faults.arm, "delay before-reply Call")
    call = Background(lambda: workers[0].run(_call))
    assert eventually(lambda: RUNS == ["w1"])
    assert call.is_blocked()

    workers[1].run(faults.release)

    assert call.result() == 1


def test_a_delay_is_measured_by_the_clock_of_the_worker():
    clock = ManualClock()
    with cluster(2, expose=[HERE], clock=clock) as workers:
        RUNS.clear()
        workers[1].run(faults.arm, "delay before-reply Call for 30")
        call = Background(lambda: workers[0].run(_call))
        assert eventually(lambda: RUNS == ["w1"])
        assert call.is_blocked()
        assert eventually(lambda: clock.advance(10) or not call.is_blocked())

        assert call.result() == 1


def test_a_delay_longer_than_a_deadline_is_a_timeout_that_names_the_worker(workers):
    workers[1].run(faults.arm, "delay before-reply Call")

    with pytest.raises(CallTimeout, match="w1 did not answer"):
        workers[0].run(lambda: gradwire.rpc_sync("w1", run, timeout=0.25))

    workers[1].run(faults.release)


# -- armed from elsewhere


def test_a_call_that_arms_does_not_meet_what_it_arms(workers):
    every = "; ".join(f"raise {point} any nth 1" for point in POINTS if point != "before-handle")

    def arm_and_look():
        gradwire.rpc_sync("w1", faults.arm, args=(every,))
        return workers[1].run(faults.fired)

    assert not any(workers[0].run(arm_and_look).values())
    workers[1].run(faults.disarm)


def test_armed_takes_care_that_it_has_happened(workers):
    def once():
        with (
            faults.armed("raise before-handle Call", on="w1"),
            pytest.raises(RemoteError, match="InjectedFault"),
        ):
            _call()

    def never():
        both = "raise before-handle Start; raise before-handle Call"
        with faults.armed(both, on="w1"), pytest.raises(RemoteError, match="InjectedFault"):
            _call()

    workers[0].run(once)
    with pytest.raises(AssertionError, match="never happened on w1: raise before-handle Start"):
        workers[0].run(never)


def test_armed_here_takes_care_too(workers):
    def never():
        with faults.armed("raise before-send Start"):
            _call()

    with pytest.raises(AssertionError, match="never happened on w0: raise before-send Start"):
        workers[0].run(never)


# -- what is met


def _trained():
    x = torch.ones(2, requires_grad=True)
    with gradwire.context():
        gradwire.rpc_sync("w1", torch.sin, args=(x,)).sum().backward()


def test_every_point_of_a_backward_pass_is_counted(workers):
    for member in (workers[0], workers[1]):
        member.run(faults.arm)

    workers[0].run(_trained)

    kinds = ("Call", "Start", "Forget")  # each is handled by a thread of its own
    handled = {f"after-handle {kind}" for kind in kinds}
    assert eventually(lambda: handled <= workers[1].run(faults.seen).keys())
    seen = workers[1].run(faults.seen)
    for kind in kinds:
        assert seen[f"before-handle {kind}"] == seen[f"after-handle {kind}"] == 1
    assert seen["before-reply Call"] == seen["before-send Result"] == 1
    assert seen["after-send Gradients"] == 1
    assert workers[0].run(faults.seen)["after-handle Result"] == 1


def test_a_worker_has_no_failpoints_unless_somebody_asks(workers, monkeypatch):
    assert all(member.worker.agent.interceptor is None for member in workers)
    monkeypatch.setenv("GRADWIRE_FAULTS", "raise before-handle Call on w1")

    with cluster(2, expose=[HERE]) as made:
        assert made[0].run(faults.fired) == {}
        with pytest.raises(RemoteError, match="InjectedFault on w1"):
            made[0].run(_call)
    monkeypatch.setenv("GRADWIRE_FAULTS", "nonsense")
    with pytest.raises(UsageError, match="not a fault: 'nonsense'"), cluster(1):
        pass


# -- processes


PROGRAM = """
import gradwire

@gradwire.expose
def ping():
    return "pong"

def main():
    try:
        gradwire.rpc_sync("w1", ping)
    except gradwire.PeerLost as error:
        return str(error).partition(":")[0]

if __name__ == "__main__":
    try:
        print(gradwire.run(main, world_size=2))
    except gradwire.GradwireError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_processes_find_their_faults_in_the_environment(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "GRADWIRE_FAULTS": "kill before-reply Call on w1"}

    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment,
    )

    assert "w1" in done.stdout
    assert "SIGKILL" in done.stdout or "was lost before answering" in done.stdout


@pytest.mark.slow
@pytest.mark.processes
def test_a_frozen_process_is_stopped_when_freeze_returns_and_goes_on_afterwards():
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            with frozen(process):
                assert state(process.pid) == "T"
            assert eventually(lambda: state(process.pid) in "SR")
        finally:
            kill(process)
        process.wait(10)


def test_nothing_is_armed_where_nobody_has_armed(workers):
    with pytest.raises(AssertionError, match="nothing is armed here"):
        workers[0].run(faults.seen)
