"""A federation whose users are elsewhere: the user's side of the wire, and the server's, whatever carries the bytes."""
