"""Samples: users with inputs and targets."""
