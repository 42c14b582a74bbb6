"""gradwire.run: workers that are started, watched and never left behind."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire import DeadlinePassed, Options, PeerLost, Timeouts, UsageError
from tests.leftovers import eventually
from tests.processes import far

SCRIPT = """
import os
import time
from dataclasses import dataclass

import gradwire

@dataclass
class Found:
    names: list

def speak():
    print("pid", os.getpid())
    return Found([gradwire.get_worker_info().name])

def main(then):
    found = [gradwire.rpc_sync(n, speak) for n in range(2)]
    if then == "wait":
        print("ready")
        time.sleep(60)
    return Found([name for one in found for name in one.names])

if __name__ == "__main__":
    import sys
    print("returned", gradwire.run(main, 2, args=(sys.argv[1],)))
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path_factory):
    """Where runs make their private directories, and must leave none. Not tmp_path: too long."""
    tmp_path_factory.getbasetemp()  # not in there
    known = set(multiprocessing.active_children())
    with tempfile.TemporaryDirectory(prefix="gradwire-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)
        assert eventually(lambda: not os.listdir(directory))
    assert set(multiprocessing.active_children()) == known


@contextlib.contextmanager
def _script(directory, text, *arguments):
    """A script in a process group of its own, as a terminal would start it."""
    path = directory / "script.py"
    path.write_text(text)
    process = subprocess.Popen(
        [sys.executable, str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process:
        yield process
        process.kill()


NAMED = """
import sys
import gradwire

def main():
    print("from", "the", "first")
    gradwire.rpc_sync("w1", print, args=("from the second",))

if __name__ == "__main__":
    options = gradwire.Options(output=sys.argv[1])
    gradwire.run(main, 2, options=options, expose=[print])
"""


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        ("auto", ["from the first", "from the second"]),
        ("named", ["[w0] from the first", "[w1] from the second"]),
    ],
)
def test_lines_begin_with_the_name_of_their_worker_if_it_is_wanted(tmp_path, output, lines):
    with _script(tmp_path, NAMED, output) as process:
        printed, errors = process.communicate(timeout=60)

    assert (printed.splitlines(), errors) == (lines, "")


def test_on_a_terminal_lines_have_names_and_colours(tmp_path):
    (tmp_path / "script.py").write_text(NAMED)
    screen, theirs = os.openpty()
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "CI": ""}
    with open(screen, "rb", buffering=0) as shown, open(theirs, "wb") as terminal:
        process = subprocess.run(
            [sys.executable, "script.py", "auto"],
            stdout=terminal,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=os.environ | environment,
            timeout=60,
            check=False,
        )
        lines = shown.read(1000).decode().splitlines()

    assert (process.returncode, process.stderr) == (0, b"")
    assert lines == ["\x1b[36m[w0]\x1b[0m from the first", "\x1b[33m[w1]\x1b[0m from the second"]


HELD_UP = """
import fcntl
import gradwire

def main():
    return "went on"

if __name__ == "__main__":
    print(gradwire.run(main, 2))
else:  # in a worker, until the test lets go
    with open("held") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
"""


def test_a_terminal_shows_how_many_workers_have_started(tmp_path):
    (tmp_path / "script.py").write_text(HELD_UP)
    screen, theirs = os.openpty()
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "CI": ""}
    with open(tmp_path / "held", "w") as held, open(screen, "rb", buffering=0) as shown:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "script.py"],
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            cwd=tmp_path,
            env=os.environ | environment,
        )
        os.close(theirs)
        with process:
            seen = b""
            while not seen.endswith(b"\r\x1b[K0 of 2 workers have started"):
                seen += shown.read(1)
            held.close()
            out, _ = process.communicate(timeout=60)
            with contextlib.suppress(OSError):  # how the end of a terminal is told
                while more := shown.read(100):
                    seen += more

    assert out == "went on\n"
    assert seen.endswith(b"\r\x1b[K"), "it is gone"


def _lines_until_ready(process) -> list[int]:
    """The processes that said their number, in lines read as they are printed."""
    pids = []
    for line in process.stdout:
        if line == "ready\n":
            return pids
        pids.append(int(line.removeprefix("pid ")))
    raise AssertionError(process.stderr.read())


def _is_gone(pid) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # A process whose parent has gone before it may wait to be buried by whoever adopted it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _all_gone(pids) -> bool:
    return len(pids) == 2 and all(map(_is_gone, pids))


def test_the_value_of_the_function_is_returned(capfd):
    weight = torch.tensor(2.0, requires_grad=True)

    gradient, pids = gradwire.run(far.train, 2, args=(weight,), expose=[far])

    assert gradient == 12
    assert weight.grad is None  # it went there as a copy
    assert len({*pids, os.getpid()}) == 3
    assert _all_gone(pids)
    assert capfd.readouterr().out == "training on w0\n"


def test_a_script_runs_its_own_functions(tmp_path):
    with _script(tmp_path, SCRIPT, "end") as process:
        out, err = process.communicate(timeout=60)

    assert out.splitlines()[-1] == "returned Found(names=['w0', 'w1'])"
    assert err == ""
    assert process.returncode == 0


def test_an_interrupt_ends_them_all_without_noise(tmp_path):
    with _script(tmp_path, SCRIPT, "wait") as process:
        pids = _lines_until_ready(process)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)

    assert process.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1
    assert err.endswith("KeyboardInterrupt\n")
    assert _all_gone(pids)


def test_workers_do_not_outlive_a_parent_that_was_killed(tmp_path):
    with _script(tmp_path, SCRIPT, "wait") as process:
        pids = _lines_until_ready(process)
        process.kill()
        process.wait()
        assert eventually(lambda: _all_gone(pids))


def test_a_script_without_a_guard_is_told_of_it(tmp_path):
    text = "import gradwire\ndef main(): pass\ngradwire.run(main, 1)\n"
    with _script(tmp_path, text) as process:
        _, err = process.communicate(timeout=60)

    assert "UsageError: run() was called while a worker was importing the script\nhint: a" in err
    assert err.endswith(
        "UsageError: w0 could not start: it ended with exit status 1 while importing the script\n"
        'hint: what it printed says why; a script calls run() under `if __name__ == "__main__":`, '
        "as every worker imports it\n"
    )


def test_what_the_function_raises_is_raised_here_as_its_own_type(tmp_path):
    told = tmp_path / "pids"

    with pytest.raises(far.Refused, match="Refused on w0: enough") as caught:
        gradwire.run(far.fail_after_telling, 2, args=(told,), expose=[far])

    assert "in fail_after_telling" in caught.value.remote_traceback
    assert _all_gone([int(pid) for pid in told.read_text().split()])


def test_a_worker_that_dies_is_named_and_where_it_was_felt():
    with pytest.raises(
        PeerLost, match=r"^w1 died \(exit status 3\) while it was at work"
    ) as caught:
        gradwire.run(far.lose_w1, 2, expose=[far])

    assert "PeerLost on w0: w1 was lost before answering" in str(caught.value.__cause__)
    assert "in lose_w1" in str(caught.value.__cause__)


def test_a_signal_that_ended_a_worker_is_named():
    with pytest.raises(PeerLost, match=r"^w0 died \(SIGKILL\) while it was at work"):
        gradwire.run(far.kill_itself, 1)


def test_a_worker_that_cannot_join_says_why():
    listening = Options(listen="tcp://not.a.host.invalid:0")
    with pytest.raises(UsageError, match=r"UsageError on w0: cannot listen on tcp://not\.a\.host"):
        gradwire.run(far.here, 1, options=listening)


def test_a_function_may_shut_down_by_itself():
    assert gradwire.run(far.leave_by_itself, 2, expose=[far]) is far.here


def test_a_function_may_close_what_it_prints_to():
    assert gradwire.run(far.close_output, 1, args=("",)) == "returned"
    with pytest.raises(far.Refused, match="Refused on w0: the real reason"):
        gradwire.run(far.close_output, 1, args=("the real reason",), expose=[far])


def test_a_value_that_cannot_come_back_is_refused():
    what = (
        r"UsageError on w0: what the function returned \(a RRef\) cannot be pickled: Can not pickle"
    )
    with pytest.raises(UsageError, match=what):
        gradwire.run(far.return_reference, 1)


def test_time_is_limited():
    with pytest.raises(DeadlinePassed, match=r"run\(\) gave up on w0, w1 after 0.01 s"):
        gradwire.run(far.here, 2, timeout=0.01)


def test_a_worker_that_leaves_later_than_the_first_one_waits_does_not_cost_the_value(capfd):
    options = Options(timeouts=Timeouts(shutdown=0.5))

    assert (
        gradwire.run(far.freeze_until_left, 2, args=("w1",), expose=[far], options=options)
        == "value"
    )
    assert "w0 shut down without w1, which did not shut down within 0.5 s" in capfd.readouterr().err


def test_what_cannot_go_there_is_refused_before_anything_starts():
    with pytest.raises(UsageError, match=r"what run\(\) was given cannot be pickled: .*lambda"):
        gradwire.run(lambda: 1, 2)


class Telling(Exception):
    """Its constructor takes what its args do not have."""

    def __init__(self, number, *, where):
        super().__init__("telling", number)
        self.where = where


def fail_with_a_cause():
    raise Telling(3, where={"row": (1, 2)}) from FileNotFoundError(2, "no such file", "data.bin")


def test_what_the_function_raised_keeps_its_contents_and_its_cause():
    with pytest.raises(Telling) as raised:
        gradwire.run(fail_with_a_cause, 1)

    assert raised.value.args == ("telling", 3)
    assert raised.value.where == {"row": (1, 2)}
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    assert raised.value.__cause__.filename == "data.bin"
