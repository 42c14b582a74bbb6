"""Encodes types of Python's standard library: times, paths, numbers, identifiers, containers.

They are matched exactly, as in builtin_types.py. A user's codec for one of them goes first. What a
peer sends is given to constructors that check it, or is compared with what they have made of it.
"""

from __future__ import annotations

import math
import reprlib
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import chain
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from types import SimpleNamespace
from typing import Any, Final, cast
from uuid import UUID, SafeUUID

from gradwire.agent.peers.directory import WorkerInfo
from gradwire.errors import BadMessage, NotSerializable, UsageError
from gradwire.rpc.codec.builtin_types import by_index, by_key, filled
from gradwire.rpc.codec.walk import Decoder, Encoder, Node, Tag, TypeDecoder, TypeEncoder, exactly

_PATHS = {kind.__name__: kind for kind in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)}
_FACTORIES: dict[str, Callable[[], object]] = {
    kind.__name__: kind
    for kind in (
        *(list, dict, set, frozenset, tuple, int, float, complex, bool, str, bytes, bytearray),
        *(OrderedDict, Counter, defaultdict, deque),
    )
}
"""the types that a defaultdict may make its values with though nobody has exposed them"""
_FORMATS: Final = frozenset("cbB?hHiIlLqQnNfd")
"""of a memoryview: those that Python can cast bytes to"""
_MOST_FRACTION_BITS: Final = 1 << 12
"""of a part of a fraction; the time to reduce a peer's one grows with the square of it"""
_MOST_LENGTH: Final = (1 << 63) - 1


def _no_attributes(value: object) -> None:
    if attributes := getattr(value, "__dict__", None):
        raise NotSerializable(
            f"a {type(value).__name__} with the attributes {sorted(attributes)} cannot be "
            "serialized",
            hint="send the attributes beside it",
        )


def _ints(items: list[object]) -> list[int]:
    return [exactly(item, int) for item in items]


# -- times


def _encode_date(_: Encoder, value: date) -> object:
    return [Tag.DATE, value.year, value.month, value.day]


def _encode_time(walk: Encoder, value: time | datetime) -> object:
    node: Node = [Tag.TIME]
    if isinstance(value, datetime):
        node = [Tag.DATETIME, value.year, value.month, value.day]
    node += [value.hour, value.minute, value.second, value.microsecond, value.fold]
    return walk.children(node, value, (value.tzinfo,), lambda *_: ".tzinfo")


def _decode_time(walk: Decoder, node: Node) -> object:
    tag, *numbers, _ = node
    *units, fold = _ints(numbers)
    (zone,) = walk.children(node, len(node) - 1)
    if zone is not None and type(zone) not in (timezone, zoneinfo.ZoneInfo):
        raise BadMessage(f"an encoded time has a {type(zone).__name__} as its zone")
    made: Any = time if tag == Tag.TIME else datetime
    return made(*units, fold=fold, tzinfo=zone)


def _encode_timedelta(_: Encoder, value: timedelta) -> object:
    return [Tag.TIMEDELTA, value.days, value.seconds, value.microseconds]


def _decode_timedelta(_: Decoder, node: Node) -> object:
    days, seconds, microseconds = _ints(node[1:])
    value = timedelta(days, seconds, microseconds)
    if (value.days, value.seconds, value.microseconds) != (days, seconds, microseconds):
        raise BadMessage("an encoded timedelta is not in its normal form")
    return value


def _encode_timezone(walk: Encoder, value: timezone) -> object:
    made_of = value.__getinitargs__()  # type: ignore[attr-defined]  # for pickle: offset and name
    return walk.children([Tag.TIMEZONE], value, made_of, by_index)


def _decode_timezone(walk: Decoder, node: Node) -> object:
    offset, *name = walk.children(node)
    return timezone(exactly(offset, timedelta), *[exactly(each, str) for each in name])


def _encode_zone(_: Encoder, value: zoneinfo.ZoneInfo) -> object:
    if value.key is None:
        raise NotSerializable(
            "a ZoneInfo that was read from a file, without a key, cannot be serialized",
            hint="make it by its key, as in ZoneInfo('Europe/Vienna')",
        )
    return [Tag.ZONE, value.key]


@cache
def _zones() -> set[str]:
    """The keys of all time zones here; a peer's key opens no other file."""
    return zoneinfo.available_timezones()


def _decode_zone(_: Decoder, node: Node) -> object:
    _tag, key = node
    if exactly(key, str) not in _zones():
        raise BadMessage(
            f"this worker has no time zone {reprlib.repr(key)}",
            hint="install the same time zones on every worker, as with `pip install tzdata`",
        )
    return zoneinfo.ZoneInfo(key)  # type: ignore[arg-type]  # it is a str


# -- paths, numbers, identifiers


def _encode_path(walk: Encoder, value: PurePath) -> object:
    return [Tag.PATH, type(value).__name__, walk.node(str(value))]


def _decode_path(walk: Decoder, node: Node) -> object:
    _, name, text = node
    return _PATHS[exactly(name, str)](exactly(walk.value(text), str))


def _decode_decimal(_: Decoder, node: Node) -> object:
    _tag, text = node
    value = Decimal(exactly(text, str))
    if str(value) != text:  # the context may turn nonsense into NaN
        raise BadMessage(f"{reprlib.repr(text)} is no decimal number in its normal form")
    return value


def _encode_fraction(walk: Encoder, value: Fraction) -> object:
    parts = value.numerator, value.denominator
    if any(part.bit_length() > _MOST_FRACTION_BITS for part in parts):
        raise NotSerializable(
            f"a fraction of more than {_MOST_FRACTION_BITS} bits cannot be serialized",
            hint="send its numerator and denominator",
        )
    return walk.children([Tag.FRACTION], value, parts, by_index)


def _decode_fraction(walk: Decoder, node: Node) -> object:
    numerator, denominator = _ints(walk.children(node))
    if max(numerator.bit_length(), denominator.bit_length()) > _MOST_FRACTION_BITS:
        raise BadMessage(f"an encoded fraction has more than {_MOST_FRACTION_BITS} bits")
    if denominator < 1 or math.gcd(numerator, denominator) != 1:
        raise BadMessage("an encoded fraction is not in its lowest terms")
    return Fraction(numerator, denominator)


def _decode_uuid(_: Decoder, node: Node) -> object:
    _tag, data, safe = node
    if safe is not None:
        exactly(safe, int)
    return UUID(bytes=exactly(data, bytes), is_safe=SafeUUID(safe))


def _decode_worker_info(_: Decoder, node: Node) -> object:
    _tag, name, number = node
    if not 0 <= exactly(number, int) < 1 << 16:
        raise BadMessage(f"an encoded worker has the number {number}")
    try:
        return WorkerInfo(exactly(name, str), cast(int, number))
    except UsageError as error:
        raise BadMessage(error.message) from None


# -- containers


def _encode_default_dict(walk: Encoder, value: defaultdict[object, object]) -> object:
    factory = value.default_factory
    name = getattr(factory, "__name__", None)
    is_known = factory is None or (type(name) is str and _FACTORIES.get(name) is factory)
    node = walk.children(
        [Tag.DEFAULT_DICT], value, (name if is_known else factory,), lambda *_: ".default_factory"
    )
    return walk.children(node, value, chain.from_iterable(value.items()), by_key)


def _decode_default_dict(walk: Decoder, node: Node) -> object:
    factory, *flat = walk.children(node)
    if type(factory) is str:
        factory = _FACTORIES[factory]
    elif factory is not None and (type(node[1]) is not list or node[1][0] != Tag.NAMED):
        raise BadMessage("an encoded defaultdict has a default_factory without a name")
    return filled(defaultdict(cast(Any, factory)), flat)


def _encode_counter(walk: Encoder, value: Counter[object]) -> object:
    _no_attributes(value)
    return walk.children([Tag.COUNTER], value, chain.from_iterable(value.items()), by_key)


def _decode_counter(walk: Decoder, node: Node) -> object:
    value: Counter[object] = Counter()
    dict.update(value, filled({}, walk.children(node)))  # its own update counts the keys
    return value


def _encode_deque(walk: Encoder, value: deque[object]) -> object:
    return walk.children([Tag.DEQUE, value.maxlen], value, value, by_index)


def _decode_deque(walk: Decoder, node: Node) -> object:
    _, most, *rest = node
    if most is not None and not len(rest) <= exactly(most, int) <= _MOST_LENGTH:
        raise BadMessage(f"an encoded deque holds {len(rest)} items, and at most {most}")
    return deque(walk.children(node, 2), cast(int | None, most))


def _encode_namespace(walk: Encoder, value: SimpleNamespace) -> object:
    return walk.children([Tag.NAMESPACE], value, chain.from_iterable(vars(value).items()), by_key)


def _decode_namespace(walk: Decoder, node: Node) -> object:
    flat = walk.children(node)
    value = SimpleNamespace()
    vars(value).update(filled({}, flat))
    if not all(type(name) is str for name in vars(value)):
        raise BadMessage("an encoded namespace has a name that is no string")
    return value


def _encode_memory(_: Encoder, value: memoryview) -> object:
    kind, shape = value.format, value.shape or ()
    if kind not in _FORMATS or (0 in shape and len(shape) > 1):
        raise NotSerializable(
            f"a memoryview of format {kind!r} and shape {shape} cannot be serialized",
            hint="send it as bytes or as a numpy array",
        )
    return [Tag.MEMORY, kind, value.readonly, value.tobytes(), *shape]


def _decode_memory(_: Decoder, node: Node) -> object:
    _tag, kind, is_read_only, data, *shape = node
    if exactly(kind, str) not in _FORMATS:
        raise BadMessage(f"an encoded memoryview has the format {reprlib.repr(kind)}")
    raw: bytes | bytearray = exactly(data, bytes)
    if not exactly(is_read_only, bool):
        raw = bytearray(raw)
    view: Any = memoryview(raw)
    sizes = _ints(shape)
    if sizes == [0] and not raw:
        return view.cast(kind)
    return view.cast("B").cast(kind, sizes)


ENCODERS: dict[type, TypeEncoder] = {
    date: _encode_date,
    time: _encode_time,
    datetime: _encode_time,
    timedelta: _encode_timedelta,
    timezone: _encode_timezone,
    zoneinfo.ZoneInfo: _encode_zone,
    **dict.fromkeys(_PATHS.values(), _encode_path),
    Decimal: lambda _, value: [Tag.DECIMAL, str(value)],
    Fraction: _encode_fraction,
    UUID: lambda _, value: [Tag.UUID, value.bytes, value.is_safe.value],
    WorkerInfo: lambda _, value: [Tag.WORKER_INFO, value.name, value.id],
    defaultdict: _encode_default_dict,
    Counter: _encode_counter,
    deque: _encode_deque,
    SimpleNamespace: _encode_namespace,
    memoryview: _encode_memory,
}

DECODERS: dict[int, TypeDecoder] = {
    Tag.DATE: lambda _, node: date(*_ints(node[1:])),
    Tag.TIME: _decode_time,
    Tag.DATETIME: _decode_time,
    Tag.TIMEDELTA: _decode_timedelta,
    Tag.TIMEZONE: _decode_timezone,
    Tag.ZONE: _decode_zone,
    Tag.PATH: _decode_path,
    Tag.DECIMAL: _decode_decimal,
    Tag.FRACTION: _decode_fraction,
    Tag.UUID: _decode_uuid,
    Tag.WORKER_INFO: _decode_worker_info,
    Tag.DEFAULT_DICT: _decode_default_dict,
    Tag.COUNTER: _decode_counter,
    Tag.DEQUE: _decode_deque,
    Tag.NAMESPACE: _decode_namespace,
    Tag.MEMORY: _decode_memory,
}
