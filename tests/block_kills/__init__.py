"""A worker is killed in every state of a block of device memory: on a GPU, or pretended ones."""
