"""Tables of one run, for the terminal and for notebooks; no charts and no torch, so that runs may import them."""
