"""gradwire behind the names of torch.distributed.rpc and torch.distributed.autograd."""
