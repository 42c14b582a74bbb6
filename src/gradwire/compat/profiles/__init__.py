"""Profiles of torch's legacy profiler that show what the calls made on other workers.

events.py     what travels, and where it lies on the clock of the caller; pure
recording.py  what this thread records, with the calls that it makes
served.py     what a worker runs for others, recorded
calls.py      a call that asks for the events, and the function that answers with them
"""
