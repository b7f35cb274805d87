"""Users with samples of their own, inputs with targets: each trains a copy of a net."""
