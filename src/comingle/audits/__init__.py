"""Privacy attacks on finished runs and on uploads."""
