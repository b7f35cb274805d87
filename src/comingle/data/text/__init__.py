"""Text: users with streams of tokens."""
