"""Exceptions cross as data and keep their types."""

from __future__ import annotations

import pytest

from gradwire.agent.failure import describe, revive
from gradwire.errors import PeerLost, RemoteError
from gradwire.rpc.registry import Registry, exception_name

REGISTRY = Registry()


def crossed(error, worker="w1"):
    try:
        raise error
    except BaseException as raised:
        failure = describe(raised, worker, exception_name)
    return revive(failure, REGISTRY.exception_type)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("bad"),
        IndexError("bad"),
        OSError("bad"),
        ZeroDivisionError("bad"),
        NotImplementedError("bad"),
        StopIteration("bad"),
        AssertionError("bad"),
        FileNotFoundError("bad"),
        PeerLost("bad"),
    ],
)
def test_a_known_type_is_kept_with_worker_text_and_traceback(error):
    came = crossed(error)

    assert isinstance(came, type(error))
    assert isinstance(came, RemoteError)
    assert came.worker == "w1"
    assert came.args == ("bad",)
    assert f"{type(error).__name__} on w1: bad" in str(came)
    assert "--- traceback on w1 ---" in str(came)
    assert "raise error" in str(came)


class NobodyKnowsThis(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [NobodyKnowsThis("bad"), SystemExit(3), KeyboardInterrupt(), ExceptionGroup("a", [OSError()])],
)
def test_any_other_arrives_as_a_remote_error(error):
    came = crossed(error)

    assert type(came) is RemoteError
    assert type(error).__name__ in str(came)


def test_an_error_from_further_away_keeps_its_worker_and_gathers_tracebacks():
    came = crossed(crossed(ValueError("bad"), "w2"), "w1")

    assert isinstance(came, ValueError)
    assert came.worker == "w2"
    assert str(came).startswith("ValueError on w2: bad")
    assert str(came).count("--- traceback on w2 ---") == 2


def test_hints_travel():
    came = crossed(PeerLost("gone", hint="start it again"))

    assert str(came).endswith("hint: start it again")
