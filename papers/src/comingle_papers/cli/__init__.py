"""``comingle reproduce`` and ``comingle theory``; heavy imports inside them."""
