"""Which functions and classes a peer may use: the exposed ones, and those on two lists of torch's.

registry.py decides; names.py names functions; torch_allowlist.py reads the lists.
Read registry.py first.
"""
