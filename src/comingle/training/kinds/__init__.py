"""Kinds of data: how users of each kind are trained and scored."""
