"""What `gradwire top` writes, from views alone."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from gradwire.__main__ import main
from gradwire.errors import PeerLost, UsageError
from gradwire.seeing import jobs, top
from gradwire.seeing.history import EdgeRow, Exchanged, Rates, ServedRow, View, WorkerRow
from gradwire.seeing.jobs import JobPage
from gradwire.seeing.waits import Wait

needs_rich = pytest.mark.skipif(
    not importlib.util.find_spec("rich"), reason="rich is not installed"
)


def view(*workers, waits=(), cycles=(), served=(), edges=()):
    lists = [*workers], [*waits], 0, [*cycles], [*served], [*edges]
    return View("w0", 7, "train.py", 0.25, *lists, [Exchanged("w0", "w1", 3, 0.5)])


def lines_of(shown, what="workers", width=170):
    from rich.console import Console

    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(top.picture(shown, what))
    return capture.get().splitlines()


W0 = WorkerRow(
    "w0",
    "waits",
    incarnation=2,
    in_flight=3,
    serves=1,
    edges=4,
    rss=3 << 20,
    rates=Rates(12.5, 0.25, 2048.0, 10.0),
    lane="u" * 16 + "rwis",
)
W1 = WorkerRow("w1", "silent", silent=12.3, lane="s" * 40)
WAIT = Wait("w0", "w1", "__main__.step", 4.25, 55.7, 9, ends_at=("w1",))


@needs_rich
def test_a_worker_is_a_line_with_what_it_does_and_waits_for():
    lines = lines_of(view(W0, W1, waits=[WAIT]))

    assert lines[0].strip() == "train.py, process 7: 2 workers, seen from w0"
    assert lines[1].strip() == "w1: no answer; waiting for it: w0"
    words = lines[3].split()
    assert words[:3] == ["w0", "(2)", "waits"]
    assert "█▄▁✕" in lines[3]
    for part in ("12.5", "2.0 KiB", "4.2 s for w1: step", "in 56 s", "3.0 MiB"):
        assert part in lines[3]
    assert "silent 12 s" in lines[4]


@needs_rich
def test_waits_that_are_in_a_cycle_say_so():
    back = Wait("w1", "w0", "f", 2.0, None, in_cycle=True)
    lines = lines_of(view(W0, cycles=[["w0", "w1"]], waits=[WAIT, back]), "waits")

    assert lines[1].strip() == "w0 and w1 wait for each other"
    assert lines[4].split() == ["w1", "w0", "f", "2.0", "s", "no", "limit", "a", "cycle"]


@needs_rich
def test_edges_and_functions_have_a_view_of_their_own():
    shown = view(
        W0,
        served=[ServedRow("w1", "w0", 3, "torch:sin", None), ServedRow("w1", "w0", 4, "f", 1.0)],
        edges=[EdgeRow("w0", "e0.1", "w1", 200.0, 5 << 20, "train.py:12")],
    )

    assert lines_of(shown, "functions")[3].split() == ["w1", "torch:sin", "w0#3", "queued"]
    line = lines_of(shown, "edges")[3]
    assert line.split() == ["w0", "e0.1", "w1", "3", "min", "5.0", "MiB", "train.py:12"]


@needs_rich
def test_what_a_peer_has_named_does_not_write_to_the_terminal():
    evil = Wait("w0", "w1", "\x1b]0;owned\x07[red]f[/red]\r\n", 1.0, 2.0, ends_at=("w1",))

    text = "\n".join(lines_of(view(W0, waits=[evil]), "waits"))

    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]f[/red]" in text


def test_without_rich_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)

    with pytest.raises(UsageError, match="needs rich") as caught:
        top.show(JobPage("http://127.0.0.1:1/x/", 7, 1, "w0", "train.py", 2), "workers", 1.0)

    assert "pip install 'gradwire[rich]'" in caught.value.hint


def test_a_page_that_has_ended_is_an_error_that_names_the_process():
    with pytest.raises(PeerLost, match="the page of process 7 does not answer"):
        top.latest_view(JobPage("http://127.0.0.1:1/x/", 7, 1, "w0", "train.py", 2))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (61, "61 s"), (600, "10 min"), (9000, "2.5 h")],
)
def test_durations_are_short(seconds, words):
    assert top.spoken(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 << 20, "200 MiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_are_short(count, words):
    assert top.in_bytes(count) == words


# -- the commands


@pytest.fixture
def no_jobs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize("command", ["top", "page"])
@pytest.mark.usefixtures("no_jobs")
def test_a_command_without_a_job_says_how_to_start_one(command, capsys):
    assert main([command]) == 2

    told = capsys.readouterr().err
    assert "no job of yours serves a page here" in told
    assert "page=True" in told


def running(monkeypatch, tmp_path):
    monkeypatch.setattr(jobs, "_is_alive", lambda pid: True)
    page = JobPage("http://127.0.0.1:1/secret/", 7, 1, "w0", "train.py", 2)
    jobs.write_down(page)
    return page


@pytest.mark.usefixtures("no_jobs")
def test_a_browser_gets_a_file_and_not_the_token(monkeypatch, tmp_path, capsys):
    running(monkeypatch, tmp_path)
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)

    assert main(["page"]) == 0

    (url,) = opened
    assert url.startswith("file://")
    assert "secret" not in url.removeprefix(f"file://{tmp_path}")
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("no_jobs")
def test_without_a_browser_the_address_is_printed(monkeypatch, tmp_path, capsys):
    page = running(monkeypatch, tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda url: False)

    assert main(["page"]) == 0

    assert capsys.readouterr().out == f"{page.url}\n"


@pytest.mark.usefixtures("no_jobs")
def test_jobs_are_listed_without_their_addresses(monkeypatch, tmp_path, capsys):
    running(monkeypatch, tmp_path)

    assert main(["page", "--list"]) == 0

    assert capsys.readouterr().out == "7  train.py  w0 of 2\n"
