"""Where Slurm is installed one test runs; the others, which take minutes, if they are asked for.

.venv/bin/python -m pytest -m needs_slurm tests/slurm
"""

from __future__ import annotations

from pathlib import Path

import pytest

SMOKE = "test_tasks_of_srun_take_their_places"


def pytest_collection_modifyitems(config, items):
    if "needs_slurm" in config.getoption("-m", ""):
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not item.name.startswith(SMOKE):
            item.add_marker(pytest.mark.skip(reason="by `-m needs_slurm` only"))
