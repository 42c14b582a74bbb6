"""A short soak; `make soak` runs longer ones."""

from __future__ import annotations

import pytest

from tests import strength
from tests.soak.soak import soak

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.mark.timeout(360)
def test_kills_leave_no_trace(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    report = soak(strength.count(30, 12), seed=3, every=strength.count(6, 4))

    assert report.wrong == []
    assert report.steps > 0
    assert sum(report.kills.values()) > 0
