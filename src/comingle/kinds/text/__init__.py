"""Users with text of their own: token streams, windows drawn at random, perplexity."""
