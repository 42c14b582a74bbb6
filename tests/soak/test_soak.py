"""A soak of half a minute; `make soak` runs longer ones."""

from __future__ import annotations

import pytest

from tests.soak.soak import soak

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.mark.timeout(360)
def test_half_a_minute_of_kills_leaves_no_trace(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    report = soak(30, seed=3, every=6)

    assert report.wrong == []
    assert report.steps > 0
    assert sum(report.kills.values()) > 0
