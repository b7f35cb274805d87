"""Exports opened where they are meant to be used: in processes that never import comingle."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from comingle.models.loading import load_base
from comingle.serving.export.gguf import write_gguf
from exporting import IDS, greedy, own_logits, trained

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")]

needs_llama = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
CASES = {"lora": ("fedit", "llama"), "mixtral": ("comigs-1g1s", "llama"), "qwen3": ("comigs-1g1s", "qwen3")}
END = """
import sys
assert not any(name.partition(".")[0] == "comingle" for name in sys.modules)
print(json.dumps(logits))
"""


@pytest.fixture(scope="module")
def people(federate: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A trained user of each case, whose base is a folder; its export and the base's folder are beside each other."""
    found = {}
    for case, (method, family) in CASES.items():
        folder = tmp_path_factory.mktemp(case)
        base = load_base(f"random:{family}", dtype="float32", device="cpu")
        base.model.save_pretrained(folder / "base")
        base.tokenizer.save_pretrained(folder / "base")
        found[case] = (trained(federate, method, base=str(folder / "base")).user("bob"), folder)
    return found


def python(code: str, folder: Path) -> str:
    """The output of code in a process of its own; only the path to llama-cpp-python is inherited."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    outside = [path for path in paths if path and not (Path(path) / "comingle").exists() and "papers" not in path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(outside), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_logits(person: Any, printed: str, tolerance: float) -> None:
    theirs = torch.tensor(json.loads(printed.splitlines()[-1]))
    torch.testing.assert_close(theirs, own_logits(person), rtol=0, atol=tolerance)


TRANSFORMERS = f"""
import json, torch
from transformers import AutoModelForCausalLM
ids = torch.tensor({IDS.tolist()})
logits = AutoModelForCausalLM.from_pretrained("exported")(input_ids=ids).logits.tolist()
"""
PEFT = f"""
import json, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
ids = torch.tensor({IDS.tolist()})
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "exported")
logits = model(input_ids=ids).logits.tolist()
"""
LLAMA = f"""
import json
from llama_cpp import Llama
model = Llama(FILES, logits_all=True, n_ctx=64, verbose=False, n_threads=1, type_k=0, type_v=0)
model.eval({IDS[0].tolist()})
logits = [model.scores[: {IDS.shape[1]}].tolist()]
"""


@pytest.mark.parametrize("case", CASES)
def test_transformers_opens_it(people: dict[str, Any], case: str) -> None:
    person, folder = people[case]
    person.export(folder / "exported", force=True)
    check_logits(person, python(TRANSFORMERS + END, folder), 1e-4)


def test_peft_opens_it(people: dict[str, Any]) -> None:
    person, folder = people["lora"]
    person.export(folder / "exported", format="peft", force=True)
    check_logits(person, python(PEFT + END, folder), 1e-4)


@needs_llama
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_opens_it(people: dict[str, Any], case: str) -> None:
    person, folder = people[case]
    person.export(folder / "exported", format="gguf", force=True)
    check_logits(person, python(LLAMA.replace("FILES", "'exported/model.gguf'") + END, folder), 1e-3)


@needs_llama
def test_llama_cpp_adds_it_to_the_base(people: dict[str, Any]) -> None:
    person, folder = people["lora"]
    person.export(folder / "exported", format="gguf-adapter", force=True)
    base = person.model.base
    write_gguf(folder / "base.gguf", "base", base.model, base.tokenizer, "F32")
    files = "'base.gguf', lora_path='exported/adapter.gguf'"
    check_logits(person, python(LLAMA.replace("FILES", files) + END, folder), 1e-3)


@needs_llama
def test_llama_cpp_opens_what_its_own_program_has_quantised(federate: Any, tmp_path: Path) -> None:
    if shutil.which("llama-quantize") is None:
        pytest.skip("llama-quantize is not on the PATH")
    person = trained(federate, "fedit", base="random:llama?dim=256&mlp=256").user("bob")
    person.export(tmp_path / "exported", format="gguf", dtype="q4_k_m")
    theirs = torch.tensor(json.loads(python(LLAMA.replace("FILES", "'exported/model.gguf'") + END, tmp_path)))
    own = own_logits(person)
    assert 1e-3 < (theirs - own).norm() / own.norm() < 0.2


@pytest.mark.parametrize("format", ["transformers", "peft", pytest.param("gguf", marks=needs_llama)])
def test_the_code_of_the_model_card_runs(people: dict[str, Any], format: str) -> None:
    """As it stands there, in the folder that has the export and the base."""
    person, folder = people["lora"]
    person.export(folder / "exported", format=format, force=True)
    card = (folder / "exported" / "README.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", card, re.MULTILINE | re.DOTALL)
    python(f"{code}\nimport sys\nassert 'comingle' not in sys.modules", folder)


def test_a_server_of_llama_cpp_says_the_same(people: dict[str, Any]) -> None:
    """``llama-server`` with the adapter on the base continues as the user's model does."""
    program = shutil.which("llama-server")
    if program is None:
        pytest.skip("llama-server is not on the PATH")
    person, folder = people["lora"]
    person.export(folder / "exported", format="gguf-adapter", force=True)
    base = person.model.base
    write_gguf(folder / "base.gguf", "base", base.model, base.tokenizer, "F32")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        program,
        "-m",
        "base.gguf",
        "--lora",
        "exported/adapter.gguf",
        "--port",
        str(port),
        "-c",
        "64",
        "-t",
        "1",
    ]
    command += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off", "--no-webui"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(f"{address}/health", server, folder / "log")
            with person.generating() as own:
                wanted = greedy(own)
            asked = {"prompt": wanted[:8], "n_predict": len(wanted) - 8, "temperature": 0, "return_tokens": True}
            asked |= {"samplers": ["temperature"], "ignore_eos": True}
            request = urllib.request.Request(
                f"{address}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.loads(response.read())["tokens"] == wanted[8:]
        finally:
            server.terminate()


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(log.read_text())
