"""Calls and backwards from finalizers, signal handlers, forked processes and threads, at random."""
