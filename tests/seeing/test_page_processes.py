"""The page and `gradwire top` of a job of real processes, one of which is frozen."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import socket
import struct
import subprocess
import sys
import termios

import pytest

from gradwire.seeing.top import latest_view
from tests.seeing.conftest import SECONDS

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_the_page_shows_the_chain_of_waits_between_processes(job):
    view = latest_view(job.page)

    assert [row.name for row in view.workers] == ["w0", "w1", "w2"]
    assert len({row.pid for row in view.workers}) == 3
    assert [(w.worker, w.peer, w.ends_at) for w in view.waits] == [
        ("w0", "w1", ("w2",)),
        ("w1", "w2", ("w2",)),
    ]
    assert view.cycles == []
    assert [row.doing for row in view.workers] == ["waits", "waits", "runs"]


def test_a_frozen_worker_is_named_with_those_that_wait_for_it(frozen):
    view = latest_view(frozen.page)

    (silent,) = [row for row in view.workers if row.silent is not None]
    assert (silent.name, silent.doing) == ("w2", "silent")
    assert silent.silent >= 1.0
    assert ("w1", "w2") in {(wait.worker, wait.peer) for wait in view.waits}


def test_top_names_the_frozen_worker(frozen):
    shown = frozen.command("top", "--once")

    assert "w2: no answer; waiting for it: w0, w1" in shown
    assert "page_program.py" in shown


def test_top_shows_the_waits_and_the_functions(job):
    waits = job.command("top", "--once", "--view", "waits")
    functions = job.command("top", str(job.page.pid), "--once", "--view", "functions")

    assert "pass_on" in waits
    assert "hold" in functions


def test_the_page_is_found_by_its_user(job):
    assert job.command("page", "--print").strip() == job.page.url
    listed = job.command("page", "--list")
    assert str(job.page.pid) in listed
    assert job.page.url not in listed


def test_top_obeys_keys_and_leaves_the_terminal_as_it_was(job):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-m", "gradwire", "top", "--seconds", "0.2"]
    about = {**job.environment, "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=about)
    try:
        for awaited, key in ((b"oldest wait", b"a"), (b"in the end for", b"f"), (b"hold", b"q")):
            shown = b""
            while awaited not in shown:
                assert select.select([ours], [], [], SECONDS)[0], f"{awaited} is not shown"
                shown += os.read(ours, 1 << 16)
            os.write(ours, key)
        assert process.wait(SECONDS) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_a_process_that_a_launcher_has_started_serves_the_page_too(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import gradwire\n"
        "from gradwire.seeing import jobs\n\n"
        "def main():\n"
        "    return [page.worker for page in jobs.running_pages()]\n\n"
        "if __name__ == '__main__':\n"
        "    print(gradwire.run(main, page=True), jobs.running_pages())\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    home = {"XDG_RUNTIME_DIR": str(tmp_path)}

    started = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, **place, **home, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=SECONDS)[0] for process in started]

    assert [process.returncode for process in started] == [0, 0]
    assert printed == ["['w0'] []\n", "None []\n"]
