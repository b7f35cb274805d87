"""Cases of the golden runs: every method on text, nets and questions where it applies, under settings that pull apart.

A case is a recipe. Text is made from names, questions from numbers and samples from seeds, so that a case needs nothing
but this file.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from comingle.methods import REGISTRY, make, settings_of

USERS = ("ann", "bob", "cem", "dan")

METHODS = {name: make(name) for name in REGISTRY}
ON_TEXT = [n for n, made in METHODS.items() if "language" in made.applies_to and not made.needs_clusters]
ON_NETS = [n for n, made in METHODS.items() if "nets" in made.applies_to and made.trains]


def takes_ranks(name: str) -> bool:
    """Return whether users may have different LoRA ranks."""
    made, mixture = METHODS[name], METHODS[name].placement.mixture
    one = (
        made.server.one_rank or made.server.first_download or (mixture is not None and not mixture.trains_independently)
    )
    return made.trains and not made.placement.pooled and not one


SMALL: dict[str, dict[str, Any]] = {
    "ifca": {"models": 2},
    "fedlease": {"max_experts": 2},
    "fedmerge": {"models": 3, "weight_step": 0.01},
    "fedtreelora": {"threshold": -1.0},
    "fedmerge-fixed": {"models": 4, "chosen": 2},
    "fedem": {"models": 2},
    "momentum-clustering": {"clusters": 2, "quantile": 0.5},
    "floral": {"clusters": 2},
    "floral-mfl": {"clusters": 2},
    "floral-optimal": {"clusters": 2},
    "ensemble": {"clusters": 2},
    "ensemble-optimal": {"clusters": 2},
    "mfl": {"clusters": 2},
    "fml": {"clusters": 2},
    "pcl": {"exchange_from": 1, "exchange_every": 2},
    "fdlora": {"fusion_steps": 6},
}
"""Settings that make a method do all that it does within a few rounds."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "comigs, specialists 0 1 2 1": ("comigs", {"specialists": [0, 1, 2, 1]}),
    "comigs, 3 generalists": ("comigs", {"generalists": 3, "specialists": 0}),
    "hetlora, pruned": ("hetlora", {"regularisation": 0.05, "gamma": 0.5}),
    "floral, stateless": ("floral", {"clusters": 2, "stateless": True, "warmup_steps": 2}),
    "feddpa, afterwards": ("feddpa", {"afterwards": True}),
    "floral, noise": ("floral", {"clusters": 2, "noise": 0.5}),
    "floral, per layer": ("floral", {"clusters": 2, "per_layer": True}),
    "floral, centred": ("floral", {"clusters": 2, "centre": True}),
    "floral, server rates": ("floral", {"clusters": 2, "adaptor_server_rate": 0.1}),
    "fedmerge, proximal": ("fedmerge", {"models": 2, "softmax": False, "column_normalize": False, "proximal": 0.01}),
    "fedmerge, largest of the body": (
        "fedmerge",
        {"models": 2, "inner_product_keys": "body", "inner_product_share": 0.1},
    ),
    "fedmerge-fixed, random": ("fedmerge-fixed", {"models": 4, "chosen": 2, "weights": "random"}),
}


def method(name: str, **settings: Any) -> dict[str, Any]:
    """Return the recipe section of a method with short periods."""
    period = {"router_every": 2, "router_steps": 1}
    own = {key: value for key, value in period.items() if key in settings_of(name)}
    return {"name": name, **own, **SMALL.get(name, {}), **settings}


def text_recipe(folder: Path, own: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Four users of a random model with two layers; text of different lengths."""
    texts = folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    for user in USERS:
        (texts / f"{user}.txt").write_text(_prose(user), encoding="utf-8")
    content = {
        "base": "random:llama",
        "method": own,
        "data": {
            "users": {user: f"{texts}/{user}.txt" for user in USERS},
            "max_train_tokens": 700,
            "max_valid_tokens": 70,
            "max_test_tokens": 60,
        },
        "adapters": {"rank": 2},
        "training": {"rounds": 4, "local_steps": 3, "batch_size": 2, "context": 16, "router": {"learning_rate": 2e-3}},
        "evaluation": {"every": 2},
        "checkpoints": {"every": 1},
        "runtime": {"dtype": "float32", "device": "cpu", "threads": 1, "compile": False},
    }
    return _changed(content, changes)


def net_recipe(own: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Four users of a small net with batch norm, in two true clusters."""
    sgd = {"name": "sgd", "learning_rate": 0.05, "schedule": "constant", "weight_decay": 0}
    content = {
        "method": own,
        "data": {"task": {"name": "mlp-norm", "users": 4, "clusters": 2, "test_samples": 9, "valid": 0.1}},
        "floral": {"rank": 2},
        "training": {"rounds": 4, "batch_size": 40, "weighting": "samples", "experts": sgd, "router": sgd},
        "evaluation": {"every": 2, "model": "exchanged"},
        "checkpoints": {"every": 1},
        "runtime": {"dtype": "float32", "device": "cpu", "threads": 1},
    }
    return _changed(content, changes)


def question_recipe(folder: Path, own: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Two users with a language each, nine made-up questions each."""
    labels = ("entailment", "neutral", "contradiction")
    rows = [
        {"id": i, "lang": who, "premise": f"{who}{i}", "hypothesis": "h", "label": labels[i % 3]}
        for who in ("en", "de")
        for i in range(9)
    ]
    (folder / "questions").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "questions" / "xnli.jsonl").write_text(lines, encoding="utf-8")
    asked = {
        "name": "xnli",
        "path": f"{folder}/questions",
        "languages": ["en", "de"],
        "train": 4,
        "valid": 2,
        "test": 3,
    }
    content = {
        "base": "random:llama",
        "method": own,
        "data": {"questions": asked},
        "adapters": {"rank": 2},
        "training": {"rounds": 2, "batch_size": 4, "context": 190, "router": {"learning_rate": 2e-3}},
        "evaluation": {"every": 1},
        "checkpoints": {"every": 1},
        "runtime": {"dtype": "float32", "device": "cpu", "threads": 1, "compile": False},
    }
    return _changed(content, changes)


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Return all recipes by name, and write the files that they read to ``folder``."""
    found: dict[str, dict[str, Any]] = {}
    for name in ON_TEXT:
        own = method(name)
        found[f"text/{name}"] = text_recipe(folder, own)
        part = {"training.participation": 0.5, "training.weighting": "tokens", "evaluation.model": "exchanged"}
        best = {} if not METHODS[name].trains else {"evaluation.select": "best", "evaluation.every": 1}
        found[f"text/{name}/half, tokens, exchanged, best"] = text_recipe(folder, own, **part, **best)
    for name in filter(takes_ranks, ON_TEXT):
        ranks = {"adapters.rank": [4, 1, 2, 3], "training.participation": 0.75}
        found[f"text/{name}/ranks"] = text_recipe(folder, method(name), **ranks)
    for title, (name, settings) in VARIANTS.items():
        if "centre" not in settings:  # which moves the base, and a language model's is frozen
            found[f"text/{title}"] = text_recipe(folder, method(name, **settings), **{"training.participation": 0.75})
        if name in ON_NETS:
            found[f"net/{title}"] = net_recipe(method(name, **settings), **{"training.participation": 0.75})
    for name in ON_NETS:
        found[f"net/{name}"] = net_recipe(method(name))
        part = {"training.participation": 0.5, "evaluation.select": "best", "evaluation.every": 1}
        found[f"net/{name}/half, best"] = net_recipe(method(name), **part)
        found[f"net/{name}/uniform, local, two users a pass"] = net_recipe(
            method(name),
            **{"training.weighting": "uniform", "evaluation.model": "local", "runtime.users_per_step": 2},
        )
    for name in ("fedavg", "comigs-1g1s", "fedmerge", "ifca", "pcl", "floral", "fedavg+"):
        found[f"questions/{name}"] = question_recipe(folder, method(name))
    return found


RESUMED = (
    *(f"text/{n}" for n in ("comigs-1g1s", "fdlora", "pcl", "fedavg+", "hetlora/ranks")),
    *(f"text/{n}/half, tokens, exchanged, best" for n in ("fedavg", "fedmerge", "ifca", "floral", "fedsa-lora")),
    *(f"net/{n}/half, best" for n in ("fedmerge", "ifca", "fedem", "floral", "pfedmoe", "fedavg+")),
    "net/floral, server rates",
    "questions/comigs-1g1s",
)
"""Cases that are also interrupted in the middle and resumed; they must end with the same digest."""


def _changed(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        *path, last = key.split(".")
        place = content
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return content


def _prose(name: str) -> str:
    draw = random.Random(name)
    words = ["".join(draw.choices("aeioulnrst", k=draw.randint(2, 7))) for _ in range(250)]
    return "\n\n".join(" ".join(words[i : i + 25]) + "." for i in range(0, len(words), 25))
