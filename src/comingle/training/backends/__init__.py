"""Backends: one process, or several with torch.distributed."""
