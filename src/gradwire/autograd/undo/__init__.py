"""What a pass changed in `.grad`, so that a failed pass leaves it as it was.

One undo log for each engine run, with an entry for each leaf it has touched.
Read undo_log.py first, then leaf_entry.py.
"""
