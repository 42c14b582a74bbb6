"""Workers that die and are started again, over real processes."""

from __future__ import annotations

import logging
import os

import pytest

import gradwire
from gradwire import Options, PeerLost, UsageError
from tests.processes import far as plain
from tests.processes import far_restarts as far
from tests.processes.conftest import TIMEOUTS


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(main, *args, restarts, listen="auto"):
    options = Options(timeouts=TIMEOUTS, listen=listen)
    return gradwire.run(
        main, 3, args, expose=[far, plain], options=options, restarts=restarts, timeout=120
    )


@pytest.mark.parametrize("listen", ["auto", "tcp://127.0.0.1:0"])
def test_a_worker_that_died_is_back_as_a_new_incarnation(tmp_path, caplog, listen):
    caplog.set_level(logging.WARNING, "gradwire")

    seen = run(far.lose_and_go_on, str(tmp_path), restarts=3, listen=listen)

    assert seen["at first"] == [("w1", 0), ("w2", 0)]
    assert seen["killed"][0] == "PeerLost"
    assert "w1 was lost before answering" in seen["killed"][1]
    assert seen["back"] == [("w1", 1), ("w2", 0)]
    assert seen["old pass"][0] == "PeerLost"
    assert "e0.0 was dropped here: w1 was lost" in seen["old pass"][1]
    for step in ("old context", "through another"):
        kind, text = seen[step]
        assert kind == "StaleIncarnation", step
        assert "was opened before this incarnation of w1 began" in text
    for step in ("old reference", "passed on", "method"):
        kind, text = seen[step]
        assert kind == "StaleIncarnation", step
        assert "belongs to incarnation 0 of w1, which was restarted as incarnation 1" in text
    assert seen["gradient"] == 4
    assert seen["new reference"] == 4
    assert (seen["die_before"], seen["die_before ran"]) == ("PeerLost", 0)
    assert seen["die_before back"] == [("w1", 2), ("w2", 0)]
    assert (seen["die_after"], seen["die_after ran"]) == ("PeerLost", 1)
    assert seen["die_after back"] == [("w1", 3), ("w2", 0)]
    assert seen["idempotent"] == ("w2", 2)
    assert seen["idempotent ran"] == 3
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"{name} died (SIGKILL) while it was at work; restarted as incarnation {n}"
        for name, n in [("w1", 1), ("w1", 2), ("w1", 3), ("w2", 1), ("w2", 2)]
    ]


def test_the_first_worker_is_not_immortal():
    assert run(far.first_dies, restarts=1) == (("w0", 1), [0], ("w2", 0))


def test_one_that_comes_back_when_all_is_over_leaves_too(tmp_path):
    assert run(far.lose_one_and_return, str(tmp_path / "ran"), restarts=1) == ("PeerLost", 1)


def test_a_death_too_many_is_told():
    with pytest.raises(PeerLost, match=r"w0 died \(SIGKILL\) while it was at work"):
        run(far.die, restarts=1)


def test_restarts_are_a_number():
    with pytest.raises(UsageError, match=r"run\(restarts=-1\) is not a number from 0"):
        gradwire.run(os.getpid, 1, restarts=-1)
