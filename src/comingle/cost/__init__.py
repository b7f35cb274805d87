"""Cost estimates of a recipe before training: parameters, bytes, FLOPs and memory of each method.

The engine's own objects are built as for a run and counted. The base has shapes but no weights, no text is read, and
nothing is trained.
"""
