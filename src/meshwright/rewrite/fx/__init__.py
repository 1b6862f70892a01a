"""torch.fx graphs in and out: the only part of rewriting that knows torch's operators."""
