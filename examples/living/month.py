"""A month of a group whose text arrives in four parts: one user joins, one leaves and is forgotten.

    python examples/living/month.py
    python examples/living/month.py --base smollm2-135m --texts posts.jsonl.xz --user category

Three users start with the first part. With the second part they continue; a fourth user joins with the third; one
leaves before the fourth, and the runs are repeated without it (``comingle leave --mode exact``). At the end each
user's model is scored on held-out text of every part, beside a model that was trained in the same steps alone, and one
that was trained at once on everything. Without ``--texts`` the users are packages of Python's own library.
"""

import argparse
import json
import lzma
import sysconfig
import tempfile
import time
from pathlib import Path

import comingle
from comingle.runs.leaving import plan_removal, remove_user
from comingle.runs.results import Run

PARTS, STARTING, JOINS_AT = 4, 3, 2  # the fourth user joins with the third part
Files = dict[str, list[dict[str, str]]]
"""Paths of training, validation and test text, by user and part."""
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
        documents: Most documents of a user in a part; a tenth of them is for testing, and another for validation.
    """
    files: Files = {}
    for name, all_documents in texts.items():
        files[name] = []
        count = min(documents, len(all_documents) // PARTS)
        for part in range(PARTS):
            chosen = all_documents[part * count : (part + 1) * count]
            tenth = max(1, count // 10)
            splits = {"test": chosen[:tenth], "valid": chosen[tenth : 2 * tenth], "train": chosen[2 * tenth :]}
            of_part = {split: folder / f"{name.replace('/', '-')}-{part + 1}-{split}.txt" for split in splits}
            for split, path in of_part.items():
                path.write_text("\n\n".join(splits[split]), encoding="utf-8")
            files[name].append({split: str(path) for split, path in of_part.items()})
    return files


def train_in_parts(recipe: dict, files: Files, folder: Path, leaver: str, replay: float) -> Run:
    """Train a run for each part, each continuing the one before; return the last one.

    Args:
        recipe: The recipe without data.
        files: Files by user and part.
        folder: Folder of the runs.
        leaver: User who leaves before the last part.
        replay: Share of earlier text in the training data.
    """
    names, earlier = list(files), {}
    for part in range(PARTS):
        present = names[: STARTING + (part >= JOINS_AT)]
        if part == PARTS - 1:
            present = [name for name in present if name != leaver]
            remove_user(plan_removal(folder / f"part{part}", leaver, "exact"), print)
        users = {name: files[name][part] for name in present}
        data = {"users": users, "replay": replay if earlier else 0.0}
        changes = {"data": data, "seed": part}
        run = comingle.run({**recipe, **changes}, out=folder / f"part{part + 1}", **earlier)
        keeps_moments = recipe["training"].get("experts") is not None  # constant rates
        earlier = {"continue_from": {"run": str(folder / f"part{part + 1}"), "moments": keeps_moments}}
        print(f"{folder.name} part {part + 1}: {', '.join(present)}; {run}", flush=True)
    return run


def train_at_once(recipe: dict, files: Files, folder: Path, leaver: str) -> Run:
    """Train one run on all parts, in which each user takes as many steps as in its parts together.

    Args:
        recipe: The recipe without data.
        files: Files by user and part.
        folder: Folder of the run.
        leaver: User who takes no part.
    """
    users, steps = {}, {}
    for position, (name, parts) in enumerate(files.items()):
        if name == leaver:
            continue
        own_parts = parts[JOINS_AT if position >= STARTING else 0 :]
        users[name] = {"test": parts[-1]["test"]}
        steps[name] = recipe["training"]["local_steps"] * len(own_parts) // PARTS
        for split in ("train", "valid"):
            whole = Path(parts[0][split]).with_stem(f"whole-{position}-{split}")
            whole.write_text("\n\n".join(Path(part[split]).read_text(encoding="utf-8") for part in own_parts))
            users[name][split] = str(whole)
    training = {**recipe["training"], "rounds": PARTS * recipe["training"]["rounds"], "local_steps": steps}
    return comingle.run({**recipe, "training": training, "data": {"users": users}}, out=folder)


def main() -> None:
    """Train in parts, alone and at once, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="random:llama?dim=64&layers=2")
    parser.add_argument("--texts", type=Path, help="JSON lines with the keys text and --user, plain or xz.")
    parser.add_argument("--user", default="user", help="Key of the user of a row.")
    parser.add_argument("--documents", type=int, default=120, help="Documents of a user and part.")
    parser.add_argument("--rounds", type=int, default=6, help="Rounds for each part.")
    parser.add_argument("--steps", type=int, default=10, help="Local steps in a round.")
    parser.add_argument("--replay", type=float, default=0.3, help="Share of earlier text in training data.")
    parser.add_argument("--cosine", action="store_true", help="Begin the learning rates anew with each part.")
    parser.add_argument("--method", default="comigs-1g1s")
    arguments = parser.parse_args()
    began = time.monotonic()
    recipe = {
        "base": arguments.base,
        "method": arguments.method,
        "training": {"rounds": arguments.rounds, "local_steps": arguments.steps, "batch_size": 4, "context": 64},
        "evaluation": {"first": False, "every": arguments.rounds},
    }
    if not arguments.cosine:
        recipe["training"] |= {"experts": {"schedule": "constant"}, "router": {"schedule": "constant"}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files = write_parts(texts_by_user(arguments), folder, arguments.documents)
        leaver, recipe_alone = list(files)[1], {**recipe, "method": "local"}
        ways = {
            "together": train_in_parts(recipe, files, folder / "together", leaver, arguments.replay),
            "alone": train_in_parts(recipe_alone, files, folder / "alone", leaver, arguments.replay),
            "at once": train_at_once(recipe, files, folder / "at once", leaver),
        }
        for entry in ways["together"].metrics["earlier"]:
            for name, scores in entry["users"].items():
                then, now = (scores[time_]["test_perplexity"] for time_ in ("before", "after"))
                print(f"{name}, test text of {Path(entry['run']).name}: {then:.2f} then, {now:.2f} after the last part")
        print(f"\nperplexity on held-out text, after {PARTS} parts ({time.monotonic() - began:.0f} s)")
        print(f"{'user':16} {'part':>4} " + " ".join(f"{way:>9}" for way in ways))
        for name in ways["together"].users:
            for part, of_part in enumerate(files[name], start=1):
                text = Path(of_part["test"]).read_text(encoding="utf-8")
                scores = [run.user(name).perplexity(text, context=64) for run in ways.values()]
                print(f"{name:16} {part:>4} " + " ".join(f"{score:>9.2f}" for score in scores))


if __name__ == "__main__":
    main()
