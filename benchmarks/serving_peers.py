"""``comingle serve`` beside llama.cpp's server and transformers' ``generate``, over HTTP as their users start them.

    python benchmarks/serving_peers.py --llama-server PATH/llama-server
    python benchmarks/serving_peers.py --llama-server PATH/llama-server --formats float32 --prompts 32 --turns 5

A run of ``fedit`` (one LoRA for each of 8 users) is trained for a step, and served by

- ``comingle serve RUN``, with ``runtime.dtype`` float32 and bfloat16, and with ``quantise: 8bit``;
- ``llama-server`` with the base in F32, BF16 and Q8_0 (``comingle export`` makes the adapters), one LoRA per request;
- transformers, whose ``generate`` answers one request after another with PEFT adapters (float32 and bfloat16).

Requests are greedy streams of up to ``--new`` tokens. A line of JSON is printed for each server
and case: 1 or 8 at once, with the same adapter or eight different ones, and prompts of 32 or 512 tokens. It has the
tokens per second of all requests together, the median seconds to the first token, the 95th percentile of the seconds
between tokens, and the peak memory of the server (PSS). Servers are measured in turns; medians over the turns count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from comingle.federation.flower.processes import free_port

USERS = tuple(f"user{number}" for number in range(8))
GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "8bit": "Q8_0"}
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"runtime": {"dtype": "float32"}},
    "bfloat16": {"runtime": {"dtype": "bfloat16"}},
    "8bit": {"runtime": {"dtype": "bfloat16"}, "quantise": "8bit"},
}
_START_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """Requests that are sent at the same time.

    Args:
        users: The user of each request.
        prompt_tokens: Length of each prompt in tokens.
    """

    users: tuple[str, ...]
    prompt_tokens: int

    @property
    def name(self) -> str:
        """Name in the table, such as "8 at once, 8 adapters, 32 tokens"."""
        adapters = len(set(self.users))
        noun = "adapter" if adapters == 1 else "adapters"
        return f"{len(self.users)} at once, {adapters} {noun}, {self.prompt_tokens} tokens"


@dataclass(kw_only=True)
class Answer:
    """Times of one answer.

    Args:
        started: Time of the request.
        times: Time of each piece of the stream.
        tokens: Number of new tokens.
    """

    started: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0


Ask = Callable[[str, str], Answer]
"""Sends a request for a user with a prompt, and returns its times."""


def main() -> None:
    """Measure every server in every case, and print the lines."""
    asked = _arguments()
    texts = Prompts()
    users = {1: USERS[:1], 8: USERS}
    cases = [Case(users=users[1], prompt_tokens=tokens) for tokens in asked.prompts]
    cases += [Case(users=(USERS[0],) * 8, prompt_tokens=tokens) for tokens in asked.prompts]
    cases += [Case(users=users[8], prompt_tokens=tokens) for tokens in asked.prompts]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for number_format in asked.formats:
            servers = start_commands(asked, folder, number_format)
            for name, start in servers.items():
                with start() as (ask, pid):
                    for case in cases:
                        if name == "transformers" and len(case.users) > 1:
                            continue  # it has no batch of different requests: eight take eight times as long
                        found = measure(asked, case, ask, texts)
                        line = {"server": name, "format": number_format, "case": case.name, **found}
                        print(json.dumps({"benchmark": "serving_peers", **line, "peak_mib": pss_mib(pid)}), flush=True)


def measure(asked: argparse.Namespace, case: Case, ask: Ask, texts: Prompts) -> dict[str, float]:
    """Return the medians over some turns of a case.

    Args:
        asked: Options of the command line.
        case: The requests.
        ask: Sends a request to the server.
        texts: Prompts that no request has had before.
    """
    speeds, firsts, gaps = [], [], []
    for _ in range(asked.turns + 1):  # the first is not counted
        prompts = [texts.next(case.prompt_tokens) for _ in case.users]  # new ones, so that none is in a cache
        began = time.perf_counter()
        with ThreadPoolExecutor(len(case.users)) as threads:
            answers = list(threads.map(ask, case.users, prompts))
        seconds = time.perf_counter() - began
        speeds.append(sum(answer.tokens for answer in answers) / seconds)
        firsts.append(statistics.median(answer.times[0] - answer.started for answer in answers))
        between = [later - earlier for a in answers for earlier, later in zip(a.times, a.times[1:], strict=False)]
        gaps.append(statistics.quantiles(between, n=20)[-1])
    return {
        "tokens_per_s": round(statistics.median(speeds[1:]), 1),
        "first_token_ms": round(1000 * statistics.median(firsts[1:]), 1),
        "p95_between_ms": round(1000 * statistics.median(gaps[1:]), 1),
    }


class Prompts:
    """Different prompts of a given length, from the source of Python's library."""

    def __init__(self) -> None:
        """Read the text."""
        from comingle.models.loading import load_base

        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._tokenizer = load_base("smollm2-135m", dtype="float32", device="cpu").tokenizer
        assert self._tokenizer is not None
        text = "\n".join(path.read_text(encoding="utf-8") for path in files)
        self._ids = list(self._tokenizer(text[:2_000_000])["input_ids"])
        self._at = 0

    def next(self, tokens: int) -> str:
        """Return the next text of about this number of tokens."""
        assert self._tokenizer is not None
        ids = self._ids[self._at : self._at + tokens]
        self._at += tokens
        return str(self._tokenizer.decode(ids))


def start_commands(asked: argparse.Namespace, folder: Path, number_format: str) -> dict[str, Callable[[], Any]]:
    """Train the run of a number format, export what others need, and return how each server is started.

    Args:
        asked: Options of the command line.
        folder: Folder for runs, exports and recipes.
        number_format: Number format of the weights, a key of :data:`SETTINGS`.
    """
    run = folder / f"run-{number_format}"
    if not run.exists():
        train(asked, folder, run, number_format)
    servers: dict[str, Callable[[], Any]] = {"comingle": lambda: comingle_server(run, asked.new)}
    base = folder / f"base-{number_format}.gguf"
    if asked.llama_server is not None:
        from comingle.models.loading import load_base
        from comingle.serving.export.gguf import write_gguf

        if not base.exists():
            plain = load_base(asked.base, dtype="float32", device="cpu")
            assert plain.tokenizer is not None
            write_gguf(base, "base", plain.model, plain.tokenizer, GGUF_TYPES[number_format])
        adapters = export(asked, folder, "gguf-adapter")
        servers["llama.cpp"] = lambda: llama_server(asked, base, adapters)
    if number_format in ("float32", "bfloat16"):
        servers["transformers"] = lambda: transformers_server(asked, export(asked, folder, "peft"), number_format)
    return servers


def train(asked: argparse.Namespace, folder: Path, run: Path, number_format: str) -> None:
    """Train the users' adapters for a step.

    Args:
        asked: Options of the command line.
        folder: Folder for runs, exports and recipes.
        run: The run folder to write.
        number_format: Number format of the weights, a key of :data:`SETTINGS`.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: -path.stat().st_size)
    users = {name: str(path) for name, path in zip(USERS, files, strict=False)}
    recipe = {
        "base": asked.base,
        "method": "fedit",
        "data": {"users": users, "max_train_tokens": 2000, "max_valid_tokens": 200, "max_test_tokens": 200},
        "training": {"rounds": 1, "local_steps": 1, "batch_size": 2, "context": 64},
        "evaluation": {"first": False},
        **SETTINGS[number_format],
    }
    file = folder / f"{number_format}.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "comingle", "run", str(file), "--out", str(run), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def export(asked: argparse.Namespace, folder: Path, export_format: str) -> list[Path]:
    """Export the adapters of the float32 run, and return the folders of the users.

    Args:
        asked: Options of the command line.
        folder: Folder for runs, exports and recipes.
        export_format: Value of ``--format``.
    """
    target, run = folder / export_format, folder / "run-float32"
    if not run.exists():
        train(asked, folder, run, "float32")
    if not target.exists():
        command = [sys.executable, "-m", "comingle", "export", str(run), "--user", "all", "--format", export_format]
        subprocess.run([*command, "--to", str(target), "--quiet"], check=True)
    return [target / name for name in USERS]


# ---------------------------------------------------------------- servers


@contextmanager
def comingle_server(run: Path, new: int) -> Iterator[tuple[Ask, int]]:
    """Run ``comingle serve``."""
    port = free_port()
    command = [sys.executable, "-m", "comingle", "serve", str(run), "--port", str(port), "--rate", "100000"]
    with _process(command, f"http://127.0.0.1:{port}/health") as pid:
        yield lambda user, prompt: stream(port, {"model": user, "prompt": prompt}, new), pid


@contextmanager
def llama_server(asked: argparse.Namespace, base: Path, adapters: Sequence[Path]) -> Iterator[tuple[Ask, int]]:
    """Run ``llama-server`` with all users' adapters loaded; each request chooses one.

    Args:
        asked: Options of the command line.
        base: GGUF file of the base.
        adapters: Folders with the users' adapters.
    """
    port = free_port()
    loras = ",".join(str(path / "adapter.gguf") for path in adapters)
    command = [str(asked.llama_server), "-m", str(base), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--lora", loras, "--lora-init-without-apply", "--parallel", "8", "--ctx-size", str(8 * 1024)]
    command += ["--threads", str(os.cpu_count()), "--no-webui"]

    def ask(user: str, prompt: str) -> Answer:
        lora = [{"id": number, "scale": float(name == user)} for number, name in enumerate(USERS)]
        return stream(port, {"prompt": prompt, "lora": lora, "cache_prompt": False}, asked.new)

    with _process(command, f"http://127.0.0.1:{port}/health") as pid:
        yield ask, pid


@contextmanager
def transformers_server(
    asked: argparse.Namespace, adapters: Sequence[Path], number_format: str
) -> Iterator[tuple[Ask, int]]:
    """Answer with ``generate`` of transformers and the adapters of PEFT, in this process.

    Args:
        asked: Options of the command line.
        adapters: Folders with the users' adapters.
        number_format: Number format of the weights, a key of :data:`SETTINGS`.
    """
    import torch
    from peft import PeftModel
    from transformers import TextIteratorStreamer

    from comingle.models.loading import load_base

    base = load_base(asked.base, dtype=number_format, device="cpu")
    tokenizer: Any = base.tokenizer
    model: Any = PeftModel.from_pretrained(base.model, str(adapters[0]), adapter_name=USERS[0])
    for name, path in zip(USERS[1:], adapters[1:], strict=True):
        model.load_adapter(str(path), adapter_name=name)

    def ask(user: str, prompt: str) -> Answer:
        model.set_adapter(user)
        answer = Answer(started=time.perf_counter())
        ids = tokenizer(prompt, return_tensors="pt")
        times = TextIteratorStreamer(tokenizer, skip_prompt=True)

        def note(value: object) -> None:
            answer.times.append(time.perf_counter())
            answer.tokens += 1

        times.put = note  # type: ignore[method-assign]  # each token, not only whole words
        limits = {"max_new_tokens": asked.new, "do_sample": False, "use_cache": True}
        with torch.inference_mode():
            model.generate(**ids, streamer=times, **limits)
        answer.times, answer.tokens = answer.times[1:], answer.tokens - 1  # the first is the prompt
        return answer

    yield ask, os.getpid()


@contextmanager
def _process(command: Sequence[str], health: str) -> Iterator[int]:
    """Run a server, and wait until it answers; yield its process id."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until = time.monotonic() + _START_SECONDS
            while True:
                try:
                    with urllib.request.urlopen(health, timeout=5):
                        break
                except OSError:
                    if process.poll() is not None or time.monotonic() > until:
                        log.seek(0)
                        raise SystemExit(f"serving_peers: {command[0]} has not started\n{log.read()[-2000:]}") from None
                    time.sleep(0.2)
            yield process.pid
        finally:
            process.terminate()
            process.wait(60)


_peaks: dict[int, int] = {}
_watched = threading.Lock()


def pss_mib(pid: int) -> int:
    """Return the largest memory of a process with its children since the first call for it, in MiB."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    with _watched:
        now = sum(process.memory_full_info().pss for process in processes)
        _peaks[pid] = max(_peaks.get(pid, 0), now)
        return round(_peaks[pid] / 2**20)


def stream(port: int, body: dict[str, Any], new: int) -> Answer:
    """Request a completion as a stream, and return the times of its tokens.

    Args:
        port: Port of the server.
        body: The request, without its length and sampling.
        new: Largest number of new tokens.
    """
    body = {**body, "max_tokens": new, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    url = f"http://127.0.0.1:{port}/v1/completions"
    answer = Answer(started=time.perf_counter())
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                answer.tokens = chunk["usage"]["completion_tokens"]
            if chunk["choices"] and chunk["choices"][0].get("text"):
                answer.times.append(time.perf_counter())
    return answer


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server; without it, it is left out.")
    parser.add_argument("--formats", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--prompts", nargs="+", type=int, default=[32, 512], help="Lengths in tokens.")
    parser.add_argument("--new", type=int, default=64, help="New tokens per request.")
    parser.add_argument("--turns", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
