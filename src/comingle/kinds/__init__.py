"""Kinds of data: text, conversations, samples; each is a folder."""
