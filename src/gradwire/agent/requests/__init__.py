"""Requests of this worker that wait for an answer: their state, promises and deadlines.

state.py is pure and decides; timer.py is the one thread that watches deadlines.
Read state.py first.
"""
