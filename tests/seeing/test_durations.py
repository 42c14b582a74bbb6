"""Histograms of durations."""

from __future__ import annotations

import threading
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gradwire.seeing.durations import MOST_FUNCTIONS, Durations, Histogram


@given(st.lists(st.floats(0, 1000)))
def test_a_histogram_counts_each_duration_in_every_bucket_above_it(seconds):
    histogram = Histogram((0.1, 1.0, 10.0))
    for each in seconds:
        histogram.observe(each)

    counts, total = histogram.seen()

    assert [top for top, _ in counts] == [0.1, 1.0, 10.0, float("inf")]
    for top, count in counts:
        assert count == sum(each <= top for each in seconds)
    assert all(one <= other for (_, one), (_, other) in pairwise(counts))
    assert abs(total - sum(seconds)) < 1e-6 * (1 + total)


def test_no_addition_of_another_thread_is_lost():
    histogram, many = Histogram(), 20_000
    threads = [
        threading.Thread(target=lambda: [histogram.observe(0.001) for _ in range(many)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert histogram.seen().counts[-1][1] == 4 * many


def test_functions_beyond_the_first_share_a_histogram():
    durations = Durations()
    for n in range(2 * MOST_FUNCTIONS):
        durations.call_took(f"f{n}", 0.1)
    durations.call_took("f0", 0.1)

    calls = durations.calls()

    assert len(calls) == MOST_FUNCTIONS + 1
    assert calls["f0"].counts[-1][1] == 2
    assert calls["other"].counts[-1][1] == MOST_FUNCTIONS
