"""A personal model in use: everybody served at once, chat, a page."""
