"""Frames over a stream socket: the receiving half, the sending half, the listener.

Shared by unix, tcp and tls. Nothing here knows what a frame means.
Read channel.py first, then reader.py.
"""
