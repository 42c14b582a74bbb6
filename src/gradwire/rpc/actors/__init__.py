"""Actors, whose methods run one at a time in order of arrival; and names of values.

`actor.py` and `lookup.py` are the public side. Not imported here, as in streams.
"""
