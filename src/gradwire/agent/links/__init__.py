"""Connections to peers: dialling, accepting, the handshake, and who reads each channel.

handshake_state.py is pure and decides who is let in; readers.py reads channels.
Read connections.py first.
"""
