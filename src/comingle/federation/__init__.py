"""Federations of clients on other machines: the client's side, the server's side, and the transport (Flower)."""
