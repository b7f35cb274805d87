"""Robust aggregation: what a server makes of uploads, some of which may be hostile."""
