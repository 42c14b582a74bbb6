"""Programs written for torch.distributed.rpc, and what makes them run on gradwire."""
