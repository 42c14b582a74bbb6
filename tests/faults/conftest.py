"""Tests that change this machine run only by `make faults`, as root."""

from __future__ import annotations

import pytest

from tests.injection import network


def pytest_collection_modifyitems(config, items):
    asked = "needs_root" in config.getoption("-m", "")
    reason = "by `make faults` only" if not asked else "needs root, ip, tc, ss and /dev/net/tun"
    if asked and network.is_possible():
        return
    for item in items:
        if item.get_closest_marker("needs_root"):
            item.add_marker(pytest.mark.skip(reason=reason))
