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

WHOLE, SHARE = "needs a whole number of at least 1", "needs a share of the base above 0 and at most 1"
ABOVE, DEVIATION = "needs a finite number above 0", "needs a finite standard deviation of at least 0"

# Settings of wrong types too: this is asked of a process without the run-time checks of annotations, as users have it.
FAULTS: dict[str, str] = {
    "rank='8'": f"floral rank: got '8', {WHOLE}",
    "rank=2.0": f"floral rank: got 2.0, {WHOLE}",
    "rank=nan": f"floral rank: got nan, {WHOLE}",
    "rank=True": f"floral rank: got True, {WHOLE}",
    "rank=-1": f"floral rank: got -1, {WHOLE}",
    "budget='1%'": f"floral budget: got '1%', {SHARE}",
    "budget=nan": f"floral budget: got nan, {SHARE}",
    "budget=-0.1": f"floral budget: got -0.1, {SHARE}",
    "budget=True": f"floral budget: got True, {SHARE}",
    "rank=1, num_clusters=-1": f"num_clusters: got -1, {WHOLE}",
    "rank=1, num_clusters=2.5": f"num_clusters: got 2.5, {WHOLE}",
    "rank=1, num_clusters='4'": f"num_clusters: got '4', {WHOLE}",
    "rank=1, num_clusters=True": f"num_clusters: got True, {WHOLE}",
    "rank=1, temperature=0": f"router temperature: got 0, {ABOVE}",
    "rank=1, temperature=-0.5": f"router temperature: got -0.5, {ABOVE}",
    "rank=1, temperature=inf": f"router temperature: got inf, {ABOVE}",
    "rank=1, temperature=None": f"router temperature: got None, {ABOVE}",
    "rank=1, noise=-1": f"router noise: got -1, {DEVIATION}",
    "rank=1, noise=nan": f"router noise: got nan, {DEVIATION}",
    "rank=1, noise=inf": f"router noise: got inf, {DEVIATION}",
    "rank=1, noise='little'": f"router noise: got 'little', {DEVIATION}",
    "rank=1, alpha='16'": "floral alpha: got '16', needs a finite number",
    "rank=1, alpha=inf": "floral alpha: got inf, needs a finite number",
    "rank=1, conv=None": "floral conv: got None, needs one of balanced-2d, channel, in, out, filter, linear, none. "
    "Did you mean 'none'?",
    "rank=1, lora='no'": "floral lora: got 'no', needs True or False",
    "rank=1, bias=None": "floral bias: got None, needs True or False",
    "rank=1, norm=0": "floral norm: got 0, needs True or False",
    "model='gpt2', rank=1": "floral model: got str, needs a torch.nn.Module",
    "model=nn.Linear, rank=1": "floral model: got type, needs a torch.nn.Module",
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


def test_every_setting_out_of_range_or_of_another_type_is_one_line() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", ASKED], input=json.dumps(list(FAULTS)), capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout) == FAULTS


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
    assert refused(model) == "floral: layers '0' and '2' share a parameter; give each its own"


@pytest.mark.parametrize(
    "layer",
    [nn.LSTM(3, 4), nn.Conv3d(2, 2, 3), nn.Bilinear(2, 2, 2), nn.RMSNorm(3), nn.LazyLinear(3)],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_without_an_adaptor_is_named(layer: nn.Module) -> None:
    kind = type(layer).__name__
    assert f"nothing to adapt in {kind} under these settings; it has model ({kind}); adapted are" in refused(layer)
    beside = floral(nn.ModuleDict({"odd": layer, "fc": nn.Linear(4, 2)}), num_clusters=2, rank=1)
    assert beside.unadapted == (f"odd ({kind})",)


def test_settings_that_leave_nothing_to_adapt_are_told_what_there_is() -> None:
    said = refused(nn.Sequential(nn.Linear(4, 2, bias=False), nn.ReLU()), lora=False)
    assert "nothing to adapt in Sequential under these settings; it has 0 (Linear); adapted are" in said


def test_a_model_that_cannot_be_copied_says_why_and_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    model.cache = model[0].get_parameter("weight") * 2  # a tensor with a graph, which PyTorch does not copy
    assert refused(model).startswith("floral model: Sequential cannot be copied (Only Tensors created explicitly")
    assert refused(model).endswith("; give copy=False")
    assert floral(model, num_clusters=2, rank=1, copy=False).num_clusters == 2


def test_a_rank_above_what_a_weight_can_have_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = floral(nn.Sequential(nn.Linear(10, 3), nn.ReLU(), nn.Linear(3, 20)), num_clusters=2, rank=3)
    assert not caplog.messages
    floral(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 2)), num_clusters=2, rank=4, conv="filter")
    floral(model.merge(), num_clusters=2, rank=99)
    assert caplog.messages == [
        "floral: rank 4 is more than a weight can have in 2 of 2 low-rank layers (0, 2); they get all that it can",
        "floral: rank 99 is more than a weight can have in 2 of 2 low-rank layers (0, 2); they get all that it can",
    ]


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
    assert str(error.value) == f"method {method}: clusters is 1; allowed: from 2, the true clusters"
