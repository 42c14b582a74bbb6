"""Changes to bytes, by a seeded random number: blind ones, and ones that know msgpack."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

_INTERESTING = [
    None, True, False, 0, 1, -1, 2, 63, 64, 65, 127, 128, 255, 256, 1 << 16, 1 << 31, 1 << 32,
    1 << 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63), 0.0, -1.5, 1e308,
    math.inf, -math.inf, math.nan, "", "a", "cpu", "meta", "cuda:0", "\0", "x" * 300, b"", b"\0",
    b"\xff" * 8, b"\x80" * 64, [], [[]], [0], {}, {0: 0}, "builtins:eval", "torch:sin", "<i8",
    "|V8", "<U9", "tests.fuzz.exposed:echo", "tests.fuzz.exposed:Record", "tests.fuzz.exposed:Bits",
    "name,items", "torch.float32", ".up", "!x", msgspec.msgpack.Ext(1, b"x"),
]  # fmt: skip
_TAGS = [*range(28), 63, 64, 65, 127, 128]
_BYTES = [0, 1, 0x7F, 0x80, 0x90, 0x93, 0xA0, 0xC0, 0xC4, 0xC6, 0xDC, 0xDD, 0xDF, 0xFF]


class Mutator:
    """One seed gives one sequence."""

    def __init__(self, seed: int, seeds: Sequence[bytes]) -> None:
        self._random = random.Random(seed)
        self._seeds = list(seeds)

    def next(self) -> bytes:
        """A change, or a few, to one of the seeds."""
        return self.changed(self._random.choice(self._seeds))

    def changed(self, data: bytes) -> bytes:
        """A change, or a few, to this."""
        for _ in range(self._random.choice((1, 1, 1, 2, 3, 6))):
            data = self._structured(data) if self._random.random() < 0.6 else self._blind(data)
        return data[: 1 << 15]

    def _blind(self, data: bytes) -> bytes:
        pick, changed = self._random, bytearray(data)
        place = pick.randrange(len(changed) + 1)
        match pick.randrange(7):
            case 0 if changed:
                changed[place % len(changed)] ^= 1 << pick.randrange(8)
            case 1 if changed:
                changed[place % len(changed)] = pick.choice(_BYTES)
            case 2:
                del changed[place : place + pick.randrange(1, 9)]
            case 3:
                changed[place:place] = pick.randbytes(pick.randrange(1, 9))
            case 4:
                changed[place:place] = changed[place : place + pick.randrange(1, 65)]
            case 5:
                other = pick.choice(self._seeds)
                changed[place:] = other[pick.randrange(len(other) + 1) :]
            case _:
                del changed[place:]
        return bytes(changed)

    def _structured(self, data: bytes) -> bytes:
        """The first byte belongs to the target, the rest is msgpack; if not, a blind change."""
        try:
            value = msgspec.msgpack.decode(data[1:])
            first = self._random.randrange(256) if self._random.random() < 0.1 else data[0]
            return bytes([first]) + msgspec.msgpack.encode(self._tree(value, 0))
        except (msgspec.DecodeError, RecursionError, UnicodeError, OverflowError, TypeError):
            return self._blind(data)

    def _tree(self, value: object, depth: int) -> object:
        """The value with one change at a random place."""
        pick = self._random
        if isinstance(value, bytes) and len(value) > 4 and pick.random() < 0.5:
            return self._structured(b"\0" + value)[1:]  # a skeleton inside a message
        if not isinstance(value, list | dict) or depth > 40 or pick.random() < 0.15:
            return self._other(value)
        if isinstance(value, dict):
            if not value:
                return {pick.choice((0, "a", -1)): 0}
            key = pick.choice(list(value))
            return {**value, key: self._tree(value[key], depth + 1)}
        changed = list(value)
        place = pick.randrange(len(changed) + 1)
        if place == len(changed) or pick.random() < 0.15:
            match pick.randrange(4):
                case 0:
                    changed.insert(place, pick.choice(_INTERESTING))
                case 1:
                    del changed[place : place + 1]
                case 2:
                    changed[place:place] = changed[: pick.randrange(1, 5)]
                case _ if changed:
                    changed[0] = pick.choice(_TAGS)
            return changed
        changed[place] = self._tree(changed[place], depth + 1)
        return changed

    def _other(self, value: object) -> object:
        pick = self._random
        match pick.randrange(6):
            case 0:
                return [pick.choice(_TAGS), value]
            case 1:
                return [value] * pick.randrange(1, 20)
            case 2 if isinstance(value, int):
                return value + pick.choice((-1, 1, 8, 1 << 20))
            case 3:
                nested: object = value
                for _ in range(pick.choice((3, 70, 300))):
                    nested = [pick.choice((0, 1)), nested]
                return nested
            case _:
                return pick.choice(_INTERESTING)
