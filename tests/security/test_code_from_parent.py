"""A worker loads the code that its parent has announced, and nobody else's."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import gradwire
from gradwire.agent.messages import Failure
from gradwire.errors import NotExposed
from gradwire.launch import received
from gradwire.launch.received import Define, Receiver, Undefine, definition_file, refusal_file
from gradwire.rpc.calls.client import Target
from gradwire.rpc.codec.pickle_codec import PickleCodec, dumps
from gradwire.rpc.messages import Body, Call
from gradwire.testing import cluster
from gradwire.wire.message import Message
from tests.leftovers import eventually

PICKLED_NONE = dumps({})


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return Path(self.path).touch, ()


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "marker"


@pytest.fixture
def workers():
    with cluster(2) as made:
        yield made


@pytest.fixture
def receiver(workers, tmp_path):
    return Receiver(workers[1].worker, tmp_path)


def announced(number, name, data):
    return msgspec.msgpack.encode(Define(number, name, hashlib.sha256(data).digest()))


def test_what_was_announced_is_called_by_its_name_until_it_is_withdrawn(
    workers, receiver, tmp_path
):
    data = dumps(torch.neg) + PICKLED_NONE
    definition_file(tmp_path, 1).write_bytes(data)
    worker = workers[0].worker

    def call(name):
        return worker.calls.call(1, Target(name, (torch.ones(1),), {}), worker.deadline(10))

    assert receiver.take(announced(1, "f@1", data)) == "has 1"
    assert workers[0].run(call, "f@1") == -1
    with pytest.raises(NotExposed, match="f@2 is not exposed on this worker"):
        workers[0].run(call, "f@2")
    receiver.take(msgspec.msgpack.encode(Undefine(["f@1"])))

    def is_withdrawn():  # once no call may still begin
        receiver.take(msgspec.msgpack.encode(Undefine([])))
        try:
            return workers[0].run(call, "f@1") is None
        except NotExposed as error:
            return "f@1 is not exposed on this worker" in str(error)

    assert eventually(is_withdrawn)


def test_a_file_that_was_changed_since_is_not_loaded(receiver, tmp_path, marker):
    data = dumps(torch.neg) + PICKLED_NONE
    definition_file(tmp_path, 1).write_bytes(dumps(Evil(marker)) + PICKLED_NONE)

    assert receiver.take(announced(1, "f@1", data)) == "refuses 1"

    assert not marker.exists()
    told = msgspec.msgpack.decode(refusal_file(tmp_path, "w1", 1).read_bytes(), type=Failure)
    assert "a definition is not the one that the program has announced" in told.text


def test_the_same_file_would_run_if_the_parent_had_announced_it(receiver, tmp_path, marker):
    data = dumps(Evil(marker)) + PICKLED_NONE
    definition_file(tmp_path, 1).write_bytes(data)

    receiver.take(announced(1, "f@1", data))

    assert marker.exists()


def test_what_the_parent_says_is_no_message_of_the_network():
    for kind in (Define, Undefine):
        assert not issubclass(kind, Message)
    everything = [c for c in vars(received).values() if isinstance(c, type)]
    assert not [kind for kind in everything if issubclass(kind, Message)]


def test_a_member_that_sends_it_as_a_call_is_refused(workers, marker):
    worker = workers[0].worker
    whole = PickleCodec().encode(((Evil(marker),), {})).data
    said = announced(1, "f@1", dumps(Evil(marker)))
    for body in (whole, said):
        for name in ("!f@1", "f@1", "__main__:f@1", "torch:neg"):
            call = Call(name, Body(body, [], [], []), None, True, False, 10.0)
            deadline = worker.agent.clock.now() + 10
            _, promise = worker.agent.request(1, call, deadline=deadline, description="an attack")
            assert isinstance(promise.wait(10), gradwire.GradwireError)
    assert not marker.exists()


PROGRAM = """
import os
import gradwire

def sockets():
    links = [os.readlink(f"/proc/self/fd/{fd}") if os.path.exists(f"/proc/self/fd/{fd}") else ""
             for fd in os.listdir("/proc/self/fd")]
    return {link for link in links if link.startswith("socket:")}

def attack(to):
    try:
        gradwire.rpc_sync(to, lambda: 1)
    except gradwire.NotExposed as error:
        return error.message

def _hidden(): return "hidden"

def by_name(to):
    try:
        return gradwire.rpc_sync(to, _hidden)
    except gradwire.NotExposed as error:
        return error.message.splitlines()[0]

names = gradwire.start(3)
found = [sockets()] + [set(gradwire.rpc_sync(n, lambda: list(sockets()))) for n in names]
print(all(found), sum(map(len, found)) == len(set().union(*found)))
for to in ("w0", "w2"):
    print(gradwire.rpc_sync("w1", attack, (to,)))
print(gradwire.rpc_sync("w2", _hidden), "|", gradwire.rpc_sync("w1", by_name, ("w2",)))
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(
    importlib.util.find_spec("cloudpickle") is None, reason="cloudpickle is not installed"
)
def test_workers_send_no_code_to_each_other_and_have_no_end_of_anothers_pipe():
    done = subprocess.run(
        [sys.executable, "-"],
        input=PROGRAM,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    refused = "__main__:attack.<locals>.<lambda> is a lambda, which has no name to be called by"
    assert done.stdout.splitlines() == [
        "True True",
        refused,
        refused,
        "hidden | __main__:_hidden is not exposed on this worker",
    ], done.stderr
