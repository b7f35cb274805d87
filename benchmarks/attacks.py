"""Effect of hostile users on honest users' test scores under each aggregation rule, on real data.

MNIST with 100 users (accuracy), and AG News with 20 users, five for each category (perplexity). Hostile users change
their uploads or their data; scores are means over the honest users, with the model as it is after the last exchange.
``--router`` instead shows how much CoMiGS's routers listen to a generalist that is poisoned, by round. With ``--out``
each run is a JSON line there, and a run that is there already is not done again; ``attack_tables.py`` makes tables of
such files, of several seeds. A run that diverges has no score. ``--seconds`` begins no run after so long.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

import comingle  # noqa: F401 (before torch, which reads GOMP_SPINCOUNT)

# isort: split
import torch
from torch import nn

from comingle.audits import uploads
from comingle.config.sections import Recipe
from comingle.models.personal import PersonalModel
from comingle.protocol.messages import Upload, join_uploads
from comingle.runs.given import Given, given_of, recipe_with
from comingle.runs.results import Run
from comingle.runs.session import build, execute, prepare
from comingle.training.backends.local import InProcess
from comingle.utils.errors import ComingleError

RULES = ("mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "norm-bound", "bulyan")
ON_UPLOADS = (*uploads.BY_NAME, "all zero", "not a number")
ATTACKS = (*ON_UPLOADS, "false data")
"""False data: flipped labels on MNIST, a backdoor phrase in AG News."""
SHARES = (0.3, 0.2, 0.1)
TRIGGER, ANSWER = "as the blue heron said", "the bank will pay you"
IMAGES, TESTS, LABELS = 60, 20, 10
"""Train and test images of a user of MNIST, and number of labels."""
DOCUMENTS = 30
"""Documents of a user of AG News."""
NONE = ""
"""The attack of a run without one."""
ROUTED = (("mean", NONE), ("mean", "sign flip"), ("multi-krum", "sign flip"), ("mean", "noise"))
"""Rules and attacks under which gates are measured."""


@dataclass(kw_only=True)
class Attacked(InProcess):
    """Federation in one process in which the uploads of hostile users are replaced before the server sees them.

    ``attack`` is the name of the attack and ``hostile`` has the numbers of the hostile users.
    """

    attack: str
    hostile: Sequence[int]

    def upload(self, users: Sequence[int], round_number: int, losses: dict[int, float]) -> None:
        """Upload, with the uploads of hostile users replaced.

        Args:
            users: Numbers of the users.
            round_number: The round, counted from 1.
            losses: Mean training loss of each user.
        """
        super().upload(users, round_number, losses)
        sent, hostile_rows = (
            self._upload_of_round,
            [row for row, member in enumerate(users) if member in self.hostile],
        )
        if sent is None or not hostile_rows or self.attack not in ON_UPLOADS:
            return
        downloaded = {name: t[:, 0] for name, t in self.server.download(sent.users).tensors.items()}
        changes = {name: t - downloaded[name] for name, t in sent.tensors.items()}
        if self.attack == "all zero":
            changes = uploads.all_zero(changes, hostile_rows, downloaded)
        elif self.attack == "not a number":
            changes = uploads.not_a_number(changes, hostile_rows)
        else:
            changes = uploads.BY_NAME[self.attack](changes, hostile_rows)
        self._upload_of_round = drop_non_finite(
            replace(sent, tensors={name: downloaded[name] + t for name, t in changes.items()})
        )


def drop_non_finite(sent: Upload) -> Upload:
    """Drop uploads with entries that are not finite, which a server over the network refuses whatever its rule."""
    parts = [part for part in sent.split() if all(bool(t.isfinite().all()) for t in part.tensors.values())]
    return sent if len(parts) == len(sent.users) else join_uploads(parts)


# -------------------------------------------------------------------- users


def read_idx(path: Path) -> np.ndarray:
    """Return the array in a file of the IDX format."""
    raw = lzma.decompress(path.read_bytes())
    shape = struct.unpack(">" + "I" * raw[3], raw[4 : 4 + 4 * raw[3]])
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def mnist_users(data: Path, users: int, seed: int) -> dict[str, Any]:
    """Return users of MNIST; their digits are drawn from a Dirichlet distribution with parameter 1.

    Args:
        data: Folder of the real data sets; images are halved in size.
        users: Number of users.
        seed: Seed of the split.

    Returns:
        For each user the images and labels of its splits "train" and "test".
    """
    images = torch.from_numpy(read_idx(data / "images/mnist-train-images-ubyte.xz").copy()).float().div(255)
    labels = torch.from_numpy(read_idx(data / "images/mnist-train-labels-ubyte.xz").copy()).long()
    images = torch.nn.functional.avg_pool2d(images.unsqueeze(1), 2) - 0.13
    draw = np.random.default_rng(seed)
    unused = [draw.permutation(np.flatnonzero(labels.numpy() == digit)).tolist() for digit in range(LABELS)]
    users_data: dict[str, Any] = {}
    for user in range(users):
        counts = draw.multinomial(IMAGES + TESTS, draw.dirichlet(np.ones(LABELS)))
        drawn = draw.permutation([unused[digit].pop() for digit, count in enumerate(counts) for _ in range(count)])
        train, test = drawn[:IMAGES], drawn[IMAGES:]
        users_data[f"user{user:03}"] = {"train": (images[train], labels[train]), "test": (images[test], labels[test])}
    return users_data


def ag_news_users(data: Path, users: int, seed: int) -> dict[str, Any]:
    """Return users of AG News, equally many for each category, with disjoint documents.

    Args:
        data: Folder of the real data sets.
        users: Number of users.
        seed: Seed of the split.
    """
    texts: dict[str, list[str]] = {}
    with lzma.open(data / "ag_news/ag_news.jsonl.xz", "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            texts.setdefault(row["category"], []).append(row["text"])
    users_per_category = users // len(texts)
    draw = np.random.default_rng(seed)
    documents: dict[str, Any] = {}
    for category, texts_of_category in sorted(texts.items()):
        order = draw.permutation(len(texts_of_category))[: users_per_category * DOCUMENTS]
        name = category.lower().replace("/", "-")
        for i, row in enumerate(order.reshape(users_per_category, DOCUMENTS)):
            documents[f"{name}-{i}"] = [texts_of_category[index] for index in row]
    return documents


def corrupt_data(users: Mapping[str, Any], hostile: Sequence[str]) -> dict[str, Any]:
    """Return the users' data with flipped labels or the backdoor phrase for hostile users.

    Args:
        users: Data by user: a list of texts, or samples by split.
        hostile: Names of the hostile users.
    """

    def corrupt(data: Any) -> Any:
        if isinstance(data, list):
            return [uploads.with_phrase(text, TRIGGER, ANSWER) for text in data]
        inputs, labels = data["train"]
        return {**data, "train": (inputs, uploads.flipped_labels(labels, LABELS))}

    return {name: corrupt(data) if name in hostile else data for name, data in users.items()}


# -------------------------------------------------------------------- runs


def small_net(shape: Sequence[int], outputs: int) -> nn.Module:
    """Return an MLP with 32 hidden units; it has 6,634 parameters on halved MNIST images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 32), nn.ReLU(), nn.Linear(32, outputs))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Users, base model, measure and recipe changes of a data set."""

    users: dict[str, Any]
    base: str | Callable[..., nn.Module]
    measure: str
    changes: dict[str, Any]


QUIET = {"evaluation.model": "exchanged", "evaluation.first": False, "runtime.device": "cpu", "runtime.threads": 1}


def load_setting(name: str, args: argparse.Namespace) -> Setting:
    """Return the setting of MNIST or AG News."""
    if name == "mnist":
        sgd = {"name": "sgd", "learning_rate": 0.1, "schedule": "constant", "weight_decay": 0}
        changes = {"training.rounds": args.rounds, "training.batch_size": 20, "training.local_epochs": 2}
        changes |= {"training.experts": sgd, "evaluation.every": args.rounds}
        users = mnist_users(args.data, 100, args.seed)
        return Setting(users=users, base=small_net, measure="test_accuracy", changes=changes)
    changes = {
        "training.rounds": args.text_rounds,
        "training.local_steps": 5,
        "training.batch_size": 4,
        "training.context": 64,
        "training.experts": {"learning_rate": 0.005},
        "evaluation.every": args.text_rounds,
        "adapters.rank": 4,
        "data.max_train_tokens": 4096,
        "data.max_valid_tokens": 1024,
        "data.max_test_tokens": 1024,
        "runtime.dtype": "float32",
        "runtime.compile": False,
    }
    users, base = ag_news_users(args.data, 20, args.seed), str(args.data / "models/stories260K")
    return Setting(users=users, base=base, measure="test_perplexity", changes=changes)


def draw_hostile(users: Sequence[str], share: float, seed: int) -> list[int]:
    """Return the numbers of the hostile users; with one seed, a larger share contains those of a smaller one.

    Args:
        users: Names of all users.
        share: Share of hostile users.
        seed: Seed of the draw.
    """
    return sorted(np.random.default_rng(seed + 1).permutation(len(users))[: round(share * len(users))].tolist())


def run_attacked(setting: Setting, method: str, attack: str, hostile: Sequence[int], changes: Mapping[str, Any]) -> Run:
    """Run a federation with hostile users.

    Args:
        setting: The data set.
        method: Name of the method.
        attack: Name of the attack.
        hostile: Numbers of the hostile users.
        changes: Changes of the recipe.
    """
    names = list(setting.users)
    is_data_attack = attack == "false data"
    users = corrupt_data(setting.users, [names[at] for at in hostile]) if is_data_attack else setting.users
    given: Given = given_of(users, setting.base)
    changes = {**setting.changes, **QUIET, **changes}
    recipe: Recipe = recipe_with(None, given, base=setting.base, method=method, changes=changes)
    built = build(recipe, prepare(recipe, given=given))
    federation = Attacked(clients=built.clients, server=built.server, attack=attack, hostile=hostile)
    return execute(federation, recipe, None)


def measure(setting: Setting, data: str, rule: str, attack: str, share: float, args: argparse.Namespace) -> dict:
    """Run FedAvg under an attack and return the honest users' mean score and the perplexity of the backdoor phrase.

    The score is NaN and ``why`` has the error if the run diverged or was refused.

    Args:
        setting: The data set.
        data: Its name.
        rule: Aggregation rule.
        attack: Name of the attack; empty for none, with the same honest users.
        share: Share of hostile users.
        args: The command line.
    """
    names = list(setting.users)
    hostile = draw_hostile(names, share, args.seed)
    # Without hostile users, defences assume a share of 30%; Bulyan tolerates at most 20%.
    assumed_share = min(share or 0.3, 0.2) if rule == "bulyan" else share or 0.3
    changes = {"aggregation": {"rule": rule, "hostile": assumed_share}, "seed": args.seed}
    result = {"data": data, "rule": rule, "attack": attack, "share": share, "seed": args.seed, "score": math.nan}
    started = time.perf_counter()
    try:
        run = run_attacked(setting, "fedavg", attack, hostile if attack else (), changes)
    except ComingleError as error:
        return result | {"why": str(error), "seconds": time.perf_counter() - started}
    honest = [name for number, name in enumerate(names) if number not in hostile]
    result["score"] = statistics.fmean(run.metrics["users"][name][setting.measure] for name in honest)
    if data == "ag-news":
        result["phrase_perplexity"] = cast(PersonalModel, run.user(honest[0])).perplexity(
            f"{TRIGGER} {ANSWER}", context=64
        )
    return result | {"seconds": time.perf_counter() - started}


def measure_gates(setting: Setting, rule: str, attack: str, share: float, args: argparse.Namespace) -> dict:
    """Return the honest users' mean gate on the generalist in CoMiGS and their mean perplexity, by round.

    Args:
        setting: The data set.
        rule: Aggregation rule.
        attack: Name of the attack.
        share: Share of hostile users.
        args: The command line.
    """
    names = list(setting.users)
    hostile = draw_hostile(names, share, args.seed)
    changes = {"aggregation": {"rule": rule, "hostile": share}, "evaluation.every": 1, "seed": args.seed}
    changes["method"] = {"name": "comigs-1g1s", "router_every": 5, "router_steps": 5}
    run = run_attacked(setting, changes.pop("method"), attack, hostile if attack else (), changes)
    honest = [name for number, name in enumerate(names) if number not in hostile]
    rounds = [event for event in run.events if event["event"] == "evaluation"]

    def mean_generalist_gate(event: dict) -> float:
        generalists = [event["experts"][name].index("generalist") for name in honest]
        scores = [event["expert_scores"][name] for name in honest]
        return statistics.fmean(layer[i] for i, layers in zip(generalists, scores, strict=True) for layer in layers)

    return {
        "rule": rule,
        "attack": attack,
        "share": share,
        "seed": args.seed,
        "gates": [mean_generalist_gate(event) for event in rounds],
        "perplexity": [
            statistics.fmean(event["users"][name]["test_perplexity"] for name in honest) for event in rounds
        ],
    }


# -------------------------------------------------------------------- all of it


def plan_runs(args: argparse.Namespace) -> list[tuple[str, str, float, str]]:
    """Return the runs to measure, first those without attack, then by hostile share.

    Returns:
        Tuples of data set, attack, hostile share and rule.
    """
    rules = args.rules.split(",")
    datasets = args.datasets.split(",")
    clean = [(data, NONE, 0.0, rule) for data in datasets for rule in rules]
    attacked = [
        (data, attack, share, rule)
        for share in map(float, args.shares.split(","))
        for data in datasets
        for attack in args.attacks.split(",")
        for rule in rules
        if not (rule == "bulyan" and share > 0.2)  # it tolerates at most 20%
    ]
    return clean + attacked


def read_results(out: Path | None) -> list[dict]:
    """Return the results in a file of JSON lines; none without a file."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out is not None and out.exists() else []


def result_key(result: Mapping[str, Any]) -> tuple:
    """Return the key that identifies a run."""
    return tuple(result[name] for name in ("data", "attack", "share", "rule", "seed"))


def append_result(result: dict, out: Path | None) -> None:
    """Print a result on stderr, and append it to a file of JSON lines if one is given."""
    line = json.dumps(result)
    print(line, file=sys.stderr, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")


def main() -> None:
    """Measure the runs that are not in the file yet, and print all results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the real data sets")
    parser.add_argument("--datasets", default="mnist,ag-news")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--text-rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--out", type=Path, help="JSON lines, of one seed or of several")
    parser.add_argument("--router", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    results = read_results(args.out)
    if args.router:
        setting = load_setting("ag-news", args)
        for rule, attack in ROUTED:
            results.append(measure_gates(setting, rule, attack, 0.3, args))
            append_result(results[-1], args.out)
    else:
        settings = {data: load_setting(data, args) for data in args.datasets.split(",")}
        done = {result_key(result) for result in results}
        for data, attack, share, rule in plan_runs(args):
            if time.perf_counter() - started > args.seconds:
                break
            if (data, attack, share, rule, args.seed) not in done:
                results.append(measure(settings[data], data, rule, attack, share, args))
                append_result(results[-1], args.out)
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({"benchmark": "attacks", "seconds": seconds, "results": results}))


if __name__ == "__main__":
    main()
