"""Who listens to whom: token-level gates and the penalties on them."""
