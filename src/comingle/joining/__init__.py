"""Somebody joins a federation that is over."""
