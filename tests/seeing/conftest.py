"""A job of real processes that serves a page, started once for the tests of a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from gradwire.errors import PeerLost
from gradwire.seeing import jobs
from gradwire.seeing.jobs import JobPage
from gradwire.seeing.top import latest_view
from tests.leftovers import eventually

PROGRAM = Path(__file__).parent / "page_program.py"
SECONDS = 60.0


class Job(NamedTuple):
    process: subprocess.Popen
    page: JobPage
    environment: dict[str, str]
    end: Path

    def row(self, name):
        """What the page shows of a worker."""
        return next(row for row in latest_view(self.page).workers if row.name == name)

    def command(self, *words):
        """What a command of gradwire prints."""
        done = subprocess.run(
            [sys.executable, "-m", "gradwire", *words],
            env={**self.environment, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Three workers: w0 waits for w1, which waits for w2, where a function runs."""
    home = tmp_path_factory.mktemp("job")
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(home)}
    command = [sys.executable, str(PROGRAM), str(home / "end")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(home))
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            assert eventually(lambda: jobs.running_pages() or process.poll() is not None, SECONDS)
            (page,) = jobs.running_pages()
            made = Job(process, page, environment, home / "end")
            assert eventually(lambda: made.row("w2").serves, SECONDS)
            yield made
            (home / "end").touch()
            assert process.wait(SECONDS) == 0, process.stderr.read()
            assert "gradwire: a page shows" in process.stderr.read()
            assert page.url not in process.stderr.read()
            assert [*(home / "gradwire").iterdir()] == []
        finally:
            process.kill()
            process.wait()
            process.stderr.close()


@pytest.fixture
def frozen(job):
    """The job, whose worker w2 is stopped inside the test."""
    pid = job.row("w2").pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert eventually(lambda: job.row("w2").silent is not None, SECONDS)
        yield job
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    with suppress(PeerLost):
        assert eventually(lambda: job.row("w2").silent is None, SECONDS)
