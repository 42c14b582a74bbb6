"""Exceptions cross as data and keep their types."""

from __future__ import annotations

import pytest

from gradwire.agent.failure import clipped, describe, revive
from gradwire.agent.messages import Failure
from gradwire.errors import PeerLost, RemoteError
from gradwire.rpc.registry import Registry, exception_name
from gradwire.wire.message import Kinds, encode, kind_of

REGISTRY = Registry()


def crossed(error, worker="w1", registry=REGISTRY):
    """The exception as it is raised at the other end, after its way over the wire."""
    try:
        raise error
    except BaseException as raised:
        failure = describe(raised, worker, exception_name)
    came = Kinds([Failure]).decode(kind_of(Failure), encode(failure))
    return revive(came, registry.exception_type)


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


class Unprintable(ValueError):
    """Nor is its type one that the receiver knows."""

    def __str__(self):
        raise LookupError("no text")


def test_an_exception_that_cannot_be_printed_still_travels():
    came = crossed(Unprintable())

    assert type(came) is RemoteError
    assert came.message == "(it cannot be printed: LookupError)"
    assert "in crossed" in came.remote_traceback


def test_text_that_is_no_unicode_still_travels():
    came = crossed(ValueError("caf\udce9"))

    assert isinstance(came, ValueError)
    assert came.args == ("caf\\udce9",)


def test_of_a_huge_text_both_ends_travel():
    came = crossed(ValueError("begin " + "x" * (4 << 20) + " end"))

    assert isinstance(came, ValueError)
    assert came.message.startswith("begin xxx")
    assert came.message.endswith("xxx end")
    assert len(str(came)) < 3 << 20


class HasMessage(Exception):
    @property
    def message(self):
        return "read only"


class HasNoSubclasses(Exception):
    def __init_subclass__(cls, **_):
        raise RuntimeError("no subclasses please")


@pytest.mark.parametrize("error", [HasMessage("bad"), HasNoSubclasses("bad")])
def test_an_exposed_type_that_cannot_be_made_again_arrives_as_a_remote_error(error):
    came = crossed(error, registry=Registry([type(error)]))

    assert type(came) is RemoteError
    assert came.worker == "w1"
    assert type(error).__name__ in came.type_name
    assert "on w1: bad" in str(came)


def test_an_error_that_is_too_large_is_clipped_not_lost():
    failure = describe(ValueError("x" * 10_000), "w1", exception_name)

    short = clipped(failure, 100)

    assert short.text == "x" * 100
    assert short.traceback == failure.traceback[-100:]
    assert isinstance(revive(short, REGISTRY.exception_type), ValueError)


def test_whom_an_error_is_about_is_kept_on_its_way_through_others():
    lost = PeerLost("w3 was lost").about("w3", link="unix:///there", phase="backward")

    came = crossed(crossed(lost, "w2"), "w1")

    assert came.worker == "w2"
    assert (came.peer, came.link, came.phase) == ("w3", "unix:///there", "backward")


def test_what_is_known_of_an_error_is_not_said_anew():
    lost = PeerLost("w3 was lost").about("w3", phase="connect")

    assert lost.about("w2", link="unix:///there", phase="call") is lost
    assert (lost.peer, lost.link, lost.phase) == ("w3", "unix:///there", "connect")
