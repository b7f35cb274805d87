"""What a recipe will cost, before any training: parameters, bytes, FLOPs and memory of each method.

The base has shapes but no weights, the text is not read, and nothing is trained: what is counted are the engine's own
objects, built as for a run.
"""
