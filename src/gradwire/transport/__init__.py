"""Whole frames between two ends; IO, no meaning.

One file or folder per kind of channel: memory, unix, tcp, tls; sockets/ is what three of them
share. Read base.py first: it is the contract of every transport.
"""
