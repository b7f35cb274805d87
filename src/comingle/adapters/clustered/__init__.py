"""FLoRAL: mixtures of the clusters' adaptors at every layer of any model, mixed by one softmax per user.

Source: "Collaborative and Efficient Personalization with Mixtures of Adaptors", sections 3.2 and 5, appendices D to F.
"""

from comingle.adapters.clustered.centre import centre
from comingle.adapters.clustered.layer import AdaptedLayer, Offset, Pair, Pairs
from comingle.adapters.clustered.model import FloralModel, Role, initialisers, roles, sizes
from comingle.adapters.clustered.precondition import precondition
from comingle.adapters.clustered.wrap import adaptor_size, floral

__all__ = [
    "AdaptedLayer",
    "FloralModel",
    "Offset",
    "Pair",
    "Pairs",
    "Role",
    "adaptor_size",
    "centre",
    "floral",
    "initialisers",
    "precondition",
    "roles",
    "sizes",
]
