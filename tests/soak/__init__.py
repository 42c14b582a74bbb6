"""Training for minutes while workers are killed at random and started again.

`python -m tests.soak --minutes 30 --seed 1`; a short one is a test (test_soak.py).
"""
