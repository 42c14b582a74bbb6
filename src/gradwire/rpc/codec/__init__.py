"""Encodes values as bytes and tensors, and decodes them. Pickles only if both sides ask for them.

codec.py encodes one value, by the walk in walk.py; body.py encodes a whole message body: value,
tensors, references and edges. Read codec.py first.
"""
