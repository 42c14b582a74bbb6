"""Where the secret of a job comes from, and what is wrong with it."""

from __future__ import annotations

import copy
import os
import stat

import pytest

from gradwire.agent.peers import secret as secrets_here
from gradwire.agent.peers.secret import (
    Secret,
    find_secret,
    fresh_secret,
    read_shared,
    shared_secret,
    write_secret,
)
from gradwire.errors import NotTrusted, UsageError
from gradwire.options import SECRET_VARIABLES, Options

TEXT = "0123456789abcdef" * 4
SAME = Secret(TEXT.encode()).key("test")


@pytest.fixture(autouse=True)
def no_secret_outside(monkeypatch):
    for name in SECRET_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    secrets_here._FROM_PIPE.value = None


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(TEXT)
    path.chmod(0o600)
    return path


def found(options=None):
    return find_secret(options or Options()).key("test")


def refusal(options=None):
    with pytest.raises(UsageError) as refused:
        find_secret(options or Options())
    assert TEXT[:8] not in str(refused.value)
    return refused.value


def test_a_file_that_the_options_name(file):
    assert found(Options(secret=str(file))) == SAME


def test_a_file_that_the_environment_names(file, monkeypatch):
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", str(file))

    assert found() == found() == SAME


def test_the_options_come_first(file, monkeypatch):
    monkeypatch.setenv("GRADWIRE_SECRET", "another secret of thirty two bytes or more")

    assert found(Options(secret=str(file))) == SAME


def test_the_environment_itself(monkeypatch):
    monkeypatch.setenv("GRADWIRE_SECRET", TEXT)

    assert found() == found() == SAME


def test_the_end_of_a_line_is_no_part_of_it(file):
    file.write_text(TEXT + "\n")

    assert found(Options(secret=str(file))) == SAME


def test_a_descriptor_that_can_be_read_again(file, monkeypatch):
    with file.open("rb") as opened:
        monkeypatch.setenv("GRADWIRE_SECRET_FD", str(opened.fileno()))

        assert found() == found() == SAME


def test_a_pipe_which_gives_it_once(monkeypatch):
    out, into = os.pipe()
    with os.fdopen(out, "rb"), os.fdopen(into, "wb", buffering=0) as writer:
        writer.write(TEXT.encode())
        writer.close()
        monkeypatch.setenv("GRADWIRE_SECRET_FD", str(out))

        assert found() == found() == SAME


def test_none_is_an_error_that_says_how_to_make_one():
    error = refusal()

    assert error.message == "this worker was given no secret"
    assert "python -m gradwire secret --out FILE" in error.hint
    assert "GRADWIRE_SECRET_FILE" in error.hint
    assert "gradwire.run()" in error.hint


def test_a_short_one_is_an_error(file, monkeypatch):
    file.write_text(TEXT[:31])

    error = refusal(Options(secret=str(file)))
    assert error.message == f"the secret in {file} has 31 bytes, and needs at least 32"
    monkeypatch.setenv("GRADWIRE_SECRET", TEXT[:31])
    assert "the secret in GRADWIRE_SECRET has 31 bytes" in refusal().message


def test_an_endless_one_is_an_error(file):
    file.write_text("x" * 5000)

    assert "longer than 4096 bytes" in refusal(Options(secret=str(file))).message


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o606, 0o610, 0o777])
def test_a_file_that_others_can_use_is_an_error(file, mode):
    file.chmod(mode)

    error = refusal(Options(secret=str(file)))
    assert f"can be read or written by other users (mode {mode:04o})" in error.message
    assert error.hint.startswith(f"chmod 600 {file}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_an_error(file):
    os.chown(file, 12345, 12345)

    assert "belongs to user 12345" in refusal(Options(secret=str(file))).message


def test_what_is_no_file_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)

    assert "is not in a file" in refusal(Options(secret=str(tmp_path / "pipe"))).message
    assert "is not in a file" in refusal(Options(secret=str(tmp_path))).message
    assert "cannot be read" in refusal(Options(secret=str(tmp_path / "nothing"))).message


def test_a_descriptor_that_was_not_passed_on_is_an_error(monkeypatch):
    monkeypatch.setenv("GRADWIRE_SECRET_FD", "999999")

    error = refusal()
    assert "the secret in GRADWIRE_SECRET_FD=999999 cannot be read" in error.message
    assert "pass_fds" in error.hint


def test_a_secret_in_the_place_of_a_number_is_not_shown(monkeypatch):
    monkeypatch.setenv("GRADWIRE_SECRET_FD", TEXT)

    assert refusal().message == "the environment variable GRADWIRE_SECRET_FD is not a number"


def test_two_ways_at_once_are_an_error(file, monkeypatch):
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", str(file))
    monkeypatch.setenv("GRADWIRE_SECRET", TEXT)

    assert "more than one of" in refusal().message


def test_a_written_one_is_private_and_new(tmp_path):
    paths = [tmp_path / "one", tmp_path / "two"]
    keys = {found(Options(secret=write_secret(path))) for path in paths}

    assert len(keys) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    with pytest.raises(FileExistsError):
        write_secret(paths[0])


def test_it_shows_itself_nowhere():
    secret = Secret(TEXT.encode())

    assert repr(secret) == str(secret) == "<Secret>"
    with pytest.raises(TypeError, match="a secret cannot be pickled"):
        copy.copy(secret)  # as pickle does


def test_keys_for_two_purposes_have_nothing_in_common():
    secret = fresh_secret()

    assert secret.key("one") != secret.key("two")
    assert len(secret.key("one")) == 32


def test_a_file_of_root_may_be_readable_by_a_group(file, monkeypatch):
    """As Kubernetes mounts a secret for a pod whose user is not root."""
    file.chmod(0o440)
    owner = file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1000)

    if owner == 0:
        assert found(Options(secret=str(file))) == SAME
    file.chmod(0o444)
    assert "other users" in refusal(Options(secret=str(file))).message or owner


# -- one that rank 0 makes for the processes of this machine


def test_a_shared_secret_is_read_by_others_and_gone_at_the_end():
    with shared_secret() as path:
        given = read_shared(path).key("test")
        assert given == found(Options(secret=path)) != SAME
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600

    with pytest.raises(FileNotFoundError):
        read_shared(path)


def test_another_file_at_its_place_is_none_of_ours(file):
    """A process that has ended may have left its number to another program."""
    with file.open() as other, pytest.raises(FileNotFoundError):
        read_shared(f"/proc/{os.getpid()}/fd/{other.fileno()}")


def test_a_store_cannot_name_another_file(file):
    for path in (str(file), f"/proc/self/cwd/{file}", f"/proc/1/fd/../../../{file}", ""):
        with pytest.raises(NotTrusted, match="as the place of the secret"):
            read_shared(path)
