"""Eight users served at once against the same requests one after another through transformers' ``generate``.

``python benchmarks/serving.py [--base smollm2-135m] [--method comigs-1g1s] [--users 8] [--new 64]`` prints one JSON
line:

- ``served_tokens_per_s`` and ``alone_tokens_per_s``: new tokens a second, and ``ratio``, the first over the second;
- ``same_texts``: how many of the greedy texts are the same both ways (in float32 all, in bfloat16 ties are rounding's);
- ``bytes_per_user``: what the process has grown by for each of 32 further users, and ``adapter_bytes``, their adapters.

The one-by-one way takes exported checkpoints; with ``--alone adapted``, each user's model over the one base.
Both ways see the same prompts and threads, in turns; the middle one of ``--repeats`` counts.

``--many 8 64 1000`` measures instead how the throughput depends on the number of users whose adapters are on disk, with
``--cache-users`` of them in memory and requests that follow a Zipf law: ``many_tokens_per_s`` by number of users,
``of_fewest`` relative to the first number, ``edge_ratio`` (all users drawn alike: as many as fit in memory, over a
quarter more), ``reads`` from disk, and ``peak_memory_gb`` of the process.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
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
from comingle.models.hardware import peak_memory_bytes
from comingle.models.kernels import expert_mlp
from comingle.models.loading import load_base
from comingle.models.personal import PersonalModel
from comingle.runs.results import Run
from comingle.runs.session import build
from comingle.serving.engine import Engine, Request
from comingle.serving.models import StoredModels
from comingle.serving.rows import reorder_weights
from comingle.training.checkpoints import STATE, CheckpointState, finish_checkpoint, progress_of
from comingle.training.kinds.base import RunData
from comingle.training.kinds.text import KIND
from comingle.training.state import initial_state
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


def make_models(base: str, method: str, users: int, dtype: str, rank: int = 8) -> dict[str, PersonalModel]:
    """Return the models of users whose adapters are perturbed, as if trained.

    Args:
        base: The base model.
        method: Name of the method.
        users: Number of users.
        dtype: Type of the base.
        rank: LoRA rank.
    """
    names = [f"user {i}" for i in range(users)]
    recipe = parse_recipe(
        {
            "base": base,
            "method": method,
            "adapters": {"rank": rank},
            "data": {"users": dict.fromkeys(names, "made")},
            "runtime": {"dtype": dtype, "device": "cpu", "compile": False},
        }
    )
    text = torch.arange(2000, dtype=torch.int32) % 256  # tokens that every base has
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


def write_adapters(folder: Path, models: Mapping[str, PersonalModel], users: int) -> StoredModels:
    """Write a checkpoint with the adapters of many users, each perturbed, and return models that are read from it.

    Args:
        folder: Folder of the checkpoint.
        models: Models of few users, which the others resemble.
        users: Number of users.
    """
    any_model = next(iter(models.values()))
    layout, tensors = any_model.model.layout, any_model.tensors
    names = [f"user {i}" for i in range(users)]
    header: dict[str, Any] = {}
    end = 0
    for slot in layout.slots:
        begin, end = end, end + users * slot.size * 4
        header[f"user/{slot.name}"] = {"dtype": "F32", "shape": [users, *slot.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(0)
    with (folder / STATE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for slot in layout.slots:
            for _ in range(users):
                noise = 0.003 * torch.randn(slot.size, generator=draw)
                file.write((tensors[slot.name].float().flatten() + noise).numpy().tobytes())
    progress = progress_of(1, "", names)
    finish_checkpoint(folder, folder.with_name("complete"), progress)
    like = initial_state(
        layout,
        torch.ones(1, layout.columns, dtype=torch.bool),
        names=names[:1],
        local=torch.zeros(layout.columns, dtype=torch.bool),
        ranks=torch.ones(1, dtype=torch.int64),
        seed=0,
    )
    stored = CheckpointState(folder.with_name("complete"), progress, layout, like, names)

    def read(name: str) -> PersonalModel:
        rows = stored.rows_of([int(name.removeprefix("user "))])
        return replace(any_model, name=name, tensors=layout.views(rows.to(any_model.model.dtype)))

    return StoredModels(names, read)


def serve_requests(engine: Engine, names: Sequence[str], new: int, clock: Any) -> float:
    """Answer one request after another of these users, as many at once as there are rows; return tokens per second.

    Args:
        engine: The engine.
        names: The user of each request.
        new: Number of new tokens.
        clock: Function that returns the time in seconds.
    """
    generated = 0

    def count(piece: Any) -> None:
        nonlocal generated
        assert piece.error is None
        generated += 1

    for i, name in enumerate(names):
        prompt = list(engine.tokenizer(PROMPTS[i % 8])["input_ids"])
        sampling = replace(read_sampling(max_new_tokens=new), eos_token_id=())
        engine.submit(Request(name=name, prompt=prompt, sampling=sampling, on_piece=count))
    start = clock()
    while engine.busy:
        engine.step()
    return generated / (clock() - start)


def measure_many(args: argparse.Namespace, clock: Any) -> dict[str, Any]:
    """Return the throughput with adapters on disk, by number of users."""
    models = make_models(args.base, args.method, 2, args.dtype, args.rank)
    if not args.no_native:
        expert_mlp.enable(cache_folder() / "native")
    reorder_weights(next(iter(models.values())).model.base.model)
    draw = random.Random(0)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        stored = write_adapters(Path(folder) / "draft", models, max(args.many))
        del models
        size = sum(t.nbytes for t in stored["user 0"].tensors.values())
        engine = Engine(stored, rows=args.users, cache_bytes=args.cache_users * size)
        cache = engine.row_adapters.user_tensors

        def speed(users: int, exponent: float) -> float:
            weights = [1 / (i + 1) ** exponent for i in range(users)]
            warm = [f"user {i}" for i in range(min(users, args.cache_users))]
            serve_requests(engine, warm, 1, clock)  # the state in which earlier requests leave the cache
            numbers = draw.choices(range(users), weights, k=args.requests)
            return serve_requests(engine, [f"user {i}" for i in numbers], args.new, clock)

        edges = (args.cache_users, args.cache_users + args.cache_users // 4)
        cases = [(users, 1.0) for users in args.many] + [(users, 0.0) for users in edges]
        speeds: dict[tuple[int, float], list[float]] = {case: [] for case in cases}
        reads: dict[tuple[int, float], int] = dict.fromkeys(cases, 0)
        for _ in range(args.repeats):
            for case in cases:
                before = cache.num_reads
                speeds[case].append(speed(*case))
                reads[case] += cache.num_reads - before
    middle = {case: statistics.median(values) for case, values in speeds.items()}
    fewest = middle[args.many[0], 1.0]
    return {
        "adapter_bytes": size,
        "many_tokens_per_s": {users: round(middle[users, 1.0], 1) for users in args.many},
        "of_fewest": {users: round(middle[users, 1.0] / fewest, 3) for users in args.many},
        "edge_ratio": round(middle[edges[0], 0.0] / middle[edges[1], 0.0], 3),
        "reads": {f"{users}{'' if exponent else ' alike'}": reads[users, exponent] for users, exponent in cases},
        "peak_memory_gb": round(peak_memory_bytes() / 1e9, 3),
    }


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
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--many", type=int, nargs="+", help="numbers of users whose adapters are on disk")
    parser.add_argument("--cache-users", type=int, default=16, help="adapters in memory with --many")
    parser.add_argument("--requests", type=int, default=64, help="requests of each measurement with --many")
    parser.add_argument("--folder", help="folder for the adapters of --many, on the disk to measure")
    add_clock(parser)
    args = parser.parse_args()
    clock = select_clock(parser, args).now
    if args.many:
        print(json.dumps({"benchmark": "serving", **vars(args), **measure_many(args, clock)}))
        return
    models = make_models(args.base, args.method, args.users, args.dtype, args.rank)
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
    user_tensors = engine.row_adapters.user_tensors[names[0]]
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
