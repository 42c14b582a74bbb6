"""Objects to bytes and back; pure.

frame.py lays out one message on the wire, message.py encodes its head, tensor.py its tensors.
Read frame.py first.
"""
