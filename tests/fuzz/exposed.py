"""What the workers under attack expose: one of each kind that a name can lead to."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import gradwire


class Colour(enum.Enum):
    """An enum."""

    RED = 1
    GREEN = "g"


class Bits(enum.Flag):
    """Flags."""

    A = 1
    B = 2


class Pair(NamedTuple):
    """A named tuple."""

    left: object
    right: object = None


@dataclass
class Record:
    """A dataclass."""

    name: object
    items: object = ()


class Row(list):
    """A subclass."""

    def total(self) -> object:
        """A method, which no attribute may replace."""
        return sum(self)


class Money:
    """Has a codec."""

    def __init__(self, cents: object) -> None:
        self.cents = cents


gradwire.register_codec(Money, lambda money: money.cents, Money)


class Counter:
    """Has methods."""

    def __init__(self, n: int = 0) -> None:
        self.n = n

    def up(self, *_: object) -> int:
        """One more."""
        self.n += 1
        return self.n


def echo(*args: object, **kwargs: object) -> object:
    """All that came."""
    return (args, kwargs)
