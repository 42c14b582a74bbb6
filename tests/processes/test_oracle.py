"""Random programs over real processes and sockets are as in one process."""

from __future__ import annotations

import pytest

from gradwire import Options, Timeouts
from tests import strength
from tests.oracle import outcome
from tests.oracle.check import Checker, exposed
from tests.oracle.leaks import cheap_collections
from tests.oracle.programs import KINDS, features_of
from tests.oracle.unusual import LOST
from tests.process_cluster import process_cluster

PROGRAMS = strength.seeds(48, 8)


@pytest.mark.slow
@pytest.mark.processes
def test_random_programs_over_processes_are_as_in_one_process():
    options = Options(timeouts=Timeouts(call=30, backward=30))
    with cheap_collections(), process_cluster(6, expose=exposed(), options=options) as hosts:
        hosts[LOST].kill()
        checker = Checker(lambda function, *args: function(*args))
        failures = [checker.failure(seed) for seed in PROGRAMS]

    assert [failure for failure in failures if failure is not None] == []
    modes = {feature for feature in features_of(KINDS) if feature.startswith("mode: ")}
    assert not strength.IS_LONG or modes <= set(checker.features)
    assert checker.skipped <= len(PROGRAMS) // 4
    assert outcome.STATES == {}
