"""Who is not let in, on real sockets: what it is told, what is counted, and who does not notice."""

from __future__ import annotations

import hmac
import logging
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
from torch.distributed import HashStore

import gradwire
from gradwire import Limits, NotTrusted, Options, PeerLost, Timeouts, UsageError
from gradwire.agent.links import handshake
from gradwire.agent.links.handshake_state import HEAD_BYTES, VERSION, Dialling, body_length
from gradwire.agent.messages import Hello
from gradwire.agent.peers.directory import Directory, Member
from gradwire.agent.peers.secret import Secret, find_secret, fresh_secret
from gradwire.rpc.join import join
from gradwire.rpc.worker import Worker
from gradwire.testing import cluster
from gradwire.testing.clock import ManualClock
from gradwire.transport.address import Transports
from gradwire.transport.memory import MemoryNetwork
from gradwire.transport.tcp import TcpTransport
from gradwire.transport.unix import UnixTransport
from gradwire.wire.message import Frame, encode, kind_of
from tests.leftovers import eventually
from tests.rpc import far_open as far

TIMEOUTS = Timeouts(join=30, call=20)
LISTEN = {"unix": "unix", "tcp": "tcp://127.0.0.1:0"}
REACH = {"unix": UnixTransport(), "tcp": TcpTransport()}


def soon() -> float:
    return time.monotonic() + 10


class World:
    """Two workers of this process over real sockets, and peers that try to join them."""

    def __init__(self, scheme: str, options: Options) -> None:
        self.scheme, self.options, self._store = scheme, options, HashStore()
        self.a, self.b = self.come("a", 0), self.come("b", 1)
        self.job = self.b.agent._connections._job
        self.secret = find_secret(options)

    def come(self, name: str, rank: int) -> Worker:
        return join(name, rank, None, self.options, expose=[far], store=self._store)

    def close(self) -> None:
        for worker in (self.a, self.b):
            worker.close()

    def call(self) -> object:
        with self.a.scope():
            return gradwire.rpc_sync("b", far.here)

    def knock(self):
        """A channel to b."""
        return REACH[self.scheme].connect(self.b.directory.myself.address, soon())

    def prove(self, secret: Secret | None = None, job: str = "", me: str = "z", peer: str = "b"):
        channel = self.knock()
        try:
            secret = secret or self.secret
            handshake.prove(channel, secret, job or self.job, me, peer, soon())
        finally:
            channel.close()

    def refused(self, **counts: int) -> None:
        """b has refused so many of each kind, and still answers."""
        assert eventually(lambda: self.b.refusals.seen() == counts), self.b.refusals.seen()
        assert self.call() == "b"


@pytest.fixture(params=LISTEN)
def scheme(request) -> str:
    return request.param


@pytest.fixture
def world(scheme, request):
    """What a test asks for by `@pytest.mark.parametrize("options", …)` is added to the options."""
    more = request.node.callspec.params.get("options", {})
    made = World(scheme, Options(**{"listen": LISTEN[scheme], "timeouts": TIMEOUTS, **more}))
    yield made
    made.close()


def doorstep(worker: Worker):
    return worker.agent._connections._acceptor


def with_version(words: bytes, version: int) -> bytes:
    return words[:8] + struct.pack(">H", version) + words[10:]


def test_a_stranger_with_another_secret_is_told_so_counted_and_logged_once(world, caplog):
    with caplog.at_level(logging.WARNING, "gradwire"):
        for _ in range(3):
            with pytest.raises(NotTrusted, match="b has another secret than z") as refusal:
                world.prove(fresh_secret())
        world.refused(secret=3)

    assert "the same secret" in refusal.value.hint
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"b refused {world.scheme}://")
    assert line.endswith(": it does not know the secret of the job")


@pytest.mark.parametrize(
    ("claim", "text", "kind"),
    [
        ({"job": "other"}, "b belongs to another job", "job"),
        ({"peer": "c"}, "another worker than c listens there", "name"),
        ({"me": "b"}, "another worker than b listens there", "name"),
    ],
)
def test_a_member_in_the_wrong_place_is_told_so(world, claim, text, kind):
    with pytest.raises(NotTrusted, match=text):
        world.prove(**claim)
    world.refused(**{kind: 1})


def test_another_version_is_told_which_one_is_spoken(world):
    channel = world.knock()
    dialling = Dialling(b"k" * 32, world.job, "z", "b", nonce=b"n" * 32)
    channel.send_raw(with_version(dialling.opening(), VERSION - 1), soon())

    head = channel.recv_raw(HEAD_BYTES, soon())
    with pytest.raises(NotTrusted, match=f"b does not speak protocol {VERSION}"):
        dialling.proof(head + channel.recv_raw(body_length(head), soon()))
    channel.close()
    world.refused(version=1)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: b\r\n\r\n",
        bytes(4096),
        b"gradwire" + struct.pack(">HBH", VERSION, 1, 500),  # one byte over the limit
        b"gradwire" + struct.pack(">HBH", VERSION, 1, 3) + b"abc",
        b"gradwire" + struct.pack(">HBH", VERSION, 3, 32) + bytes(32),  # a proof of nothing
    ],
    ids=["http", "zeros", "oversize", "no opening", "out of turn"],
)
def test_what_is_not_our_protocol_gets_no_answer(world, words):
    channel = world.knock()
    channel.send_raw(words, soon())

    with pytest.raises(PeerLost, match="by peer"):
        channel.recv_raw(1, soon())
    channel.close()
    world.refused(stranger=1)


def test_a_frame_is_not_decoded_before_the_handshake(world):
    """Not even one that a member could send."""
    channel = world.knock()
    hello = encode(Hello(7, 99, "unix:///nowhere"))
    with suppress(PeerLost):  # it may be gone already
        channel.send(Frame(kind_of(Hello), 0, 0, hello, (bytes(100_000),)), soon())

    with pytest.raises(PeerLost, match="by peer"):
        channel.recv_raw(1, soon())
    channel.close()
    world.refused(stranger=1)
    assert not world.b.directory.has(7)


def test_a_recorded_handshake_is_refused_when_played_again(world):
    recorded: list[bytes] = []
    channel = world.knock()
    real = channel.send_raw

    class Recorder:
        binding, peer_names, recv_raw = b"", None, staticmethod(channel.recv_raw)

        @staticmethod
        def send_raw(words: bytes, deadline: float) -> None:
            recorded.append(words)
            real(words, deadline)

    handshake.prove(Recorder, world.secret, world.job, "z", "b", soon())
    channel.close()

    again = world.knock()
    opening, proof = recorded
    again.send_raw(opening, soon())
    again.recv_raw(HEAD_BYTES + 32, soon())
    again.send_raw(proof, soon())
    answer = again.recv_raw(HEAD_BYTES + 1, soon())
    again.close()

    assert answer[-1] == 5  # the reason: another secret
    world.refused(secret=1)


@pytest.mark.parametrize("part", ["nothing", "the beginning of a word", "all but the proof"])
def test_who_takes_too_long_is_cut_off(world, part):
    opening = Dialling(b"k" * 32, world.job, "z", "b", nonce=b"n" * 32).opening()
    said = {"nothing": b"", "the beginning of a word": opening[:4], "all but the proof": opening}
    doorstep(world.b)._seconds = 0.05  # only now: a and b know each other already
    channel = world.knock()
    channel.send_raw(said[part], soon())
    if part == "all but the proof":
        channel.recv_raw(HEAD_BYTES + 32, soon())

    with pytest.raises(PeerLost, match="by peer"):
        channel.recv_raw(1, soon())
    channel.close()
    world.refused(slow=1)


def test_who_only_looks_whether_we_are_alive_is_not_counted(world):
    world.knock().close()

    assert eventually(lambda: not doorstep(world.b)._unfinished)
    world.refused()


@pytest.mark.parametrize("scheme", ["tcp"], indirect=True)
@pytest.mark.parametrize("options", [{"limits": Limits(pending_handshakes=64)}])
@pytest.mark.slow
def test_calls_go_on_while_a_thousand_say_nothing(world, options):
    """However many come, only so many threads look after them; later there is room again."""
    crowd = 1000
    _allow_handles(crowd + 500)
    assert world.call() == "b"
    address = world.b.directory.myself.address.removeprefix("tcp://").rsplit(":", 1)
    with ExitStack() as stack:
        for _ in range(crowd):
            idle = stack.enter_context(socket.socket())
            idle.setblocking(False)
            idle.connect_ex((address[0], int(address[1])))
        assert eventually(lambda: not doorstep(world.b)._pending_handshakes.has_room)
        most = 0
        for _ in range(300):
            assert world.call() == "b"
            most = max(most, _greeters("b"))
        assert most <= 2 * 64, "more threads than for those that stand there, and those that go"
    assert eventually(lambda: doorstep(world.b)._pending_handshakes.has_room, 30)
    world.prove()
    assert world.call() == "b"


@pytest.mark.parametrize("scheme", ["tcp"], indirect=True)
@pytest.mark.parametrize("options", [{"limits": Limits(pending_handshakes=4)}])
@pytest.mark.slow
def test_a_crowd_that_says_nothing_makes_room_for_who_comes_next(world, options):
    with ExitStack() as stack:
        for _ in range(6):
            stack.callback(world.knock().close)
        world.prove()  # a dialler waits until those before it have had their fair time
        assert world.b.refusals.seen()["crowd"] >= 2
        assert world.call() == "b"


def _greeters(name: str) -> int:
    return sum(thread.name == f"gradwire {name} handshake" for thread in threading.enumerate())


def _allow_handles(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * count:
        if hard != resource.RLIM_INFINITY and hard < 2 * count:
            pytest.skip(f"only {hard} file descriptors")
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * count, hard))


def test_a_call_costs_no_proof(world, monkeypatch):
    """Who is there is settled once for a connection."""
    made = []
    real = hmac.digest
    monkeypatch.setattr(hmac, "digest", lambda *args: made.append(args) or real(*args))

    world.prove()
    proofs = len(made)
    for _ in range(20):
        assert world.call() == "b"

    assert proofs == len(made) > 0


# -- the other end


@pytest.fixture
def lonely():
    """A worker w0 that knows a w1, and the listener where w1 should be."""
    network = MemoryNetwork()
    transports = Transports({"memory": network})
    mine, theirs = network.listen("memory://w0"), network.listen("memory://w1")
    members = [Member(n, f"w{n}", f"memory://w{n}") for n in range(2)]
    secret = fresh_secret()
    worker = Worker(Directory(0, members), "job", secret, transports, mine, Options())
    worker.test_secret = secret
    yield worker, theirs
    worker.close()
    theirs.close()


def answered_by(listener, answer: Callable[[object], None]) -> threading.Thread:
    def serve() -> None:
        channel = listener.accept()
        with suppress(PeerLost):
            answer(channel)
        channel.close()

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def refusal_of(lonely, answer) -> NotTrusted:
    worker, listener = lonely
    thread = answered_by(listener, answer)
    with worker.scope(), pytest.raises(NotTrusted) as refusal:
        gradwire.rpc_sync("w1", far.here, timeout=10)
    thread.join()
    assert worker.refusals.seen() == {"listener not trusted": 1}
    assert not worker.agent.in_flight
    return refusal.value


def test_an_impostor_that_listens_for_a_peer_is_noticed_before_anything_is_said_to_it(lonely):
    said = []

    def answer(channel):
        said.append(channel.recv_raw(HEAD_BYTES + 8 + len("jobw0w1") + 32, soon()))
        channel.send_raw(b"gradwire" + struct.pack(">HBH", VERSION, 2, 32) + b"n" * 32, soon())
        said.append(channel.recv_raw(HEAD_BYTES + 32, soon()))
        channel.send_raw(said[-1], soon())  # the proof is reflected
        said.append(channel.recv_raw(1, soon()))

    error = refusal_of(lonely, answer)

    assert "w1 did not prove that it knows the secret of the job" in error.message
    assert "at memory://w1" in error.message
    assert "the same secret" in error.hint
    assert len(said) == 2, "something was said to an impostor"


def test_a_listener_with_another_secret_is_named(lonely):
    def answer(channel):
        with suppress(NotTrusted):
            handshake.examine(channel, fresh_secret(), "job", "w1", soon())

    assert "w1 has another secret than w0" in refusal_of(lonely, answer).message


def test_another_worker_at_the_address_is_noticed(lonely):
    worker, _ = lonely

    def answer(channel):
        with suppress(NotTrusted):
            handshake.examine(channel, worker.test_secret, "job", "w2", soon())

    assert "another worker than w1 listens there" in refusal_of(lonely, answer).message


def test_a_clock_that_moves_when_told_does_not_hurry_a_handshake():
    clock = ManualClock()
    clock.advance(-1000.0)  # as if the test had taken so long to come here

    with cluster(2, expose=[far], clock=clock) as workers:
        assert workers[0].run(gradwire.rpc_sync, "w1", far.here) == "w1"


# -- before anything is opened


def test_no_secret_no_worker(monkeypatch):
    monkeypatch.delenv("GRADWIRE_SECRET_FILE")

    with pytest.raises(UsageError, match="this worker was given no secret"):
        join("a", 0, None, Options(listen="unix"), store=HashStore())


@pytest.mark.parametrize("listen", ["tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://192.0.2.1:0"])
def test_no_listener_beyond_this_machine_without_tls(listen):
    with pytest.raises(UsageError, match="is on another machine") as refusal:
        join("a", 0, None, Options(listen=listen), store=HashStore())
    assert "TLS" in refusal.value.hint
    assert "insecure=True" in refusal.value.hint


def test_insecure_listens_anywhere_and_says_so_at_each_start(caplog):
    options = Options(init_method="tcp://localhost:1", listen="tcp://0.0.0.0:0", insecure=True)
    with caplog.at_level(logging.WARNING, "gradwire"):
        for rank in range(2):
            join(f"w{rank}", rank, None, options, store=HashStore()).close()

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(
        line.startswith("insecure=True: traffic to other machines may go without TLS")
        for line in said
    )


def test_a_rendezvous_host_that_cannot_be_found_is_named():
    options = Options(init_method="tcp://nowhere.invalid:1", timeouts=Timeouts(join=1))

    with pytest.raises(UsageError, match=r"no route to rendezvous host nowhere\.invalid"):
        join("a", 1, 2, options)


def test_where_workers_meet_elsewhere_they_need_tls_or_the_word():
    options = Options(init_method="tcp://192.0.2.1:1", timeouts=Timeouts(join=1))

    with pytest.raises(UsageError, match="is on another machine"):
        join("a", 1, 2, options)
