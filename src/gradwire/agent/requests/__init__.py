"""Requests of this worker that wait for an answer: their state, promises and deadlines.

state.py is the table and is pure; timer.py is the clock, and the thread that watches deadlines.
Read state.py first.
"""
