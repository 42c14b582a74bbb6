"""Encoding of messages and tensors to bytes, and decoding; no IO.

frame.py lays out one message on the wire, message.py encodes its head, tensor.py its tensors.
Read frame.py first.
"""
