"""Tensors on accelerators: on which device they arrive, and how they get there.

Read links.py first: it encodes and decodes the tensors of every message. maps.py says on which
device of the receiver a tensor arrives, lanes.py keeps the blocks of device memory of one link.
"""
