"""``data.train_on_valid``: experts train on training and validation text, in as many steps; nothing else changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from comingle.config import Recipe, load_recipe, parse_recipe
from comingle.runs import api
from comingle.runs.session import build, prepare
from comingle.training.kinds.base import check_recipe
from comingle.utils.errors import ComingleError

ON = {"data.train_on_valid": True}


@pytest.fixture
def recipe(recipe_file: Path) -> Recipe:
    return load_recipe(recipe_file).with_changes({"training.rounds": 1})


def said(recipe: Recipe) -> str:
    with pytest.raises(ComingleError) as caught:
        prepare(recipe)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_validation_text_comes_behind_the_training_text(recipe: Recipe) -> None:
    recipe = recipe.with_changes({"data.max_train_tokens": 100, "data.max_valid_tokens": 40})
    for plain, control in zip(prepare(recipe).users, prepare(recipe.with_changes(ON)).users, strict=True):
        assert (len(plain.train), len(plain.valid)) == (100, 40)
        assert torch.equal(control.train, torch.cat([plain.train, plain.valid]))
        assert torch.equal(control.valid, plain.valid)
        assert torch.equal(control.test, plain.test)


def test_on_a_mixture_it_is_the_text_of_all(recipe: Recipe) -> None:
    recipe = recipe.with_changes({"data.held_out": "mixture"})
    own, mixed = prepare(recipe.with_changes(ON)).users, prepare(recipe).users
    assert all(torch.equal(o.train, torch.cat([m.train, m.valid])) for o, m in zip(own, mixed, strict=True))


def test_the_one_who_has_what_all_have_trains_on_it_too(recipe: Recipe) -> None:
    recipe = recipe.with_changes({"method": "centralized", **ON})
    run_data = prepare(recipe)
    (everyone,) = build(recipe, run_data).clients.trainers
    assert torch.equal(everyone.train, torch.cat([user.train for user in run_data.users]))


def test_steps_are_as_many(recipe: Recipe) -> None:
    """Whoever trains in as many steps has seen as much, and ends elsewhere."""
    for method in ("local", "comigs-1g1s"):
        runs = [api.run(recipe.with_changes({"method": method, **more})) for more in ({}, ON)]
        seen = [[event["tokens"] for event in run.events_in_memory if event["event"] == "round"] for run in runs]
        assert seen[0] == seen[1]
        assert runs[0].metrics["mean_test_perplexity"] != runs[1].metrics["mean_test_perplexity"]


def test_a_run_of_before_there_was_a_choice_is_known_again(recipe: Recipe) -> None:
    assert "train_on_valid" not in recipe.result_content["data"]
    assert recipe.with_changes({"data.train_on_valid": False}).fingerprint == recipe.fingerprint
    assert recipe.with_changes(ON).fingerprint != recipe.fingerprint


def test_text_that_is_trained_on_chooses_no_round(recipe: Recipe) -> None:
    message = said(recipe.with_changes({**ON, "evaluation.select": "best"}))
    assert re.match(r"evaluation\.select: .*best .*data\.train_on_valid.*; allowed: last", message)


def test_there_must_be_some(recipe: Recipe) -> None:
    message = said(recipe.with_changes({**ON, "method": "local", "data.split": {"valid": 0}}))
    assert re.match(r"data\.train_on_valid: .*'ann' ", message)


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "conversations", "users": {"ann": "ann.jsonl"}},
        {"kind": "samples", "users": {"ann": "ann.npz"}},
        {"questions": "xnli"},
        {"task": "linear"},
    ],
)
def test_where_rounds_are_passes_it_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ComingleError, match="train_on_valid is not used for"):
        check_recipe(parse_recipe({"data": {**data, "train_on_valid": True}}))
