"""Refusals are counted, and logged once per kind and peer."""

from __future__ import annotations

from gradwire.agent.peers.refusals import Refusals


def test_each_kind_and_peer_is_logged_once_and_counted_always():
    refusals = Refusals()

    logged = [refusals.count(*each) for each in [("a", "x"), ("a", "x"), ("a", "y"), ("b", "x")]]

    assert logged == [True, False, True, True]
    assert refusals.seen() == {"a": 3, "b": 1}


def test_a_crowd_of_peers_fills_neither_memory_nor_log():
    refusals = Refusals()

    logged = sum(refusals.count("a", str(peer)) for peer in range(5000))

    assert logged == 1024
    assert refusals.seen() == {"a": 5000}
