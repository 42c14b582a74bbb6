"""Exceptions cross as data and keep their types."""

from __future__ import annotations

import copy
import enum
import itertools
import os
from pathlib import Path

import pytest
import torch

from gradwire.agent.messages import Failure
from gradwire.agent.remote_errors import clipped, describe, fresh, revive
from gradwire.errors import PeerLost, RemoteError, StepFailed
from gradwire.rpc.codec.pickle_codec import dumps, loads
from gradwire.rpc.expose.registry import Registry, exception_name
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
    [
        NobodyKnowsThis("bad"),
        SystemExit(3),
        KeyboardInterrupt(),
        BaseExceptionGroup("a", [KeyboardInterrupt()]),
    ],
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
    assert came.args == ("caf\udce9",)
    assert came.message == "caf\\udce9"


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

    short = clipped(failure, 800)

    assert short.text == "x" * 100
    assert short.traceback == failure.traceback[-100:]
    assert isinstance(revive(short, REGISTRY.exception_type), ValueError)
    assert clipped(short, 800) is short


def test_whom_an_error_is_about_is_kept_on_its_way_through_others():
    lost = PeerLost("w3 was lost").about("w3", link="unix:///there", phase="backward")

    came = crossed(crossed(lost, "w2"), "w1")

    assert came.worker == "w2"
    assert (came.peer, came.link, came.phase) == ("w3", "unix:///there", "backward")


def test_what_is_known_of_an_error_is_not_said_anew():
    lost = PeerLost("w3 was lost").about("w3", phase="connect")

    assert lost.about("w2", link="unix:///there", phase="call") is lost
    assert (lost.peer, lost.link, lost.phase) == ("w3", "unix:///there", "connect")


# -- what an exception holds


def raised_by(function, *args):
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def no_module():
    import nowhere_to_be_found  # noqa: F401


def missing_name():
    return nobody_has_defined_this  # noqa: F821


BUILTINS = {
    "open": ((open, "/nowhere/x"), ["errno", "strerror", "filename"]),
    "path": ((os.stat, Path("/nowhere/x")), ["errno", "strerror"]),
    "rename": ((os.rename, "/nowhere/x", "/nowhere/y"), ["errno", "filename", "filename2"]),
    "bytes": ((os.stat, b"/nowhere/\xff"), ["errno", "filename"]),
    "surrogates": ((open, "/nowhere/\udcff"), ["errno", "filename"]),
    "decode": ((b"\xff".decode,), ["encoding", "object", "start", "end", "reason"]),
    "encode": (("\udc80".encode,), ["encoding", "object", "start", "end", "reason"]),
    "key": (({}.__getitem__, 3), []),
    "tuple key": (({}.__getitem__, (1, "a")), []),
    "attribute": ((getattr, [], "x"), ["name"]),
    "name": ((missing_name,), ["name"]),
    "import": ((no_module,), ["name", "msg"]),
    "syntax": ((compile, "x = = 1", "f.py", "exec"), ["filename", "lineno", "offset", "text"]),
    "stop": ((next, iter(())), []),
}


@pytest.mark.parametrize(("call", "names"), BUILTINS.values(), ids=BUILTINS)
@pytest.mark.parametrize("hops", [1, 2])
def test_a_builtin_keeps_its_args_and_its_fields(call, names, hops):
    error = raised_by(*call)

    came = error
    for hop in range(hops):
        came = crossed(came, f"w{hop}")

    assert isinstance(came, type(error))
    assert came.args == error.args
    for name in names:
        assert getattr(came, name) == getattr(error, name)


def test_a_path_arrives_as_its_text():
    error = FileNotFoundError(2, "no", Path("/nowhere"))

    assert crossed(error).filename == "/nowhere"


class Level(enum.IntEnum):
    HIGH = 3


class Colour(enum.StrEnum):
    RED = "red"


class Telling(Exception):
    """With attributes, and a constructor that does not take its args."""

    retries = 0

    def __init__(self, code, *, details):
        super().__init__("it went wrong", code)
        self.code, self.details = code, details
        self._hidden = "but not secret"
        self.retries = 3


DATA = [
    None,
    True,
    1.5,
    1 << 80,
    -(1 << 80),
    b"bytes",
    "caf\xe9",
    [1, (2, [3])],
    {"a": {1: (2,)}, (1, 2): None},
    {1, 2},
    frozenset({"a"}),
]


@pytest.mark.parametrize("data", DATA, ids=repr)
def test_attributes_that_are_plain_data_are_kept(data):
    came = crossed(Telling(7, details=data), registry=Registry([Telling]))

    assert isinstance(came, Telling)
    assert came.args == ("it went wrong", 7)
    assert (came.code, came.details, came._hidden, came.retries) == (7, data, "but not secret", 3)
    assert type(came.details) is type(data)


def test_numbers_and_texts_with_a_type_of_their_own_arrive_as_plain_ones():
    came = crossed(Telling(Level.HIGH, details=Colour.RED), registry=Registry([Telling]))

    assert (came.code, came.details) == (3, "red")
    assert (type(came.code), type(came.details)) == (int, str)


def test_what_is_no_plain_data_stays_behind():
    came = crossed(Telling(7, details=torch.ones(2)), registry=Registry([Telling]))

    assert came.code == 7
    assert not hasattr(came, "details")


def test_args_that_are_not_all_plain_data_are_the_text():
    came = crossed(ValueError("loss is", torch.tensor(1.0)))

    assert came.args == ("('loss is', tensor(1.))",)


def test_an_exception_of_an_unknown_type_keeps_its_contents_too():
    came = crossed(Telling(7, details="x"))

    assert type(came) is RemoteError
    assert came.args == ("it went wrong", 7)
    assert (came.code, came.details) == (7, "x")
    assert came.message == "('it went wrong', 7)"


class Slotted(Exception):
    __slots__ = ("code", "empty")


def test_slots_are_kept():
    error = Slotted("bad")
    error.code = 7

    came = crossed(error, registry=Registry([Slotted]))

    assert came.code == 7
    assert not hasattr(came, "empty")


def test_notes_are_kept():
    error = ValueError("bad")
    error.add_note("while loading")
    error.add_note("for the second time")

    assert crossed(crossed(error)).__notes__ == ["while loading", "for the second time"]


def with_causes(*errors):
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def test_the_chain_of_causes_is_kept():
    came = crossed(with_causes(ValueError("outer"), KeyError(3), OSError(2, "no", "file")))

    assert isinstance(came.__cause__, KeyError)
    assert came.__cause__.args == (3,)
    assert isinstance(came.__cause__.__cause__, FileNotFoundError)
    assert came.__cause__.__cause__.filename == "file"
    assert came.__cause__.__cause__.__cause__ is None
    assert str(came.__cause__) == "KeyError on w1: 3"


def test_a_cause_from_further_away_keeps_its_worker():
    came = crossed(with_causes(ValueError("outer"), crossed(KeyError("inner"), "w2")), "w1")

    assert (came.worker, came.__cause__.worker) == ("w1", "w2")


def test_a_context_is_in_the_traceback_only():
    def handle():
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904

    came = crossed(raised_by(handle))

    assert (came.__cause__, came.__context__) == (None, None)
    assert "KeyError: 'first'" in came.remote_traceback


def test_a_chain_that_bites_its_tail_is_cut():
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first

    came = crossed(first)

    assert isinstance(came.__cause__, KeyError)
    assert came.__cause__.__cause__ is None


def test_a_long_chain_is_cut_somewhere():
    came = crossed(with_causes(*[ValueError(n) for n in range(100)]))

    depth = 0
    while came is not None:
        assert came.args == (depth,)
        came, depth = came.__cause__, depth + 1
    assert 8 < depth < 30


GROUP = ExceptionGroup(
    "several", [ValueError("a", 1), OSError(2, "no", "f"), ExceptionGroup("more", [KeyError(3)])]
)


@pytest.mark.parametrize("hops", [1, 2])
def test_a_group_keeps_its_members(hops):
    came = GROUP
    for hop in reversed(range(hops)):
        came = crossed(came, f"w{hop}")

    assert isinstance(came, ExceptionGroup)
    assert isinstance(came, RemoteError)
    assert came.message == "several"
    assert [error.args for error in came.exceptions[:2]] == [("a", 1), (2, "no")]
    assert came.exceptions[2].exceptions[0].args == (3,)
    assert came.worker == came.exceptions[0].worker == f"w{hops - 1}"
    assert str(came).startswith(f"ExceptionGroup on w{hops - 1}: several")


def test_the_members_of_a_group_are_caught_one_by_one():
    caught = []
    try:
        raise crossed(GROUP)
    except* OSError as group:
        caught += [error.errno for error in group.exceptions]
    except* (ValueError, KeyError) as group:
        caught += [type(error).__name__ for error in group.exceptions]

    assert caught == [2, "RemoteValueError", "ExceptionGroup"]


def test_of_a_huge_group_the_first_members_arrive_and_a_note_says_so():
    came = crossed(ExceptionGroup("many", [ValueError("x" * 1000) for _ in range(1000)]))

    arrived = len(came.exceptions)
    assert 5 < arrived < 1000
    assert came.__notes__ == [f"{1000 - arrived} more members were left out"]


def test_what_is_too_large_stays_behind_alone():
    error = ValueError("bad")
    error.large, error.long, error.small = "x" * (1 << 20), list(range(100_000)), 7

    came = crossed(error)

    assert (came.args, came.small) == (("bad",), 7)
    assert not hasattr(came, "large")
    assert not hasattr(came, "long")
    assert len(describe(error, "w1", exception_name).contents) < 1000


def test_our_own_errors_keep_what_they_say():
    came = crossed(StepFailed("it failed", stepped=("w1", "w2"), unknown=("w3",), hint="again"))

    assert (came.stepped, came.unknown) == (("w1", "w2"), ("w3",))
    assert came.hint == "again"


@pytest.mark.parametrize(
    "error",
    [OSError(2, "no", "f"), Telling(7, details=[1]), ValueError(1, 2), UnicodeError(), GROUP],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("copied", [fresh, copy.copy])
def test_a_copy_holds_the_same(error, copied):
    if copied is copy.copy and isinstance(error, OSError):
        pytest.skip("Python copies an OSError with its filename among its args")
    error.__cause__ = KeyError("why")
    came = crossed(error, registry=Registry([Telling]))
    came.__traceback__ = None

    again = copied(came)

    assert again is not came
    assert type(again) is type(came)
    assert again.args == came.args
    assert again.__dict__ == came.__dict__
    assert getattr(again, "errno", None) == getattr(came, "errno", None)
    assert getattr(again, "exceptions", ()) == getattr(came, "exceptions", ())
    if copied is fresh:
        assert again.__cause__ is came.__cause__


def test_a_plain_remote_error_can_be_pickled():
    came = crossed(Telling(7, details="x"))

    again = loads(dumps(came))

    assert (again.args, again.code, str(again)) == (came.args, 7, str(came))
