"""TLS between workers: who is let in, who is believed, and what records do to frames."""

from __future__ import annotations

import os
import select
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from gradwire.errors import NotTrusted, PeerLost, UsageError
from gradwire.launch import certs
from gradwire.options import Limits, Tls
from gradwire.transport import tls as tls_module
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.sockets.channel import SocketChannel
from gradwire.transport.tcp import TcpTransport
from gradwire.transport.tls import TlsTransport
from gradwire.transport.tls_session import Identity, TlsSession, TlsStream
from gradwire.wire.message import Frame
from tests import certificates
from tests.certificates import DAY, job, other_job
from tests.leftovers import eventually
from tests.transport.conformance import recv
from tests.transport.test_sockets import (
    BYTES,
    HUGE,
    Interrupted,
    _signals_raise,  # noqa: F401
    in_background,
    interrupt_this_thread_once_it_is_in,
)

MIB = 1 << 20
FRAME = Frame(1, 0, 7, b"head", [b"payload"])


def soon() -> float:
    return time.monotonic() + 10


def transport_of(worker: str, **settings) -> TlsTransport:
    return TlsTransport(job().tls(worker), **settings)


@contextmanager
def listening(worker: str, **settings):
    """A listener whose `refused` counts the connections that it refused, by reason."""
    refused = Counter()
    settings.setdefault("refused", lambda why, _: refused.update([why]))
    listener = transport_of(worker, **settings).listen("tls://")
    listener.refused = refused
    try:
        yield listener
    finally:
        listener.close()


def place_of(listener) -> tuple[str, int]:
    host, _, port = listener.address.removeprefix("tls://").rpartition(":")
    return host, int(port)


def stranger(listener) -> socket.socket:
    return socket.create_connection(place_of(listener), timeout=10)


def careless(tls: Tls | None = None) -> ssl.SSLContext:
    """A client that believes anyone, and shows that certificate or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if tls is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context


def refusal_of(listener, context: ssl.SSLContext) -> str:
    """What a client hears that should be refused, and is."""
    with stranger(listener) as sock, pytest.raises(ssl.SSLError) as refused:
        heard_by(sock, context)
    return str(refused.value.reason)


def heard_by(sock: socket.socket, context: ssl.SSLContext) -> bytes:
    with context.wrap_socket(sock) as wrapped:
        return wrapped.recv(1)


# --- who is there ---


def test_both_ends_know_whom_they_speak_with():
    with listening("w1") as listener:
        near = transport_of("w0").connect(listener.address, soon(), "w1")
        far = listener.accept()
    assert (near.peer_names, far.peer_names) == (("w1",), ("w0",))
    assert near.remote == listener.address
    assert far.remote.startswith("tls://127.0.0.1:")
    near.close()
    far.close()


def test_both_ends_have_the_same_binding_and_others_have_another():
    bindings = []
    for accepting, dialling in (("w1", "w0"), ("w0", "w1"), ("w1", "w2")):
        with listening(accepting) as listener:
            near = transport_of(dialling).connect(listener.address, soon())
            far = listener.accept()
        assert near.binding == far.binding
        assert len(near.binding) == 32
        bindings.append(near.binding)
        near.close()
        far.close()
    assert len(set(bindings)) == 3


def test_a_certificate_may_be_for_several_workers():
    assert transport_of("all").names == ("w0", "w1", "w2")


def test_a_channel_without_certificates_says_so():
    listener = TcpTransport().listen("tcp://")
    near = TcpTransport().connect(listener.address, soon(), "w1")
    assert (near.peer_names, near.binding) == (None, b"")
    near.close()
    listener.close()


# --- whom a worker that dials refuses ---


def test_the_certificate_of_another_worker_is_refused():
    with listening("w1") as listener, pytest.raises(NotTrusted) as refused:
        transport_of("w0").connect(listener.address, soon(), "w2")
    assert str(refused.value) == (
        f"{listener.address} is not w2: its certificate is for w1\n"
        "hint: the worker that listens there needs a certificate with the URI gradwire:w2"
    )


def test_a_name_is_not_compared_by_its_beginning_or_its_case():
    with listening("w1") as listener:
        for name in ("w", "w11", "W1", "gradwire:w1"):
            with pytest.raises(NotTrusted, match=f"is not {name}: its certificate is for w1"):
                transport_of("w0").connect(listener.address, soon(), name)


def test_the_certificate_of_another_authority_is_refused():
    refused = []
    other = TlsTransport(other_job().tls("w0"), refused_by=lambda why, _: refused.append(why))
    with closing(other.listen("tls://")) as listener:
        with pytest.raises(
            NotTrusted, match=f"^{listener.address} is not trusted: its certificate"
        ):
            transport_of("w1").connect(listener.address, soon(), "w0")
        assert eventually(lambda: refused)


@contextmanager
def answering(answer) -> Iterator[str]:
    """A server of any kind: what it does with the one who connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock, suppress(OSError):
                answer(sock)

        thread = in_background(serve)
        yield f"tls://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def refused_by_us(address: str) -> NotTrusted:
    with pytest.raises(NotTrusted) as refused:
        transport_of("w1").connect(address, soon(), "w0")
    return refused.value


def server_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    return context


def test_an_expired_certificate_is_refused():
    context = server_context(job().tls("late"))
    with answering(lambda sock: context.wrap_socket(sock, server_side=True)) as address:
        error = refused_by_us(address)
    assert f"{address} is not trusted: its certificate is refused: certificate has" in str(error)


def test_tls_of_an_older_version_is_refused():
    context = server_context(job().tls("w0"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with answering(lambda sock: context.wrap_socket(sock, server_side=True)) as address:
        error = refused_by_us(address)
    assert f"{address} does not speak TLS 1.3: " in str(error)


def test_one_who_does_not_speak_tls_is_found_out():
    with answering(lambda sock: sock.sendall(b"220 ready when you are\r\n" * 4)) as address:
        error = refused_by_us(address)
    assert f"{address} does not speak TLS 1.3: " in str(error)
    assert str(error).endswith("hint: start every worker with Options(tls=…)")


def test_a_worker_that_speaks_plain_tcp_is_found_out():
    listener = TcpTransport().listen("tcp://")

    def serve() -> None:
        with suppress(Exception):
            recv(listener.accept())

    serving = in_background(serve)
    with pytest.raises(PeerLost, match=r"cannot reach .*\nhint: it refused this worker, or does"):
        transport_of("w1").connect(listener.address.replace("tcp", "tls"), soon(), "w0")
    serving.join()
    listener.close()


def test_one_who_never_answers_is_given_up_at_the_deadline():
    gate = threading.Event()
    with answering(lambda _: gate.wait(10)) as address:
        with pytest.raises(TimeoutError, match=f"{address} did not answer before the deadline"):
            transport_of("w1").connect(address, time.monotonic() + 0.05)
        gate.set()


# --- whom a worker that listens refuses ---


def test_one_without_a_certificate_is_refused():
    with listening("w0") as listener:
        assert refusal_of(listener, careless()) == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
        assert eventually(lambda: listener.refused == {"peer did not return a certificate": 1})


def test_one_with_a_certificate_of_another_authority_is_refused():
    with listening("w0") as listener:
        refusal = refusal_of(listener, careless(other_job().tls("w0")))
        assert refusal == "TLSV1_ALERT_UNKNOWN_CA"
        assert eventually(lambda: listener.refused == {"unable to get local issuer certificate": 1})


def test_one_with_an_expired_certificate_is_refused():
    with listening("w1") as listener:
        refusal = refusal_of(listener, careless(job().tls("late")))
        assert refusal == "SSLV3_ALERT_CERTIFICATE_EXPIRED"
        assert eventually(lambda: listener.refused == {"certificate has expired": 1})


def test_one_whose_certificate_names_no_worker_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(certs, "URI_PREFIX", "https://")
    nameless = certs.Folder(tmp_path)
    certificates.authority().enrol(nameless, "w9", DAY)
    tls = Tls(
        certificate=nameless.certificate("w9"),
        key=nameless.key("w9"),
        authority=job().authority,
    )
    with listening("w0") as listener:
        with stranger(listener) as sock, suppress(OSError):
            assert heard_by(sock, careless(tls)) == b""
        assert eventually(lambda: listener.refused == {"has a certificate that names no worker": 1})
    with pytest.raises(UsageError, match="names no worker\nhint: the worker's name is a URI among"):
        TlsTransport(tls)


def test_one_who_speaks_an_older_tls_is_refused():
    context = careless(job().tls("w1"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with listening("w0") as listener:
        assert refusal_of(listener, context) == "TLSV1_ALERT_PROTOCOL_VERSION"
        assert eventually(lambda: listener.refused == {"unsupported protocol": 1})


def test_one_who_speaks_plain_tcp_is_refused():
    with listening("w0") as listener:
        near = TcpTransport().connect(listener.address.replace("tls", "tcp"), soon())
        near.send(FRAME, soon())
        with pytest.raises(PeerLost, match=r"^connection closed by peer$"):
            recv(near)
        near.close()
        assert eventually(lambda: listener.refused == {"does not speak TLS": 1})


@pytest.mark.parametrize(
    "said",
    [
        b"\x16",
        b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00",
        b"\x16\x03\x01\xff\xff" + bytes(70_000),
        b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes(16_380),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["one byte", "a short hello", "a long record", "a hello of 16 MiB", "http"],
)
def test_rubbish_is_refused_and_others_still_come_in(said):
    with listening("w0") as listener:
        with stranger(listener) as sock, suppress(OSError):
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1000):
                pass
        assert eventually(lambda: listener.refused.total() == 1)
        transport_of("w1").connect(listener.address, soon(), "w0").close()


def test_a_mistake_of_ours_keeps_nobody_else_out(monkeypatch, caplog):
    mistakes = [RuntimeError("a mistake")]
    tuned = tls_module.tuned

    def mistaken(*args: object) -> str:
        if mistakes:
            raise mistakes.pop()
        return tuned(*args)

    monkeypatch.setattr(tls_module, "tuned", mistaken)
    with listening("w0") as listener:
        unlucky = transport_of("w1").connect(listener.address, soon(), "w0")
        with pytest.raises(PeerLost):
            recv(unlucky)
        assert eventually(lambda: listener.refused == {"RuntimeError": 1})
        lucky = transport_of("w1").connect(listener.address, soon(), "w0")
        listener.accept().close()
        for channel in (unlucky, lucky):
            channel.close()
    assert "the TLS handshake with 127.0.0.1 failed" in caplog.text


# --- strangers take nobody's time ---


def test_one_who_says_nothing_is_sent_away_and_keeps_nobody_waiting():
    with listening("w0", patience=0.2) as listener, stranger(listener) as idle:
        near = transport_of("w1").connect(listener.address, soon(), "w0")
        listener.accept().close()
        near.close()
        assert idle.recv(1) == b""
        assert eventually(lambda: listener.refused == {"took too long for the handshake": 1})


def test_one_who_says_a_little_now_and_then_is_sent_away_too():
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
    with listening("w0", patience=0.1) as listener, stranger(listener) as slow:
        slow.settimeout(0.005)
        said = b""
        with suppress(ConnectionError):
            for byte in hello:
                slow.send(bytes([byte]))
                with suppress(TimeoutError):
                    said = slow.recv(1)
                    break
        assert said == b""
        assert eventually(lambda: listener.refused == {"took too long for the handshake": 1})


def test_the_oldest_stranger_goes_when_there_are_too_many():
    with listening("w0", limits=Limits(pending_handshakes=2)) as listener:
        first, second, third = (stranger(listener) for _ in range(3))
        assert first.recv(1) == b""
        near = transport_of("w1").connect(listener.address, soon(), "w0")
        listener.accept().close()
        near.close()
        assert second.recv(1) == b""
        assert eventually(
            lambda: listener.refused == {"was the oldest of too many pending handshakes": 2}
        )
        for sock in (first, second, third):
            sock.close()


def test_strangers_go_with_the_listener():
    with listening("w0") as listener:
        idle = stranger(listener)
        near = transport_of("w1").connect(listener.address, soon(), "w0")
    assert idle.recv(1) == b""
    idle.close()
    with pytest.raises(PeerLost):
        recv(near)
    near.close()
    assert repr(listener).startswith("<TlsListener on tls://127.0.0.1:")


# --- frames ---


def shaken(accepting: str = "w1", dialling: str = "w0") -> tuple[TlsSession, TlsSession]:
    """Two ends of a connection that have greeted each other in memory."""
    near = Identity(job().tls(dialling)).session(accepts=False)
    far = Identity(job().tls(accepting)).session(accepts=True)
    while not all([near.do_handshake(), far.do_handshake()]):
        far.incoming.write(near.outgoing.read())
        near.incoming.write(far.outgoing.read())
    return near, far


def as_channel(sock: socket.socket, session: TlsSession, stall: float = 10.0) -> SocketChannel:
    return SocketChannel(
        TlsStream(sock, session, stall),
        "tls://there:1",
        limits=Limits(),
        stall=stall,
        pool=BlockPool(),
    )


@pytest.fixture
def ends() -> Iterator[tuple[SocketChannel, SocketChannel, socket.socket]]:
    """Two channels over a pair of sockets, where what is sent has come; and the second."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MIB)
    near, far = shaken()
    channels = as_channel(ours, near), as_channel(theirs, far)
    yield *channels, theirs
    for channel in channels:
        channel.close()


@pytest.fixture
def wire() -> Iterator[tuple[SocketChannel, SocketChannel, socket.socket, socket.socket]]:
    """Two channels with a cut between them: what the first has sent, and where the second hears."""
    near, far = shaken()
    (ours, sent), (cut, theirs) = socket.socketpair(), socket.socketpair()
    parts = as_channel(ours, near), as_channel(theirs, far), sent, cut
    yield parts
    for part in parts:
        part.close()


def has_bytes(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))


@pytest.mark.parametrize("until", [0.0, float("inf")], ids=["a look", "a wait"])
def test_what_is_decrypted_but_unread_is_found_though_the_kernel_has_nothing(ends, until):
    near, far, sock = ends
    frames = [Frame(1, 0, n, b"", [bytes(size)]) for n, size in enumerate((100_000, 10, 60_000, 0))]
    for frame in frames:
        near.send(frame, soon())
    unseen = 0
    for frame in frames:
        found = far.maybe_recv(until)
        assert found is not None
        assert found.request == frame.request
        unseen += not has_bytes(sock)
    assert unseen > 1  # so there was something that no poll would have seen
    assert far.maybe_recv(0.0) is None
    assert far.maybe_recv(time.monotonic() + 0.005) is None


def test_a_part_of_a_record_is_no_frame_yet(wire):
    sender, receiver, sent, cut = wire
    sender.send(FRAME, soon())
    record = sent.recv(1000)
    for byte in record[:-1]:
        cut.sendall(bytes([byte]))
        assert receiver.maybe_recv(0.0) is None
    cut.sendall(record[-1:])
    assert recv(receiver).request == 7


def test_a_byte_that_was_changed_on_the_way_ends_the_channel(wire):
    sender, receiver, sent, cut = wire
    sender.send(FRAME, soon())
    sender.send(FRAME, soon())
    changed = bytearray(sent.recv(1000))
    changed[-20] ^= 1
    cut.sendall(changed)
    assert recv(receiver).request == 7
    for _ in range(2):
        with pytest.raises(PeerLost, match="tls: decryption failed or bad record mac"):
            recv(receiver)


def test_records_that_are_repeated_end_the_channel(wire):
    sender, receiver, sent, cut = wire
    sender.send(FRAME, soon())
    record = sent.recv(1000)
    cut.sendall(record + record)
    assert recv(receiver).request == 7
    with pytest.raises(PeerLost, match="tls: decryption failed or bad record mac"):
        recv(receiver)


def test_an_end_that_was_forged_within_a_frame_is_seen(wire):
    sender, receiver, sent, cut = wire
    sender.send(Frame(1, 0, 7, b"", [bytes(20_000)]), soon())
    cut.sendall(sent.recv(100_000)[:18_000])  # a whole record, and some of the next
    cut.close()
    with pytest.raises(PeerLost, match="connection closed by peer in the middle of a message"):
        recv(receiver)


def test_bytes_can_be_taken_one_by_one_and_what_follows_stays(ends):
    near, far, _ = ends
    near.send(FRAME, soon())
    near.send(FRAME, soon())
    assert b"".join(far.recv_raw(1, soon()) for _ in BYTES) == BYTES
    assert recv(far).request == 7
    with pytest.raises(BlockingIOError):
        far._sock.recv_into(memoryview(bytearray(1)), 0, socket.MSG_DONTWAIT)


def test_refusals_can_be_heard_of():
    heard = []
    settings = {"refused": lambda kind, remote: heard.append((kind, remote))}
    with listening("w0", **settings) as listener:
        refusal_of(listener, careless())
        assert eventually(lambda: heard)
    assert heard == [("peer did not return a certificate", "tls://127.0.0.1")]


def test_nothing_of_a_frame_can_be_read_on_the_wire(ends):
    near, _, sock = ends
    near.send(Frame(1, 0, 0, b"the secret head", [b"the secret payload"]), soon())
    assert b"secret" not in sock.recv(1000)


@pytest.mark.slow
def test_large_payloads_go_both_ways_at_once():
    with listening("w1") as listener:
        near = transport_of("w0").connect(listener.address, soon(), "w1")
        far = listener.accept()
    payload = os.urandom(MIB) * 64
    failures: list[BaseException] = []

    def does(work) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        return in_background(run)

    def sends(channel: SocketChannel) -> None:
        for n in range(2):
            channel.send(Frame(1, 0, n, b"", [payload]), soon())

    def receives(channel: SocketChannel) -> None:
        for n in range(2):
            frame = recv(channel)
            assert (frame.request, frame.payload[0] == payload) == (n, True)

    threads = [
        does(lambda end=end, work=work: work(end))
        for end in (near, far)
        for work in (sends, receives)
    ]
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    near.close()
    far.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_peer_may_change_its_keys():
    tls = job().tls("w1")
    with listening("w0") as listener:
        host, port = place_of(listener)
        command = f"openssl s_client -connect {host}:{port} -tls1_3 -cert {tls.certificate}"
        peer = subprocess.Popen(
            [*command.split(), "-key", tls.key, "-CAfile", tls.authority],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
        far = listener.accept()
    with peer:
        peer.stdin.write(b"K\n")  # its word for: change keys, and let the other one too
        heard = b""
        while b"KEYUPDATE" not in heard:
            heard += peer.stdout.read(1)
        peer.stdin.write(BYTES)
        assert recv(far).request == 7
        far.send(FRAME, soon())
        far.close()
        assert b"headpayload" in peer.stdout.read()


def test_many_key_updates_that_ask_for_an_answer_end_the_channel(ends):
    near, far, _ = ends
    far._sock._outgoing.write(bytes(MIB))  # as if as many answers were due
    near.send(FRAME, soon())
    with pytest.raises(PeerLost, match="tls: too many key updates"):
        recv(far)


def test_a_peer_that_stops_reading_within_a_message_is_given_up():
    ours, theirs = socket.socketpair()
    session, _ = shaken()
    channel = as_channel(ours, session, stall=0.02)
    with pytest.raises(PeerLost, match=r"closed here: no byte moved for 0.02 s in the middle"):
        channel.send(HUGE, soon())
    theirs.close()


@pytest.mark.usefixtures("_signals_raise")
def test_an_interrupt_while_nothing_arrives_leaves_the_channel_usable(ends):
    near, far, _ = ends
    interrupt_this_thread_once_it_is_in("_await_frame")
    with pytest.raises(Interrupted):
        recv(far)
    near.send(FRAME, soon())
    assert recv(far).request == 7


def test_an_interrupt_while_something_is_decrypted_ends_the_channel(ends, monkeypatch):
    near, far, _ = ends
    stream = far._sock
    decrypt = stream._read

    def interrupted(*args: object) -> int:
        decrypt(*args)
        raise Interrupted

    near.send(FRAME, soon())
    monkeypatch.setattr(stream, "_read", interrupted)
    with pytest.raises(Interrupted):
        recv(far)
    monkeypatch.setattr(stream, "_read", decrypt)
    with pytest.raises(PeerLost, match="closed here: interrupted in the middle of a message"):
        recv(far)


# --- files ---


def test_an_expired_certificate_of_our_own_is_refused_at_once():
    with pytest.raises(UsageError, match=r"no peer would accept the certificate .*has expired"):
        transport_of("late")


def test_a_key_that_others_may_read_is_refused(tmp_path):
    tls = job().tls("w0")
    loose = tmp_path / "w0.key"
    loose.write_bytes(Path(tls.key).read_bytes())
    loose.chmod(0o640)
    with pytest.raises(UsageError, match=rf"can be read by others\nhint: chmod 600 {loose}"):
        TlsTransport(Tls(certificate=tls.certificate, key=loose, authority=tls.authority))


def test_a_key_of_another_user_is_refused(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    if os.getuid() == 0:
        os.chown(job().key("w2"), 12345, -1)
    try:
        with pytest.raises(UsageError, match="belongs to another user"):
            transport_of("w2")
    finally:
        if os.getuid() == 0:
            os.chown(job().key("w2"), 0, -1)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"key": "/nowhere"}, "cannot use the key /nowhere: no such file or directory"),
        ({"authority": "/nowhere"}, "cannot use the authority /nowhere: no such file"),
        ({"certificate": "/nowhere"}, "cannot use the certificate /nowhere with key .*: no such"),
        ({"authority": __file__}, "cannot use the authority .*: "),
        ({"key": "w1"}, "cannot use the certificate .* with key .*: key values mismatch"),
        ({"authority": "other"}, "no peer would accept the certificate .*: "),
    ],
    ids=["no key", "no authority", "no certificate", "no pem", "wrong key", "wrong authority"],
)
def test_files_that_cannot_be_used_are_named(changed, says):
    tls = job().tls("w0")
    files = {"certificate": tls.certificate, "key": tls.key, "authority": tls.authority} | changed
    if files["key"] == "w1":
        files["key"] = job().tls("w1").key
    if files["authority"] == "other":
        files["authority"] = other_job().tls("w0").authority
    with pytest.raises(UsageError, match=rf"^{says}"):
        TlsTransport(Tls(**files))


def test_a_read_whose_reason_a_signal_handler_has_lost_is_repeated():
    """The handler runs inside of SSLObject.read, and reads by the same session.

    Python asks OpenSSL for the reason of a failure afterwards: it hears that the last operation,
    the handler's, was none that failed.
    """
    dialling, accepting = shaken()
    one, other = socket.socketpair()
    stream = TlsStream(one, dialling, 10.0)
    read, lost = dialling.tls.read, [True, True]

    def interrupted(*args: object) -> object:
        if lost:
            lost.pop()
            raise ssl.SSLError(
                ssl.SSLErrorNumber.SSL_ERROR_INVALID_ERROR_CODE, "Invalid error code"
            )
        return read(*args)

    stream._read = interrupted
    with one, other:
        accepting.tls.write(b"hello")
        other.sendall(accepting.outgoing.read())
        buffer = bytearray(5)
        assert stream.recv_into(memoryview(buffer)) == 5
        assert (buffer, lost) == (b"hello", [])
        one.setblocking(False)
        lost.append(True)
        with pytest.raises(BlockingIOError):
            stream.recv_into(memoryview(buffer))
