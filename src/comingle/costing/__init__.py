"""What a recipe will cost, before any training: parameters, bytes, FLOPs and memory of each method.

The base has shapes but no weights, the text is not read, and nothing is trained: what is counted are the engine's own
objects, built as for a run.
"""

from comingle.costing.planning import plan, user_names
from comingle.costing.records import MemoryCost, MethodCost, Plan, UserCost

__all__ = ["MemoryCost", "MethodCost", "Plan", "UserCost", "plan", "user_names"]
