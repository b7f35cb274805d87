"""What the one call ``floral`` cannot take is one line; what it can take although it looks wrong works."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from clusters import scatter
from torch import Tensor, nn

from comingle.models.floral.wrapper import floral
from comingle.training.client import train
from comingle.utils.errors import ComingleError, RecipeError
from comingle.utils.trees import ADAPTOR

# Settings of wrong types too: this is asked of a process without the run-time checks of annotations, as users have it.
FAULTS: dict[str, str] = {
    "rank='8'": "floral rank: got '8';",
    "rank=2.0": "floral rank: got 2.0;",
    "rank=nan": "floral rank: got nan;",
    "rank=True": "floral rank: got True;",
    "rank=-1": "floral rank: got -1;",
    "budget='1%'": "floral budget: got '1%';",
    "budget=nan": "floral budget: got nan;",
    "budget=-0.1": "floral budget: got -0.1;",
    "budget=True": "floral budget: got True;",
    "rank=1, num_clusters=-1": "num_clusters: got -1;",
    "rank=1, num_clusters=2.5": "num_clusters: got 2.5;",
    "rank=1, num_clusters='4'": "num_clusters: got '4';",
    "rank=1, num_clusters=True": "num_clusters: got True;",
    "rank=1, temperature=0": "router temperature: got 0;",
    "rank=1, temperature=-0.5": "router temperature: got -0.5;",
    "rank=1, temperature=inf": "router temperature: got inf;",
    "rank=1, temperature=None": "router temperature: got None;",
    "rank=1, noise=-1": "router noise: got -1;",
    "rank=1, noise=nan": "router noise: got nan;",
    "rank=1, noise=inf": "router noise: got inf;",
    "rank=1, noise='little'": "router noise: got 'little';",
    "rank=1, alpha='16'": "floral alpha: got '16';",
    "rank=1, alpha=inf": "floral alpha: got inf;",
    "rank=1, conv=None": "floral conv: got None;",
    "rank=1, lora='no'": "floral lora: got 'no';",
    "rank=1, bias=None": "floral bias: got None;",
    "rank=1, norm=0": "floral norm: got 0;",
    "model='gpt2', rank=1": "floral model: got str;",
    "model=nn.Linear, rank=1": "floral model: got type;",
}

ASKED = """
import json, sys
from math import inf, nan
from torch import nn
from comingle import floral
from comingle.utils.errors import ComingleError

def said(settings):
    options = eval(f"dict({settings})")
    model = options.pop("model", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    try:
        floral(model, **{"num_clusters": 2, **options})
    except ComingleError as error:
        return str(error)
    return "nothing"

print(json.dumps({settings: said(settings) for settings in json.load(sys.stdin)}))
"""


@pytest.mark.slow
def test_every_setting_out_of_range_or_of_another_type_is_one_line() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", ASKED], input=json.dumps(list(FAULTS)), capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, asked.stderr
    lines = json.loads(asked.stdout)
    assert lines.keys() == FAULTS.keys()
    for settings, place in FAULTS.items():
        assert lines[settings].startswith(place), settings
        assert "\n" not in lines[settings]


def refused(model: nn.Module, **settings: Any) -> str:
    with pytest.raises(RecipeError) as error:
        floral(model, **{"num_clusters": 2, "rank": 1, **settings})
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", [lambda: nn.Linear(4, 4), lambda: nn.LayerNorm(4), lambda: nn.Conv1d(4, 4, 3)])
def test_layers_that_share_any_parameter_are_named(kind: Any, name: str) -> None:
    model = nn.Sequential(kind(), nn.ReLU(), kind())
    model[2].register_parameter(name, model[0].get_parameter(name))
    assert "floral: layers '0' and '2'" in refused(model)


@pytest.mark.parametrize(
    "layer",
    [nn.LSTM(3, 4), nn.Conv3d(2, 2, 3), nn.Bilinear(2, 2, 2), nn.RMSNorm(3), nn.LazyLinear(3)],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_without_an_adaptor_is_named(layer: nn.Module) -> None:
    kind = type(layer).__name__
    assert f"model ({kind}); allowed: Linear, " in refused(layer)
    beside = floral(nn.ModuleDict({"odd": layer, "fc": nn.Linear(4, 2)}), num_clusters=2, rank=1)
    assert beside.unadapted == (f"odd ({kind})",)


def test_settings_that_leave_nothing_to_adapt_are_told_what_there_is() -> None:
    said = refused(nn.Sequential(nn.Linear(4, 2, bias=False), nn.ReLU()), lora=False)
    assert "0 (Linear); allowed: Linear, " in said


def test_a_model_that_cannot_be_copied_says_why_and_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    model.cache = model[0].get_parameter("weight") * 2  # a tensor with a graph, which PyTorch does not copy
    assert refused(model).startswith("floral model: Sequential ")
    assert "(Only Tensors created explicitly" in refused(model)
    assert refused(model).endswith("; give copy=False")
    assert floral(model, num_clusters=2, rank=1, copy=False).num_clusters == 2


def test_a_rank_above_what_a_weight_can_have_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = floral(nn.Sequential(nn.Linear(10, 3), nn.ReLU(), nn.Linear(3, 20)), num_clusters=2, rank=3)
    assert not caplog.messages
    floral(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 2)), num_clusters=2, rank=4, conv="filter")
    floral(model.merge(), num_clusters=2, rank=99)
    for rank, message in zip((4, 99), caplog.messages, strict=True):
        assert message.startswith(f"floral: rank {rank} ")
        assert "2 of 2 low-rank layers (0, 2)" in message


class Twice(nn.Module):
    """A linear and a batch norm that each run twice in one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(torch.relu(self.norm(self.linear(x)))))


@pytest.mark.parametrize("nora", [False, True])
def test_layers_that_run_twice_compute_and_count_as_the_base_does(nora: bool) -> None:
    base, x = Twice().double(), torch.randn(8, 4, dtype=torch.float64)
    model = floral(base, num_clusters=2, rank=1, batch_nora=nora)
    torch.testing.assert_close(model(x), base(x))
    state = model.state_dict()
    for name, buffer in base.norm.named_buffers():
        torch.testing.assert_close(state[f"model.norm.base.{name}"], buffer)
    scatter(model)
    model.eval()
    torch.testing.assert_close(model(x), model.merge()(x))


# ---------------------------------------------------------------- clusters without users


@pytest.mark.parametrize("method", ["floral-optimal", "ensemble-optimal"])
def test_a_cluster_that_nobody_present_is_in_keeps_its_component(federate_nets: Any, method: str) -> None:
    """Users 0 and 2 are in cluster 0; nobody is ever in cluster 2."""
    federation = federate_nets({"name": method, "clusters": 3})
    clients = federation.clients
    before = {name: t.clone() for name, t in clients.model.layout.views(clients.state.rows).items()}
    for number in range(2):
        work = train(clients, [0, 2], number)
        federation.upload([0, 2], number + 1, work.losses)
        federation.aggregate()
        federation.download(range(len(clients.trainers)))
    after = clients.model.layout.views(clients.state.rows)
    names = [slot.name for slot in clients.model.layout.only({ADAPTOR}).slots]
    assert names
    for name in names:
        assert after[name].isfinite().all()
        torch.testing.assert_close(after[name][:, 1:], before[name][:1, 1:].expand_as(after[name][:, 1:]))
    assert any(not torch.equal(after[name][:, 0], before[name][:, 0]) for name in names)


@pytest.mark.parametrize("method", ["floral-optimal", "ensemble-optimal"])
def test_optimal_routing_refuses_to_make_two_clusters_one(federate_nets: Any, method: str) -> None:
    with pytest.raises(ComingleError) as error:
        federate_nets({"name": method, "clusters": 1})
    assert str(error.value).startswith(f"method {method}: clusters is 1; allowed: at least 2")
