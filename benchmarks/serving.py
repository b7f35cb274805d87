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

from clocks import add_clock, clock_of
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
from comingle.serving.rows import prepare
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


def people_of(base: str, method: str, users: int, dtype: str) -> dict[str, PersonalModel]:
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
    return {name: cast_person(run.user(name)) for name in names}


def cast_person(person: Any) -> PersonalModel:
    assert isinstance(person, PersonalModel)
    return person


def at_once(engine: Engine, prompts: Mapping[str, list[int]], new: int) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():

        def tell(piece: Any, name: str = name) -> None:
            said[name].append(piece.sampled.token)

        engine.submit(Request(name=name, prompt=prompt, sampling=read_sampling(max_new_tokens=new), on_piece=tell))
    while engine.busy:
        engine.step()
    return said


def exported(people: Mapping[str, Any]) -> dict[str, Any]:
    """Export each user's model for transformers and load it."""
    from transformers import AutoModelForCausalLM

    networks = {}
    for name, person in people.items():
        with tempfile.TemporaryDirectory() as folder:
            person.export(Path(folder) / "model", format="transformers")
            dtype = person.model.base.dtype
            networks[name] = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=dtype).eval()
    return {name: partial(nullcontext, network) for name, network in networks.items()}


def one_by_one(networks: Mapping[str, Any], prompts: Mapping[str, list[int]], new: int) -> dict[str, list[int]]:
    said = {}
    for name, prompt in prompts.items():
        with networks[name]() as network, torch.inference_mode():
            ids = torch.tensor([prompt])
            generate: Any = network.generate
            out = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        said[name] = out[0, len(prompt) :].tolist()
    return said


def timed(call: Any, clock: Any) -> tuple[float, dict[str, list[int]]]:
    start = clock()
    said = call()
    return sum(map(len, said.values())) / (clock() - start), said


def growth(people: Mapping[str, PersonalModel]) -> float:
    """Return the growth of the process in bytes per additional user."""
    first = next(iter(people.values()))
    gc.collect()
    before = psutil.Process().memory_info().rss
    further = {
        f"further {i}": replace(first, tensors={k: t.clone() for k, t in first.tensors.items()}) for i in range(FURTHER)
    }
    engine = Engine({**people, **further}, rows=1)
    one_row = sum(t.numel() * t.element_size() for t in engine.rows.stacked.values())
    return (psutil.Process().memory_info().rss - before - one_row) / FURTHER


def main() -> None:
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
    clock = clock_of(parser, args).now
    people = people_of(args.base, args.method, args.users, args.dtype)
    if not args.no_native:
        expert_mlp.enable(cache_folder() / "native")
    further = round(growth(people))  # first of all: later there is memory that others have left
    engine = Engine(people, rows=args.users)
    names = list(people)
    prompts = {name: list(engine.tokenizer(PROMPTS[i % 8])["input_ids"]) for i, name in enumerate(people)}
    networks = exported(people) if args.alone == "exported" else {name: one.generating for name, one in people.items()}
    prepare(engine.models[names[0]].model.base.model)
    at_once(engine, prompts, 4)
    one_by_one(networks, prompts, 4)
    served, alone, same = [], [], 0
    for _ in range(args.repeats):
        speed, together = timed(lambda: at_once(engine, prompts, args.new), clock)
        served.append(speed)
        speed, apart = timed(lambda: one_by_one(networks, prompts, args.new), clock)
        alone.append(speed)
        same = sum(together[name] == apart[name] for name in people)
    own = next(iter(engine.rows.user_tensors.values()))
    record = {
        "benchmark": "serving",
        **vars(args),
        "served_tokens_per_s": round(statistics.median(served), 2),
        "alone_tokens_per_s": round(statistics.median(alone), 2),
        "ratio": round(statistics.median(served) / statistics.median(alone), 2),
        "same_texts": same,
        "bytes_per_user": further,
        "adapter_bytes": sum(t.numel() * t.element_size() for t in own.values()),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
