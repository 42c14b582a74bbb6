"""Encoding of messages and tensors to bytes, and decoding; no IO.

message.py lays out one message on the wire, tensor.py its tensors. Read message.py first.
"""
