"""The recipes for public benchmarks: made files in their layouts, a tiny base, and an adapter that stock PEFT opens."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import comingle
from comingle.models.loading import load_base

REPOSITORY = Path(__file__).parents[2]
RECIPES = REPOSITORY / "examples" / "benchmarks"
PAGE = (REPOSITORY / "docs" / "conversations.md").read_text(encoding="utf-8")
ROWS = [
    {"instruction": f"What is {a} plus {b}?", "input": f"number {a}", "language": "English", "answer": str(a + b)}
    for a in range(12)
    for b in range(4)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a folder, which PEFT finds again by the adapter's configuration."""
    folder = tmp_path_factory.mktemp("base")
    tiny = load_base("random:llama", dtype="float32", device="cpu")
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder


def fed_aya(folder: Path) -> None:
    """Write FedLLM-Bench's file, an object with a list of rows for each client, and convert it as the page says."""
    rows = [{"instruction": row["instruction"], "response": row["answer"], "language": row["language"]} for row in ROWS]
    data = folder / "data" / "Fed-Aya" / "aya_38c_25k.json"
    data.parent.mkdir(parents=True)
    data.write_text(json.dumps({str(client): rows[client::4] for client in range(4)}, indent=4), encoding="utf-8")
    (code,) = re.findall(r'^python -c "([^"]*json\.load\([^"]*)" > fed_aya\.jsonl$', PAGE, re.MULTILINE)
    converted = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, check=True)
    (folder / "fed_aya.jsonl").write_bytes(converted.stdout)


def flowertune(folder: Path) -> None:
    """Write rows as those of ``flwrlabs/fingpt-sentiment-train``, with the clients that the page's command adds."""
    (code,) = re.findall(r"lambda row, number: (\{'client': [^}]*\}'\})", PAGE)
    lines = []
    for number, row in enumerate(ROWS * 5):
        client = eval(code, {"number": number % 4})  # four users instead of 50
        lines.append(
            json.dumps({"input": row["input"], "output": row["answer"], "instruction": row["instruction"], **client})
        )
    (folder / "fingpt.jsonl").write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize(("name", "make"), [("fed_aya", fed_aya), ("flowertune_finance", flowertune)])
def test_stock_peft_opens_the_shared_adapter(
    base: Path, tmp_path: Path, name: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    make(tmp_path)
    content = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    content |= {"base": str(base), "quantise": "none", "adapters": {"rank": 4, "alpha": 8}}  # the base is 32 wide
    content["training"] |= {"rounds": 2, "batch_size": 4, "context": 64, "participation": 0.5}
    content["training"]["experts"]["learning_rate"] = 0.02
    content["data"]["split"] = {"valid": 0.2, "test": 0.2}
    content["runtime"] = {"dtype": "float32", "device": "cpu", "compile": False}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(content), encoding="utf-8")
    run = comingle.run(recipe)
    assert run.users == [f"client {number}" for number in range(4)]
    for number, user in enumerate(run.users[:2]):
        run.user(user).export(tmp_path / f"peft_{number}", format="peft")
    first, second = ((tmp_path / f"peft_{number}" / "adapter_model.safetensors").read_bytes() for number in (0, 1))
    assert first == second  # one shared adapter
    config = json.loads((tmp_path / "peft_0" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == base.name  # the evaluators load base and tokenizer by it
    monkeypatch.chdir(base.parent)
    assert config["r"] == 4
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft_0", dtype=torch.float32).eval()
    tokens = torch.tensor([[5, 17, 33, 80, 9]])
    with torch.no_grad():
        ours, plain = run.user(run.users[2]).logits(tokens), model.get_base_model()
        theirs = model(tokens).logits
        with model.disable_adapter():
            untrained = plain(tokens).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(untrained, theirs, atol=1e-3)
