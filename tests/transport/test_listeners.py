"""Where peers meet: what every transport's listen and connect owe, and what each adds."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from gradwire.errors import DeadlinePassed, NotTrusted, PeerLost, UsageError
from gradwire.transport import tcp, unix
from gradwire.transport.address import parse_address
from gradwire.transport.base import Channel, Listener, Transport
from gradwire.transport.memory import MemoryNetwork
from gradwire.transport.sockets import stream
from gradwire.transport.tcp import TcpTransport
from gradwire.transport.tls import TlsTransport
from gradwire.transport.unix import UnixTransport
from gradwire.wire.message import Frame
from tests.certificates import job
from tests.transport.conformance import recv

FRAME = Frame(1, 0, 7, b"head", [b"payload"])


def soon() -> float:
    return time.monotonic() + 5


@pytest.fixture(params=["memory", "unix", "tcp", "tls"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def transport(scheme: str) -> Transport:
    if scheme == "tls":
        return TlsTransport(job().tls("w0"))
    made: dict[str, Transport] = {
        "memory": MemoryNetwork(),
        "unix": UnixTransport(),
        "tcp": TcpTransport(),
    }
    return made[scheme]


@pytest.fixture
def listener(transport: Transport, scheme: str) -> Iterator[Listener]:
    listener = transport.listen(f"{scheme}://")
    yield listener
    listener.close()


def greet(near: Channel, far: Channel) -> None:
    near.send(FRAME, soon())
    assert recv(far).head == b"head"


def test_a_channel_joins_who_connects_and_who_accepts(transport, listener):
    near = transport.connect(listener.address, soon())
    far = listener.accept()
    greet(near, far)
    greet(far, near)
    assert near.remote == listener.address
    near.close()
    far.close()


def test_many_may_connect_before_one_is_accepted(transport, listener):
    near = [transport.connect(listener.address, soon()) for _ in range(20)]
    far = [listener.accept() for _ in range(20)]
    for mine, theirs in zip(near, far, strict=True):
        greet(mine, theirs)
    for channel in near + far:
        channel.close()


def test_close_wakes_accept_and_says_why(listener):
    errors: list[str] = []

    def accept() -> None:
        try:
            listener.accept()
        except PeerLost as error:
            errors.append(str(error))

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    thread.join(0.02)
    assert thread.is_alive()
    listener.close("enough")
    listener.close("again")
    thread.join()
    accept()
    assert errors == [f"{listener.address} was closed here: enough"] * 2


def test_nobody_is_reached_after_close_and_the_address_is_named(transport, listener):
    listener.close()
    with pytest.raises(PeerLost, match=f"cannot reach {listener.address}: "):
        transport.connect(listener.address, soon())


def test_channels_outlive_their_listener(transport, listener):
    near = transport.connect(listener.address, soon())
    far = listener.accept()
    listener.close()
    greet(near, far)
    near.close()
    far.close()


def test_an_address_cannot_be_taken_twice(transport, listener):
    with pytest.raises(UsageError, match=f"cannot listen on {listener.address}: "):
        transport.listen(listener.address)


def connect_until_it_fails(transport: Transport, address: str) -> None:
    """Fill the queue of a listener that accepts nobody; nobody answers who does not fit in."""
    with ExitStack() as connected:
        while True:
            channel = transport.connect(address, time.monotonic() + 0.03)
            connected.callback(channel.close)


# --- tcp ---


def test_tcp_listens_on_this_host_only_unless_told():
    listener = TcpTransport().listen("tcp://")
    assert listener.address.startswith("tcp://127.0.0.1:")
    assert not listener.address.endswith(":0")
    listener.close()


def test_tcp_speaks_ipv6():
    try:
        listener = TcpTransport().listen("tcp://[::1]:0")
    except UsageError:
        pytest.skip("this machine has no ::1")
    near = TcpTransport().connect(listener.address, soon())
    far = listener.accept()
    assert far.remote.startswith("tcp://[::1]:")
    for each in (near, far, listener):
        each.close()


def test_tcp_refused_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PeerLost, match=f"^cannot reach {address}: connection refused$"):
            TcpTransport().connect(address, soon())


def test_tcp_that_does_not_answer_is_given_up_at_the_deadline():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeadlinePassed, match=f"^{address} did not answer before the deadline$"):
            connect_until_it_fails(TcpTransport(), address)


@pytest.mark.parametrize("scheme", ["unix", "tcp", "tls"])
def test_a_deadline_that_has_passed_is_not_waited_for(transport, listener):
    with pytest.raises(DeadlinePassed, match=f"{listener.address} did not answer before"):
        transport.connect(listener.address, time.monotonic() - 1)


def test_tcp_names_a_host_that_is_none():
    host = "x" * 64  # no label is that long, so no server is asked
    with pytest.raises(PeerLost, match=f"cannot reach tcp://{host}:1: name or service not known"):
        TcpTransport().connect(f"tcp://{host}:1", soon())
    with pytest.raises(UsageError, match=f"cannot listen on tcp://{host}:1: name or service"):
        TcpTransport().listen(f"tcp://{host}:1")


@pytest.mark.parametrize("address", ["tcp://", "tcp://:80", "tcp://host:0"])
def test_tcp_needs_host_and_port_to_connect(address):
    with pytest.raises(UsageError, match="does not say which host and port to connect to"):
        TcpTransport().connect(address, soon())


def test_tcp_refuses_other_schemes():
    with pytest.raises(UsageError, match="unix:///x is not a tcp address"):
        TcpTransport().listen("unix:///x")


def test_tcp_sends_at_once_and_watches_for_a_host_that_vanished():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sock,
    ):
        tcp.tuned(sock, "tcp", stall=15.0)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        pause = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        probes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert 15 <= idle + pause * probes <= 16


def test_a_socket_that_met_itself_counts_as_refused(monkeypatch):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
        monkeypatch.setattr(tcp.socket, "socket", lambda *_: sock)
        with pytest.raises(PeerLost, match=f"cannot reach {address}: connection refused"):
            TcpTransport().connect(address, soon())


# --- unix ---


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_unix_socket_of_its_own_lies_in_a_private_directory_and_both_go_away():
    listener = UnixTransport().listen("unix://")
    path = Path(listener.address.removeprefix("unix://"))
    assert (mode_of(path), mode_of(path.parent)) == (0o600, 0o700)
    listener.close()
    assert not path.parent.exists()


def test_a_unix_socket_at_a_path_of_yours_leaves_the_directory(tmp_path):
    path = tmp_path / "socket"
    listener = UnixTransport().listen(f"unix://{path}")
    assert listener.address == f"unix://{path}"
    assert mode_of(path) == 0o600
    listener.close()
    assert not path.exists()
    assert tmp_path.exists()


def test_a_unix_path_left_behind_says_how_to_go_on(tmp_path):
    path = tmp_path / "socket"
    path.touch()
    with pytest.raises(UsageError, match="address already in use\nhint: remove the file if no"):
        UnixTransport().listen(f"unix://{path}")
    assert path.exists()


def test_a_unix_path_where_nobody_listens_is_named(tmp_path):
    address = f"unix://{tmp_path}/nobody"
    with pytest.raises(PeerLost, match=f"^cannot reach {address}: no such file or directory$"):
        UnixTransport().connect(address, soon())


def test_a_unix_path_may_not_be_longer_than_the_system_takes(tmp_path):
    address = f"unix://{tmp_path}/{'x' * 108}"
    for ask in (UnixTransport().listen, lambda address: UnixTransport().connect(address, soon())):
        with pytest.raises(UsageError, match="over the limit of 107\nhint: choose a shorter path"):
            ask(address)


def test_a_private_directory_does_not_outlive_a_listen_that_failed(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(UsageError, match="or a shorter TMPDIR"):
        UnixTransport().listen("unix://")
    assert not list(long.iterdir())


def test_unix_that_does_not_answer_is_given_up_at_the_deadline(tmp_path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "socket"))
        silent.listen(0)
        address = f"unix://{tmp_path}/socket"
        with pytest.raises(DeadlinePassed, match=f"^{address} did not answer before the deadline$"):
            connect_until_it_fails(UnixTransport(), address)


def test_unix_needs_a_path_to_connect():
    with pytest.raises(UsageError, match="unix:// does not say which path to connect to"):
        UnixTransport().connect("unix://", soon())


def test_unix_refuses_other_schemes():
    with pytest.raises(UsageError, match="tcp://host:1 is not a unix address"):
        UnixTransport().connect("tcp://host:1", soon())


def test_unix_names_the_process_that_connected():
    listener = UnixTransport().listen("unix://")
    near = UnixTransport().connect(listener.address, soon())
    far = listener.accept()
    assert far.remote == f"{listener.address} (process {os.getpid()})"
    for each in (near, far, listener):
        each.close()


def test_unix_refuses_another_user_and_takes_the_next(monkeypatch):
    me, refused = os.geteuid(), []
    users = [me, me, me + 1, me]
    monkeypatch.setattr(unix, "_peer_of", lambda _: (1, users.pop(0)))
    transport = UnixTransport(refused=lambda kind, peer: refused.append((kind, peer)))
    listener = transport.listen("unix://")
    stranger = UnixTransport().connect(listener.address, soon())
    friend = UnixTransport().connect(listener.address, soon())
    far = listener.accept()
    with pytest.raises(PeerLost, match="connection closed by peer"):
        recv(stranger)
    greet(friend, far)
    assert refused == [("another user", f"{listener.address} (user {me + 1})")]
    for each in (stranger, friend, far, listener):
        each.close()


def test_unix_does_not_speak_to_a_listener_of_another_user(monkeypatch):
    monkeypatch.setattr(unix, "_peer_of", lambda _: (1, os.geteuid() + 1))
    listener = UnixTransport().listen("unix://")
    with pytest.raises(NotTrusted, match=f"is a process of another user, {os.geteuid() + 1}"):
        UnixTransport().connect(listener.address, soon())
    listener.close()


@pytest.mark.parametrize("place", ["0.0.0.0", "[::]", "192.0.2.1", "[2001:db8::1]"])
def test_tcp_for_this_host_only_goes_nowhere_else(place):
    near = TcpTransport(this_host_only=True)
    for way in (near.listen, lambda address: near.connect(address, soon())):
        with pytest.raises(UsageError, match="is on another machine") as refusal:
            way(f"tcp://{place}:1")
        assert "TLS" in refusal.value.hint
        assert "insecure=True" in refusal.value.hint


@pytest.mark.parametrize("place", ["127.0.0.1", "127.9.9.9", "localhost", ""])
def test_tcp_for_this_host_only_listens_here(place):
    listener = TcpTransport(this_host_only=True).listen(f"tcp://{place}:0")
    near = TcpTransport(this_host_only=True).connect(listener.address, soon())
    for each in (near, listener.accept(), listener):
        each.close()


@pytest.mark.parametrize("written", ["0", "0x0", "00.0.0.0", "0.0.0.0", "[0::0]"])
def test_a_wildcard_is_told_in_one_way(written: str):
    with closing(TcpTransport().listen(f"tcp://{written}:0")) as listener:
        assert parse_address(listener.address).place == ("::" if ":" in written else "0.0.0.0")


def blocked(error: OSError) -> str | None:
    with (
        pytest.raises((PeerLost, DeadlinePassed)) as caught,
        stream.connecting_to("tcp://192.0.2.1:80", hint="it is gone", blocked_hint="open port 80"),
    ):
        raise error
    return caught.value.hint


def test_what_a_firewall_causes_has_a_hint_of_its_own():
    assert blocked(TimeoutError()) == "open port 80"
    assert blocked(OSError(errno.EHOSTUNREACH, "no route to host")) == "open port 80"
    assert blocked(OSError(errno.ENETUNREACH, "network is unreachable")) == "open port 80"
    assert blocked(ConnectionRefusedError(errno.ECONNREFUSED, "refused")) == "it is gone"


def test_one_that_never_answers_on_another_machine_shows_which_port_to_open():
    with pytest.raises(DeadlinePassed) as caught:
        TcpTransport().connect("tcp://192.0.2.1:8080", time.monotonic() - 1)
    assert caught.value.hint == (
        "firewalls must let the other workers connect to port 8080 of 192.0.2.1; "
        'Options(listen="tcp://0.0.0.0:PORT") there sets the port'
    )
