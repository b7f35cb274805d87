"""A server before the first round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.config.settings import Training
from comingle.engines.private import guard_of
from comingle.engines.server import ServerHalf
from comingle.engines.state import draw
from comingle.methods.base import Method
from comingle.methods.server import ServerSetup
from comingle.models.hardware import require_room
from comingle.models.model import Model
from comingle.privacy.checks import check_layout, check_population
from comingle.utils.errors import RecipeError
from comingle.utils.trees import ADAPTOR, STATISTICS, restrict


def clustered(model: Model, method: Method) -> tuple[str, ...]:
    """The tensors whose leading axis is a mixture's components; whole models have statistics of their own. In the
    layout's order, so that who counts layers by them counts as the model does.
    """
    mixture = method.placement.mixture
    roles = {ADAPTOR, STATISTICS} if mixture is not None and mixture.of == "models" else {ADAPTOR}
    return tuple(
        slot.name for slot in model.layout.slots if len(slot_roles := set(slot.roles)) == 1 and slot_roles <= roles
    )


def start_server(model: Model, method: Method, users: Sequence[str], training: Training) -> ServerHalf:
    """The server before the first round.

    Raises:
        RecipeError: it merges or hands out whole models, and users' ranks differ; or it passes uploads on, compressed.
    """
    uploads, privacy = training.uploads, training.privacy
    if privacy is not None and privacy.noisy:
        if not privacy.of_examples:
            check_population(privacy, len(users))
        check_layout(method, model.layout)
    if method.server.peer_to_peer and uploads != "float32":
        raise RecipeError(
            f"training.uploads: got {uploads!r} for {method.name}, whose users mix uploads; allowed: float32"
        )
    if (method.server.first_download or method.server.one_rank) and not bool(model.mask().all()):
        raise RecipeError(
            f"method {method.name}: adapters.rank differs between users; the server's models have one rank"
        )
    half = ServerHalf(
        method=method,
        layout=model.layout,
        users=users,
        scales=_of_each(model.scales, len(users)),
        ranks=_of_each(model.ranks, len(users)),
        weighted=training.weighting != "uniform" and privacy is None,
        uploads=uploads,
        clustered=clustered(model, method),
        centred=model.centre,
        guard=guard_of(training, users),
        sums=training.sums,
        aggregation=training.aggregation,
    )
    if method.shared:
        first = model.layout.views(_first_models(model, method, training.seed))
        models = restrict(first, model.layout, method.received)
        roles = model.layout.named_roles(method.received)
        setup = ServerSetup(models=models, users=half.users, scales=half.scales, seed=training.seed, roles=roles)
        kept = method.server.start(setup)
        half.kept = {name: t.to(model.device) for name, t in kept.items()}
        if half.sums is not None:
            half.sums.check_size(half.size)
    return half


def _of_each(values: Tensor, users: int) -> Tensor:
    """Everybody's own, where one number may be that of all."""
    return values.cpu().expand(users).clone()


def _first_models(model: Model, method: Method, seed: int) -> Float[Tensor, "models columns"]:
    """The differently initialised models that the server begins with; the first is what users start from."""
    count, layout = method.server.server_models, model.layout
    dtype = torch.promote_types(model.dtype, torch.float32)
    first = draw(layout, seed, "server").unsqueeze(0)
    if (others := model.other_starts) is None:
        require_room(f"method {method.name}", count, layout.columns)
        others = torch.stack([draw(layout, seed, f"server/{n}") for n in range(1, count)]) if count > 1 else first[:0]
    return torch.cat([first, others]).to(model.device, dtype)
