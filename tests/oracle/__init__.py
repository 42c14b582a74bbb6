"""Random programs over several workers, compared with the same program in one process."""
