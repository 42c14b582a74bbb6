"""Torch cannot forget a device type, so only a process that asks for it collects these tests."""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("GRADWIRE_PRETENDED") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _fresh_order(request):
    from gradwire.testing.pretend import streams

    streams.shuffle(hash(request.node.name) % 1000)
    yield
    streams.synchronize()
