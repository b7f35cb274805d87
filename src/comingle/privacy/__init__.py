"""What may happen to an upload on its way: clipping, noise, and the account of what has been revealed."""
