"""Groups of a fixed world, over `torch.distributed`."""
