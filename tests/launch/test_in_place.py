"""What `run` refuses in a process that a launcher has started, and who leaves how."""

from __future__ import annotations

import pytest

from gradwire import Options, UsageError, run
from gradwire.launch.in_place import check
from gradwire.places import Place
from tests.test_places import PLAIN

PLACE = Place("torchrun", 1, 3, "env://", True)


@pytest.mark.parametrize("world_size", [None, 3])
def test_the_world_size_may_be_left_out(world_size):
    check(PLACE, world_size, None, 0, Options())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (2, None, 0, Options()),
            r"run\(\) was given world_size=2, but torchrun has started 3 processes",
        ),
        ((3, 5.0, 0, Options()), r"run\(timeout=…\) is for processes that run\(\) starts"),
        ((3, None, 2, Options()), r"run\(restarts=…\) is for processes that run\(\) starts"),
        ((3, None, 0, Options(is_open=True)), r"run\(\) needs a closed world"),
    ],
)
def test_what_contradicts_the_launcher_is_refused(arguments, text):
    with pytest.raises(UsageError, match=text) as refused:
        check(PLACE, *arguments)
    assert refused.value.hint


def test_run_asks_the_environment(monkeypatch):
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="given world_size=3, but env has started 2 processes"):
        run(print, 3)
    monkeypatch.setenv("GRADWIRE_LAUNCHER", "none")
    with pytest.raises(UsageError, match="no launcher has started this process"):
        run(print)


def test_without_a_launcher_the_number_may_come_from_the_command(monkeypatch):
    monkeypatch.setenv("GRADWIRE_WORKERS", "0")
    with pytest.raises(UsageError, match="run\\(\\) needs at least one worker, not world_size=0"):
        run(print)
