"""Conversations: users with messages, trained on the responses."""
