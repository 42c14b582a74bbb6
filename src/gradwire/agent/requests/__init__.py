"""Requests of this worker that wait for an answer: their state, promises and deadlines.

promise.py has the table; timer.py is the clock, and the thread that watches deadlines.
Read promise.py first.
"""
