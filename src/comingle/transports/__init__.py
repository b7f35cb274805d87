"""Transports move messages between the two halves."""
