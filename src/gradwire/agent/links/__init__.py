"""Connections to peers: dialling, accepting, the handshake, and reading each channel.

handshake_state.py is pure and decides which peers are let in; readers.py reads channels.
Read connections.py first.
"""
