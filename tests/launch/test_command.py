"""`python -m gradwire`: its commands, as far as they start nothing."""

from __future__ import annotations

import os
import stat

import pytest

import gradwire
from gradwire import Options
from gradwire.__main__ import main
from gradwire.agent.peers.secret import find_secret


def test_a_secret_is_made_where_only_its_owner_reads_it(tmp_path, capsys):
    path = tmp_path / "job.secret"

    assert main(["secret", "--out", str(path)]) == 0

    assert capsys.readouterr().out == f"{path}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find_secret(Options(secret=str(path)))


def test_a_secret_that_is_there_is_kept(tmp_path, capsys):
    path = tmp_path / "job.secret"
    path.write_text("mine")

    assert main(["secret", "--out", str(path)]) == 2

    assert path.read_text() == "mine"
    assert "File exists" in capsys.readouterr().err


def test_a_secret_is_printed_for_a_shell_to_put_somewhere(capsys):
    main(["secret"])
    first = capsys.readouterr().out
    main(["secret"])

    assert len(first) == 65
    assert first != capsys.readouterr().out


def test_the_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "gradwire run -n 3 train.py" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"gradwire {gradwire.__version__}\n"


def test_run_becomes_the_program_and_says_how_many_workers(monkeypatch):
    became = []
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))

    main(["run", "-n", "3", "train.py", "--epochs", "2"])

    ((_, command, environment),) = became
    assert command[1:] == ["train.py", "--epochs", "2"]
    assert environment["GRADWIRE_WORKERS"] == "3"
    assert environment["GRADWIRE_LAUNCHER"] == "none"
