"""``evaluation.guard`` in a federation: every client serves the best model, as the run of one process, and says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federation.direct import Direct, federated
from tests.federation.test_continued_federations import of_users
from tests.federation.tiny import said, tensors_of, tiny

from comingle.federation.client import Client
from comingle.federation.messages import unpack_answer
from comingle.runs import api
from comingle.runs.guard import LOCAL, SHARED, read_choices
from comingle.utils.records import read_metrics
from comingle.utils.trees import Tree

OFF_RECORD = ("since", "since_round")


def guarded(folder: Path, name: str = "fedavg", **changes: Any) -> dict[str, Any]:
    """A recipe of three users whose models are trained enough to differ."""
    options = {"evaluation__guard": "local", "evaluation__every": 1, "runtime__users_per_step": 1}
    options |= {"training__rounds": 3, "training__local_steps": 2}
    return tiny(folder, name, users=3, **{**options, **changes})


def model_of(folder: Path, name: str) -> Path:
    (model,) = (folder / name).glob("run-*/model")
    return model


def served_by(folder: Path, name: str) -> dict[str, Any]:
    return read_metrics(model_of(folder, name))["served"][name]


def apart_from_names(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in OFF_RECORD}


def tensors_served(run: api.Run, name: str) -> Tree:
    return dict(run.user(name).tensors)


def assert_same_guard(together: api.Run, apart: Path) -> None:
    """The same choices by the same losses, the same local models, and the same served models."""
    assert together.local is not None
    names = together.users
    for name in names:
        assert apart_from_names(served_by(apart, name)) == apart_from_names(together.metrics["served"][name])
        opened = api.load(model_of(apart, name))
        assert opened.local is not None
        local = together.local.clients.state.rows[names.index(name) :: len(names)]
        assert torch.equal(opened.local.clients.state.rows, local)
        mine, theirs = tensors_served(opened, name), tensors_served(together, name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("method", ["fedavg", "comigs-1g1s", "ditto", "fdlora", "fedavg+", "ifca", "stacking", "pcl"])
@pytest.mark.parametrize("model", ["local", "exchanged"])
def test_it_is_the_guard_of_one_process(method: str, model: str, tmp_path: Path) -> None:
    content = guarded(tmp_path / "texts", method, evaluation__model=model)
    together = api.run(content, out=tmp_path / "together")
    federated(content, tmp_path / "apart")
    assert_same_guard(together, tmp_path / "apart")
