"""Pretended devices: tensors of "pretend:0" and "pretend:1" that lie in host memory.

An operator on such a tensor is queued on the current stream of the calling thread and runs later,
as on a GPU. Each stream runs its work in order; the order among streams comes from a seed, and is
limited only by events. So a wait that is missing somewhere shows as a wrong value, on any machine.
Read streams.py first; driver.py shares pretended memory between the workers of one process.
"""
