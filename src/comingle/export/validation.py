"""A user's model, and a network in its place, on the user's validation data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from comingle.export.sources import Source
from comingle.models import routing
from comingle.models.adapted import AdaptedModel
from comingle.models.pretrained import PreTrainedModel
from comingle.models.scoring import perplexity_of
from comingle.models.windows import PAD, inputs_of


def validated(source: Source) -> tuple[float, list[Float[Tensor, " experts"]]]:
    """The model's perplexity on the user's validation data, and each layer's mean gates there."""
    model = source.model
    if not isinstance(model, AdaptedModel):
        return perplexity(source, _own_losses(source, [])), []
    experts = int(model.adapters.present[source.row].sum())
    layers = len(model.adapters.experts)
    if not routing.routed(model.adapters):
        return perplexity(source, _own_losses(source, [])), [torch.full((experts,), 1 / experts)] * layers
    seen: list[Tensor] = []
    assert source.about is not None
    with routing.watched(model.adapters), torch.compiler.set_stance("force_eager"):
        score = source.about.validate(_own_losses(source, seen), lambda: torch.cat(seen, 1))
    present = model.adapters.present[source.row]
    return perplexity_of(score.mean_loss), [torch.tensor(layer)[present] for layer in score.expert_scores]


def perplexity(source: Source, losses: Callable[[Sequence[int], Tensor], Tensor]) -> float:
    """Return the perplexity of the user's validation data, or of its responses, under these losses."""
    assert source.about is not None
    return perplexity_of(source.about.validate(losses, None).mean_loss)


def _own_losses(source: Source, seen: list[Tensor]) -> Callable[[Sequence[int], Tensor], Tensor]:
    """Of the user's model in every slot, in turn; ``seen`` gets each slot's gates, where they are watched."""
    model = source.model

    def losses(slots: Sequence[int], windows: Tensor) -> Tensor:
        seen.clear()
        found = []
        for batch in windows.to(model.device).unsqueeze(1):
            found.append(model.predict(source.tensors, [source.row], batch)[0])
            if isinstance(model, AdaptedModel) and any(m.router.watched for m in model.adapters.experts.values()):
                seen.append(routing.gates(model.adapters))
        return torch.stack(found)

    return losses


def losses_of(network: PreTrainedModel) -> Callable[[Sequence[int], Tensor], Tensor]:
    """Of a plain network in every slot; a negative target carries no loss."""

    def losses(slots: Sequence[int], windows: Tensor) -> Tensor:
        targets = windows[..., 1:]
        logits = network(input_ids=inputs_of(windows).flatten(0, 1), use_cache=False).logits
        lost = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.clamp(min=PAD).flatten(), ignore_index=PAD, reduction="none"
        )
        return lost.view(targets.shape)

    return losses
