"""A month of a group whose text arrives in four parts: one user joins, one leaves and is forgotten.

    python examples/living/month.py
    python examples/living/month.py --base smollm2-135m --texts posts.jsonl.xz --user category

Three users start with the first part. With each part all users train again, on all of their text so far. A fourth user
joins with the third part; one leaves before the fourth, and the runs are repeated without it (``comingle leave --mode
exact``). At the end each user's model is scored on held-out text of every part, beside a model that was trained in the
same steps alone, and one that was trained at once on everything. Without ``--texts`` the users are packages of Python's
own library. ``clients.py`` is the same month with a server and a client process for each user.
"""

import argparse
import json
import lzma
import math
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import comingle
from comingle.runs.leaving import plan_removal, remove_user
from comingle.runs.results import Run

PARTS, STARTING, JOINS_AT = 4, 3, 2  # the fourth user joins with the third part
Files = dict[str, list[dict[str, str]]]
"""Paths of training, validation and test text, by user and part."""
Scores = dict[tuple[str, int], float]
"""Perplexity by user and part."""
PACKAGES = ("unittest", "asyncio", "email", "multiprocessing")


def texts_by_user(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return the documents of four users, in the order in which they arrive."""
    if arguments.texts is None:
        library = Path(sysconfig.get_path("stdlib"))
        return {
            name: chunks_of("\n".join(p.read_text() for p in sorted((library / name).glob("*.py"))))
            for name in PACKAGES
        }
    open_file = lzma.open if arguments.texts.suffix == ".xz" else open
    texts: dict[str, list[str]] = {}
    with open_file(arguments.texts, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            texts.setdefault(str(row[arguments.user]), []).append(row["text"])
    largest = sorted(texts, key=lambda name: -len(texts[name]))[:4]
    return {name: texts[name] for name in largest}


def chunks_of(text: str, size: int = 1000) -> list[str]:
    """Cut a text into documents."""
    return [text[start : start + size] for start in range(0, len(text), size)]


def write_parts(texts: dict[str, list[str]], folder: Path, documents: int) -> Files:
    """Write the training, validation and test text of each user and part; return the files.

    Args:
        texts: Documents by user, in the order in which they arrive.
        folder: Folder of the files.
        documents: Most documents of a user in a part; a fifth of them is for testing, and a tenth for validation.
    """
    files: Files = {}
    for name, all_documents in texts.items():
        files[name] = []
        count = min(documents, len(all_documents) // PARTS)
        for part in range(PARTS):
            chosen = all_documents[part * count : (part + 1) * count]
            fifth, tenth = max(1, count // 5), max(1, count // 10)
            splits = {"test": chosen[:fifth], "valid": chosen[fifth : fifth + tenth], "train": chosen[fifth + tenth :]}
            of_part = {split: folder / f"{name.replace('/', '-')}-{part + 1}-{split}.txt" for split in splits}
            for split, path in of_part.items():
                path.write_text("\n\n".join(splits[split]), encoding="utf-8")
            files[name].append({split: str(path) for split, path in of_part.items()})
    return files


def users_by_part(files: Files) -> list[list[str]]:
    """Return the users who take part when each part has arrived: the fourth joins late, and the second leaves early."""
    present = [list(files)[: STARTING + (part >= JOINS_AT)] for part in range(PARTS)]
    present[-1].remove(leaver_of(files))
    return present


def leaver_of(files: Files) -> str:
    """Return the user who leaves before the last part."""
    return list(files)[1]


def join_parts(parts: Sequence[Mapping[str, str]], path: Path) -> dict[str, str]:
    """Write the training and validation text of some parts together, and return the files with the last test text.

    Args:
        parts: Files by split, of each part.
        path: Beginning of the paths.
    """
    joined = {"test": parts[-1]["test"]}
    for split in ("train", "valid"):
        joined[split] = f"{path}-{split}.txt"
        Path(joined[split]).write_text("\n\n".join(Path(part[split]).read_text(encoding="utf-8") for part in parts))
    return joined


def train_in_parts(recipe: dict, files: Files, folder: Path, present: list[list[str]]) -> list[Run]:
    """Train a run for each part, each continuing the one before, and return them.

    Args:
        recipe: The recipe without data.
        files: Files by user and part.
        folder: Folder of the runs.
        present: Users of each part. The influence of one who is missing in the next part is removed before it.
    """
    folder.mkdir()
    earlier: dict = {}
    for part, names in enumerate(present):
        for name in set(present[part - 1]) - set(names) if part else ():
            remove_user(plan_removal(folder / f"part{part}", name, "exact"), print)
        users = {}
        for name in names:
            own_parts = [files[name][number] for number in range(part + 1) if name in present[number]]
            users[name] = join_parts(own_parts, folder / f"{list(files).index(name)}-until-{part + 1}")
        run = comingle.run(
            {**recipe, "data": {"users": users}, "seed": part}, out=folder / f"part{part + 1}", **earlier
        )
        earlier = {"continue_from": {"run": str(folder / f"part{part + 1}"), "moments": True}}
        print(f"{folder.name} part {part + 1}: {', '.join(names)}; {run}", flush=True)
    return [comingle.load(folder / f"part{part + 1}") for part in range(len(present))]


def train_at_once(recipe: dict, files: Files, folder: Path, present: list[list[str]]) -> Run:
    """Train one run on all parts, in which each user takes as many steps as in its parts together.

    Args:
        recipe: The recipe without data.
        files: Files by user and part.
        folder: Folder of the run.
        present: Users of each part; those of the last one take part.
    """
    folder.mkdir()
    users, steps = {}, {}
    for name in present[-1]:
        own_parts = [of_part for of_part, names in zip(files[name], present, strict=True) if name in names]
        steps[name] = recipe["training"]["local_steps"] * len(own_parts) // PARTS
        users[name] = join_parts(own_parts, folder / str(list(files).index(name)))
    training = {**recipe["training"], "rounds": PARTS * recipe["training"]["rounds"], "local_steps": steps}
    return comingle.run({**recipe, "training": training, "data": {"users": users}}, out=folder / "run")


def train_references(recipe: dict, files: Files, folder: Path, present: list[list[str]]) -> dict[str, Scores]:
    """Train each user alone in parts, and all at once, and return the scores.

    Args:
        recipe: The recipe of the group, without data.
        files: Files by user and part.
        folder: Folder of the runs.
        present: Users of each part. One who leaves is in none of these runs.
    """
    staying = [[name for name in names if name in present[-1]] for names in present]
    alone = train_in_parts({**recipe, "method": "local"}, files, folder / "alone", staying)[-1]
    at_once = train_at_once(recipe, files, folder / "at once", staying)
    return {"alone": score(alone, files), "at once": score(at_once, files)}


def score(run: Run, files: Files, parts: Sequence[int] = range(PARTS)) -> Scores:
    """Return the perplexity of held-out text by user and part.

    Args:
        run: The run whose models are scored.
        files: Files by user and part.
        parts: Numbers of the parts.
    """
    return {
        (name, part): run.user(name).perplexity(Path(files[name][part]["test"]).read_text(encoding="utf-8"), context=64)
        for name in run.users
        for part in parts
    }


def print_results(ways: Mapping[str, Scores], when_new: Scores, present: list[list[str]]) -> None:
    """Print the table, and for each user what taking part in parts has cost.

    Args:
        ways: Scores of the final models: "together", "alone" and "at once".
        when_new: Scores of each part when it was the newest.
        present: Users of each part.
    """
    print(f"{'user':16} {'part':>4} " + " ".join(f"{way:>9}" for way in ways))
    for name in present[-1]:
        for part in range(PARTS):
            print(f"{name:16} {part + 1:>4} " + " ".join(f"{scores[name, part]:>9.2f}" for scores in ways.values()))
    together, alone, at_once = (ways[way] for way in ("together", "alone", "at once"))
    last = PARTS - 1
    for name in present[-1]:
        own_parts = [part for part in range(PARTS) if name in present[part]]
        behind = percent(together[name, last] / at_once[name, last])
        lost = max(percent(together[name, part] / when_new[name, part]) for part in own_parts if part < last)
        ratios = [math.log(together[name, part] / alone[name, part]) for part in own_parts]
        to_alone = percent(math.exp(sum(ratios) / len(ratios)))
        print(
            f"{name}: newest part {behind:+.1f}% to training at once ({verdict(behind <= 3)}: at most 3%); "
            f"earlier parts {lost:+.1f}% since they were new ({verdict(lost <= 5)}: at most 5%); "
            f"all its parts {to_alone:+.1f}% to training alone ({verdict(to_alone <= 0)}: not above 0)"
        )


def percent(ratio: float) -> float:
    """Return how much larger than one a ratio is, in percent."""
    return 100 * (ratio - 1)


def verdict(is_kept: bool) -> str:
    """Return whether a bound is kept."""
    return "kept" if is_kept else "missed"


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of the options of a month."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="random:llama?dim=64&layers=2")
    parser.add_argument("--texts", type=Path, help="JSON lines with the keys text and --user, plain or xz.")
    parser.add_argument("--user", default="user", help="Key of the user of a row.")
    parser.add_argument("--documents", type=int, default=120, help="Documents of a user and part.")
    parser.add_argument("--rounds", type=int, default=12, help="Rounds for each part.")
    parser.add_argument("--steps", type=int, default=5, help="Local steps in a round.")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="Constant learning rate of the experts.")
    parser.add_argument("--method", default="comigs-1g1s")
    parser.add_argument("--guard", action="store_true", help="Serve each user the best of several models.")
    return parser


def recipe_of(arguments: argparse.Namespace) -> dict:
    """Return the recipe without data."""
    experts = {"schedule": "constant", "learning_rate": arguments.learning_rate}
    return {
        "base": arguments.base,
        "method": arguments.method,
        "training": {
            "rounds": arguments.rounds,
            "local_steps": arguments.steps,
            "batch_size": 4,
            "context": 64,
            "experts": experts,
        },
        "evaluation": {
            "first": False,
            "every": arguments.rounds,
            "guard": "local" if arguments.guard else None,
        },
    }


def main() -> None:
    """Train in parts, alone and at once, and print the table."""
    arguments = argument_parser(__doc__).parse_args()
    began, recipe = time.monotonic(), recipe_of(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files = write_parts(texts_by_user(arguments), folder, arguments.documents)
        present = users_by_part(files)
        runs = train_in_parts(recipe, files, folder / "together", present)
        when_new: Scores = {}
        for part, run in enumerate(runs):
            when_new |= score(run, files, [part])
        ways = {"together": score(runs[-1], files), **train_references(recipe, files, folder, present)}
        print(f"\nperplexity on held-out text, after {PARTS} parts ({time.monotonic() - began:.0f} s)")
        print_results(ways, when_new, present)


if __name__ == "__main__":
    main()
