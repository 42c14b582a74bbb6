"""What a peer says that its exception held is data: bounded, checked, and set without any code."""

from __future__ import annotations

import random
import sys

import msgspec
import pytest

import gradwire
from gradwire.agent.exception_contents import unpack_contents
from gradwire.agent.messages import MOST_CONTENTS, Failure
from gradwire.agent.remote_errors import describe, fresh, revive
from gradwire.errors import BadMessage, OverLimit, PeerLost, RemoteError
from gradwire.rpc.expose.registry import Registry, exception_name
from gradwire.testing import cluster
from gradwire.wire.message import Kinds, encode, kind_of

HERE = sys.modules[__name__]
RAN: list[object] = []


@pytest.fixture(autouse=True)
def _nothing_ran():
    RAN.clear()
    yield
    assert RAN == []


class Touchy(Exception):
    """Exposed, and full of code that a peer must not run."""

    plain = 0

    def __new__(cls, *args):
        RAN.append(("__new__", args))
        return super().__new__(cls, *args)

    def __init__(self, *args):
        RAN.append(("__init__", args))

    def __setattr__(self, name, value):
        RAN.append(("__setattr__", name))

    def __getattribute__(self, name):
        if name in ("__dict__", "args"):
            RAN.append(("__getattribute__", name))
        return super().__getattribute__(name)

    def __setstate__(self, state):
        RAN.append(("__setstate__", state))

    @property
    def setter(self):
        return "read"

    @setter.setter
    def setter(self, value):
        RAN.append(("setter", value))

    def method(self):
        return "the method"

    def add_note(self, note):
        RAN.append(("add_note", note))


class OwnMessage(Exception):
    """A property with a setter in the place of an attribute of ours."""

    @property
    def message(self):
        return "its own"

    @message.setter
    def message(self, value):
        RAN.append(("message", value))


REGISTRY = Registry([HERE])
TOUCHY = f"{__name__}:Touchy"


def failure(type_name="builtins:ValueError", contents=b"", **held):
    """As a peer would send it; `held` are the fields of what it holds."""
    names = ("args", "attributes", "notes", "cause", "members")
    defaults = {"args": None, "attributes": {}, "notes": [], "cause": None, "members": []}
    fields = [{**defaults, **held}[name] for name in names]
    data = contents or msgspec.msgpack.encode(fields)
    message = Failure(type_name, "text", None, "traceback", "w1", contents=data)
    return Kinds([Failure]).decode(kind_of(Failure), encode(message))


def came(*args, **kwargs):
    return revive(failure(*args, **kwargs), REGISTRY.exception_type)


def link(type_name, held=(None, {}, [], None, [])):
    return [type_name, "text", None, "", list(held)]


# -- nothing runs


def test_no_code_of_an_exposed_type_runs():
    attributes = {"setter": 1, "plain": 2, "free": 3, "method": 4}

    error = came(TOUCHY, args=["a", 1], attributes=attributes, notes=["n"], cause=link(TOUCHY))
    again = fresh(error)

    assert RAN == []
    for one in (error, again):
        assert type(one).__name__ == "RemoteTouchy"
        held = object.__getattribute__(one, "__dict__")
        assert (held["plain"], held["free"], held["__notes__"]) == (2, 3, ["n"])
        assert BaseException.__dict__["args"].__get__(one) == ("a", 1)
        assert type(one).method(one) == "the method"
        assert one.setter == "read"


def test_a_property_in_the_place_of_an_attribute_of_ours_is_not_set():
    error = came(f"{__name__}:OwnMessage", args=["a"])

    assert type(error) is RemoteError
    assert error.message == "text"


@pytest.mark.parametrize(
    "name",
    [
        "__class__",
        "__dict__",
        "__traceback__",
        "__cause__",
        "__context__",
        "__suppress_context__",
        "__notes__",
        "__init__",
        "__str__",
        "__reduce__",
        "args",
        "message",
        "hint",
        "worker",
        "peer",
        "link",
        "phase",
        "type_name",
        "remote_traceback",
        "with_traceback",
        "add_note",
        "about",
        "",
        "not a name",
        "a.b",
    ],
)
@pytest.mark.parametrize("type_name", ["builtins:ValueError", "unknown:Type", "builtins:OSError"])
def test_what_is_no_attribute_of_the_users_is_not_set(type_name, name):
    blank, error = came(type_name), came(type_name, attributes={name: "evil"})

    assert error.__dict__ == blank.__dict__
    assert type(error) is type(blank)
    assert error.args == ("text",)
    assert callable(error.with_traceback)


@pytest.mark.parametrize(
    ("type_name", "attributes"),
    [
        ("builtins:UnicodeDecodeError", {"start": "x", "end": 1 << 63, "object": 5}),
        ("builtins:OSError", {"errno": "x", "filename": [0]}),
        ("builtins:SyntaxError", {"lineno": "x", "text": 5}),
        ("builtins:ExceptionGroup", {"exceptions": 5, "message": 5}),
    ],
)
def test_fields_of_the_wrong_kind_harm_nobody(type_name, attributes):
    error = came(type_name, args=["a", [0, 1, 2]], attributes=attributes)

    assert isinstance(error, RemoteError)
    assert str(error).startswith(f"{type_name.partition(':')[2]} on w1: text")
    assert repr(error)
    assert fresh(error).args == error.args


@pytest.mark.parametrize("type_name", ["builtins:SystemExit", "builtins:KeyboardInterrupt"])
def test_a_cause_that_would_end_us_is_a_remote_error(type_name):
    error = came(cause=link(type_name), members=[link(type_name)])

    assert type(error.__cause__) is RemoteError


def test_nothing_is_looked_up_for_a_cause_but_what_is_exposed():
    error = came(cause=link("os:system"), attributes={"x": [0, 1]})

    assert type(error.__cause__) is RemoteError
    assert error.x == (1,)


def test_a_group_without_members_is_a_remote_error():
    assert type(came("builtins:ExceptionGroup", args=["a"])) is RemoteError
    assert type(came("builtins:ExceptionGroup", args=[5], members=[link("x:y")])) is RemoteError


# -- it is bounded


def nested(depth):
    node: object = 1
    for _ in range(depth):
        node = [1, node]
    return node


def chain(depth):
    held = [None, {}, [], None, []]
    for _ in range(depth):
        held = [None, {}, [], link("builtins:ValueError", held), []]
    return held


def args(*nodes):
    return msgspec.msgpack.encode([nodes, {}, [], None, []])


BAD = {
    "deep args": args(nested(18)),
    "very deep args": b"\x95\x91" + b"\x92\x01" * 20_000 + b"\x01\x80\x90\xc0\x90",
    "deep causes": msgspec.msgpack.encode(chain(17)),
    "very deep causes": msgspec.msgpack.encode(chain(200)),
    "a long number": args([5, b"x" * 2000]),
    "many values": args(*[None] * 20_000),
    "an unknown tag": args([99, 1]),
    "no tag": args([]),
    "half an item of a dict": args([2, 1]),
    "a list in a set": args([3, [1]]),
    "a text where bytes are due": args([6, "text"]),
    "a bare map": args({"a": 1}),
    "a number as the name of an attribute": msgspec.msgpack.encode([None, {1: 2}, [], None, []]),
    "a number as a note": msgspec.msgpack.encode([None, {}, [1], None, []]),
    "a number as the cause": msgspec.msgpack.encode([None, {}, [], 5, []]),
    "a text": msgspec.msgpack.encode("not a list"),
    "nothing whole": b"\x95",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_contents_over_the_bounds_are_left_out_and_the_failure_is_heard(data):
    with pytest.raises(BadMessage):
        unpack_contents(data)
    error = came(contents=data)

    assert isinstance(error, ValueError)
    assert error.args == ("text",)
    assert error.__cause__ is None
    assert error.remote_traceback == "traceback"


def test_too_many_values_are_over_the_limit_before_any_is_made():
    with pytest.raises(OverLimit, match="holds more than"):
        unpack_contents(msgspec.msgpack.encode([[None] * 20_000, {}, [], None, []]))


def test_a_message_with_longer_contents_does_not_decode():
    with pytest.raises(BadMessage, match="does not decode"):
        failure(contents=b"\x00" * (MOST_CONTENTS + 1))


def test_bytes_at_random_lead_to_nothing_else_than_a_refusal():
    chance = random.Random(0)
    error = ExceptionGroup("g", [OSError(2, "no", "f"), ValueError("a", {1: (2, [3])})])
    error.__cause__ = KeyError("k")
    error.add_note("note")
    whole = describe(error, "w1", exception_name).contents
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        made = came(
            "builtins:ExceptionGroup", contents=bytes(data[: chance.choice([None, -1, -9])])
        )
        assert isinstance(made, RemoteError)
        assert str(made)


# -- and over the wire


@gradwire.expose
class Careful(Exception):
    """Its constructor wants what its args do not have."""

    def __init__(self, code, *, where):
        super().__init__("careful")
        self.code, self.where = code, where


@gradwire.expose
def fail():
    error = Careful(7, where={"row": 3, "column": (1, 2)})
    error.add_note("noted")
    raise error from FileNotFoundError(2, "no such file", "data.bin")


def check(error):
    assert (error.args, error.code) == (("careful",), 7)
    assert error.where == {"row": 3, "column": (1, 2)}
    assert error.__notes__ == ["noted"]
    assert isinstance(error.__cause__, FileNotFoundError)
    assert (error.__cause__.errno, error.__cause__.filename) == (2, "data.bin")


def test_every_way_of_calling_brings_them():
    def program():
        future = gradwire.rpc_async("w1", fail)
        for ask in (
            lambda: gradwire.rpc_sync("w1", fail),
            future.wait,
            future.wait,
            gradwire.remote("w1", fail).to_here,
            lambda: gradwire.rpc_sync("w0", fail),
        ):
            with pytest.raises(Careful) as raised:
                ask()
            check(raised.value)

    with cluster(2) as workers:
        workers[0].run(program)


def test_what_a_lost_peer_is_about_is_not_for_the_peer_to_replace():
    error = came("gradwire.errors:PeerLost", attributes={"peer": "w0", "free": 1})

    assert isinstance(error, PeerLost)
    assert (error.peer, error.free) == ("", 1)
