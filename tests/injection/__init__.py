"""Ways to let things go wrong around a worker: its process, the bytes on its links, its network.

What goes wrong inside of one is in gradwire.testing.faults.
"""
