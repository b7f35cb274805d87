"""One run whose users are shared out over several processes, which do the same and tell each other what they found."""
