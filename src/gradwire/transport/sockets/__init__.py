"""Channels and listeners over stream sockets, shared by unix, tcp and tls.

channel.py joins reader.py (receive) and writer.py (send); stream.py closes the socket they share.
Read channel.py first, then reader.py.
"""
