"""What a federation leaves in a user's own folder is exported like any run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.commands import Answer as CliAnswer
from tests.federation.direct import federated
from tests.federation.tiny import tiny
from transformers import AutoModelForCausalLM

from comingle.runs import api
from comingle.utils.errors import RunError
from comingle.utils.records import read_metrics
from exporting import check_same


def test_a_clients_own_model_is_shown_without_what_only_the_server_knows(
    tmp_path: Path, comingle: Callable[..., CliAnswer]
) -> None:
    _, channel = federated(tiny(tmp_path, "fedavg"), tmp_path)
    name = next(iter(channel.nodes))
    (folder,) = (tmp_path / name).glob("run-*/model")
    answer = comingle("show", folder)
    assert (answer.code, answer.err) == (0, "")
    assert name in answer.out
    assert "peak memory" in answer.out
    for absent in ("no training", " 0.0 s", "tokens/s", "by round"):
        assert absent not in answer.out
    whole = comingle("show", tmp_path / "server")
    assert "tokens/s" in whole.out


def test_a_participants_own_model_is_exported(tmp_path: Path) -> None:
    metrics, channel = federated(tiny(tmp_path), tmp_path)
    name, *others = channel.nodes
    (folder,) = (tmp_path / name).glob("run-*/model")
    run = api.load(folder)
    assert run.users == [name]
    person = run.user(name)
    person.export(tmp_path / "out")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert network.config.num_local_experts == 2
    check_same(person, network)
    lost = person.export(tmp_path / "plain", format="merged-approximately").lost
    assert len(lost) == 2
    assert not any(other in (tmp_path / "plain" / "README.md").read_text() for other in others)
    assert metrics["users"].keys() >= {name}
    with pytest.raises(RunError, match=r"server: .*federation's server"):
        api.load(tmp_path / "server")
    (tmp_path / "server" / "metrics.json").unlink()
    with pytest.raises(RunError, match=r"no metrics.json; .*federation"):
        read_metrics(tmp_path / "server")
