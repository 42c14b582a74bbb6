"""Requests of peers that are served here: handlers, lanes, threads, limits.

dispatch.py finds the handler and the lane; thread_pool.py runs it; peer_limits.py bounds each peer.
Read dispatch.py first.
"""
