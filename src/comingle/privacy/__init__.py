"""Privacy and robustness of uploads: clipping, noise, accounting, secure aggregation and robust rules."""
