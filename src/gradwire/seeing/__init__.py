"""Seeing: traces, pictures of graphs, a live view and metrics of all workers.

Each worker answers what it did and does; the one that asks collects and shows it. Names, shapes
and sizes leave a worker, values never. Read trace.py first.
"""
