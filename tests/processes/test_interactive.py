"""Workers of a notebook, a prompt or a script on stdin, in real processes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.leftovers import eventually

ROOT = Path(__file__).parents[2]
SECONDS = 100

needs_cloudpickle = pytest.mark.skipif(
    importlib.util.find_spec("cloudpickle") is None, reason="cloudpickle is not installed"
)


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path_factory):
    """Where workers have their private directories, of which none may be left."""
    tmp_path_factory.getbasetemp()  # not in there
    with tempfile.TemporaryDirectory(prefix="gradwire-") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        yield Path(directory)
        assert eventually(lambda: not os.listdir(directory))


def printed_by(*arguments, given=""):
    """What a program prints that ends well and says nothing else."""
    done = subprocess.run(
        [sys.executable, *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


BY_VALUE = """
import functools
import gradwire, torch
from dataclasses import dataclass

factor = 2
def scaled(x): return x * factor
def twice(x): return scaled(x) + scaled(x)
def elsewhere(x): return gradwire.rpc_sync("w2", scaled, (x,))
def add(n): return lambda x: x + n

@dataclass
class Point:
    at: int

class Counter:
    def __init__(self, count=0): self.count = count
    def up(self): self.count += 1; return self.count
    def __call__(self, x): return x + self.count
    @classmethod
    def made(cls): return cls(7).count

class Refused(Exception): pass
def refuse(): raise Refused("enough")

def at_of(point): return Point(point.at + 1)

names = gradwire.start(2)
assert gradwire.start(2) == names == ["w1", "w2"]
call = gradwire.rpc_sync
x = torch.ones(3, requires_grad=True)
twice_there = call("w1", twice, (x,))
twice_there.sum().backward()
print("gradient", x.grad.tolist())
factor = 5
print("a global", call("w1", scaled, (1,)))
def scaled(x): return x * 100
print("redefined", call("w1", twice, (1,)))
print("nested", call("w1", elsewhere, (1,)))
print("lambda", call("w1", lambda x: x - factor, (1,)))
print("closure", call("w1", add(10), (1,)), call("w2", add(20), (1,)))
print("partial", call("w1", functools.partial(twice, 2)))
print("class", call("w1", at_of, (Point(1),)))
counter = Counter()
print("method", call("w1", counter.up), call("w1", counter.up))
counter.count = 5
print("changed", call("w1", counter.up), call("w1", counter, (1,)), counter.count)
print("class method", call("w1", Counter.made))
kept = gradwire.remote("w1", Counter, (1,))
print("kept", kept.rpc_sync().up(), kept.rpc_sync().up())
class Counter: pass
print("of the old class", kept.rpc_sync().up())
try:
    call("w1", refuse)
except Refused as error:
    print("raised", str(error).splitlines()[0])
futures = [gradwire.rpc_async("w1", lambda i=i: i) for i in range(300)]
print("many", sum(future.wait() for future in futures))
gradwire.stop()
gradwire.stop()
print("again", gradwire.start(1), call("w1", lambda: factor))
"""

SAID = """gradient [4.0, 4.0, 4.0]
a global 5
redefined 200
nested 100
lambda -4
closure 11 21
partial 400
class Point(at=2)
method 1 1
changed 6 6 5
class method 7
kept 2 3
of the old class 4
raised Refused on w1: enough
many 44850
again ['w1'] 5""".splitlines()


@needs_cloudpickle
@pytest.mark.parametrize("way", ["-c", "stdin", "a script without a guard"])
def test_what_a_program_defines_is_sent_by_value(way, tmp_path):
    if way == "-c":
        said = printed_by("-c", BY_VALUE)
    elif way == "stdin":
        said = printed_by(given=BY_VALUE)
    else:
        (tmp_path / "script.py").write_text(BY_VALUE)
        said = printed_by(str(tmp_path / "script.py"))

    assert said == SAID


SPAWNED = """
import gradwire
def where(): return __name__
with gradwire.workers(1, start_method="spawn") as names:
    print(gradwire.rpc_sync("w1", where), names)
"""


@needs_cloudpickle
def test_spawned_workers_import_no_script_either(tmp_path):
    (tmp_path / "script.py").write_text(SPAWNED)

    assert printed_by(str(tmp_path / "script.py")) == ["__main__ ['w1']"]
    assert printed_by(given=SPAWNED) == ["__main__ ['w1']"]


@contextlib.contextmanager
def prompt(*arguments):
    """A Python prompt that reads lines, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-i", "-q", "-c", "import sys; sys.ps1 = sys.ps2 = ''", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def answer(process, lines):
    """What the prompt prints in answer to these lines."""
    process.stdin.write(lines.rstrip("\n") + "\n\n")
    process.stdin.flush()
    return process.stdout.readline().rstrip("\n")


@needs_cloudpickle
def test_a_prompt_calls_what_it_defines_and_redefines():
    with prompt() as process:
        assert answer(process, "import gradwire; print(gradwire.start(1))") == "['w1']"
        assert (
            answer(process, "def f(x):\n    return x + 1\n\ngradwire.rpc_sync('w1', f, (1,))")
            == "2"
        )
        assert (
            answer(process, "def f(x):\n    return x + 2\n\ngradwire.rpc_sync('w1', f, (1,))")
            == "3"
        )
        assert answer(process, "[gradwire.rpc_sync('w1', lambda: n) for n in (1, 2)]") == "[1, 2]"
        process.stdin.close()

        assert process.wait(SECONDS) == 0
        assert process.stderr.read().strip() == ""


def gone(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@needs_cloudpickle
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_a_killed_driver(number):
    with prompt() as process:
        said = answer(
            process,
            "import os, gradwire; print(*(gradwire.rpc_sync(n, lambda: os.getpid()) "
            "for n in gradwire.start(2)))",
        )
        pids = [int(pid) for pid in said.split()]
        assert len(set(pids)) == 2
        assert not any(map(gone, pids))

        process.send_signal(number)
        process.wait(SECONDS)

        assert eventually(lambda: all(map(gone, pids)))


@needs_cloudpickle
def test_an_interrupt_ends_the_cell_and_not_the_workers():
    with prompt() as process:
        begun = answer(
            process,
            "import os, time, gradwire; names = gradwire.start(2); "
            "pids = [gradwire.rpc_sync(n, lambda: os.getpid()) for n in names]; "
            "print('begun')",
        )
        assert begun == "begun"
        waits = "print('waits') or gradwire.rpc_sync('w1', lambda: time.sleep(60))"
        assert answer(process, waits) == "waits"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, and Jupyter

        again = "print(pids == [gradwire.rpc_sync(n, lambda: os.getpid()) for n in names])"
        assert answer(process, again) == "True"
        assert answer(process, "gradwire.shutdown(graceful=False) or print('left')") == "left"
        process.stdin.close()
        assert process.wait(SECONDS) == 0
        errors = process.stderr.read()
        assert errors.count("Traceback") == 1
        assert "KeyboardInterrupt" in errors


@needs_cloudpickle
def test_a_worker_that_died_is_named_at_its_next_use():
    program = """
import os, signal, gradwire
gradwire.start(2)
try:
    gradwire.rpc_sync("w1", lambda: os.kill(os.getpid(), signal.SIGKILL))
except gradwire.PeerLost as error:
    print(error.message.partition(" before")[0])
print("other", gradwire.rpc_sync("w2", lambda: 2))  # waits until w1 is known to be lost
try:
    gradwire.rpc_sync("w1", lambda: 1)
except gradwire.PeerLost as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert done.stdout.splitlines() == [
        "w1 was lost",
        "other 2",
        "w1 died (SIGKILL) while it was at work",
        "hint: gradwire.stop() and gradwire.start() start all again; restarts=1 does it for each",
    ]
    first, *rest = done.stderr.splitlines()
    assert first == "w1 died (SIGKILL) while it was at work"
    assert all(line.startswith("w2 shut down without") for line in rest)  # if it was the last


@needs_cloudpickle
def test_a_worker_that_is_restarted_gets_what_the_others_have():
    program = """
import os, signal, gradwire
from dataclasses import dataclass
@dataclass
class Point:
    at: int
def at_of(point): return point.at
def there(): return gradwire.rpc_sync("w1", at_of, (Point(3),))
gradwire.start(2, restarts=1)
print(gradwire.rpc_sync("w2", there))
for attempt in gradwire.retrying(times=3):
    with attempt:
        if attempt.number == 0:
            gradwire.rpc_sync("w1", lambda: os.kill(os.getpid(), signal.SIGKILL))
        print(gradwire.rpc_sync("w2", there), gradwire.incarnation("w1"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert done.stdout.splitlines() == ["3", "3 1"]
    assert done.stderr.splitlines() == [
        "w1 died (SIGKILL) while it was at work; restarted as incarnation 1"
    ]


WITHOUT = """
import sys
sys.modules["cloudpickle"] = None
import gradwire, torch

def mine(): return 1

with gradwire.workers(1) as names:
    print(gradwire.rpc_sync("w1", torch.neg, (torch.ones(1),)).item())
    for refused in (mine, lambda: 1):
        try:
            gradwire.rpc_sync("w1", refused)
        except gradwire.UsageError as error:
            print(error)
"""


def test_without_cloudpickle_there_is_a_way_out():
    hint = (
        "hint: pip install 'gradwire[interactive]'; or put it into a module, and pass "
        "expose=[module]"
    )
    why = "is defined where workers cannot import it: to send it, gradwire needs the library"

    assert printed_by("-c", WITHOUT) == [
        "-1.0",
        f"__main__.mine for w1 {why} cloudpickle",
        hint,
        f"__main__.<lambda> for w1 {why} cloudpickle",
        hint,
    ]


MISTAKES = """
import gradwire

def refusal(make):
    try:
        make()
    except gradwire.UsageError as error:
        return error.message

print(refusal(lambda: gradwire.start(0)))
print(refusal(lambda: gradwire.start(1, restarts=-1)))
print(refusal(lambda: gradwire.start(1, start_method="fork")))
print(refusal(lambda: gradwire.start(1, expose=[lambda: 1])))
gradwire.start(1)
print(refusal(lambda: gradwire.start(2)))
print(refusal(lambda: gradwire.workers(1).__enter__()))
gradwire.shutdown()
print(gradwire.start(1))
"""


def test_mistakes_are_told_before_anything_starts():
    *told, unpicklable, running, again, restarted = printed_by("-c", MISTAKES)

    assert told == [
        "workers() needs at least one worker, not count=0",
        "workers(restarts=-1) is not a number from 0 to 65535",
        "run(start_method='fork') is none of forkserver, spawn",
    ]
    assert "cannot be pickled" in unpicklable
    assert running == "start() was called before: w1 run"
    assert again == "this process is a worker already"
    assert restarted == "['w1']"


@needs_cloudpickle
def test_a_block_ends_though_a_worker_has_died_in_it():
    program = """
import os, signal, gradwire
with gradwire.workers(2) as names:
    gradwire.rpc_async("w1", lambda: os.kill(os.getpid(), signal.SIGKILL))
    print(gradwire.rpc_sync("w2", lambda: 2))
print("over")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert done.stdout.splitlines() == ["2", "over"], done.stderr
    assert done.returncode == 0


def test_a_block_that_raises_ends_the_workers():
    program = """
import gradwire
try:
    with gradwire.workers(1):
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print("out")
"""
    assert printed_by("-c", program) == ["out"]


FROZEN = """
import os, signal, time, gradwire
gradwire.start(2)
pid = gradwire.rpc_sync("w2", lambda: os.getpid())
os.kill(pid, signal.SIGSTOP)
print([gradwire.rpc_sync("w1", lambda: n) for n in range(200)][-1])
try:
    gradwire.rpc_sync("w2", lambda: 1, timeout=0.5)
except gradwire.DeadlinePassed as error:
    print(error.message)
os.kill(pid, signal.SIGCONT)
print(gradwire.rpc_sync("w2", lambda: 2))
"""


@needs_cloudpickle
def test_a_frozen_worker_holds_up_only_the_calls_to_it():
    done = subprocess.run(
        [sys.executable, "-c", FROZEN], capture_output=True, text=True, timeout=SECONDS, check=False
    )

    assert done.stdout.splitlines() == [
        "199",
        "w2 did not load __main__.<lambda> in time",
        "2",
    ], done.stderr
