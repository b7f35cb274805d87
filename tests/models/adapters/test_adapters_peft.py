"""Users who start from somebody's PEFT adapter: the first logits are PEFT's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from comingle.config import parse_recipe
from comingle.methods import make
from comingle.models.loading import load_base
from comingle.models.lora import read_peft
from comingle.runs.join import join
from comingle.runs.results import Run
from comingle.training.kinds.base import check_recipe
from comingle.utils.errors import BaseModelError, ComingleError, RecipeError
from comingle.utils.trees import GENERALIST, SPECIALIST
from exporting import of_text

# PEFT asks transformers by an older name.
RECIPE = {"data": {"users": {"ann": "unused", "bob": "unused", "cem": "unused"}}}
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

IDS = torch.arange(3, 27).unsqueeze(0) * 11 % 256
MLP = ["gate_proj", "up_proj", "down_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", *MLP]


def peft_model(base: str, **settings: Any) -> Any:
    """Stock PEFT with random factors, on a base in float64."""
    network = load_base(base, dtype="float64", device="cpu").model
    config = peft.LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    torch.manual_seed(3)
    return peft.get_peft_model(network, config, autocast_adapter_dtype=False).eval()


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[Path, torch.Tensor]]:
    """Save an adapter; return its folder, and PEFT's logits with it."""

    def save(base: str = "random:llama", **settings: Any) -> tuple[Path, torch.Tensor]:
        model = peft_model(base, **{"target_modules": ALL, **settings})
        model.save_pretrained(tmp_path / "adapter")
        with torch.no_grad():
            return tmp_path / "adapter", model(input_ids=IDS).logits

    return save


def checked(federate: Any, method: Any, changes: dict[str, Any]) -> Any:
    """A federation whose recipe is checked first, as commands do."""
    check_recipe(parse_recipe({**RECIPE, "method": method}).with_changes(changes))
    return federate(method, changes=changes)


def logits(federation: Any, row: int, model: Any = None) -> torch.Tensor:
    """Of a user before the first round."""
    clients = federation.clients
    model = model or clients.model
    model.adapters.bind(model.tensors(clients.state.rows[row : row + 1]), [row])
    with torch.no_grad():
        return model.network(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("method", "base", "settings"),
    [
        ("fedit", "random:llama", {}),
        ("fedavg", "random:llama", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
        ("comigs-1g1s", "random:llama", {"use_rslora": True}),
        ({"name": "comigs", "specialists": [0, 2, 1]}, "random:qwen3", {}),
        ("local", "random:mistral", {"layers_to_transform": [1]}),
        ("ditto", "random:llama", {}),
        ("fedit", "random:gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    ],
)
@pytest.mark.parametrize("rank", [2, 5])
def test_users_and_the_server_start_as_pefts_own_model(
    federate: Any, saved: Any, method: Any, base: str, settings: dict[str, Any], rank: int
) -> None:
    """Before and after a download of the server's initial tensors, also with a higher rank than the adapter's."""
    folder, wanted = saved(base, **settings)
    plain = load_base(base, dtype="float64", device="cpu").model(input_ids=IDS).logits
    assert (wanted - plain).abs().max() > 1e-2
    federation = federate(method, base=base, changes={"adapters.start": str(folder), "adapters.rank": rank})
    for _ in range(2):
        for row in range(3):
            torch.testing.assert_close(logits(federation, row), wanted, rtol=0, atol=1e-5)
        federation.clients.state.versions.fill_(-1)
        federation.download([0, 1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in of_text() if name != "fedbn"])  # which needs norms to train
def test_every_method_starts_as_pefts_own_model_or_refuses(federate: Any, saved: Any, method: str) -> None:
    """Refused: LoRAs of clusters, those that are made anew, and several models that would be the same."""
    folder, wanted = saved()
    refused = not make(method).server.keeps_adapters or make(method).placement.mixture is not None
    if refused or method in ("fedmerge", "fedmerge-fixed", "ifca"):
        with pytest.raises(RecipeError, match=r"^adapters\.start: got |models are identical"):
            checked(federate, method, {"adapters.start": str(folder)})
        return
    federation = federate(method, changes={"adapters.start": str(folder)})
    for _ in range(2):
        torch.testing.assert_close(logits(federation, 0), wanted, rtol=0, atol=1e-5)
        federation.clients.state.versions.fill_(-1)
        federation.download(range(len(federation.clients.trainers)))


@pytest.mark.parametrize("role", [GENERALIST, SPECIALIST])
def test_each_expert_starts_from_it(federate: Any, saved: Any, role: str) -> None:
    folder, wanted = saved()
    federation = federate("comigs-1g1s", changes={"adapters.start": str(folder)})
    other = {GENERALIST: SPECIALIST, SPECIALIST: GENERALIST}[role]
    model = federation.clients.model
    (kept,) = [i for i, name in enumerate((GENERALIST, SPECIALIST)) if name == role]
    tensors = model.tensors(federation.clients.state.rows[1:2])
    alone = model.without(frozenset({other}))
    restricted = {n: t[:, kept : kept + 1] if ".mlp." in n else t for n, t in tensors.items() if ".router" not in n}
    alone.adapters.bind(restricted, [1])
    with torch.no_grad():
        torch.testing.assert_close(alone.network(input_ids=IDS).logits, wanted, rtol=0, atol=1e-5)


def test_a_specialist_starts_from_its_users_adapter(federate: Any, saved: Any) -> None:
    """The others', and what all share, start as without: their B is zero."""
    folder, wanted = saved(target_modules=MLP)
    changes = {"adapters.start": [None, str(folder), None]}
    federation, usual = federate("comigs-1g1s", changes=changes), federate("comigs-1g1s")
    views = federation.clients.model.layout.views(federation.clients.state.rows)
    for name, tensor in usual.clients.model.layout.views(usual.clients.state.rows).items():
        changed = (views[name] != tensor).flatten(2).any(-1)  # (users, experts) in MLPs
        assert not changed[[0, 2]].any()
        assert changed[1].tolist() == (
            [False, True] if ".mlp." in name and "router" not in name else changed[1].tolist()
        )
    model = federation.clients.model
    tensors = model.tensors(federation.clients.state.rows[1:2])
    alone = model.without(frozenset({GENERALIST}))
    alone.adapters.bind({n: t[:, 1:] if ".mlp." in n else t for n, t in tensors.items() if "router" not in n}, [1])
    with torch.no_grad():
        torch.testing.assert_close(alone.network(input_ids=IDS).logits, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(federation.server.kept, usual.server.kept, rtol=0, atol=0)


def test_a_local_model_starts_from_its_users_adapter_whatever_its_rank(federate: Any, saved: Any) -> None:
    folder, wanted = saved()
    changes = {"adapters.start": [None, str(folder), str(folder)], "adapters.rank": [1, 2, 3]}
    federation = federate("local", changes=changes)
    plain = load_base("random:llama", dtype="float64", device="cpu").model(input_ids=IDS).logits
    for row, expected in enumerate((plain, wanted, wanted)):
        torch.testing.assert_close(logits(federation, row), expected, rtol=0, atol=1e-5)


def test_what_is_shared_is_said(federate: Any, saved: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = saved()
    federate("comigs-1g1s", changes={"adapters.start": [None, str(folder), None]})
    assert "its LoRAs of attention are not used, as comigs-1g1s shares these" in caplog.text
    caplog.clear()
    folder, _ = saved(target_modules=MLP)
    federate("comigs-1g1s", changes={"adapters.start": [None, str(folder), None]})
    assert caplog.text == ""
    with pytest.raises(RecipeError, match=r"adapters.start.bob: .* fedit shares all of its LoRAs; allowed: "):
        federate("fedit", changes={"adapters.start": [None, str(folder), None]})


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("fedit", {"adapters.rank": 1}, r"^adapters\.rank: got 1; allowed: from 2, the rank of adapters\.start: "),
        (
            "hetlora",
            {"adapters.rank": [2, 3, 2]},
            r"^adapters\.rank: got \[2, 3, 2\]; allowed with one adapters\.start",
        ),
        (
            "flora-stacking",
            {},
            r"^adapters\.start: got it for flora-stacking, which makes users' LoRAs anew; allowed: ",
        ),
        ({"name": "floral", "clusters": 2}, {}, r"^adapters\.start: got it for floral, whose LoRAs belong to clusters"),
        (
            "fedit",
            {"adapters.start": {"ann": None, "bob": "x", "cem": None}},
            r"^adapters\.start: got adapters by user; ",
        ),
        ("local", {"adapters.start": [None]}, r"^adapters\.start: 1 adapters for 3 users; give one, or one per user"),
        ("fedit", {"runtime.store": "disk"}, r"^adapters\.start: got it with runtime\.store: disk; allowed: memory"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(
    federate: Any, saved: Any, method: Any, changes: dict[str, Any], said: str
) -> None:
    """Most before anything is read."""
    folder, _ = saved()
    start = {"adapters.start": str(folder)}
    with pytest.raises(ComingleError, match=said) as caught:
        checked(federate, method, {**start, **changes})
    assert "\n" not in str(caught.value)


def test_another_base_is_one_line(federate: Any, saved: Any) -> None:
    folder, _ = saved()
    for base, said in (
        ("random:llama?dim=64", r"down_proj: got a weight of shape \(32, 88\); allowed: the base's, \(64, 176\)"),
        ("random:llama?layers=1", r"got a LoRA of 'model\.layers\.1\..*'; allowed: model\.layers\.0\."),
        ("random:gpt2", r"got a LoRA of 'model\.layers\.0\..*'; allowed: transformer\.h\.0\."),
    ):
        with pytest.raises(RecipeError, match=f"^adapters.start: .*{said}"):
            federate("fedit", base=base, changes={"adapters.start": str(folder)})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("peft_type", "IA3", "peft_type: got 'IA3'; allowed: 'LORA'"),
        ("use_dora", True, "use_dora: got True; allowed: False"),
        ("rank_pattern", {"q_proj": 4}, r"rank_pattern: got {'q_proj': 4}; allowed: {}"),
        ("modules_to_save", ["lm_head"], r"modules_to_save: got \['lm_head'\]"),
        ("init_lora_weights", "pissa", "init_lora_weights: got 'pissa'"),
        ("r", 3, r"got 'base_model.model.*'; allowed: pairs .* of rank 3"),
        ("r", None, "cannot be read as a PEFT adapter: TypeError"),
    ],
)
def test_an_adapter_of_another_kind_is_one_line(saved: Any, key: str, value: Any, said: str) -> None:
    folder, _ = saved()
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(BaseModelError, match=f"{said}") as caught:
        read_peft(folder)
    assert "\n" not in str(caught.value)


def test_tensors_of_another_kind_and_damage_are_one_line(saved: Any) -> None:
    folder, _ = saved()
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = "base_model.model.model.embed_tokens.lora_embedding_A"
    save_file({**tensors, name: torch.zeros(2, 2)}, weights)
    with pytest.raises(BaseModelError, match=f"adapter_model.safetensors: got '{name}'; allowed: pairs "):
        read_peft(folder)
    weights.write_bytes(b"damaged")
    with pytest.raises(BaseModelError, match="cannot be read as a PEFT adapter: SafetensorError") as caught:
        read_peft(folder)
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------- runs


@pytest.fixture
def recipe(write_recipe: Callable[[Path], Path], tmp_path: Path) -> dict[str, Any]:
    from comingle.config import load_recipe

    content = load_recipe(write_recipe(tmp_path / "project")).model_dump(mode="json", exclude_unset=True)
    return content | {"method": "comigs-1g1s"}


def test_a_run_opens_without_the_adapter_that_it_started_from(recipe: Any, saved: Any, tmp_path: Path) -> None:
    from comingle.runs import api

    folder, _ = saved(recipe["base"])
    changed = {**recipe, "adapters": {**recipe.get("adapters", {}), "start": str(folder)}}
    run = api.run(changed, out=tmp_path / "run")
    usual = api.run(recipe, out=tmp_path / "usual")
    assert run.metrics["users"]["bob"] != usual.metrics["users"]["bob"]
    trained = run.user("bob").logits(IDS)
    shutil.rmtree(folder)
    torch.testing.assert_close(api.load(tmp_path / "run").user("bob").logits(IDS), trained, rtol=0, atol=0)


def test_a_model_that_is_not_trained_is_the_adapters_also_when_it_is_opened(
    recipe: Any, saved: Any, tmp_path: Path
) -> None:
    """Its run has nothing in checkpoints to read."""
    from comingle.runs import api

    folder, wanted = saved(recipe["base"])
    start = {**recipe["adapters"], "start": str(folder)}
    api.run({**recipe, "method": "pretrained", "adapters": start}, out=tmp_path / "run")
    opened = api.load(tmp_path / "run").user("bob").logits(IDS)
    torch.testing.assert_close(opened.double(), wanted, rtol=0, atol=1e-4)


def test_a_path_is_relative_to_the_recipes_file(recipe: Any, tmp_path: Path) -> None:
    import yaml

    from comingle.config import load_recipe

    (tmp_path / "given").mkdir()
    for start, read in (
        ("given", str(tmp_path / "given")),
        ("owner/given", "owner/given"),
        ({"ann": "given", "bob": None, "cem": "owner/given"}, {"ann": str(tmp_path / "given"), "bob": None}),
    ):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "adapters": {"start": start}}))
        found = load_recipe(tmp_path / "recipe.yaml").adapters.start
        assert found == read if isinstance(read, str) else found == {**read, "cem": "owner/given"}


def test_a_recipe_without_it_has_the_fingerprint_of_older_versions(recipe: Any) -> None:
    from comingle.config import parse_recipe

    plain = parse_recipe(recipe)
    assert "start" not in plain.result_content["adapters"]
    assert plain.with_changes({"adapters.start": "x"}).fingerprint != plain.fingerprint


def test_a_federation_refuses_it(recipe: Any) -> None:
    from comingle.config import parse_recipe
    from comingle.federation.public import check_remote_clients

    with pytest.raises(RecipeError, match=r"^adapters\.start: got 'x'; allowed in a federation: null"):
        check_remote_clients(parse_recipe({**recipe, "adapters": {"start": "x"}}))


@pytest.mark.slow
def test_resumed_runs_and_processes_start_from_it_too(recipe: Any, saved: Any, tmp_path: Path) -> None:
    """Of two processes each reads the adapter, and has the users of one."""
    import subprocess
    import sys

    import yaml

    from comingle.runs import api

    folder, _ = saved(recipe["base"])
    changed = {**recipe, "method": "fedavg", "adapters": {**recipe["adapters"], "start": str(folder)}}
    changed["training"] = {**recipe["training"], "rounds": 2}
    changed["checkpoints"] = {"every": 1, "keep": 2}
    wanted = api.run(changed, out=tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    shutil.rmtree(newest)
    resumed = api.run(changed, out=tmp_path / "run", resume=True)
    assert resumed.metrics["users"] == wanted.metrics["users"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(changed))
    command = ["run", str(tmp_path / "recipe.yaml"), "--processes", "2", "--out", str(tmp_path / "split")]
    subprocess.run([sys.executable, "-m", "comingle", *command], check=True, capture_output=True)
    split = api.load(tmp_path / "split").metrics["users"]
    for name, scores in wanted.metrics["users"].items():
        assert split[name]["test_perplexity"] == pytest.approx(scores["test_perplexity"], rel=1e-4)


def test_a_user_joins_with_an_adapter(recipe: Any, saved: Any, tmp_path: Path) -> None:
    """Its specialist starts there; what it has downloaded is the run's."""
    from comingle.runs import api

    run = api.run(recipe, out=tmp_path / "run")
    data = tmp_path / "dan.txt"
    data.write_text("A line of dan's that nobody else has written.\n\n" * 60)
    folder, _ = saved(recipe["base"], target_modules=MLP)
    with_adapter: Run = join(run, name="dan", data=data, adapter=folder, rounds=1).run
    without: Run = join(run, name="dan", data=data, rounds=1).run
    for name, tensor in without.user("dan").tensors.items():
        if ".mlp." in name and not name.endswith("router"):
            assert torch.equal(tensor[:, 0], with_adapter.user("dan").tensors[name][:, 0])  # the generalist
            assert not torch.allclose(tensor[:, 1], with_adapter.user("dan").tensors[name][:, 1])
        elif not name.endswith("router"):
            assert torch.equal(tensor, with_adapter.user("dan").tensors[name])
