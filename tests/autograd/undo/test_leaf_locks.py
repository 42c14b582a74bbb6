"""One lock for each leaf, as long as the leaf lives."""

from __future__ import annotations

import threading

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
