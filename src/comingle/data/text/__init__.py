"""Text: users with token streams."""
