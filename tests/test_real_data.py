"""CoMiGS on real text: who beats whom, as in the paper, with a tiny real base, and with SmolLM2-135M."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from comingle.config import Recipe, parse_recipe
from comingle.runs import api
from comingle.runs.session import prepare

CATEGORIES = ["World", "Sports", "Business", "Sci/Tech"]
LANGUAGES = ["de", "fr", "it", "nl"]
COMIGS = "comigs-1g1s"

pytestmark = pytest.mark.slow


def news(shared_data: Path) -> dict[str, Any]:
    """Four users who each read one kind of news and are tested on all kinds: AG News, out of distribution."""
    return {
        "dataset": {
            "path": str(shared_data / "ag_news" / "ag_news.jsonl.xz"),
            "user": "category",
            "split": "split",
            "users": CATEGORIES,
        },
        "split": {"given": True, "valid": 0.1},
        "held_out": "mixture",
    }


def languages(shared_data: Path) -> dict[str, Any]:
    """Four users who each read and write one language."""
    return {
        "dataset": {
            "path": str(shared_data / "wiki_ner" / "wiki_ner.jsonl.xz"),
            "user": "category",
            "split": "split",
            "users": LANGUAGES,
        },
        "split": {"given": True, "valid": 0.1},
    }


def mean_perplexities(recipe: Recipe, methods: list[str]) -> dict[str, float]:
    """Mean test perplexity of each method, on the same base and text; the recipe's settings go to CoMiGS alone."""
    run_data = prepare(recipe)
    found = {}
    for method in methods:
        one = recipe if method == recipe.method.name else recipe.with_changes({"method": method})
        found[method] = api.run(one, run_data=run_data).metrics["mean_test_perplexity"]
    return found


# ---------------------------------------------------------------- stories260K: seconds


def tiny(shared_data: Path, data: dict[str, Any]) -> Recipe:
    """A Llama of 260,032 parameters that knows English children's stories: 40 iterations of 4 x 64 tokens.

    Its width of 64 wants a higher rate than the 2e-3 of large models: of 2e-3, 4e-3, 5e-3, 7e-3, 1e-2 and 2e-2, 5e-3
    is best for CoMiGS on the news; from 1e-2 on everything overfits, Local first.
    """
    return parse_recipe(
        {
            "base": str(shared_data / "models" / "stories260K"),
            "method": {"name": COMIGS, "router_every": 10, "router_steps": 3},
            "data": {**data, "max_train_tokens": 60_000, "max_valid_tokens": 20_000, "max_test_tokens": 6_000},
            "training": {
                "rounds": 4,
                "local_steps": 10,
                "batch_size": 4,
                "context": 64,
                "experts": {"learning_rate": 5e-3},
                "router": {"learning_rate": 5e-3},
            },
            "runtime": {"dtype": "float32", "device": "cpu", "threads": 1, "compile": False},
        }
    )


def test_news_out_of_distribution_with_a_tiny_base(shared_data: Path) -> None:
    """Measured, seeds 0, 1, 2: pretrained 107.9, 111.6, 106.7; local 38.9, 39.7, 39.4; comigs-1g1s 32.0, 32.3, 32.2

    (and fedavg 30.6, 31.3, 31.0: best here, as in the paper's Table 2). The margin of 10% is half of the distance.
    """
    found = mean_perplexities(tiny(shared_data, news(shared_data)), ["pretrained", "local", COMIGS])
    assert found[COMIGS] < 0.9 * found["local"], found
    assert found[COMIGS] < 0.5 * found["pretrained"], found


def test_four_languages_with_a_tiny_base(shared_data: Path) -> None:
    """Measured, seeds 0, 1, 2: fedavg 51.0, 50.1, 49.7; local 43.5, 43.3, 42.6; comigs-1g1s 42.7, 42.5, 42.2.

    Averaging four languages costs about 16%; the margin of 7% is half of that.
    """
    found = mean_perplexities(tiny(shared_data, languages(shared_data)), ["fedavg", "local", COMIGS])
    assert found["fedavg"] > 1.07 * found["local"], found
    assert found["fedavg"] > 1.07 * found[COMIGS], found


# ---------------------------------------------------------------- SmolLM2-135M: tens of minutes


def smollm2(data: dict[str, Any]) -> Recipe:
    """The budget of the prototype: 40 iterations of 8 x 128 tokens, a mean every 10."""
    return parse_recipe(
        {
            "base": "smollm2-135m",
            "method": {"name": COMIGS, "router_every": 15, "router_steps": 5},
            "data": {**data, "max_train_tokens": 60_000, "max_valid_tokens": 20_000, "max_test_tokens": 20_000},
            "training": {"rounds": 4, "local_steps": 10, "batch_size": 8, "context": 128},
            "runtime": {"threads": None},
        }
    )


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_news_out_of_distribution_with_smollm2(shared_data: Path) -> None:
    """The prototype's means: pretrained 92.4, local 46.8, fedavg 40.2, comigs-1g1s 41.7."""
    found = mean_perplexities(smollm2(news(shared_data)), ["pretrained", "local", COMIGS])
    assert found[COMIGS] < found["local"] < found["pretrained"], found


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_four_languages_with_smollm2(shared_data: Path) -> None:
    """The prototype's means: pretrained 107.1, local 48.7, fedavg 56.4, comigs-1g1s 49.3."""
    found = mean_perplexities(smollm2(languages(shared_data)), ["fedavg", "local", COMIGS])
    assert found["fedavg"] > found["local"], found
    assert found["fedavg"] > found[COMIGS], found
