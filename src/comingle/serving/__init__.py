"""Use of personal models: a server for all users, chat, a web page."""
