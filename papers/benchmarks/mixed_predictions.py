"""The value of combining two models: predictions of two finished runs, mixed with a weight for each user.

    python papers/benchmarks/mixed_predictions.py RUNS/local-seed0-... RUNS/fedavg-seed0-...

Both runs have the same users with the same text, as ``comingle compare`` and ``comingle reproduce`` make them. The next
token's probability is ``w p_first + (1 - w) p_second``; a user's w is the most likely one on its validation text, on
which neither model was trained. Beside it stands the one of the two models that the same text would choose. Prints one
JSON line with test perplexities.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import comingle

# isort: split
import torch
from jaxtyping import Float
from torch import Tensor

from comingle.models.scoring import PAD, evaluation_windows
from comingle.runs.results import Run

BATCH = 16
EM_STEPS = 200


def main() -> None:
    """Measure one pair of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    args = parser.parse_args()
    print(json.dumps(measure(comingle.load(args.first), comingle.load(args.second))))


def measure(first: Run, second: Run) -> dict[str, Any]:
    """Return test perplexities of every user (each model, the chosen one, the mixture) and their means."""
    if first.users != second.users:
        raise SystemExit(f"other users: {first.users}, {second.users}")
    if first.recipe.data != second.recipe.data or first.recipe.seed != second.recipe.seed:
        raise SystemExit("other text: the two recipes differ in data or seed")
    users = {name: of_user(first, second, number) for number, name in enumerate(first.users)}
    means = {key: statistics.fmean(user[key] for user in users.values()) for key in next(iter(users.values()))}
    methods = [run.recipe.method.name for run in (first, second)]
    return {"methods": methods, "seed": first.recipe.seed, "means": means, "users": users}


def of_user(first: Run, second: Run, number: int) -> dict[str, float]:
    """Return one user's figures.

    Args:
        first: The first run.
        second: The second run.
        number: Index of the user.

    Returns:
        Test perplexities by name, and ``weight``, the weight of the first model.
    """
    valid, test = (
        torch.stack([token_losses(run, number, split) for run in (first, second)]) for split in ("valid", "test")
    )
    weight = likeliest_weight(valid)
    chosen = int(valid.mean(1).argmin())
    return {
        "first": math.exp(test[0].mean()),
        "second": math.exp(test[1].mean()),
        "chosen": math.exp(test[chosen].mean()),
        "mixed": math.exp(mixed_losses(test, weight).mean()),
        "weight": weight,
    }


@torch.no_grad()
def token_losses(run: Run, number: int, split: str) -> Float[Tensor, " tokens"]:
    """Return the loss in nats of every token of a user's split, but the first, under the user's model.

    Args:
        run: The finished run.
        number: Index of the user.
        split: Name of the split.
    """
    clients = run.federation.clients
    windows = evaluation_windows(getattr(clients.users[number], split), context=run.recipe.training.context)
    found = []
    for batch in windows.split(BATCH):
        lost = clients.scorer.predict(clients.models, [clients.row_of[number]], batch.unsqueeze(0))[0]
        found.append(lost[batch[:, 1:] != PAD])
    return torch.cat(found).double()


def likeliest_weight(losses: Float[Tensor, "2 tokens"]) -> float:
    """Return the weight of the first of two models that maximises the likelihood of text, by EM."""
    odds = (losses[1] - losses[0]).exp()  # how much likelier each token is under the first
    weight = 0.5
    for _ in range(EM_STEPS):
        weight = float((weight * odds / (weight * odds + 1 - weight)).mean())
    return weight


def mixed_losses(losses: Float[Tensor, "2 tokens"], weight: float) -> Float[Tensor, " tokens"]:
    """Return ``-log(w p_first + (1 - w) p_second)`` of every token."""
    weights = torch.tensor([weight, 1 - weight], dtype=losses.dtype).log().unsqueeze(1)
    return -torch.logsumexp(weights - losses, 0)


if __name__ == "__main__":
    main()
