"""Nets of the papers, offered to the core through entry points ``comingle.nets``."""
