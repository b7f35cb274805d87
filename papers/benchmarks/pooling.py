"""Ways to pool the predictions of two models that were trained apart, compared with that of ``stacking``.

    python papers/benchmarks/pooling.py RUNS/stacking-seed0-...

Of a finished run of ``stacking``: a shared and an own model p and q of each user. All that is fitted is fitted on the
user's validation text, which trained neither; test perplexities are printed, as one JSON line:

- ``shared``, ``own``: one model alone; ``chosen``: the one with the lower validation loss.
- ``shared_tempered``, ``own_tempered``: one model alone to a power, one number: what is calibration, and no mixture.
- ``linear``: ``w p + (1 - w) q``, which is the method.
- ``gated``: the same with ``w = sigmoid(c f)`` of every token, f a constant, both entropies and both largest
  log-probabilities: five numbers.
- ``logarithmic``: ``p^a q^b`` up to a factor, two numbers; (1, 0) and (0, 1) are the models alone.
- ``calibrated``: linear, of the two models each to the power that suits it alone: three numbers, one by one, each
  the highest point of a concave function.
- ``tempered``: ``w p^a + (1 - w) q^b``, each up to a factor, three numbers at once.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comingle

# isort: split
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from comingle.methods.stacking import likeliest_weight
from comingle.models.ensembles import EnsembleModel
from comingle.models.scoring import PAD, evaluation_windows, inputs_of
from comingle.runs.results import Run

BATCH = 16
ITERATIONS = 60

Models = Float64[Tensor, "2 tokens vocab"]
"""Log-probabilities of the next token under both models."""


def main() -> None:
    """Measure one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+")
    for folder in parser.parse_args().run:
        print(json.dumps(measure(comingle.load(folder))), flush=True)


def measure(run: Run) -> dict[str, Any]:
    """Return test perplexities of every user and their means."""
    users = {name: of_user(run, number) for number, name in enumerate(run.users)}
    means = {key: statistics.fmean(user[key] for user in users.values()) for key in next(iter(users.values()))}
    return {"seed": run.recipe.seed, "means": means, "users": users}


def of_user(run: Run, number: int) -> dict[str, float]:
    """Return one user's figures: ``weight`` of the shared model, exponents ``a`` and ``b`` of the product."""
    (valid, said), (test, wanted) = (predictions(run, number, split) for split in ("valid", "test"))
    alone = losses(valid, said)
    weight = float(likeliest_weight(alone.unsqueeze(0))[0])
    found = {"shared": losses(test, wanted)[0], "own": losses(test, wanted)[1]}
    found["chosen"] = losses(test, wanted)[int(alone.mean(1).argmin())]
    found["linear"] = pooled(losses(test, wanted), torch.tensor(weight).double())
    gate = fitted(lambda c: pooled(alone, (features(valid) @ c).sigmoid()), 5)
    found["gated"] = pooled(losses(test, wanted), (features(test) @ gate).sigmoid())
    powers = fitted(lambda c: losses(product(valid, c + 0.5), said)[0], 2) + 0.5
    found["logarithmic"] = losses(product(test, powers), wanted)[0]
    alone_powers = torch.ones(2, dtype=torch.float64)
    for number, name in enumerate(("shared", "own")):
        one, other = valid[number : number + 1], test[number : number + 1]
        alone_powers[number] += fitted(lambda c, one=one: losses((one * (1 + c)).log_softmax(-1), said)[0], 1)[0]
        found[f"{name}_tempered"] = losses((other * alone_powers[number]).log_softmax(-1), wanted)[0]
    calibrated = likeliest_weight(losses(tempered(valid, alone_powers), said).unsqueeze(0))[0]
    found["calibrated"] = pooled(losses(tempered(test, alone_powers), wanted), calibrated)
    sharp = fitted(lambda c: pooled(losses(tempered(valid, 1 + c[:2]), said), c[2].sigmoid()), 3)
    found["tempered"] = pooled(losses(tempered(test, 1 + sharp[:2]), wanted), sharp[2].sigmoid())
    figures = {key: math.exp(float(lost.mean())) for key, lost in found.items()}
    return figures | {"weight": weight, "a": float(powers[0]), "b": float(powers[1])}


@torch.no_grad()
def predictions(run: Run, number: int, split: str) -> tuple[Models, Int64[Tensor, " tokens"]]:
    """Return log probabilities of both models and the tokens, of a user's split but its first token.

    Args:
        run: The finished run.
        number: Index of the user.
        split: Name of the split.
    """
    clients = run.federation.clients
    model, row = clients.model, clients.row_of[number]
    assert isinstance(model, EnsembleModel)
    tensors = model.tensors(clients.state.rows[[row]])
    windows = evaluation_windows(getattr(clients.users[number], split), context=run.recipe.training.context)
    model.bind(tensors, [number])
    found, said = [], []
    for batch in windows.split(BATCH):
        ids = inputs_of(batch).repeat(2, 1)
        logits = model.inner.network(input_ids=ids, use_cache=False).logits.unflatten(0, (2, -1))
        here = batch[:, 1:] != PAD
        found.append(logits.double().log_softmax(-1)[:, here])
        said.append(batch[:, 1:][here])
    return torch.cat(found, 1), torch.cat(said)


def losses(models: Float64[Tensor, "n tokens vocab"], said: Int64[Tensor, " tokens"]) -> Float64[Tensor, "n tokens"]:
    """Return the losses of the observed tokens in nats."""
    return -models.gather(2, said.expand(len(models), -1).unsqueeze(2)).squeeze(2)


def pooled(alone: Float64[Tensor, "2 tokens"], weight: Float64[Tensor, "*tokens"]) -> Float64[Tensor, " tokens"]:
    """Return ``-log(w p + (1 - w) q)``, where w is one number or one per token."""
    return -torch.logsumexp(torch.stack([weight.log() - alone[0], (1 - weight).log() - alone[1]]), 0)


def product(models: Models, powers: Float64[Tensor, " models"]) -> Float64[Tensor, "1 tokens vocab"]:
    """Return ``p^a q^b``, normalised."""
    return torch.einsum("m,mtv->tv", powers, models).log_softmax(-1).unsqueeze(0)


def tempered(models: Models, powers: Float64[Tensor, " models"]) -> Models:
    """Raise each model's probabilities to a power and normalise them."""
    return (powers.view(2, 1, 1) * models).log_softmax(-1)


def features(models: Models) -> Float[Tensor, "tokens 5"]:
    """Return features of both predictions that do not depend on the token."""
    entropies = -(models.exp() * models).sum(-1)
    return torch.stack([torch.ones_like(entropies[0]), *entropies, *models.amax(-1)], 1)


def fitted(lost: Callable[[Tensor], Tensor], numbers: int) -> Float64[Tensor, " numbers"]:
    """Minimise the mean loss over some numbers, starting from zeros."""
    found = torch.zeros(numbers, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([found], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        mean = lost(found).mean()
        mean.backward()
        return mean

    optimizer.step(closure)
    return found.detach()


if __name__ == "__main__":
    main()
