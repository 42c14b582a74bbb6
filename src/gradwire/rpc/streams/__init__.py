"""Generators on other workers: their items are made ahead of the reader, and come in batches.

`stream.py` is the public side. Not imported here, so that each file can be imported by itself.
"""
