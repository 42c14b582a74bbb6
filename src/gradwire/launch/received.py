"""Functions and classes that a worker gets by value, from the process that has started it.

Note [Code from the parent]: a worker of `gradwire.workers` loads code of its parent only. What says
that it is the parent's is the pipe between both processes: a pair of sockets without a name, whose
ends no other process has. Through it the parent announces the SHA-256 of a pickle, which lies in
the private directory of the run, as more than a few words might fill the pipe. No message between
workers leads here. Peers call what has arrived by its name, as any function.

The public functions and classes of the parent's `__main__` become those of this process's: values,
exceptions and calls between workers name them as in a script. Each version also has a name of its
own with a random part, which the parent calls it by: a call under way keeps its version.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FunctionType
from typing import Any, final

import msgspec

from gradwire.agent.remote_errors import describe
from gradwire.errors import BadMessage
from gradwire.rpc.codec.pickle_codec import loads_with_code
from gradwire.rpc.expose.names import stand_for
from gradwire.rpc.expose.registry import exception_name, mark_exposed
from gradwire.rpc.worker import Worker

HAS, REFUSES = "has", "refuses"


class Define(msgspec.Struct, frozen=True, tag=True):
    """Load the definition of that number."""

    number: int
    name: str
    digest: bytes


class Undefine(msgspec.Struct, frozen=True, tag=True):
    """Nobody calls them by these names any more."""

    names: list[str]


_decoder: msgspec.msgpack.Decoder[Define | Undefine] = msgspec.msgpack.Decoder(Define | Undefine)


def definition_file(directory: Path, number: int) -> Path:
    """The file with the pickle of a definition."""
    return directory / f"definition-{number}"


def refusal_file(directory: Path, worker: str, number: int) -> Path:
    """The file with the error of a worker that could not load it."""
    return directory / f"definition-{number}.{worker}.failure"


@final
class Receiver:
    """What one worker does with the messages of its parent."""

    def __init__(self, worker: Worker, directory: Path) -> None:
        self._worker, self._directory = worker, directory
        self._forgotten: list[str] = []

    def take(self, message: bytes) -> str | None:
        """Do what the parent says; the word to answer."""
        self._forget()
        told = _decoder.decode(message)
        if isinstance(told, Define):
            return self._answer(told)
        self._forgotten += told.names
        return None

    def _answer(self, told: Define) -> str:
        try:
            with self._worker.scope():
                self._load(told)
        except BaseException as error:  # reported to the parent, whatever it is
            failure = describe(error, self._worker.name, exception_name)
            place = refusal_file(self._directory, self._worker.name, told.number)
            place.write_bytes(msgspec.msgpack.encode(failure))
            return f"{REFUSES} {told.number}"
        return f"{HAS} {told.number}"

    def _load(self, told: Define) -> None:
        data = definition_file(self._directory, told.number).read_bytes()
        if hashlib.sha256(data).digest() != told.digest:
            raise BadMessage("a definition is not the one that the program has announced")
        value, of_main = _opened(data)
        for name, each in of_main.items():
            setattr(sys.modules["__main__"], name, each)
        for each in (value, *of_main.values()):
            if isinstance(each, type):
                mark_exposed(each)  # objects of it may outlast it
        is_code = isinstance(value, FunctionType | type)
        self._worker.registry.give(told.name, value if is_code else partial(_call_copy, data))

    def _forget(self) -> None:
        """Drop what the parent does not call any more, unless a call of it may still begin."""
        if self._forgotten and not self._worker.agent.dispatch.active:
            for name in self._forgotten:
                self._worker.registry.take_back(name)
            self._forgotten.clear()


def _opened(data: bytes) -> tuple[Any, dict[str, Any]]:
    value, of_main = loads_with_code(data)
    for name, each in of_main.items():
        stand_for(each, f"__main__:{name}")
    return value, of_main


def _call_copy(data: bytes, /, *args: object, **kwargs: object) -> object:
    """Call a copy of an object, or its method: what a call changes in it, the next does not see."""
    return _opened(data)[0](*args, **kwargs)


def receive(heard: SimpleQueue[bytes], receiver: Receiver, report: Callable[[str], None]) -> None:
    """Take the messages of the parent, one after the other, as long as this process runs."""
    while True:
        answer = receiver.take(heard.get())
        if answer is not None:
            report(answer)
