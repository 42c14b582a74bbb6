"""One lock for each leaf, as long as the leaf lives."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from gradwire.autograd.undo.leaf import LeafLocks


def test_a_leaf_has_one_lock_and_equal_leaves_have_two():
    locks = LeafLocks()
    leaf, equal = torch.ones(2), torch.ones(2)

    assert locks.of(leaf) is locks.of(leaf)
    assert locks.of(leaf) is not locks.of(equal)


def test_the_lock_of_a_leaf_is_forgotten_with_it():
    locks = LeafLocks()
    for _ in range(100):
        locks.of(torch.ones(2, requires_grad=True))

    assert len(locks) == 0


def test_a_leaf_that_only_its_graph_holds_keeps_its_lock():
    locks = LeafLocks()
    leaf = torch.ones(2, requires_grad=True)
    lock, product = locks.of(leaf), leaf * leaf
    del leaf

    assert len(locks) == 1
    (accumulator, _), _ = product.grad_fn.next_functions
    assert locks.of(accumulator.variable) is lock


def test_threads_that_meet_at_a_new_leaf_share_its_lock():
    locks, leaf, found = LeafLocks(), torch.ones(2), []
    barrier = threading.Barrier(8)

    def look() -> None:
        barrier.wait(10)
        found.append(locks.of(leaf))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    assert len(set(map(id, found))) == 1


def test_in_a_fork_no_leaf_is_held_by_a_thread_of_the_parent():
    """An error that leaves a backward there reverts what that has added, and must not wait."""
    locks, leaf = LeafLocks(), torch.ones(2, requires_grad=True)
    record = locks.of(leaf)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(record.wait).result()
        child = os.fork()
        if child == 0:
            os._exit(0 if record.lock.acquire(False) else 1)
        _, status = os.waitpid(child, 0)
        pool.submit(record.lock.release).result()

    assert os.waitstatus_to_exitcode(status) == 0
