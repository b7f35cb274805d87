"""What a run in one process has of secure aggregation: its settings, the grid of whole numbers, and messages' sizes.

There the numbers are added, which is what a server has once all masks are off. The protocol itself, for users on other
machines, is :mod:`comingle.masking`.
"""
