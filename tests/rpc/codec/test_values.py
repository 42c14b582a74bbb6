"""The table of values: what crosses besides builtins, tensors and classes of the program."""

from __future__ import annotations

import io
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from uuid import UUID, uuid1
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.errors import BadMessage, NotExposed, NotSerializable, RemoteError, UsageError
from gradwire.options import Limits
from gradwire.rpc.codec.codec import Codec
from gradwire.rpc.codec.walk import Tag
from gradwire.rpc.expose.registry import Registry
from gradwire.testing import cluster

HERE = sys.modules[__name__]
VIENNA = ZoneInfo("Europe/Vienna")


class Unlucky(Exception):
    """Has a constructor that may not run, and an attribute."""

    def __init__(self, what, number):
        super().__init__(what)
        self.number = number


class OwnZone(tzinfo):
    def utcoffset(self, _):
        return timedelta(0)


def nine():
    return 9


def who():
    return gw.get_worker_info()


def same(value):
    return value


@pytest.fixture(scope="module")
def codec():
    return Codec(Registry([HERE]), Limits())


def crossed(codec, value):
    data, tensors, _ = codec.encode(value)
    return codec.decode(data, tensors)


# -- equal, and of the same type

FIELDS = np.array([(1, 2.5, "ü", [1, 2])], "i4, >f8, U3, (2,)i2")
PADDED = np.dtype({"names": ["a", "b"], "formats": ["u1", "i8"], "offsets": [9, 0], "itemsize": 24})
VALUES = {
    "date": date(2024, 2, 29),
    "time": time(23, 59, 58, 999_999, fold=1),
    "datetime": datetime(1, 1, 1, 0, 0, 0, 1),
    "datetime, UTC": datetime(2024, 1, 1, tzinfo=UTC),
    "datetime, offset": datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-3), "here")),
    "datetime, zone": datetime(2024, 10, 27, 2, 30, tzinfo=VIENNA, fold=1),
    "time, zone": time(1, tzinfo=VIENNA),
    "zone": VIENNA,
    "timezone": timezone(timedelta(microseconds=-1)),
    "timedelta": timedelta(days=-1, microseconds=3),
    "longest timedelta": timedelta.max,
    "path": Path("a") / "b",
    "path that is no UTF-8": PurePosixPath("\udcff/x"),
    "windows path": PureWindowsPath("C:/x"),
    "decimal": Decimal("-1.500E+77"),
    "infinite decimal": Decimal("-Infinity"),
    "fraction": Fraction(-3, 1 << 100),
    "uuid": UUID(int=7),
    "safe uuid": uuid1(),
    "range in a list": [range(1 << 70), slice(None, (1,))],
    "defaultdict": defaultdict(list, {"a": [1]}),
    "defaultdict without a factory": defaultdict(None, a=1),
    "defaultdict of an exposed function": defaultdict(nine, {2: 3}),
    "counter": Counter({"a": 2, "b": -1, 3: 1.5}),
    "deque": deque([1, (2,)], maxlen=5),
    "deque without an end": deque(),
    "ordered dict": OrderedDict(b=1, a=2),
    "namespace": SimpleNamespace(a=1, b=[SimpleNamespace()]),
    "worker": gw.WorkerInfo("w1", 1),
    "memoryview": memoryview(b"abc"),
    "empty memoryview": memoryview(b""),
    "writable memoryview": memoryview(bytearray(b"abc")),
    "memoryview of rows": memoryview(np.arange(6, dtype="i4").reshape(2, 3)),
    "memoryview of one number": memoryview(np.array(3.5)),
    "records": FIELDS,
    "no records": FIELDS[:0],
    "records in columns": np.asfortranarray(np.zeros((2, 3), "i4, f4")),
    "records with gaps": np.zeros((2, 2), PADDED),
    "records of records": np.zeros(2, [("a", [("b", "i4"), ("c", "M8[D]")], (2,)), ("d", "S3")]),
    "aligned records": np.zeros(2, np.dtype("u1, i8", align=False)),
    "record": FIELDS[0],
}


def assert_same(sent, got):
    assert type(got) is type(sent)
    match sent:
        case np.ndarray() | np.void():
            assert got.dtype == sent.dtype
            assert got.shape == sent.shape
            assert got.tobytes() == sent.tobytes()
        case memoryview():
            assert got == sent
            assert (got.format, got.shape, got.readonly) == (sent.format, sent.shape, sent.readonly)
        case list() | deque():
            for a, b in zip(sent, got, strict=True):
                assert_same(a, b)
        case _:
            assert got == sent
            assert repr(got) == repr(sent)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_arrives_equal_and_of_the_same_type(codec, name):
    sent = VALUES[name]

    got = crossed(codec, [sent, {"x": (sent,)}])

    assert_same(sent, got[0])
    assert_same(sent, got[1]["x"][0])


def test_what_compares_equal_is_not_taken_for_the_same(codec):
    moment = crossed(codec, VALUES["datetime, zone"])
    assert moment.fold == 1
    assert moment.tzinfo is VIENNA
    assert crossed(codec, UTC) is UTC
    assert crossed(codec, VALUES["deque"]).maxlen == 5
    assert crossed(codec, VALUES["safe uuid"]).is_safe is VALUES["safe uuid"].is_safe
    assert crossed(codec, VALUES["defaultdict"])["new"] == []
    assert crossed(codec, VALUES["defaultdict of an exposed function"])["new"] == 9
    assert str(crossed(codec, Decimal("sNaN12"))) == "sNaN12"
    assert isinstance(crossed(codec, Path("x")), PurePath)
    assert crossed(codec, Counter("aab")).most_common(1) == [("a", 2)]
    assert crossed(codec, FIELDS).flags.writeable


def test_values_cross_between_workers():
    with cluster(2, expose=[HERE]) as workers:
        got = workers[0].run(gw.rpc_sync, "w1", same, args=(VALUES,))
        info = workers[0].run(gw.rpc_sync, "w1", who)

    assert list(got) == list(VALUES)
    for name, sent in VALUES.items():
        assert_same(sent, got[name])
    assert info == gw.WorkerInfo("w1", 1)


# -- exceptions


def unlucky():
    error = Unlucky("what", 13)
    error.add_note("a note")
    error.__cause__ = KeyError("nowhere", torch.ones(2))
    return error


def test_an_exception_arrives_as_its_own_type_with_what_it_holds(codec):
    sent = unlucky()

    got = crossed(codec, [sent])[0]

    assert type(got) is Unlucky
    assert (got.args, got.number, got.__notes__) == (("what",), 13, ["a note"])
    assert type(got.__cause__) is KeyError
    assert got.__cause__.args[1] is sent.__cause__.args[1]
    assert got.__traceback__ is None
    with pytest.raises(Unlucky, match="what"):
        raise got


@pytest.mark.parametrize(
    "sent",
    [
        ValueError(),
        OSError(2, "no such", "file"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        StopIteration(4),
        UsageError("why", hint="what to do"),
        NotSerializable("what", place="args[0]"),
        ImportError("no", name="x"),
    ],
    ids=lambda sent: type(sent).__name__,
)
def test_an_exception_of_python_or_gradwire_arrives_with_its_attributes(codec, sent):
    got = crossed(codec, sent)

    assert type(got) is type(sent)
    assert got.args == sent.args
    assert vars(got) == vars(sent)
    assert str(got) == str(sent)
    assert getattr(got, "filename", None) == getattr(sent, "filename", None)
    assert getattr(got, "value", None) == getattr(sent, "value", None)


def test_a_group_arrives_with_its_members(codec):
    got = crossed(codec, ExceptionGroup("several", [ValueError(1), unlucky()]))

    assert type(got) is ExceptionGroup
    assert got.message == "several"
    assert [type(each) for each in got.exceptions] == [ValueError, Unlucky]
    assert got.exceptions[1].number == 13


def test_an_exception_that_cannot_cross_is_refused_with_the_place(codec):
    class Local(Exception):
        pass

    remote = RemoteError("x")
    with pytest.raises(NotSerializable, match=r"args\[0\]\.args\[1\]: a value of type .*object"):
        codec.encode([ValueError(1, object())])
    with pytest.raises(NotSerializable, match=r'args\.__dict__\["number"\]: '):
        codec.encode(Unlucky("what", object()))
    with pytest.raises(NotSerializable, match="which another worker has raised"):
        codec.encode(remote)
    with pytest.raises(NotSerializable, match="is local"):
        codec.encode(Local())
    with pytest.raises(NotExposed, match=r"Unlucky' is not exposed on this worker"):
        Codec(Registry(), Limits()).decode(codec.encode(unlucky()).data, [torch.ones(2)])


# -- what is refused


def zone_of_a_file():
    header = struct.pack(">4sc15x6l", b"TZif", b"1", 0, 0, 0, 0, 1, 4)
    return ZoneInfo.from_file(io.BytesIO(header + struct.pack(">lbb", 0, 0, 0) + b"UTC\0"))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (datetime(2024, 1, 1, tzinfo=OwnZone()), r"args\.tzinfo: a value of type .*OwnZone cannot"),
        (defaultdict(lambda: 0), r"args\.default_factory: .*<lambda> is a lambda"),
        (Fraction(1 << 5000), "a fraction of more than 4096 bits"),
        (memoryview(np.zeros(2, ">i4")), r"a memoryview of format '>i' and shape \(2,\)"),
        (memoryview(np.zeros((2, 0))), "a memoryview of format 'd' and shape"),
        (zone_of_a_file(), "without a key"),
        (np.zeros(2, [("a", object)]), "dtype .* cannot be serialized"),
        (np.zeros(2, [(("title", "a"), "i4")]), "dtype .* cannot be serialized"),
        (np.zeros(2, np.dtype("u1, i8", align=True)), "dtype .* cannot be serialized"),
        (np.zeros(2, "i4, i4").view(np.recarray), "recarray cannot be serialized"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_would_arrive_as_something_else_is_refused(codec, value, why):
    with pytest.raises(NotSerializable, match=why):
        codec.encode(value)


def test_a_counter_with_attributes_is_refused(codec):
    value = Counter("a")
    value.extra = 1

    with pytest.raises(NotSerializable, match=r"a Counter with the attributes \['extra'\]"):
        codec.encode(value)


T = Tag
FIELD = ["a", 0, [], "<i4"]


@pytest.mark.parametrize(
    "node",
    [
        [T.DATE, 2024, 2, 30],
        [T.DATE, 2024, True, 1],
        [T.DATE, 1 << 60, 1, 1],
        [T.TIME, 24, 0, 0, 0, 0, None],
        [T.TIME, 1, 0, 0, 0, 2, None],
        [T.TIME, 1, 0, 0, 0, 0, 5],
        [T.TIME],
        [T.DATETIME, 2024, 1, 1, 1, 0, 0, 0, 0, [T.DATE, 2024, 1, 1]],
        [T.TIMEDELTA, 0, 86400, 0],
        [T.TIMEDELTA, 1 << 60, 0, 0],
        [T.TIMEZONE, [T.TIMEDELTA, 2, 0, 0]],
        [T.TIMEZONE, 5],
        [T.TIMEZONE, [T.TIMEDELTA, 0, 0, 0], b"x"],
        [T.ZONE, "../../etc/passwd"],
        [T.ZONE, "Europe/Nowhere"],
        [T.ZONE, 3],
        [T.PATH, "Path", "x"],
        [T.PATH, "PurePosixPath", 5],
        [T.PATH, "WindowsPath", "x"],
        [T.DECIMAL, "1_0"],
        [T.DECIMAL, "abc"],
        [T.DECIMAL, 1],
        [T.FRACTION, 2, 4],
        [T.FRACTION, 1, 0],
        [T.FRACTION, 1, -2],
        [T.FRACTION, 1.0, 2],
        [T.FRACTION, 1, [T.BIG_INT, bytes(600) + b"\1"]],
        [T.UUID, b"short", None],
        [T.UUID, bytes(16), 5],
        [T.UUID, bytes(16), True],
        [T.DEFAULT_DICT, "eval"],
        [T.DEFAULT_DICT, 5],
        [T.DEFAULT_DICT, [T.LIST]],
        [T.DEFAULT_DICT, None, "a"],
        [T.DEFAULT_DICT, None, "a", 1, "a", 2],
        [T.COUNTER, "a"],
        [T.DEQUE, 1, 1, 2],
        [T.DEQUE, -1],
        [T.DEQUE, 1 << 63],
        [T.DEQUE, "many"],
        [T.NAMESPACE, 1, 2],
        [T.NAMESPACE, "a"],
        [T.MEMORY, "O", True, bytes(8)],
        [T.MEMORY, "i", True, bytes(8), 3],
        [T.MEMORY, "i", True, bytes(8), -2],
        [T.MEMORY, "i", 1, bytes(8), 2],
        [T.MEMORY, "B", True, b"", *[1] * 70],
        [T.WORKER_INFO, "", 1],
        [T.WORKER_INFO, "w1", -1],
        [T.WORKER_INFO, "w1", True],
        [T.EXCEPTION, "builtins:int", [T.TUPLE], [T.DICT], None, [T.TUPLE]],
        [T.EXCEPTION, "builtins:ValueError", [T.LIST], [T.DICT], None, [T.TUPLE]],
        [T.EXCEPTION, "builtins:ValueError", [T.TUPLE], [T.DICT], 5, [T.TUPLE]],
        [T.EXCEPTION, "builtins:ValueError", [T.TUPLE], [T.DICT, 1, 2], None, [T.TUPLE]],
        [T.EXCEPTION, "builtins:ExceptionGroup", [T.TUPLE, "m"], [T.DICT], None, [T.TUPLE, 1]],
        [T.EXCEPTION, "builtins:ExceptionGroup", [T.TUPLE, "m"], [T.DICT], None, [T.TUPLE]],
        [T.RECORDS, 0, [4, *FIELD], 0, 4],
        [T.RECORDS, 0, [4, *FIELD], False, 3],
        [T.RECORDS, 0, [4], False, 4],
        [T.RECORDS, 0, [3, *FIELD], False, 4],
        [T.RECORDS, 0, [4, "a", 1, [], "<i4"], False, 4],
        [T.RECORDS, 0, [4, "a", -1, [], "<i4"], False, 4],
        [T.RECORDS, 0, [4, "a", 0, [2], "<i4"], False, 4],
        [T.RECORDS, 0, [4, "a", 0, [1 << 30, 1 << 30], "<i4"], False, 4],
        [T.RECORDS, 0, [8, "a", 0, [], "|O8"], False, 2],
        [T.RECORDS, 0, [4, *FIELD, *FIELD], False, 4],
        [T.RECORDS, 0, [4, "a", 0, [], "<U1"], False, 4],
        [T.RECORDS, 0, [1 << 40, *FIELD], False, 4],
    ],
    ids=repr,
)
def test_what_no_correct_peer_sends_is_a_bad_message(codec, node):
    data = msgspec.msgpack.encode([Tag.LIST, node])
    tensors = [torch.full((16,), 255, dtype=torch.uint8)] if node[0] == Tag.RECORDS else []

    with pytest.raises((BadMessage, NotExposed)):
        codec.decode(data, tensors)


def test_a_peer_does_not_replace_the_methods_of_an_exception(codec):
    held = [T.DICT, "add_note", 5, "number", 7, "__class__", 3]

    node = [T.EXCEPTION, f"{__name__}:Unlucky", [T.TUPLE], held, None, [T.TUPLE]]
    got = codec.decode(msgspec.msgpack.encode(node), [])

    assert vars(got) == {"number": 7}
    got.add_note("works")


def test_a_codec_of_the_user_goes_first(monkeypatch):
    from gradwire.rpc.codec import named_types

    monkeypatch.setattr(named_types, "_BY_TYPE", {})
    monkeypatch.setattr(named_types, "_BY_NAME", {})
    gw.register_codec(Fraction, str, Fraction)
    codec = Codec(Registry(), Limits())

    assert codec.encode(Fraction(1, 3)).data == msgspec.msgpack.encode(
        [Tag.REGISTERED, "fractions:Fraction", "1/3"]
    )
    assert crossed(codec, Fraction(1, 3)) == Fraction(1, 3)
