"""What workers of a run are told, what is refused before they start, and how it is said."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gradwire import DeadlinePassed, JoinTimeout, Options, PeerLost, UsageError
from gradwire.launch.child import worker_specs
from gradwire.launch.run import check_arguments
from gradwire.launch.supervise_state import Died, Overdue, WorkerStage, death_error, overdue_error

HOME = Path("/private")


def test_workers_are_numbered_and_named_and_meet_in_the_private_directory():
    first, second = worker_specs(2, Options(threads=7), HOME)

    assert (first.name, first.rank, first.world_size) == ("w0", 0, 2)
    assert (second.name, second.rank, second.world_size) == ("w1", 1, 2)
    assert first.options.init_method == second.options.init_method == "file:///private/rendezvous"
    assert first.options.threads == 7
    assert first.failure != second.failure


def test_only_the_worker_that_runs_the_function_serves_a_page():
    asked, not_asked = worker_specs(2, Options(), HOME, page=True), worker_specs(2, Options(), HOME)

    assert [spec.page for spec in asked] == [True, False]
    assert [spec.page for spec in not_asked] == [False, False]


@pytest.mark.parametrize("listen", ["auto", "unix"])
def test_their_sockets_lie_there_too(listen):
    first, second = worker_specs(2, Options(listen=listen), HOME)

    assert first.options.listen == "unix:///private/w0.socket"
    assert second.options.listen == "unix:///private/w1.socket"


def test_another_link_may_be_asked_for():
    (only,) = worker_specs(1, Options(listen="tcp://127.0.0.1:0"), HOME)

    assert only.options.listen == "tcp://127.0.0.1:0"


@pytest.mark.parametrize("world_size", [0, -1, 2.0, "3", True])
def test_a_run_needs_a_worker(world_size):
    with pytest.raises(UsageError, match="at least one worker, not world_size="):
        check_arguments(world_size, Options(), None)


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan])
def test_a_timeout_is_a_number_of_seconds(timeout):
    with pytest.raises(UsageError, match=r"run\(timeout=.*\) is not a positive, finite number"):
        check_arguments(1, Options(), timeout)


def test_another_meeting_place_is_refused_not_ignored():
    with pytest.raises(UsageError, match="cannot use tcp://here:1"):
        check_arguments(1, Options(init_method="tcp://here:1"), None)


@pytest.mark.parametrize(
    ("died", "kind", "text"),
    [
        (
            Died(1, 1, WorkerStage.STARTING, None),
            UsageError,
            "b could not start: it ended with exit",
        ),
        (Died(1, -9, WorkerStage.STARTING, None), PeerLost, r"b died \(SIGKILL\) while it started"),
        (
            Died(0, 3, WorkerStage.WORKING, 1),
            PeerLost,
            r"a died \(exit status 3\) while it was at w",
        ),
        (
            Died(0, 0, WorkerStage.LEAVING, None),
            PeerLost,
            r"a died \(exit status 0\) while it was l",
        ),
        (Died(0, -11, WorkerStage.LEFT, None), PeerLost, r"a died \(SIGSEGV\) after it had left"),
        (Died(0, -99, WorkerStage.WORKING, None), PeerLost, r"a died \(signal 99\) while"),
    ],
)
def test_a_death_is_told_with_its_cause_and_its_moment(died, kind, text):
    with pytest.raises(kind, match=text):
        raise death_error(died, ["a", "b"])


@pytest.mark.parametrize(
    ("due", "kind", "text"),
    [
        (WorkerStage.WORKING, JoinTimeout, "a, c did not start in time"),
        (WorkerStage.LEAVING, DeadlinePassed, r"run\(\) gave up on a, c after 2\.5 s"),
        (
            WorkerStage.LEFT,
            DeadlinePassed,
            "a, c did not end in time after the function",
        ),
    ],
)
def test_a_wait_that_is_given_up_names_whom_it_was_for(due, kind, text):
    with pytest.raises(kind, match=text):
        raise overdue_error(Overdue((0, 2), due), ["a", "b", "c"], 2.5)
