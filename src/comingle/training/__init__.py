"""The round loop, clients and server, optimizers, evaluation and checkpoints."""
