"""What a peer may name: exposed functions and classes, and a checked-in list of torch's.

registry.py decides; names.py says how a function is named; torch_allowlist.py reads the lists.
Read registry.py first.
"""
