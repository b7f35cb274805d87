"""Answers of ``comingle live`` while it trains, and the time from new text to a changed answer; one JSON line.

    python benchmarks/live.py --base BASE
    python benchmarks/live.py --base smollm2-135m --dtype bfloat16 --rounds 2 --steps 4

A live run of four users trains on a first text. Then requests are timed one after another, first while nothing is
trained and then from the arrival of new text of all users until the answer to a fixed prompt has changed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

USERS = ("ann", "bob", "cem", "dan")
FIRST_CHARACTERS, NEW_CHARACTERS = 12_000, 8_000
PROMPT, ANSWER_TOKENS = "def main() -> None:", 16


def main() -> None:
    """Start the command, measure, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--answers", type=int, default=30, help="Answers while nothing is trained.")
    parser.add_argument("--pause", type=float, default=0.5, help="Seconds between an answer and the next request.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        texts = write_recipe(asked, folder)
        command = [sys.executable, "-m", "comingle", "live", str(folder / "recipe.yaml"), "--out", str(folder / "live")]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen([*command, "--port", "0", "--users", str(len(USERS))], stdout=log, stderr=log)
        try:
            print(json.dumps({"benchmark": "live", "base": Path(asked.base).name, **measure(asked, folder, texts)}))
        finally:
            process.terminate()
            process.wait(120)


def write_recipe(asked: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Write the recipe and the users' first texts, files of Python's library; return their new texts."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    paths, new_texts = {}, {}
    for number, name in enumerate(USERS):
        start = number * (FIRST_CHARACTERS + NEW_CHARACTERS)
        paths[name] = str(folder / f"{name}.txt")
        (folder / f"{name}.txt").write_text(text[start : start + FIRST_CHARACTERS], encoding="utf-8")
        new_texts[name] = text[start + FIRST_CHARACTERS : start + FIRST_CHARACTERS + NEW_CHARACTERS]
    training = {"rounds": asked.rounds, "local_steps": asked.steps, "batch_size": 4, "context": 64}
    evaluation = {"first": False, "every": asked.rounds}
    recipe: dict[str, Any] = {"base": asked.base, "data": {"users": paths}, "training": training}
    recipe |= {"evaluation": evaluation, "runtime": {"dtype": asked.dtype}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return new_texts


def measure(asked: argparse.Namespace, folder: Path, texts: dict[str, str]) -> dict[str, Any]:
    """Return seconds of answers, and from new text to a changed answer.

    Args:
        asked: Options of the command line.
        folder: Folder of the live run.
        texts: New text by user.
    """
    while not (found := re.search(r"http://[\d.:]+", (folder / "log").read_text(encoding="utf-8"))):
        time.sleep(0.1)
    url = found[0]
    wait_for_run(url, "0001")
    idle = [answer(url, asked.pause)[1] for _ in range(asked.answers)]
    text_before, _seconds = answer(url)
    began = time.monotonic()
    for name, text in texts.items():
        documents = [{"text": text[start : start + 1000]} for start in range(0, len(text), 1000)]
        post(f"{url}/v1/users/{name}/documents", {"documents": documents})
    meanwhile: list[float] = []
    while True:
        text, seconds = answer(url, asked.pause)
        if text != text_before:
            break
        meanwhile.append(seconds)
    return {
        "dtype": asked.dtype,
        "pause_seconds": asked.pause,
        "idle_median_seconds": round(statistics.median(idle), 3),
        "idle_p95_seconds": round(percentile(idle), 3),
        "training_median_seconds": round(statistics.median(meanwhile), 3),
        "training_p95_seconds": round(percentile(meanwhile), 3),
        "p95_ratio": round(percentile(meanwhile) / percentile(idle), 2),
        "answers_while_training": len(meanwhile),
        "changed_after_seconds": round(time.monotonic() - began, 1),
    }


def percentile(seconds: list[float]) -> float:
    """Return the 95th percentile."""
    return statistics.quantiles(seconds, n=20)[-1]


def wait_for_run(url: str, run: str) -> None:
    """Wait until a run has ended and its models answer."""
    while True:
        with urllib.request.urlopen(f"{url}/v1/live") as response:
            state = json.load(response)
        if state["state"] == "waiting" and state["run"] == run:
            return
        time.sleep(0.2)


def answer(url: str, pause: float = 0.0) -> tuple[str, float]:
    """Return the most probable answer of the first user's model, and its seconds, after a pause."""
    time.sleep(pause)
    body = {"model": USERS[0], "prompt": PROMPT, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    began = time.monotonic()
    response = post(f"{url}/v1/completions", body)
    return response["choices"][0]["text"], time.monotonic() - began


def post(url: str, body: object) -> dict[str, Any]:
    """Send a request with a JSON body, and return that of the response."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return dict(json.load(response))


if __name__ == "__main__":
    main()
