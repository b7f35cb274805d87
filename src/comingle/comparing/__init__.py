"""Several methods on the same users: compared, or tried out in short runs for advice."""
