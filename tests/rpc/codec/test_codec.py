from __future__ import annotations

import contextlib
import enum
import functools
import math
import struct
import threading
import typing
from collections import OrderedDict, namedtuple
from dataclasses import InitVar, dataclass, field

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradwire.errors import BadMessage, NotExposed, NotSerializable
from gradwire.options import Limits
from gradwire.rpc.codec import builtin_types, named_types, numpy_types, standard_types
from gradwire.rpc.codec.codec import Codec
from gradwire.rpc.codec.walk import Tag
from tests.case_names import case_name


class Table:
    """Names as a plain table."""

    def __init__(self, *exposed):
        self._by_name = {each.__qualname__: each for each in exposed}

    def name_of(self, obj):
        name = getattr(obj, "__qualname__", "?")
        if self._by_name.get(name) is not obj:
            raise NotExposed(f"{name} is not exposed", hint="expose it with @gradwire.expose")
        return name

    def lookup(self, name):
        if name not in self._by_name:
            raise NotExposed(f"{name} is not exposed")
        return self._by_name[name]


def double(x):
    return 2 * x


def strange():
    yield 1


class Color(enum.Enum):
    RED = 1
    CRIMSON = 1  # noqa: PIE796
    BLUE = (2, "b")


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    FAR = 1 << 70


Point = namedtuple("Point", "x y")


class Typed(typing.NamedTuple):
    data: object
    n: int = 3


class Stubborn(typing.NamedTuple("Stubborn", [("a", int)])):
    def __new__(cls):
        return super().__new__(cls, 7)


@dataclass
class Config:
    lr: object
    name: str = "sgd"
    steps: list[object] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: object
    y: object = None


@dataclass
class Converting:
    raw: InitVar[str]
    n: int = field(init=False)
    doubled: int = field(init=False, default=0)

    def __post_init__(self, raw):
        self.n = int(raw)
        self.doubled += 2 * self.n

    @functools.cached_property
    def slow(self):
        return self.n + 1


@dataclass
class Holding:
    n: int

    def __post_init__(self):
        self.cache = {}


class Slotted:
    __slots__ = ("more",)


@dataclass(slots=True)
class InheritsSlot(Slotted):
    n: int


@dataclass
class ListLike(list):
    n: int = 0


@dataclass(frozen=True)
class BadHash:
    n: int

    def __hash__(self):
        raise ZeroDivisionError("no hash today")


class Plain:
    pass


EXPOSED = (
    *(double, Color, Level, Access, Point, Typed, Stubborn, Config, Frozen, Converting),
    *(Holding, InheritsSlot, ListLike, BadHash, Plain, dict),
)


@pytest.fixture(scope="module")
def codec():
    return Codec(Table(*EXPOSED), Limits())


def crossed(codec, value):
    data, tensors, _ = codec.encode(value)
    assert type(data) is bytes
    return codec.decode(data, tensors)


def assert_same(sent, got):
    """Equal, and of equal types all the way down; NaN equals NaN."""
    assert type(got) is type(sent)
    match sent:
        case float():
            assert struct.pack("d", got) == struct.pack("d", sent)
        case complex():
            assert_same([sent.real, sent.imag], [got.real, got.imag])
        case list() | tuple():
            assert len(got) == len(sent)
            for a, b in zip(sent, got, strict=True):
                assert_same(a, b)
        case dict():
            assert_same(list(sent), list(got))
            assert_same(list(sent.values()), list(got.values()))
        case set() | frozenset():
            assert got == sent
            assert {type(item) for item in got} == {type(item) for item in sent}
        case Frozen():
            assert_same([sent.x, sent.y], [got.x, got.y])
        case slice():
            assert_same([sent.start, sent.stop, sent.step], [got.start, got.stop, got.step])
        case _:
            assert got == sent


# -- what travels


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            False,
            0,
            -1,
            (1 << 64) - 1,
            -(1 << 63),
            1 << 64,
            -(1 << 63) - 1,
            -(1 << 999),
        ),
        *(
            0.0,
            -0.0,
            math.inf,
            math.nan,
            1e-320,
            "",
            "añ",
            "\U0001f600",
            "a\0b",
            "\udcff/x",
            b"",
            b"\xff",
        ),
        *([], (), {}, set(), frozenset(), [()], ([],), [[1, (2,)], {3}], bytearray(b"xy")),
        *({"a": 1}, {1: "x", None: 2, (1, "a"): [3], frozenset({4}): {}, 2.5: True}),
        *({1, "a", None, (2,)}, frozenset({b"x"}), 1 + 2j, complex(-0.0, math.inf)),
        *(
            slice(None),
            slice(1, None, -2),
            slice("a", (1,), None),
            range(3),
            range(0, 1 << 80, 7),
            ...,
        ),
        *(torch.float32, torch.qint8, torch.strided, torch.sparse_csr, torch.channels_last),
        *(
            torch.per_tensor_affine,
            torch.device("cpu"),
            torch.device("cuda", 3),
            torch.device("meta"),
        ),
        *(torch.Size([]), torch.Size([2, 0, 3]), torch.Size([-1])),
    ],
    ids=case_name,
)
def test_a_value_arrives_equal_and_of_the_same_type(codec, value):
    assert_same(value, crossed(codec, value))


def test_the_order_of_a_dict_is_kept(codec):
    assert list(crossed(codec, {"b": 1, "a": 2, "c": 3})) == ["b", "a", "c"]


def test_a_state_dict_arrives_with_its_metadata(codec):
    sent = nn.BatchNorm1d(2).state_dict()

    got = crossed(codec, sent)

    assert type(got) is OrderedDict
    assert list(got) == list(sent)
    assert got._metadata == sent._metadata
    nn.BatchNorm1d(2).load_state_dict(got)
    assert crossed(codec, OrderedDict(a=1)) == OrderedDict(a=1)


def test_tensors_are_listed_in_the_order_of_the_walk_and_once_each(codec):
    a, b = torch.ones(2), nn.Parameter(torch.zeros(3))

    data, tensors, _ = codec.encode(([a, {"b": b}], a, a.view(2)))
    got = codec.decode(data, tensors)

    assert [id(tensor) for tensor in tensors[:2]] == [id(a), id(b)]
    assert len(tensors) == 3
    assert got[0][0] is got[1] is a
    assert got[0][1]["b"] is b
    assert got[2] is not a


@pytest.mark.parametrize("index", [1, 0, -1, True, "0", None])
def test_a_tensor_is_named_again_only_after_it_has_come(codec, index):
    again, first = [Tag.SAME_TENSOR, index], [Tag.TENSOR, 0]
    nodes = [first, again] if index != 0 else [again, first]

    with pytest.raises(BadMessage):
        codec.decode(msgspec.msgpack.encode([Tag.LIST, *nodes]), [torch.ones(1)])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=">i4"),
        np.array(3.5),
        np.zeros((0, 3), np.int16),
        np.arange(24).reshape(2, 3, 4).T,
        np.arange(10)[::-2],
        np.broadcast_to(np.arange(3), (2, 3)),
        np.array([True, False]),
        np.array([1 + 2j], np.complex64),
        np.array(["a", "longer", "ü"]),
        np.zeros((0, 2), "U3"),
        np.array([b"x\0y", b"z"]),
        np.array(["2020-01-01", "NaT"], "datetime64[D]"),
        np.array([3], "timedelta64[25us]"),
        np.array([b"\1\2\3"], "V3"),
        np.array([1.5], np.longdouble),
        np.frombuffer(b"1234", np.uint8),
    ],
    ids=lambda array: f"{array.dtype.str} {array.shape}",
)
def test_an_array_arrives_with_its_dtype_shape_and_order_and_may_be_written_to(codec, array):
    data, (tensor,), _ = codec.encode(array)
    got = codec.decode(data, [tensor.clone()])

    assert type(got) is np.ndarray
    assert got.dtype.str == array.dtype.str
    np.testing.assert_array_equal(got, array)
    assert got.flags.writeable
    assert got.flags.f_contiguous or not array.flags.f_contiguous


def test_the_bytes_of_a_contiguous_array_are_not_copied(codec):
    array = np.zeros(4)

    _, (tensor,), _ = codec.encode(array)
    array[0] = 1.0

    assert tensor.view(torch.float64)[0] == 1.0


@pytest.mark.parametrize(
    "scalar",
    [
        *(np.float32(1.5), np.float64(-0.0), np.int64(-3), np.uint8(200), np.bool_(True)),
        *(np.complex128(1 + 2j), np.float16(2), np.datetime64("2020-01-01T00:00", "25s")),
        *(
            np.timedelta64(3, "D"),
            np.str_("a\0"),
            np.str_(""),
            np.str_("\udc80"),
            np.bytes_(b"a\0"),
        ),
        *(np.void(b"abc"), np.longdouble(1) / 3),
    ],
    ids=lambda scalar: f"{type(scalar).__name__} {scalar!a}",
)
def test_a_numpy_scalar_arrives_as_one(codec, scalar):
    got = crossed(codec, scalar)

    assert type(got) is type(scalar)
    assert got.dtype == scalar.dtype
    assert got.tobytes() == scalar.tobytes()


@pytest.mark.parametrize(
    "member",
    [*Color, *Level, *Access, Access.READ | Access.WRITE, Access.READ | Access.FAR, Access(0)],
    ids=str,
)
def test_an_enum_member_arrives_as_the_very_same(codec, member):
    assert crossed(codec, member) is member


def test_functions_and_classes_arrive_as_what_their_name_means_here(codec):
    assert crossed(codec, [double, Color, dict, Config]) == [double, Color, dict, Config]


def test_named_tuples_arrive_without_a_call_of_their_constructor(codec):
    for value in (Point(1, [2]), Typed({"a": (1,)}, 4), Stubborn()):
        assert_same(value, crossed(codec, value))


def test_what_torch_operators_return_arrives_as_it_is(codec):
    sent = torch.ones(2, 2).max(dim=0)

    got = crossed(codec, sent)

    assert type(got) is torch.return_types.max
    assert got.values is sent.values


def test_dataclasses_arrive_field_by_field(codec):
    config = Config(Frozen(1, torch.ones(1)), steps=[Frozen((2,))])

    got = crossed(codec, config)

    assert type(got) is Config
    assert type(got.lr) is Frozen
    assert got.lr.y is config.lr.y
    assert got.steps == [Frozen((2,))]


def test_a_dataclass_is_rebuilt_without_converting_twice_and_computes_again(codec):
    sent = Converting("4")
    assert sent.slow == 5

    got = crossed(codec, sent)

    assert (got.n, got.doubled) == (4, 8)
    assert "slow" not in vars(got)
    assert got.slow == 5


class Ticket:
    def __init__(self, n):
        self.n = n


class LateTicket(Ticket):
    pass


def test_an_extension_travels_as_what_it_makes_of_itself():
    codec = Codec(Table(), Limits())
    codec.extend(Ticket, 64, lambda ticket: [ticket.n, "t"], lambda data: Ticket(data[0]))

    assert crossed(codec, {"t": (Ticket(5),)})["t"][0].n == 5
    with pytest.raises(
        NotSerializable, match=r"args: a value of type .*LateTicket cannot be serialized"
    ):
        codec.encode(LateTicket(1))
    with pytest.raises(BadMessage, match="malformed: TypeError"):
        codec.decode(msgspec.msgpack.encode([64, 3]), [])


def test_extensions_of_one_codec_are_unknown_to_another(codec):
    extended = Codec(Table(), Limits())
    extended.extend(Ticket, 64, lambda ticket: ticket.n, Ticket)

    with pytest.raises(BadMessage, match="unknown tag 64"):
        codec.decode(extended.encode(Ticket(1)).data, [])


@pytest.mark.parametrize(("tag", "why"), [(5, "not for"), (128, "not for"), (64, "is taken")])
def test_a_tag_that_is_not_free_is_our_own_bug(tag, why):
    codec = Codec(Table(), Limits())
    codec.extend(Ticket, 64, lambda ticket: ticket.n, Ticket)

    with pytest.raises(AssertionError, match=f"tag {tag} {why}|tag {tag} is {why}"):
        codec.extend(Plain, tag, lambda _: 0, lambda _: Plain())


def test_tags_are_never_shared():
    own = {Tag.PICKLED: None, Tag.EXCEPTION: None, Tag.SUBCLASS: None, Tag.DISTRIBUTION: None}
    tables = (
        builtin_types.DECODERS,
        numpy_types.DECODERS,
        standard_types.DECODERS,
        named_types.DECODERS,
        own,
    )
    numbers = [n for name, n in vars(Tag).items() if name.isupper()]

    assert sorted(numbers) == sorted(tag for table in tables for tag in table)


# -- what does not


def refused(codec, value, **place):
    with pytest.raises(NotSerializable) as caught:
        codec.encode(value, **place)
    return caught.value


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (Plain(), "test_codec.Plain cannot be serialized"),
        (threading.Lock(), "_thread.lock cannot be serialized"),
        (math, "builtins.module cannot be serialized"),
        ([].append, "list.append is not exposed"),
        (lambda: 0, "<lambda> is not exposed"),
        (int, "int is not exposed"),
        (
            type("Hidden", (enum.Enum,), enum.EnumType.__prepare__("Hidden", (enum.Enum,))),
            "not exp",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_data_is_refused_by_its_type(codec, value, what):
    refusal = refused(codec, value)

    assert what in refusal.message
    assert refusal.place == "args"
    if "cannot be serialized" in what:
        assert "gradwire.register_codec on both workers" in refusal.hint
        assert "Options(pickle=True) on both" in refusal.hint
    else:
        assert "@gradwire.expose" in refusal.hint


@pytest.mark.parametrize(
    ("value", "base"),
    [
        (type("MyInt", (int,), {})(3), "int"),
        (np.zeros((2, 2)).view(np.matrix), "ndarray"),
        (nn.UninitializedParameter(), "Tensor"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_subclass_is_refused_rather_than_changed(codec, value, base):
    assert refused(codec, value).hint.startswith(f"send it as a plain {base}, give its class a c")


@pytest.mark.parametrize(
    ("value", "base"),
    [
        (type("MyStr", (str,), {})("a"), "str"),
        (type("MyDict", (dict,), {})(), "dict"),
        (torch.ones(1).as_subclass(type("Mine", (torch.Tensor,), {})), "Tensor"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_subclass_that_has_no_name_is_refused(codec, value, base):
    refusal = refused(codec, value)

    assert refusal.message.endswith("is not exposed")
    assert refusal.hint.endswith(f"; or send it as a plain {base}")


def test_an_unknown_type_is_refused_the_second_time_too(codec):
    assert str(refused(codec, Plain())) == str(refused(codec, Plain()))


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ((1, {"cfg": Config(lr=Plain())}), 'args[1]["cfg"].lr'),
        ([[0, Plain()]], "args[0][1]"),
        ({3: Plain()}, "args[3]"),
        ({(1, 2): Plain()}, "args[(1, 2)]"),
        ({"a": 0, Plain(): 1}, "args.keys()[1]"),
        ({Plain()}, "args{...}"),
        (Point(1, Plain()), "args.y"),
        (slice(0, Plain()), "args.stop"),
        (torch.return_types.max((1, Plain())), "args[1]"),
        ([np.array([object()])], "args[0]"),
        (OrderedDict(a=Plain()), 'args["a"]'),
        ([double, strange], "args[1]"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_refusal_says_where_the_culprit_sits(codec, value, place):
    refusal = refused(codec, value)

    assert refusal.place == place
    assert str(refusal).startswith(f"{place}: ")


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (((1, Plain()), {}), "args[1]"),
        (((), {"x": [Plain()]}), 'kwargs["x"][0]'),
        (Plain(), ""),
    ],
)
def test_a_place_may_name_the_elements_of_a_tuple(codec, value, place):
    assert refused(codec, value, place=("args", "kwargs")).place == place


@pytest.mark.parametrize(
    ("value", "what", "hint"),
    [
        (np.array([object()]), "dtype object cannot be serialized", "as a list"),
        (
            np.array(["a"], np.dtypes.StringDType()),
            "dtype StringDType.* cannot be serialized",
            "list",
        ),
        (np.zeros(2, "V0"), r"dtype \|V0 cannot be serialized", "list"),
        (Holding(1), "Holding with attributes besides its fields .*: cache", "make them fields"),
        (Converting.__new__(Converting), "Converting without a value for n cannot", "default"),
    ],
    ids=["objects", "pointers", "nothing", "attributes", "unset"],
)
def test_what_would_arrive_as_less_than_it_is_is_refused(codec, value, what, hint):
    with pytest.raises(NotSerializable, match=rf"args: a.*{what}[^\n]*\nhint: .*{hint}"):
        codec.encode(value)


def test_attributes_beside_the_content_are_refused_wherever_they_hide(codec):
    point, ordered, slotted = Stubborn(), OrderedDict(), InheritsSlot(1)
    point.extra = ordered.extra = slotted.more = 1

    assert (
        "Stubborn with attributes besides its fields cannot be serialized"
        in refused(codec, point).message
    )
    assert "InheritsSlot with attributes besides its fields" in refused(codec, slotted).message
    assert "an OrderedDict with the attributes ['extra']" in refused(codec, ordered).message
    assert crossed(codec, InheritsSlot(2)).n == 2


def test_a_container_that_holds_itself_is_refused(codec):
    loop = [1]
    loop.append({"again": loop})

    refusal = refused(codec, loop)

    assert refusal.message == "containers are nested deeper than 64"
    assert refusal.place.startswith('args[1]["again"][1]["again"]')
    assert "no container may hold itself" in refusal.hint


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {0: x}, Frozen, slice])
def test_depth_is_limited_alike_on_both_ends(wrap):
    deep, shallow = Codec(Table(*EXPOSED), Limits()), Codec(Table(*EXPOSED), Limits(depth=3))
    three, four = wrap(wrap(wrap("a\udc80"))), wrap(wrap(wrap(wrap(1 << 70))))

    assert crossed(shallow, three) == three
    assert refused(shallow, four).message == "containers are nested deeper than 3"
    with pytest.raises(BadMessage, match="nested deeper than the limit"):
        shallow.decode(deep.encode(four).data, [])


def test_a_depth_that_python_cannot_walk_is_refused_on_both_ends():
    codec = Codec(Table(), Limits(depth=1 << 20))
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]

    with pytest.raises(NotSerializable, match="deeper than Python's stack"):
        codec.encode(deep)
    with pytest.raises(BadMessage, match="malformed: RecursionError"):
        codec.decode(b"\x92\x00" * 5000 + b"\xc0", [])


def test_bulk_data_outside_of_tensors_is_refused_before_it_is_sent():
    codec = Codec(Table(), Limits(head=100))

    with pytest.raises(
        NotSerializable, match=r"10\d bytes besides tensors are over the limit of 100\nhint"
    ):
        codec.encode(b"x" * 100)


# -- what a peer may send


def node(*elements):
    return msgspec.msgpack.encode(list(elements))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "malformed: DecodeError"),
        (b"\xa1\xff", "malformed: UnicodeDecodeError"),
        (b"\xdd\xff\xff\xff\xff", "malformed: DecodeError"),
        (b"\x90", "unknown tag None"),
        (b"\x80", "holds a bare dict"),
        (b"\xd6\xff\0\0\0\1", "holds a bare datetime"),
        (b"\xd4\x05a", "holds a bare Ext"),
        (node(99), "unknown tag 99"),
        (node(True), "unknown tag True"),
        (node(1.0), "unknown tag 1.0"),
        (node("a"), "unknown tag 'a'"),
        (node(-1), "unknown tag -1"),
        (node([Tag.LIST]), r"unknown tag \[0\]"),
        (node(Tag.DICT, 1), "malformed: ValueError"),
        (node(Tag.DICT, 1, 2, 1, 3), "an encoded dict has a key twice"),
        (node(Tag.DICT, [Tag.LIST], 1), "malformed: TypeError: unhashable"),
        (node(Tag.SET, [Tag.DICT]), "malformed: TypeError: unhashable"),
        (node(Tag.SET, 1, 1), "an encoded set has an item twice"),
        (node(Tag.FROZENSET, 1, True), "an encoded set has an item twice"),
        (node(Tag.SET, [Tag.DATACLASS, "BadHash", "n", 1]), "malformed: ZeroDivisionError"),
        (node(Tag.BIG_INT, 3), "holds 3 where a bytes was expected"),
        (node(Tag.BIG_INT), "malformed: ValueError: not enough values"),
        (node(Tag.COMPLEX, 1.0, 2), "holds 2 where a float was expected"),
        (node(Tag.SLICE, 1, 2), "malformed: TypeError"),
        (node(Tag.RANGE, 1, 2, 0), "malformed: ValueError"),
        (node(Tag.RANGE, 1, 2, True), "holds True where a int was expected"),
        (node(Tag.ELLIPSIS, 1), "malformed: TypeError"),
        (node(Tag.BYTEARRAY, 1 << 60), "where a bytes was expected"),
        (node(Tag.SURROGATES, b"\xff"), "malformed: UnicodeDecodeError"),
        (node(Tag.ORDERED_DICT), "malformed: ValueError"),
        (node(Tag.TORCH_CONSTANT, "torch.load"), "has no 'torch.load'"),
        (node(Tag.DEVICE, "nowhere"), "malformed: RuntimeError"),
        (node(Tag.DEVICE, "cuda:300"), "'cuda:300' is no device"),
        (node(Tag.DEVICE, 0), "holds 0 where a str was expected"),
        (node(Tag.SIZE, (1 << 64) - 1), "a number over 64 bits"),
        (node(Tag.SIZE, "a"), "holds 'a' where a int was expected"),
        (node(Tag.NAMED, 7), "holds 7 where a str was expected"),
        (node(Tag.ENUM, "Color", "GREEN"), "malformed: KeyError: 'GREEN'"),
        (node(Tag.ENUM, "Color", 1), "Color is no Flag here"),
        (node(Tag.ENUM, "Access", 1 << 9), "malformed: ValueError"),
        (node(Tag.ENUM, "Config", "lr"), "Config is no Enum here"),
        (node(Tag.NAMED_TUPLE, "double", "x", 1), "double is no tuple here"),
        (node(Tag.NAMED_TUPLE, "Point", "x,y", 1), "1 values came as the fields x,y of .*Point"),
        (node(Tag.NAMED_TUPLE, "Point", "y,x", 1, 2), "fields y,x of .*Point, which here are x,y"),
        (node(Tag.DATACLASS, "Plain", ""), "Plain is no dataclass here"),
        (node(Tag.DATACLASS, "ListLike", "n", 1), "ListLike is no dataclass here"),
        (node(Tag.DATACLASS, "double", "x", 1), "double is no object here"),
        (node(Tag.DATACLASS, "Frozen", "x,z", 1, 2), "fields x,z of .*Frozen, which here are x,y"),
        (node(Tag.DATACLASS, "Config"), "malformed: ValueError"),
        (node(Tag.RETURN_TYPE, "max", 1), "malformed: TypeError"),
        (node(Tag.RETURN_TYPE, "os", 1), "malformed: KeyError"),
        (node(Tag.RETURN_TYPE), "malformed: IndexError"),
        (node(Tag.NUMPY_SCALAR, "|O8", b"12345678"), r"no plain dtype '\|O8'"),
        (node(Tag.NUMPY_SCALAR, "T", b"1" * 16), "no plain dtype 'T'"),
        (node(Tag.NUMPY_SCALAR, "<i8", b"1234"), "numpy scalar of int64 has 4 bytes"),
        (node(Tag.NUMPY_SCALAR, "<U1", b"\xff" * 4), "numpy scalar of <U1 has 4 bytes"),
        (node(Tag.NUMPY_SCALAR, "<f3", b"123"), "malformed: TypeError"),
        (node(Tag.NUMPY_SCALAR, "U", b"a"), "holds b'a' where a str was expected"),
    ],
)
def test_a_wrong_node_is_a_bad_message(codec, data, why):
    with pytest.raises(BadMessage, match=why):
        codec.decode(data, [])


def test_another_version_of_a_class_is_told_apart_with_a_hint(codec):
    with pytest.raises(
        BadMessage, match="hint: run the same version of the program on every worker"
    ):
        codec.decode(node(Tag.NAMED_TUPLE, "Point", "x", 1), [])


def test_a_name_that_is_unknown_here_is_not_exposed_rather_than_bad(codec):
    with pytest.raises(NotExposed, match=r"os\.system is not exposed"):
        codec.decode(node(Tag.NAMED, "os.system"), [])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (node(Tag.LIST), "2 of 2 tensors belong to no value"),
        (node(Tag.LIST, [5, 0]), "1 of 2 tensors belong to no value"),
        (node(Tag.LIST, [5, 0], [5, 0]), "names tensor 0 where 1 of 2 was expected"),
        (node(Tag.LIST, [5, 1], [5, 0]), "names tensor 1 where 0 of 2 was expected"),
        (node(Tag.LIST, [5, 0], [5, 1], [5, 2]), "names tensor 2 where 2 of 2 was expected"),
        (node(Tag.TENSOR, -1), "names tensor -1 where 0"),
        (node(Tag.TENSOR, "a"), "names tensor 'a' where 0"),
        (node(Tag.TENSOR), "malformed: TypeError"),
    ],
)
def test_every_tensor_is_used_exactly_once(codec, data, why):
    with pytest.raises(BadMessage, match=why):
        codec.decode(data, [torch.ones(1), torch.ones(1)])


@pytest.mark.parametrize(
    ("rest", "tensor", "why"),
    [
        (("|O8", False, 1), torch.zeros(8, dtype=torch.uint8), "no plain dtype"),
        (("<i8", False, 1), torch.zeros(1), "came as torch.float32 on cpu"),
        (("<i8", False, 1), torch.zeros(8, dtype=torch.uint8, device="meta"), "uint8 on meta"),
        (("<i8", False, 2), torch.zeros(8, dtype=torch.uint8), "malformed: ValueError"),
        (("<i8", False, 1), torch.zeros(9, dtype=torch.uint8), "malformed: ValueError"),
        (("<i8", False, -1), torch.zeros(8, dtype=torch.uint8), r"has the shape \[-1\]"),
        (
            ("<U1", False, 1),
            torch.full((4,), 255, dtype=torch.uint8),
            "that is no character",
        ),
        (
            (">U1", False, 2),
            torch.arange(8, dtype=torch.uint8),
            "that is no character",
        ),
        (("<i8", 0, 1), torch.zeros(8, dtype=torch.uint8), "where a bool was expected"),
        (("<i8", False, "a"), torch.zeros(8, dtype=torch.uint8), "where a int was expected"),
        (("i4,O", False, 1), torch.zeros(12, dtype=torch.uint8), "no plain dtype 'i4,O'"),
    ],
)
def test_a_wrong_array_is_a_bad_message(codec, rest, tensor, why):
    with pytest.raises(BadMessage, match=why):
        codec.decode(node(Tag.ARRAY, 0, *rest), [tensor])


# -- any value, any bytes

CODEC = Codec(Table(*EXPOSED), Limits())

plain = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
scalars = (
    plain
    | st.integers(-(1 << 99), 1 << 99)
    | st.complex_numbers()
    | st.text(st.characters(codec=None), max_size=5)
    | st.sampled_from([torch.half, torch.device("cpu"), torch.Size([1]), ..., Color.RED, double])
)
# Not NaN: a set of two of them has no equal.
hashables = st.recursive(
    scalars.filter(lambda value: value == value),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashables, inner, max_size=3)
        | st.sets(hashables, max_size=3)
        | st.builds(Frozen, inner, inner)
        | st.builds(Point, inner, inner)
        | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(derandomize=True, deadline=None)
@given(values)
def test_any_nested_value_arrives_equal_with_equal_types(value):
    assert_same(value, crossed(CODEC, value))


any_tag = st.integers(-1, Tag.RETURN_TYPE + 1)
words = st.sampled_from(
    [*(each.__qualname__ for each in EXPOSED), "max", "torch.int8", "<i4", "x,y"]
)
garbage = st.recursive(
    plain | words,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.builds(lambda tag, rest: [tag, *rest], any_tag, st.lists(inner | words, max_size=4))
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=10,
)


@pytest.mark.slow
@settings(derandomize=True, deadline=None)
@given(garbage, st.integers(0, 2))
def test_any_skeleton_gives_a_value_or_a_refusal(skeleton, count):
    tensors = [torch.zeros(8, dtype=torch.uint8)] * count
    with contextlib.suppress(BadMessage, NotExposed):
        CODEC.decode(msgspec.msgpack.encode(skeleton), tensors)


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_give_a_value_or_a_refusal(data):
    with contextlib.suppress(BadMessage, NotExposed):
        CODEC.decode(data, [])
