"""Users' tensors on disk: those of whoever takes part are in memory, and of whoever never did there are none."""
