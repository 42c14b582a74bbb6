"""Tests with pretended devices. They run in a process of their own: tests/test_pretended.py."""
