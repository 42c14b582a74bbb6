"""From the events of workers to one timeline, its critical path and its text: all of it pure."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.seeing.clocks import Offset, Offsets, Reading, estimate
from gradwire.seeing.critical_path import critical_path
from gradwire.seeing.messages import Event
from gradwire.seeing.perfetto import perfetto
from gradwire.seeing.summary import summary
from gradwire.seeing.timeline import Arrow, Log, Slice, Timeline, Track, timeline_of
from tests.seeing.test_trace import check_rows

MAIN, POOL = 100, 200


def event(n, what, began, ended, thread=MAIN, **about):
    return Event(n, what, began, ended, thread, **about)


def call_logs(offset=0.0, uncertainty=0.0):
    """w0 calls f on w1, whose clock is ahead by `offset`, and computes before and after."""
    w0 = [
        event(1, "span", 0.5, 1.5, about="loader"),
        event(2, "call", 2.0, 2.5, id="w0#1", peer="w1", about="f", tensors="float32[8]", size=32),
        event(3, "waited", 2.5, 9.0, id="w0#1", peer="w1"),
    ]
    w1 = [
        event(1, "serve", 3.0, 8.0, POOL, id="w0#1", peer="w0", about="f"),
        event(2, "answer", 7.0, 7.5, POOL, id="w0#1", peer="w0", tensors="float32[4]", size=16),
    ]
    late = [
        Event(e.n, e.what, e.began + offset, e.ended + offset, e.thread, e.id, e.peer, e.about)
        if offset
        else e
        for e in w1
    ]
    clock = Offsets(Offset(-offset, uncertainty, 0.0), Offset(-offset, uncertainty, 10.0))
    names = {MAIN: "MainThread", POOL: "pool"}
    return [
        Log("w0", 0, w0, names, ways={"w1": "tls"}),
        Log("w1", 1, late, names, clock, ways={"w0": "tls"}),
    ]


def test_the_path_of_one_call():
    timeline = timeline_of(call_logs(), 0.0, 10.0, ("w0", MAIN))

    found = [(part.track.worker, part.name, part.seconds) for part in critical_path(timeline)]
    assert found == [
        ("w0", "python between calls", 0.5),
        ("w0", "loader", 1.0),
        ("w0", "python between calls", 0.5),
        ("w1", "call of f", 1.0),
        ("w1", "f", 4.0),
        ("w0", "answer of f", 2.0),
        ("w0", "python between calls", 1.0),
    ]


def test_the_text_of_one_call():
    timeline = timeline_of(call_logs(), 0.0, 10.0, ("w0", MAIN))

    crossed = "w0 > w1 call of f float32[8] 32 B; w1 > w0 answer of f float32[4] 16 B"
    assert summary(timeline, critical_path(timeline), "step.json.gz").splitlines() == [
        "10.0 s over 2 workers (one clock)    trace: step.json.gz, open it at ui.perfetto.dev",
        " 40 %     4.0 s  w1       f",
        " 20 %     2.0 s  w0       python between calls",
        " 20 %     2.0 s  w1 > w0  answer of f, float32[4], 16 B, tls",
        " 10 %     1.0 s  w0       loader",
        " 10 %     1.0 s  w0 > w1  call of f, float32[8], 32 B, tls",
        f" largest crossings: {crossed}",
        " waits not on the path: w0 idle 6.5 s (65 %), w1 idle 5.0 s (50 %)",
    ]


def test_the_times_of_another_clock_are_those_of_ours():
    here = timeline_of(call_logs(), 0.0, 10.0, ("w0", MAIN))
    there = timeline_of(call_logs(offset=1000.0, uncertainty=0.001), 0.0, 10.0, ("w0", MAIN))

    assert [s.began for s in there.slices] == pytest.approx([s.began for s in here.slices])
    assert there.uncertainty == 0.001
    assert "(clocks known to ±1.0 ms)" in summary(there, critical_path(there))


def test_what_comes_before_it_left_is_moved_and_said():
    logs = call_logs()
    early = [event(1, "serve", 1.0, 8.0, POOL, id="w0#1", peer="w0", about="f")]
    logs[1] = Log("w1", 1, early)

    timeline = timeline_of(logs, 0.0, 10.0, ("w0", MAIN))

    (arrow,) = [arrow for arrow in timeline.arrows if arrow.way == "call"]
    assert (arrow.left, arrow.came, timeline.moved) == (2.0, 2.0, 1)
    assert "1 arrows were moved" in summary(timeline, critical_path(timeline))


def test_what_was_there_already_has_not_been_waited_for():
    logs = [
        Log(
            "w0",
            0,
            [
                event(1, "call", 1.0, 1.1, id="w0#1", peer="w1", about="f"),
                event(2, "answered", 3.0, 3.0, thread=POOL, id="w0#1", peer="w1"),
                event(3, "span", 1.1, 9.0, about="long work"),
            ],
        ),
        Log(
            "w1",
            1,
            [
                event(1, "serve", 1.2, 2.0, POOL, id="w0#1", peer="w0", about="f"),
                event(2, "answer", 1.9, 2.0, POOL, id="w0#1", peer="w0"),
            ],
        ),
    ]

    timeline = timeline_of(logs, 0.0, 10.0, ("w0", MAIN))

    assert {part.track.worker for part in critical_path(timeline)} == {"w0"}
    assert [call.ended for call in timeline.calls] == [3.0]


def test_slices_that_overlap_on_a_thread_become_asynchronous_ones():
    events = [
        event(1, "span", 1.0, 3.0, about="a"),
        event(2, "span", 2.0, 4.0, about="b"),
        event(3, "span", 2.5, 2.8, about="c"),
    ]
    timeline = timeline_of([Log("w0", 0, events)], 0.0, 10.0, ("w0", MAIN))

    rows = perfetto(timeline, critical_path(timeline))["traceEvents"]

    check_rows(rows)
    assert [(row["name"], row["ph"]) for row in rows if row.get("cat") == "overlapping"] == [
        ("b", "b"),
        ("b", "e"),
    ]


def test_a_clock_that_runs_apart_is_corrected_in_between():
    offsets = Offsets(Offset(-100.0, 0.001, 0.0), Offset(-101.0, 0.001, 10.0))

    assert offsets.here(100.0) == 0.0
    assert offsets.here(105.5) == 5.0
    assert offsets.here(111.0) == 10.0


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1), st.floats(-1e3, 1e3))
def test_the_true_offset_is_within_the_uncertainty(ways, ahead):
    readings, now = [], 0.0
    for there, back in ways:
        readings.append(Reading(now, now + there + ahead, now + there + back))
        now += there + back + 1.0

    found = estimate(readings)

    assert abs(found.seconds + ahead) <= found.uncertainty + 1e-9


# -- random histories: threads that compute, send and wait


@st.composite
def histories(draw):
    """A timeline of threads that send to each other, and the length of the longest chain of causes.

    It is the longest of all chains, also over what came before somebody waited for it.
    """
    threads = [Track(f"w{n}", 1) for n in range(draw(st.integers(1, 4)))]
    now = dict.fromkeys(threads, 0.0)
    longest = dict.fromkeys(threads, 0.0)
    arrows, slices = [], []
    for n in range(draw(st.integers(0, 25))):
        source, target = draw(st.sampled_from(threads)), draw(st.sampled_from(threads))
        work = draw(st.integers(0, 5)) * 1.0
        slices.append(Slice(source, "span", f"work {n}", now[source], now[source] + work))
        now[source] += work
        longest[source] += work
        if source == target:
            continue
        came = now[source] + draw(st.integers(1, 5))
        waits = came > now[target]
        arrows.append(Arrow("call", f"m{n}", str(n), source, now[source], target, came, woke=waits))
        longest[target] = max(longest[target], longest[source] + came - now[source])
        if waits:
            now[target] = came
    root = max(threads, key=lambda thread: now[thread])
    slices = [one for one in slices if one.ended > one.began]
    slices.sort(key=lambda one: (one.began, -one.ended))
    names = [thread.worker for thread in threads]
    logs = {name: Log(name, n, []) for n, name in enumerate(names)}
    made = Timeline(names, now[root], slices, arrows, [], {}, root, logs)
    return made, longest[root]


@given(histories())
def test_no_chain_of_causes_is_longer_than_the_path(history):
    timeline, longest = history

    path = critical_path(timeline)

    assert sum(part.seconds for part in path) == pytest.approx(longest)
    assert all(part.ended == after.began for part, after in pairwise(path))
    if path:
        assert path[0].began == 0.0
        assert path[-1].ended == timeline.seconds
        assert path[-1].track == timeline.root
    for part in path:
        if part.arrow is None:
            assert any(
                one.track == part.track and one.began <= part.began and part.ended <= one.ended
                for one in timeline.slices
            )
