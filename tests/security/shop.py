"""A module as a user writes and exposes one: it imports, aliases, hides and decorates things."""

from __future__ import annotations

import functools
import os
from os import system
from pathlib import Path
from subprocess import run as launch

import torch

import gradwire

SECRET = "the price list"
shell = os.system
buy_later = functools.partial(system)
by_lambda = lambda command: system(command)  # noqa: E731


def buy(item):
    """The one thing that is for sale."""
    return f"a {item}"


def _steal(command):
    return system(command)


def logged(function):
    """Hides what it wraps behind what may be called."""

    @functools.wraps(function)
    def wrapper(*args):
        return "logged"

    return wrapper


@logged
def careful(command):
    """What is behind the decorator would do anything."""
    return system(command)


async def slowly(command):
    """Nobody awaits it."""
    return system(command)


class Basket:
    """Exposed with its module."""

    runner = staticmethod(system)
    at_class = classmethod(launch)
    runs_later = functools.partialmethod(launch, "touch marker")
    borrowed = launch
    os = os

    def __init__(self):
        self.items = []
        self.hook = system

    def __reduce__(self):
        return system, ("false",)

    def add(self, item):
        """Public."""
        self.items.append(item)
        return len(self.items)

    def _empty(self, command):
        return system(command)

    @property
    def total(self):
        """Reading it does something."""
        Path(SECRET).touch()

    @staticmethod
    def weigh(command="true"):
        """Public, and harmless."""
        return "heavy"

    @staticmethod
    def _open(command):
        return system(command)

    class Inner:
        """Not exposed: it is no name of the module."""

        @staticmethod
        def go(command):
            """Anything."""
            return system(command)


class _Till:
    """Private."""

    @staticmethod
    def open(command):
        """Anything."""
        return system(command)

    def __call__(self, command):
        return system(command)


class Layer(torch.nn.Module):
    """A module with a method that is not forward."""

    def forward(self, x):
        """Public."""
        return x


class Greedy(torch.optim.SGD):
    """Exposed with its module, as any class of it."""


@gradwire.expose
def declared(x):
    """Exposed by itself."""
    return x


def till():
    """Gives a reference to something private."""
    return _Till()


def launcher():
    """Gives a reference to a function."""
    return launch


def module_os():
    """Gives a reference to a module."""
    return os
