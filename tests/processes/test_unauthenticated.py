"""Who may speak, between real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

import gradwire
from gradwire import JoinTimeout, NotTrusted, Options, Timeouts, UsageError
from gradwire.agent.links import handshake
from gradwire.agent.peers.secret import Secret, fresh_secret, write_secret
from gradwire.current import current_worker
from gradwire.transport.unix import UnixTransport
from tests.leftovers import eventually
from tests.processes import far
from tests.processes.conftest import TIMEOUTS


def test_a_process_without_the_secret_is_refused_by_a_worker_that_goes_on(workers):
    worker = current_worker.find()
    address = worker.directory.address(worker.directory.find("w1").id)
    channel = UnixTransport().connect(address, time.monotonic() + 10)

    with pytest.raises(NotTrusted, match="w1 has another secret than w9"):
        handshake.prove(
            channel,
            fresh_secret(),
            worker.agent._connections._job,
            "w9",
            "w1",
            time.monotonic() + 10,
        )
    channel.close()

    assert gradwire.rpc_sync("w1", far.here) == "w1"
    assert gradwire.rpc_sync("w1", far.refused) == {"secret": 1}


NOBODY = 65534


def _knock_as_nobody(path: str) -> str:
    """What another user of this machine gets at a socket, by a process that does only this."""
    out, into = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with socket.socket(socket.AF_UNIX) as knocking:
                knocking.settimeout(10)
                knocking.connect(path)
                os.write(into, b"heard " + knocking.recv(10))
        except OSError as error:
            os.write(into, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(into)
    os.waitpid(child, 0)
    with os.fdopen(out) as said:
        return said.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_of_this_machine_does_not_get_in(workers):
    worker = current_worker.find()
    path = Path(worker.directory.myself.address.removeprefix("unix://"))

    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert _knock_as_nobody(str(path)) == "PermissionError"

    path.parent.chmod(0o755)
    path.chmod(0o666)  # opened by hand: then the kernel's word remains
    assert _knock_as_nobody(str(path)) in ("heard ", "ConnectionResetError")
    assert eventually(lambda: worker.refusals.seen() == {"another user": 1})
    assert gradwire.rpc_sync("w1", far.here) == "w1"


def _join_and_leave(rank: int, options: Options) -> None:
    gradwire.init_rpc(f"w{rank}", rank, 2, options)
    gradwire.shutdown()


def test_two_processes_with_two_secrets_do_not_meet(hosts, tmp_path):
    (host,) = hosts.take(1)
    place = f"file://{tmp_path}/meeting"
    one, other = (write_secret(tmp_path / name) for name in ("one", "other"))
    soon = Timeouts(join=3)
    host.begin(_join_and_leave, 0, Options(init_method=place, secret=one, timeouts=soon))

    with pytest.raises(NotTrusted, match="was not signed with this worker's secret"):
        _join_and_leave(1, Options(init_method=place, secret=other, timeouts=TIMEOUTS))
    with pytest.raises(JoinTimeout, match="w0 timed out waiting for rank 1 to join"):
        host.finish()


def test_two_processes_with_one_secret_do(hosts, tmp_path):
    (host,) = hosts.take(1)
    secret = write_secret(tmp_path / "secret")
    options = Options(init_method=f"file://{tmp_path}/meeting", secret=secret, timeouts=TIMEOUTS)
    host.begin(_join_and_leave, 0, options)
    _join_and_leave(1, options)
    host.finish()


def _without_secret(options: Options) -> None:
    kept = os.environ.pop("GRADWIRE_SECRET_FILE")
    try:
        _join_and_leave(0, options)
    finally:
        os.environ["GRADWIRE_SECRET_FILE"] = kept


def test_a_process_without_any_secret_is_no_worker(hosts, tmp_path):
    (host,) = hosts.take(1)

    with pytest.raises(UsageError, match="this worker was given no secret"):
        host.do(_without_secret, Options(init_method=f"file://{tmp_path}/meeting"))


def test_a_process_finds_its_secret_in_a_descriptor(no_secret):
    told = "0123456789abcdef" * 2
    code = (
        "from gradwire import Options; from gradwire.agent.peers.secret import find_secret; "
        "print([find_secret(Options()).key('x').hex() for _ in range(2)])"
    )
    out, into = os.pipe()
    os.write(into, told.encode())
    os.close(into)
    environment = os.environ | {"GRADWIRE_SECRET_FD": str(out)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)

    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        pass_fds=[out],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(out)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([Secret(told.encode()).key("x").hex()] * 2)


def look() -> tuple[bool, str, list[int]]:
    """Whether this process shows its secret, where that is, and who may read it."""
    path = Path(current_worker.find().options.secret)
    shown = Path("/proc/self/cmdline").read_bytes() + Path("/proc/self/environ").read_bytes()
    modes = [place.stat().st_mode & 0o777 for place in (path, path.parent)]
    return path.read_bytes() in shown, str(path), modes


def test_a_run_has_a_secret_of_its_own_that_it_shows_nowhere(no_secret):
    looks = [gradwire.run(look, 2) for _ in range(2)]

    assert [(shows, modes) for shows, _, modes in looks] == [(False, [0o600, 0o700])] * 2
    assert len({path for _, path, _ in looks}) == 2
    assert not any(Path(path).exists() for _, path, _ in looks)
