"""gradwire beside torch.distributed.rpc, in one invocation: one question to a file."""
