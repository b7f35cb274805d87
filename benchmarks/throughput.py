"""Training speed of stacked users on a random GPT-2, against its own frozen base in the same run.

    python benchmarks/throughput.py --layers 4 --dim 256 --heads 4 --vocab 8192 --users 4 --batch 16 --ctx 128 --iters 4

Prints one JSON line. ``base_tokens_per_s`` sends the same tokens through the frozen base alone, forward and backward to
the embeddings, under the same settings (dtype, attention, compilation, chunked head), no adapters;
``adapter_efficiency`` is the ratio of the two. Both are timed in turns, so a machine whose speed drifts moves both.
On a machine with other work, ``--threads 1 --cpu-time`` counts the processor time that a pass took, not the time that
it waited for a core.
``--one-by-one`` adds the usual way (float32, users in turn, whole experts) and the speed-up over it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import comingle  # noqa: F401 (before torch, which reads GOMP_SPINCOUNT)

# isort: split
import torch

from clocks import add_clock, select_clock
from comingle.config.settings import AdaptersSection, RuntimeSection, TrainingSection
from comingle.data.text.streams import UserData
from comingle.methods import make
from comingle.models.adapted import adapt
from comingle.models.base import Base
from comingle.models.hardware import keep_buffers, peak_memory_bytes
from comingle.models.injection import ExpertCounts
from comingle.models.kernels import expert_mlp
from comingle.models.layouts import decoder_layers
from comingle.models.loading import backbone, lm_head, load_base
from comingle.models.loss import cross_entropy, use_native_code
from comingle.training.client import Clients, batch_size, train
from comingle.training.kinds.text import TextBatchSource
from comingle.training.settings import RunPlan
from one_by_one import one_by_one


def parse_arguments() -> argparse.Namespace:
    """Return the command line, with the selected clock."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "layers": 4,
        "dim": 256,
        "heads": 4,
        "vocab": 8192,
        "users": 4,
        "batch": 16,
        "ctx": 128,
        "iters": 4,
        "experts": 2,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--method", default="comigs-1g1s")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--users-per-step", type=int, default=None)
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile off")
    parser.add_argument("--no-native", action="store_true", help="leave the native mixture off")
    add_clock(parser)
    parser.add_argument("--one-by-one", action="store_true", help="time the usual way too (see one_by_one.py)")
    parser.add_argument("--no-base", action="store_true", help="skip the base alone (for memory measurements)")
    args = parser.parse_args()
    args.clock = select_clock(parser, args)
    return args


def make_clients(args: argparse.Namespace, base: Base) -> Clients:
    """Return clients of users with random tokens, under the method of the command line.

    Args:
        args: Options as of ``throughput.py``; ``experts`` is the number of experts per block of ``comigs-1g1s``.
        base: The base model.
    """
    if args.experts != 2 and args.method == "comigs-1g1s":
        method = make("comigs", specialists=args.experts - 1)
    else:
        method = make(args.method)
    placement = method.placement
    counts = ExpertCounts(generalists=placement.generalists, specialists=placement.specialists_of(args.users))
    model = adapt(
        base,
        AdaptersSection(),
        counts,
        routed=placement.routed,
        compiled=not args.no_compile,
        native_code=not args.no_native,
    )
    draw = torch.Generator().manual_seed(0)
    text = [torch.randint(args.vocab, (20_000,), generator=draw, dtype=torch.int32) for _ in range(args.users)]
    users = [UserData(name=f"user{i}", train=t, valid=t, test=t) for i, t in enumerate(text)]
    plan = RunPlan(
        method=method,
        training=TrainingSection(rounds=100, local_steps=1, batch_size=args.batch, context=args.ctx),
        runtime=RuntimeSection(users_per_step=args.users_per_step, micro_batch=args.micro_batch),
    )
    batch_source = TextBatchSource(users, plan, batch_size(plan, len(users)))
    return Clients(model, plan, trainers=users, users=users, batch_source=batch_source)


def base_pass(args: argparse.Namespace, base: Base, sequences: int) -> Callable[[], None]:
    """Return a function that passes all users' batches through the frozen base alone, forward and backward.

    Args:
        args: The command line.
        base: The base model; it is compiled in place.
        sequences: Sequences per pass.
    """
    head, body = lm_head(base), backbone(base.model)
    if not args.no_native and expert_mlp.is_enabled():
        use_native_code(base.model, attention=True)
    if not args.no_compile:
        for layer in decoder_layers(base.model):
            layer.compile()
    model: Any = base.model
    table = model.get_input_embeddings().weight.detach().clone().requires_grad_()
    tokens = torch.randint(args.vocab, (args.users * args.batch, args.ctx + 1), device=base.device)

    def step() -> None:
        for part in tokens.split(sequences):
            embedded = torch.nn.functional.embedding(part[:, :-1], table.detach()).requires_grad_()
            hidden = body(inputs_embeds=embedded, use_cache=False).last_hidden_state
            loss = cross_entropy(hidden, head, part[:, 1:]).mean()
            torch.autograd.grad(loss, embedded)

    return step


def time_step(step: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the seconds of a step, GPU work included."""
    started = clock()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started


def main() -> None:
    """Time the steps in turns and print one line of JSON."""
    args = parse_arguments()
    keep_buffers()
    name = f"random:gpt2?layers={args.layers}&dim={args.dim}&heads={args.heads}&vocab={args.vocab}"
    clients = make_clients(args, load_base(name, dtype=args.dtype, device=args.device))
    all_users = list(range(args.users))
    round_numbers = iter(range(10_000))
    steps: dict[str, Callable[[], object]] = {"train": lambda: train(clients, all_users, next(round_numbers))}
    router_phases = [phase for phase in clients.phases if phase.optimizer == "router"]
    if router_phases:
        single_step = replace(router_phases[0], steps=1)
        users_of_pass = all_users[: clients.pass_size.users]
        steps["router"] = lambda: clients.steps.take_phase(
            clients.cohort(users_of_pass, next(round_numbers)), single_step, 0
        )
    if not args.no_base:
        bare_base = load_base(name, dtype=args.dtype, device=args.device)
        steps["base"] = base_pass(args, bare_base, clients.pass_size.users * clients.pass_size.sequences)
    if args.one_by_one:
        shape = {"users": args.users, "batch": args.batch, "context": args.ctx, "vocab": args.vocab}
        steps["one_by_one"] = one_by_one(name, **shape, experts=args.experts, device=args.device)
    times: dict[str, list[float]] = {key: [] for key in steps}
    for round_number in range(args.iters + 2):  # the first two rounds compile and warm up
        for key, step in steps.items():
            seconds = time_step(step, args.clock.now)
            if round_number >= 2:
                times[key].append(seconds)
    tokens = args.users * args.batch * args.ctx
    medians = {key: statistics.median(values) for key, values in times.items()}
    result = {
        "method": clients.method.name,
        "dtype": str(clients.model.dtype).removeprefix("torch."),
        "device": str(clients.model.device),
        "compiled": expert_mlp.is_fusing(),
        "native": expert_mlp.is_enabled(),
        **args.clock.fields,
        "users_per_step": clients.pass_size.users,
        "micro_batch": clients.pass_size.sequences,
        "tokens_per_s": round(tokens / medians["train"], 1),
        "s_per_iter": round(medians["train"] / args.users, 4),
        "peak_rss_mb": round(peak_memory_bytes() / 1e6, 1),
        "router_step_s": round(medians["router"], 4) if "router" in medians else None,
    }
    if "base" in medians:
        result["base_tokens_per_s"] = round(tokens / medians["base"], 1)
        # Pair by pair: the two passes of one turn saw the same machine.
        ratios = [b / t for b, t in zip(times["base"], times["train"], strict=True)]
        result["adapter_efficiency"] = round(statistics.median(ratios), 3)
    if args.one_by_one:
        result["one_by_one_tokens_per_s"] = round(tokens / medians["one_by_one"], 1)
        ratios = [slow / fast for slow, fast in zip(times["one_by_one"], times["train"], strict=True)]
        result["speedup"] = round(statistics.median(ratios), 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
