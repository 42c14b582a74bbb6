"""Whatever a test leaves behind fails it: threads of ours, sockets, shared memory."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

from gradwire.agent.peers.secret import write_secret
from tests.gates import GATES

# The same examples every time, and no failure because a machine was busy.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")

# A shell's background job ignores SIGINT, and so would processes that a test starts to interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FDS = Path("/proc/self/fd")
SECONDS = 5.0
HERE = Path(__file__).parent
IN_ONE_PROCESS = {"agent", "autograd", "nn", "optim", "rpc", "security", "transport", "wire"}


SMOKE = {
    "needs_slurm": "test_tasks_of_srun_take_their_places_though_the_name_of_their_node_is_unknown",
    "needs_ray": "test_an_example_gives_the_same_losses_to_the_bit_as_by_itself",
}
"""What runs of the tests with a mark, unless they are asked for by `-m`: they take minutes."""


def pytest_collection_modifyitems(config, items):
    """Files that take long or wait for processes first: the short ones fill the gaps at the end."""
    items.sort(key=lambda item: item.path.relative_to(HERE).parts[0] in IN_ONE_PROCESS)
    for item in items:
        for mark, smoke in SMOKE.items():
            is_asked = mark in config.getoption("-m", "")
            if not is_asked and item.get_closest_marker(mark) and item.name != smoke:
                item.add_marker(pytest.mark.skip(reason=f"by `-m {mark}` only"))


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("gradwire")}


def open_handles() -> Counter:
    """Sockets and anonymous memory of this process, by what they are."""
    found: Counter = Counter()
    if FDS.exists():
        for entry in os.listdir(FDS):
            try:
                target = os.readlink(FDS / entry)
            except OSError:  # the one that listed the directory
                continue
            found[target.split(":")[0].split(" ")[0]] += 1
    return Counter({kind: found[kind] for kind in ("socket", "/memfd")})


@pytest.fixture(scope="session", autouse=True)
def secret(tmp_path_factory):
    """What workers that a test starts by hand find, here and in processes started from here."""
    path = write_secret(tmp_path_factory.mktemp("job") / "secret")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADWIRE_SECRET_FILE", path)
        yield path


@pytest.fixture
def no_secret(monkeypatch):
    """As a program finds the world that nobody has prepared for it."""
    monkeypatch.delenv("GRADWIRE_SECRET_FILE")


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind():
    """Checked around each file of tests, as clusters are often shared by all tests of a file."""
    threads, handles = our_threads(), open_handles()
    yield
    for thread in our_threads() - threads:
        thread.join(SECONDS)
    left = sorted(thread.name for thread in our_threads() - threads)
    assert left == [], f"threads left behind: {left}"
    assert open_handles() - handles == Counter(), "sockets or memory left behind"


@pytest.fixture
def gate(request):
    """An event that a served function waits for; open when the test ends, whatever happens."""
    name = request.node.name
    opened = GATES[name] = threading.Event()
    yield name
    opened.set()
