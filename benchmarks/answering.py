"""Joint against separate generation when users' models are scored by their answers, on a random GPT-2 in one run.

    python benchmarks/answering.py [--users 4] [--questions 16] [--prompt 60] [--new 32] [--threads 1 --cpu-time]

Prints one JSON line: tokens per second of `comigs-1g1s` when users answer one after another in passes as large as a
training pass (2,048 tokens), and when all users share a pass. ``ratio`` is the median over turns of the time alone over
the time together. Both must give the same texts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from typing import Any

import comingle  # noqa: F401 (before torch, which reads GOMP_SPINCOUNT)

# isort: split
import torch

from clocks import add_clock, select_clock
from comingle.config.settings import TrainingSection
from comingle.data.conversations.encoding import Question, UserAnswers, build_answers, encode
from comingle.methods import make
from comingle.models.hardware import keep_buffers
from comingle.models.loading import load_base
from comingle.models.random_bases import EOS, byte_tokenizer
from comingle.training.client import Clients
from comingle.training.kinds import conversations as feeding
from comingle.training.settings import PassSize, RunPlan
from throughput import make_clients

TOKENS_PER_PASS = 2048
"""Tokens of a training pass."""


def make_users(args: argparse.Namespace) -> list[UserAnswers]:
    """Return users with questions of random letters."""
    draw, users = torch.Generator().manual_seed(0), []
    for number in range(args.users):
        texts = (97 + torch.randint(26, (args.questions, args.prompt), generator=draw)).tolist()
        questions = [Question(prompt=bytes(text).decode(), answer="a") for text in texts]
        encoded = encode(questions, byte_tokenizer())
        answers = build_answers(encoded, limit=args.new, measures=("rouge1", "loss"), ends=(EOS,))
        users.append(UserAnswers(name=f"user{number}", train=answers, valid=answers, test=answers))
    return users


def perturb_users(clients: Clients) -> Clients:
    """Perturb the tensors so that each user has a different model."""
    rows = clients.state.rows
    rows += 0.05 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
    return clients


def main() -> None:
    """Time both ways in turns and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "layers": 4,
        "dim": 256,
        "heads": 4,
        "vocab": 8192,
        "users": 4,
        "questions": 16,
        "prompt": 60,
        "new": 32,
        "repeats": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    add_clock(parser)
    args = parser.parse_args()
    clock = select_clock(parser, args)
    keep_buffers()
    settings = {"method": "comigs-1g1s", "experts": 2, "batch": 4, "ctx": 128, "device": "cpu", "no_compile": True}
    shape = {key: getattr(args, key) for key in ("layers", "dim", "heads", "vocab", "users", "dtype")}
    switches = {"users_per_step": None, "micro_batch": None, "no_native": False}
    name = "random:gpt2?" + "&".join(f"{key}={shape[key]}" for key in ("layers", "dim", "heads", "vocab"))
    base = load_base(name, dtype=args.dtype, device="cpu")
    clients = perturb_users(make_clients(argparse.Namespace(**shape, **settings, **switches), base))
    users = make_users(args)
    plan = RunPlan(method=make("fedavg"), training=TrainingSection(context=128))
    batch_source = feeding.AnswerBatchSource(users, plan, 4, tokenizer=byte_tokenizer())
    pass_size = PassSize(users=1, sequences=max(1, TOKENS_PER_PASS // (args.prompt + args.new)))
    generate, sets = partial(clients.scorer.generate, clients.models), [user.test for user in users]

    together = feeding._generation_shape  # the only private name: its decision is what this benchmark compares
    ways: dict[str, Any] = {"alone": lambda sets, pass_size: pass_size.slots(512), "together": together}
    times: dict[str, list[float]] = {way: [] for way in ways}
    texts: dict[str, list[list[str]]] = {}
    for repeat in range(args.repeats + 1):
        for way, choose_slots in ways.items():
            feeding._generation_shape = choose_slots
            started = clock.now()
            texts[way] = batch_source.generate_responses(generate, sets, list(range(args.users)), pass_size)
            times[way] += [clock.now() - started] if repeat else []
    assert texts["alone"] == texts["together"]
    tokens = args.users * args.questions * args.new
    line = {
        "users": args.users,
        "questions": args.questions,
        "dtype": args.dtype,
        **clock.fields,
        **{f"{way}_tokens_per_s": round(tokens / statistics.median(seconds), 1) for way, seconds in times.items()},
        "ratio": round(statistics.median(a / b for a, b in zip(times["alone"], times["together"], strict=True)), 2),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
