"""Measures of what users end up with."""
