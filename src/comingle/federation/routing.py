"""How users' models share the work out among experts and components, as far as users tell: for events and reports.

A user tells its own numbers; by which names they go the server knows itself, and how many there must be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comingle.federation.coordinator import Coordinator
from comingle.training.evaluation import mixtures_event

RoutingMetrics = Mapping[str, Mapping[str, Any]]
"""What users have told in their answers."""


def routing_event(coordinator: Coordinator, told: RoutingMetrics) -> dict[str, Any]:
    """What an evaluation's event says of those who tell it; nothing of numbers that cannot be theirs."""
    return _gates(coordinator, told) | _mixtures(coordinator, told)


def _gates(coordinator: Coordinator, told: RoutingMetrics) -> dict[str, Any]:
    """In each layer as many mean gates as the user has experts, in as many layers as most users say."""
    users, model = coordinator.public.users, coordinator.model
    if not model.routed:
        return {}
    names = {name: model.expert_names(users.index(name)) for name, one in told.items() if "gates" in one}
    fitting = {
        name: told[name]["gates"]
        for name, experts in names.items()
        if all(len(layer) == len(experts) for layer in told[name]["gates"])
    }
    layers = _usual([len(gates) for gates in fitting.values()])
    scores = {name: gates for name, gates in fitting.items() if len(gates) == layers > 0}
    return {"experts": {name: names[name] for name in scores}, "expert_scores": scores} if scores else {}


def _mixtures(coordinator: Coordinator, told: RoutingMetrics) -> dict[str, Any]:
    """Those that users tell; the weights by which the server merges models for its users are its own."""
    method, server = coordinator.house.method, coordinator.server
    merging = method.server.merging_weights(server.kept)
    if merging is not None:
        return mixtures_event(coordinator.public.users, merging.double().cpu(), method)
    mixture = method.placement.mixture
    size = method.server.server_models if mixture is None else mixture.clusters
    rows = {name: one["mixture"] for name, one in told.items() if len(one.get("mixture", ())) == size}
    return mixtures_event(list(rows), torch.tensor(list(rows.values()), dtype=torch.float64), method) if rows else {}


def _usual(sizes: Sequence[int]) -> int:
    """What is there most often, of equals the first; one user who says something else changes nothing."""
    return Counter(sizes).most_common(1)[0][0] if sizes else 0
