"""Frozen pretrained models: where they come from, how they are loaded, and their output layer."""
