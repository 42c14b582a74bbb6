"""Nothing: membership is the core's affair. Programs import the name."""
