"""Benchmarks of gradwire and torch.distributed.rpc in one invocation; one file per question."""
