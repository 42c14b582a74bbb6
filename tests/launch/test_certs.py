"""`gradwire certs`: files that fit together, keys that nobody else reads, nothing overwritten."""

from __future__ import annotations

import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gradwire.__main__ import main
from gradwire.errors import UsageError
from gradwire.launch.certs import Folder, make
from gradwire.transport.tls import TlsTransport


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_certificates_of_a_job_are_for_its_workers(tmp_path):
    folder = Folder(tmp_path / "new" / "job")
    make(folder, ["trainer", "ps:0", "x" * 127])
    for worker in ("trainer", "ps:0", "x" * 127):
        assert TlsTransport(folder.tls(worker)).names == (worker,)


def test_keys_are_read_by_their_owner_alone(tmp_path):
    folder = Folder(tmp_path)
    make(folder, ["trainer"])
    assert mode_of(folder.authority_key) == mode_of(folder.key("trainer")) == 0o600
    assert mode_of(folder.certificate("trainer").parent) == 0o700
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "authority.key",
        "authority.pem",
        "trainer.key",
        "trainer.pem",
        "workers",
    ]


def test_a_worker_is_added_to_an_authority_that_is_there(tmp_path):
    folder = Folder(tmp_path)
    make(folder, ["trainer"])
    before = folder.authority.read_bytes()
    make(folder, ["ps0"])
    assert folder.authority.read_bytes() == before
    assert TlsTransport(folder.tls("ps0")).names == ("ps0",)


def test_the_key_of_the_authority_may_be_elsewhere(tmp_path):
    folder, safe = Folder(tmp_path / "job"), tmp_path / "safe.key"
    make(folder, ["trainer"])
    folder.authority_key.rename(safe)
    with pytest.raises(UsageError, match=r"cannot read the authority .*\nhint: bring its key back"):
        make(folder, ["ps0"])
    make(folder, ["ps0"], authority_key=safe)
    assert not folder.authority_key.exists()
    assert TlsTransport(folder.tls("ps0")).names == ("ps0",)


def test_a_key_of_another_authority_is_refused(tmp_path):
    here, there = Folder(tmp_path / "here"), Folder(tmp_path / "there")
    make(here, ["a"])
    make(there, ["a"])
    with pytest.raises(UsageError, match="is not the key of"):
        make(here, ["b"], authority_key=there.authority_key)


def test_nothing_is_replaced_unless_told(tmp_path):
    folder = Folder(tmp_path)
    make(folder, ["b"])
    before = folder.certificate("b").read_bytes(), folder.key("b").read_bytes()
    with pytest.raises(UsageError, match=r"b.pem is there already\nhint: --renew replaces it"):
        make(folder, ["a", "b"])
    assert (folder.certificate("b").read_bytes(), folder.key("b").read_bytes()) == before
    assert not folder.certificate("a").exists()
    make(folder, ["a", "b"], renew=True)
    assert folder.certificate("b").read_bytes() != before[0]
    assert TlsTransport(folder.tls("b")).names == ("b",)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "*"])
def test_a_name_that_no_worker_can_have_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="Worker name must match"):
        make(Folder(tmp_path), [name])
    assert not list(tmp_path.iterdir())


def test_a_certificate_must_last_a_while(tmp_path):
    with pytest.raises(UsageError, match="for 0 days would never be valid"):
        make(Folder(tmp_path), ["a"], days=0)


def test_the_command_says_what_it_made(tmp_path, capsys):
    assert main(["certs", "--out", str(tmp_path), "--workers", "trainer, ps0"]) == 0
    assert capsys.readouterr().out == textwrap.dedent(
        f"""\
        {tmp_path}/authority.pem  for every worker
        {tmp_path}/workers/trainer.pem  for trainer alone, with its .key
        {tmp_path}/workers/ps0.pem  for ps0 alone, with its .key
        {tmp_path}/authority.key  can name anyone: move it away from the workers
        """
    )
    assert main(["certs", "--out", str(tmp_path), "--workers", "ps1"]) == 0
    assert "authority.key" not in capsys.readouterr().out


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert main(["certs", "--out", str(tmp_path), "--workers", "a b"]) == 2
    assert capsys.readouterr().err.startswith("gradwire: Worker name must match")


@pytest.mark.slow
@pytest.mark.processes
def test_without_the_library_the_command_says_how_to_get_it(tmp_path):
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from gradwire.__main__ import main\n"
        f"sys.exit(main(['certs', '--out', {str(tmp_path)!r}, '--workers', 'a']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (
        2,
        "gradwire: to make certificates, gradwire needs the library cryptography\n"
        "hint: pip install 'gradwire[certs]'\n",
    )
