"""Eight users served at once against the same requests one after another through transformers' ``generate``.

``python benchmarks/serving.py [--base smollm2-135m] [--method comigs-1g1s] [--users 8] [--new 64]`` prints one JSON
line:

- ``served_tokens_per_s`` and ``alone_tokens_per_s``: new tokens a second, and ``ratio``, the first over the second;
- ``same_texts``: how many of the greedy texts are the same both ways (in float32 all, in bfloat16 ties are rounding's);
- ``bytes_per_user``: what the process has grown by for each of 32 further users, and ``adapter_bytes``, their adapters.

The one-by-one way takes exported checkpoints; with ``--alone adapted``, each user's model over the one base.
Both ways see the same prompts and threads, in turns; the middle one of ``--repeats`` counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

import comingle  # noqa: F401 (before torch, which reads GOMP_SPINCOUNT)

# isort: split
import torch

from clocks import add_clock, select_clock
from comingle.config import parse_recipe
from comingle.data.populations import as_users
from comingle.data.text.streams import UserData
from comingle.models.generation import read_sampling
from comingle.models.kernels import expert_mlp
from comingle.models.loading import load_base
from comingle.models.personal import PersonalModel
from comingle.runs.results import Run
from comingle.runs.session import build
from comingle.serving.engine import Engine, Request
from comingle.serving.rows import reorder_weights
from comingle.training.kinds.base import RunData
from comingle.training.kinds.text import KIND
from comingle.utils.files import cache_folder

PROMPTS = (
    "The harbour was quiet that morning, and",
    "To make a good cup of coffee, first",
    "My favourite thing about mathematics is that",
    "When the rain had stopped, the children went out to look for snails. They",
    "A function in Python is defined with the keyword def, followed by",
    "Dear neighbours,",
    "In the year 1848, revolutions broke out all over Europe. In Vienna,",
    "The difference between a comet and an asteroid is",
)
FURTHER = 32
"""Users that are added to measure the memory of each."""


def make_models(base: str, method: str, users: int, dtype: str) -> dict[str, PersonalModel]:
    """Return the models of users whose adapters are perturbed, as if trained.

    Args:
        base: The base model.
        method: Name of the method.
        users: Number of users.
        dtype: Type of the base.
    """
    names = [f"user {i}" for i in range(users)]
    recipe = parse_recipe(
        {
            "base": base,
            "method": method,
            "data": {"users": dict.fromkeys(names, "made")},
            "runtime": {"dtype": dtype, "device": "cpu", "compile": False},
        }
    )
    text = torch.arange(2000, dtype=torch.int32)
    made = as_users(UserData(name=name, train=text, valid=text, test=text) for name in names)
    federation = build(recipe, RunData(kind=KIND, base=load_base(base, dtype=dtype, device="cpu"), users=made))
    rows = federation.clients.state.rows
    rows.add_(0.003 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)))
    run = Run(folder=None, recipe=recipe, metrics={}, federation=federation)
    return {name: as_personal_model(run.user(name)) for name in names}


def as_personal_model(model: Any) -> PersonalModel:
    """Narrow the type of a user's model."""
    assert isinstance(model, PersonalModel)
    return model


def serve_together(engine: Engine, prompts: Mapping[str, list[int]], new: int) -> dict[str, list[int]]:
    """Generate for all users at once with the engine of ``comingle serve``.

    Args:
        engine: The engine with all users' models.
        prompts: Token ids of each user's prompt.
        new: Number of new tokens.

    Returns:
        The new tokens of each user.
    """
    generated: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():

        def collect(piece: Any, name: str = name) -> None:
            generated[name].append(piece.sampled.token)

        engine.submit(Request(name=name, prompt=prompt, sampling=read_sampling(max_new_tokens=new), on_piece=collect))
    while engine.busy:
        engine.step()
    return generated


def load_exported(models: Mapping[str, Any]) -> dict[str, Any]:
    """Export each user's model for transformers; return, for each user, a function that gives the loaded network."""
    from transformers import AutoModelForCausalLM

    networks = {}
    for name, model in models.items():
        with tempfile.TemporaryDirectory() as folder:
            model.export(Path(folder) / "model", format="transformers")
            dtype = model.model.base.dtype
            networks[name] = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=dtype).eval()
    return {name: partial(nullcontext, network) for name, network in networks.items()}


def generate_alone(networks: Mapping[str, Any], prompts: Mapping[str, list[int]], new: int) -> dict[str, list[int]]:
    """Generate for one user after another with transformers' ``generate``.

    Args:
        networks: For each user a function that returns its network as a context manager.
        prompts: Token ids of each user's prompt.
        new: Number of new tokens.

    Returns:
        The new tokens of each user.
    """
    generated = {}
    for name, prompt in prompts.items():
        with networks[name]() as network, torch.inference_mode():
            ids = torch.tensor([prompt])
            generate: Any = network.generate
            out = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        generated[name] = out[0, len(prompt) :].tolist()
    return generated


def time_tokens(call: Any, clock: Any) -> tuple[float, dict[str, list[int]]]:
    """Return the new tokens per second of a way to generate, and the tokens.

    Args:
        call: Function that returns the new tokens of each user.
        clock: Function that returns the time in seconds.
    """
    start = clock()
    generated = call()
    return sum(map(len, generated.values())) / (clock() - start), generated


def bytes_per_user(models: Mapping[str, PersonalModel]) -> float:
    """Return the growth of the process in bytes per additional user."""
    first = next(iter(models.values()))
    gc.collect()
    before = psutil.Process().memory_info().rss
    copies = {
        f"further {i}": replace(first, tensors={k: t.clone() for k, t in first.tensors.items()}) for i in range(FURTHER)
    }
    engine = Engine({**models, **copies}, rows=1)
    one_row = sum(t.numel() * t.element_size() for t in engine.row_adapters.stacked.values())
    return (psutil.Process().memory_info().rss - before - one_row) / FURTHER


def main() -> None:
    """Time both ways in turns and print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--method", default="comigs-1g1s")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--alone", choices=["exported", "adapted"], default="exported")
    parser.add_argument("--no-native", action="store_true", help="without compiled code, as runtime.compile: false")
    add_clock(parser)
    args = parser.parse_args()
    clock = select_clock(parser, args).now
    models = make_models(args.base, args.method, args.users, args.dtype)
    if not args.no_native:
        expert_mlp.enable(cache_folder() / "native")
    user_bytes = round(bytes_per_user(models))  # first of all: later there is memory that others have left
    engine = Engine(models, rows=args.users)
    names = list(models)
    prompts = {name: list(engine.tokenizer(PROMPTS[i % 8])["input_ids"]) for i, name in enumerate(models)}
    networks = (
        load_exported(models)
        if args.alone == "exported"
        else {name: model.generating for name, model in models.items()}
    )
    reorder_weights(engine.models[names[0]].model.base.model)
    serve_together(engine, prompts, 4)
    generate_alone(networks, prompts, 4)
    served, alone, same = [], [], 0
    for _ in range(args.repeats):
        speed, together = time_tokens(lambda: serve_together(engine, prompts, args.new), clock)
        served.append(speed)
        speed, apart = time_tokens(lambda: generate_alone(networks, prompts, args.new), clock)
        alone.append(speed)
        same = sum(together[name] == apart[name] for name in models)
    user_tensors = next(iter(engine.row_adapters.user_tensors.values()))
    record = {
        "benchmark": "serving",
        **vars(args),
        "served_tokens_per_s": round(statistics.median(served), 2),
        "alone_tokens_per_s": round(statistics.median(alone), 2),
        "ratio": round(statistics.median(served) / statistics.median(alone), 2),
        "same_texts": same,
        "bytes_per_user": user_bytes,
        "adapter_bytes": sum(t.numel() * t.element_size() for t in user_tensors.values()),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
