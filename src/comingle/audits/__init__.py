"""Attacks: on what a finished run says of its users' data, and on a server by hostile users' uploads."""
