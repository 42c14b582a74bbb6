"""Classes that do not travel by themselves, as a user's program may have them."""

from __future__ import annotations

import gradwire


class Money:
    """Has a codec."""

    def __init__(self, cents):
        self.cents = cents

    def __eq__(self, other):
        return type(other) is Money and self.cents == other.cents

    def __hash__(self):
        return hash(self.cents)


def _money(cents):
    if type(cents) is not int:
        raise TypeError("cents are a number")
    return Money(cents)


gradwire.register_codec(Money, lambda money: money.cents, _money)


class Box:
    """Has a codec whose data holds anything."""

    def __init__(self, *inside):
        self.inside = inside


gradwire.register_codec(Box, lambda box: list(box.inside), lambda inside: Box(*inside))


class Fallback:
    """Has none."""

    def __init__(self, inside=None):
        self.inside = inside


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def echo(x):
    return x


def inside(box):
    return box.inside


def is_odd(value):
    return type(value) is Fallback


def product(odd):
    return odd.inside * 3
