"""Other libraries beside the two, where they are installed."""


def echoes(run, size):
    return {}
