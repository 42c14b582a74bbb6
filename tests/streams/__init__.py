"""Random programs that switch streams: on pretended devices in CI, here on a GPU."""
