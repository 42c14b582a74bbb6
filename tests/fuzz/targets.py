"""What is fed: each target takes bytes, and returns unless something is wrong.

frame     the reader of a socket: prefixes, sums, lengths, shared blocks
message   the decoder of every message
payload   the codec of values; what it gives must be something that can be packed again
tensors   headers and payloads of tensors; what it gives must lie inside its payload
handshake the words of a stranger, to one who listens and to one who dials (handshake.py)
world     a worker that serves: any message of any kind from a peer that has joined
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import torch

import gradwire
from gradwire.agent import messages as agent_messages
from gradwire.agent.peers.directory import WorkerInfo
from gradwire.agent.requests.promise import Pending, Promise
from gradwire.autograd import messages as autograd_messages
from gradwire.autograd.messages import (
    Crossing,
    Forget,
    Gradients,
    PassEnded,
    Release,
    RunDone,
    Start,
)
from gradwire.errors import BadMessage, GradwireError, NotSerializable, PeerLost
from gradwire.ids import EdgeId, ForkId, PassId, RefId
from gradwire.options import Limits, Options, Timeouts
from gradwire.rpc import messages as rpc_messages
from gradwire.rpc.codec.codec import Codec
from gradwire.rpc.expose.registry import Registry
from gradwire.rpc.messages import (
    Accept,
    BackwardFrom,
    Body,
    Call,
    Drop,
    Fetch,
    Fork,
    Kept,
    Reference,
)
from gradwire.testing import cluster
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.shared_memory import SharedMemory
from gradwire.transport.sockets.channel import SocketChannel
from gradwire.wire.message import Frame, Kinds, Message, encode, encode_prefix, kind_of, pack_prefix
from gradwire.wire.tensor import TensorHeader, decode_tensors, encode_tensors
from tests.fuzz import exposed, handshake
from tests.leftovers import eventually
from tests.transport.conformance import recv

LIMITS = Limits(head=1 << 16, payload=1 << 20, elements=1 << 12, edges=1 << 10)
HOME = exposed.__name__
Run = Callable[[bytes], None]


class Target(NamedTuple):
    """What to feed, and with what to begin."""

    name: str
    open: Callable[[], object]
    """a context manager that gives the function to call"""
    seeds: Callable[[], list[bytes]]


class Defect(AssertionError):
    """An outcome that is neither a value nor a typed error."""


# --- frame ----------------------------------------------------------------------------------------

_CLAIM = struct.Struct("<BHHHIQ")


@contextmanager
def _frame() -> Iterator[Run]:
    pool = BlockPool()

    def run(data: bytes) -> None:
        stream = _stream(data)
        ours, theirs = socket.socketpair()
        shared = SharedMemory() if len(data) % 2 else None
        channel = SocketChannel(ours, "peer", limits=LIMITS, stall=5.0, pool=pool, shared=shared)
        try:
            theirs.sendall(stream[: 1 << 16])
            theirs.shutdown(socket.SHUT_WR)
            while True:
                frame = recv(channel)
                assert len(frame.head) <= LIMITS.head
                assert all(len(part) <= LIMITS.payload for part in frame.payload)
        except (PeerLost, BadMessage):
            pass
        finally:
            channel.close()
            theirs.close()

    yield run


def _stream(data: bytes) -> bytes:
    """The bytes as they are, or as frames whose sums are right: else few would get past those."""
    if not data or data[0] & 1:
        return data[1:]
    stream, rest = b"", data[1:]
    while len(rest) >= _CLAIM.size:
        how, kind, flags, head, length, request = _CLAIM.unpack_from(rest)
        rest = rest[_CLAIM.size :]
        content = rest[: head % 64]
        rest = rest[head % 64 :]
        if how & 1:
            frame = Frame(kind, flags & 0x303, request, content, [rest[: length % 128]])
            stream += encode_prefix(frame) + content + rest[: length % 128]
            rest = rest[length % 128 :]
        else:
            stream += pack_prefix(kind, flags, head, length, request) + content
    return stream


def _frame_seeds() -> list[bytes]:
    frames = [
        Frame(0x40, 0, 1, b"head", [b"payload"]),
        Frame(3, 1, 9, b"", ()),
        Frame(1, 0, 0, b"x", ()),
    ]
    raw = [b"\1" + b"".join(encode_prefix(f) + f.head + b"".join(f.payload) for f in frames)]
    made = b"".join(_CLAIM.pack(1, f.kind, f.flags, len(f.head), 7, 1) + f.head for f in frames)
    told = _CLAIM.pack(0, 1, 0x300, 0, 1 << 17, 1) + b"\1\0\0\0\1\0\0\0"
    return [*raw, b"\0" + made, b"\0" + told, b"\0" + told + made]


# --- message --------------------------------------------------------------------------------------

_HOMES = (agent_messages, autograd_messages, rpc_messages)
TYPES = sorted(
    {
        found
        for home in _HOMES
        for found in vars(home).values()
        if isinstance(found, type) and issubclass(found, Message) and found is not Message
    },
    key=kind_of,
)


@contextmanager
def _message() -> Iterator[Run]:
    kinds = Kinds(TYPES, LIMITS.elements)

    def run(data: bytes) -> None:
        try:
            message = kinds.decode(_kind_in(data), data[1:])
        except BadMessage:
            return
        encode(message)

    yield run


def _kind_in(data: bytes) -> int:
    if not data:
        return 0
    return kind_of(TYPES[data[0] % len(TYPES)]) if data[0] < 250 else data[0]


def examples() -> list[Message]:
    """One message of most kinds, as a correct peer sends them."""
    codec = _codec()
    tensor = torch.ones(2, 3)
    packed = codec.encode(((1, {"a": tensor}, "text"), {"k": [None, (True,)]}))
    headers, _ = encode_tensors(packed.tensors)
    crossing = Crossing(EdgeId(0, 0), 1, {0: b"\1"}, [0])
    reference = Reference(RefId(0, 1), 0, ForkId(0, 2))
    body = Body(packed.data, headers, [crossing], [reference])
    plain = Body(codec.encode(((1,), {})).data, [], [], [])
    context = 0
    return [
        Call(f"{HOME}:echo", body, context, True, False, 5.0),
        Call(f"{HOME}:echo", plain, None, True, False, 5.0),
        Call("torch:neg", plain, None, False, True, 5.0),
        Call(".up", plain, None, True, False, 5.0),
        Call(f"{HOME}:Counter", plain, None, True, False, 5.0, Kept(RefId(0, 5), ForkId(0, 6))),
        Fetch(RefId(0, 5), None, 1.0),
        Fork(RefId(0, 5), ForkId(0, 7), 3, 1),
        Accept(ForkId(1, 1)),
        Drop([(RefId(0, 5), ForkId(0, 6))], 2),
        BackwardFrom(RefId(0, 5), context, False, 1.0),
        Start(PassId(0, 1), 1, context, {1 << 45: b"\1"}, None, False, False, 1.0, None),
        Gradients(PassId(0, 1), EdgeId(1, 0), [True], headers, [crossing]),
        RunDone(PassId(1, 1), True),
        PassEnded(PassId(0, 1), None),
        Release([0]),
        Forget(context, [7]),
        agent_messages.Failure("builtins:ValueError", "text", None, "", "w0"),
        agent_messages.Done(),
    ]


def _message_seeds() -> list[bytes]:
    return [bytes([TYPES.index(type(m))]) + encode(m) for m in examples()]


# --- payload --------------------------------------------------------------------------------------


def _codec() -> Codec:
    return Codec(Registry([exposed]), LIMITS)


@contextmanager
def _payload() -> Iterator[Run]:
    codec = _codec()
    ready = [torch.zeros(8, dtype=torch.uint8), torch.ones(2, 2)]

    def run(data: bytes) -> None:
        count = data[0] % 4 if data else 0
        tensors = [ready[n % 2].clone() for n in range(count)]
        try:
            value = codec.decode(data[1:], tensors)
        except GradwireError:
            return
        try:
            codec.encode(value)
        except NotSerializable:
            return

    yield run


def values() -> list[object]:
    """Something of each kind that travels."""
    return [
        ((1, 2.5, None, True, "text", b"bytes"), {"k": [1, (2,), {3}, frozenset({4})]}),
        [1 << 70, 1j, slice(1, None), range(3), ..., bytearray(b"x"), "\ud800"],
        [torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.strided],
        [exposed.Colour.RED, exposed.Bits.A | exposed.Bits.B, exposed.Pair(1, 2)],
        [exposed.Record("n", [1]), exposed.Money(3), exposed.echo, exposed.Counter, torch.sin],
        [np.float32(1), np.str_("s"), np.bytes_(b"b"), np.datetime64("2020")],
        [torch.return_types.max((torch.ones(1), torch.ones(1)))],
        {"a": {"b": {"c": [[[[]]]]}}},
        [np.arange(8, dtype=np.uint8), torch.ones(2, 2)],
        torch.nn.Linear(1, 1).state_dict(),
        [
            datetime(2024, 1, 1, tzinfo=UTC),
            date(2024, 1, 1),
            time(1),
            timedelta(1),
            ZoneInfo("UTC"),
        ],
        [PurePosixPath("a"), Decimal("1.5"), Fraction(1, 3), UUID(int=1), SimpleNamespace(a=1)],
        [
            defaultdict(list, a=1),
            Counter("a"),
            deque([1], 2),
            memoryview(b"ab"),
            WorkerInfo("w", 1),
        ],
        [ValueError(1), OSError(2, "no"), ExceptionGroup("g", [KeyError("k")])],
        [np.zeros(1, "u1, i2, (2,)u1, S1")],
        [exposed.Row([1, (2,)]), torch.Generator(), torch.distributions.LogNormal(0.0, 1.0)],
        [twice := torch.ones(2, 2), {"again": twice}],
    ]


def _payload_seeds() -> list[bytes]:
    codec = _codec()
    packed = [codec.encode(value) for value in values()]
    return [bytes([len(one.tensors)]) + one.data for one in packed]


# --- tensors --------------------------------------------------------------------------------------

_HEADERS = msgspec.msgpack.Decoder(list[TensorHeader])


@contextmanager
def _tensors() -> Iterator[Run]:
    def run(data: bytes) -> None:
        size = 16 * data[0] if data else 0
        payload = memoryview(bytearray(size)) if size else None
        try:
            headers = _HEADERS.decode(data[1:])
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return  # as wire/message.py does
        try:
            tensors = decode_tensors(headers, payload, LIMITS)
        except BadMessage:
            return
        for tensor in tensors:
            if tensor.layout is torch.strided and not tensor.is_meta:
                used = tensor.numel() * tensor.element_size()
                assert used <= size, f"{used} bytes of {size}"
                assert tensor.untyped_storage().nbytes() <= max(size, used)
                tensor.clone()

    yield run


def _tensor_seeds() -> list[bytes]:
    some = [
        torch.ones(2, 3),
        torch.arange(4),
        torch.ones(2, 3).t(),
        torch.ones(0, 3),
        torch.ones(2, device="meta"),
        torch.ones(3, dtype=torch.bfloat16),
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
    ]
    seeds = []
    for group in (some, *([tensor] for tensor in some)):
        headers, buffers = encode_tensors(group)
        size = -(-sum(map(len, buffers)) // 16)
        seeds.append(bytes([size]) + msgspec.msgpack.encode(headers))
    return seeds


# --- world ----------------------------------------------------------------------------------------


class _Watching(logging.Handler):
    """Notes what workers log as failures of their own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, GradwireError):
            self.found.append(f"{record.getMessage()}: {error!r}")


_OF_A_FUNCTION = {"builtins:TypeError", "builtins:RuntimeError", "builtins:AttributeError"}
"""What a function or operator itself may raise when it is given the wrong arguments."""


@contextmanager
def _world() -> Iterator[Run]:
    watching = _Watching()
    log = logging.getLogger("gradwire")
    log.addHandler(watching)
    threads_failed: list[str] = []
    before = threading.excepthook
    threading.excepthook = lambda args: threads_failed.append(repr(args.exc_value))
    options = Options(limits=LIMITS, timeouts=Timeouts(backward=2.0, call=5.0))
    try:
        with cluster(2, expose=[exposed], options=options) as workers:
            attacker, victim = workers[0].worker, workers[1].worker

            def run(data: bytes) -> None:
                _attack(attacker, data)
                if data and data[0] % 8 == 0:
                    _check_service(attacker)
                if watching.found or threads_failed:
                    raise Defect(f"{watching.found} {threads_failed}")
                if len(victim.engine.contexts) > LIMITS.contexts:
                    raise Defect("contexts pile up")

            yield run
    finally:
        threading.excepthook = before
        log.removeHandler(watching)


def _attack(attacker, data: bytes) -> None:
    """Send one frame, as a request, and look at the answer."""
    kind = _kind_in(data)
    agent = attacker.agent
    deadline = agent.clock.now() + 5
    promise_of = _Raw(kind, bytes(data[1:]))
    try:
        outcome = promise_of.sent_by(agent, deadline)
    except (PeerLost, GradwireError):
        return
    if isinstance(outcome, GradwireError) and hasattr(outcome, "type_name"):
        name = outcome.type_name
        if not name.startswith("gradwire.errors:") and name not in _OF_A_FUNCTION:
            raise Defect(f"kind {kind:#x} was answered by {name}: {outcome}")


_ZEROS = [bytes(1024)]
"""The payload of every message: room for a few tensors."""


class _Raw(NamedTuple):
    kind: int
    head: bytes

    def sent_by(self, agent, deadline: float) -> object:
        """Past our own encoder, with a number that an answer can come to; None if none comes."""
        channel = agent._connections.to(1, deadline)
        wants_answer = self.kind in _ANSWERED
        if not wants_answer:
            channel.send(Frame(self.kind, 0, 0, self.head, _ZEROS), deadline)
            return None
        promise = agent_promise(agent, channel, deadline)
        channel.send(Frame(self.kind, 0, promise[0], self.head, _ZEROS), deadline)
        try:
            return promise[1].wait(0.5)
        except TimeoutError:
            return None


def agent_promise(agent, channel, deadline: float):
    """A place in the table of requests, as `Agent.request` takes one."""
    promise: Promise = Promise()
    pending = Pending(1, "an attack", agent.clock.now(), deadline, promise, via=channel)
    n = promise.request = agent._calls.opened(pending)
    return n, promise


_ANSWERED = {kind_of(t) for t in (Call, Fetch, Fork, Accept, Drop, BackwardFrom)}


def _check_service(attacker) -> None:
    """An honest call is served, once it is noticed that the connection was given up."""

    def is_served() -> bool:
        try:
            with attacker.scope():
                return gradwire.rpc_sync("w1", exposed.echo, (1,)) == ((1,), {})
        except PeerLost:
            return False

    if not eventually(is_served):
        raise Defect("an honest call is not served any more")


TARGETS = {
    target.name: target
    for target in (
        Target("frame", _frame, _frame_seeds),
        Target("handshake", handshake.opened, handshake.seeds),
        Target("message", _message, _message_seeds),
        Target("payload", _payload, _payload_seeds),
        Target("tensors", _tensors, _tensor_seeds),
        Target("world", _world, _message_seeds),
    )
}
