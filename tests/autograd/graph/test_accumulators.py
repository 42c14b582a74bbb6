"""A leaf that is sent by one thread while others compute with it."""

import sys
import threading

import pytest
import torch

import gradwire
from gradwire.testing import cluster

WEIGHT = torch.nn.Parameter(torch.ones(4))


@pytest.fixture
def impatient():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.timeout(60)
def test_a_leaf_is_sent_while_other_threads_use_it(impatient):
    """See Note [Accumulators and the interpreter's lock]: without care this stands still."""
    over = threading.Event()

    def use():
        while not over.is_set():
            WEIGHT * 2

    with cluster(2) as workers:

        def send():
            for _ in range(2000):
                with gradwire.context():  # the accumulator lives as long as what was sent
                    gradwire.rpc_sync("w1", torch.numel, args=(WEIGHT,))

        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            workers[0].run(send)
        finally:
            over.set()
            for thread in threads:
                thread.join()
