"""The peers' sides of ``peers.py``: each runs in a process of its own, in an environment that need not have comingle.

    python benchmarks/peers_theirs.py PEER --work FOLDER [--checkout FOLDER] [--threads 2]

Reads the work that ``peers_ours.py`` wrote (:func:`read_work`), and answers lines of standard input: ``turn`` with the
seconds of one turn, ``score`` with what the model has learnt. This file imports torch and, where it is used, the peer.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import torch
from torch import Tensor, nn

Work = Mapping[str, Any]
"""Contents of a row: tensors, sizes and settings by name."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One implementation of a row.

    Args:
        turn: Runs one turn: a local step of every user, or a round.
        score: Returns what the model has learnt, such as its loss, or how its values differ from ours.
    """

    turn: Callable[[], object]
    score: Callable[[], dict[str, Any]] = dict


def read_work(folder: Path, dtype: str, checkout: Path | None = None) -> Work:
    """Return the contents of a row, as ``peers_ours.py`` wrote them.

    Args:
        folder: Folder of the work.
        dtype: Number format of models.
        checkout: Folder of the peer's public code, for peers that are not a package.
    """
    written = torch.load(folder / "work.pt", weights_only=True)
    return {**written, "folder": folder, "dtype": dtype, "checkout": checkout}


@cache
def replies() -> TextIO:
    """Return standard output for answers alone; what is printed after the first call goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer(side: Side) -> None:
    """Answer lines of standard input with lines of JSON.

    Args:
        side: The implementation that takes the turns.
    """
    print(json.dumps({"ready": True}), file=replies(), flush=True)
    for line in sys.stdin:
        if line.strip() == "turn":
            started = time.perf_counter(), time.process_time()
            side.turn()
            ended = time.perf_counter(), time.process_time()
            reply: dict[str, Any] = {"seconds": ended[0] - started[0], "cpu_seconds": ended[1] - started[1]}
        else:
            reply = side.score()
        print(json.dumps(reply), file=replies(), flush=True)


# -------------------------------------------------------------------- language models


def load_model(work: Work, *, adapters: Sequence[str] = ("default",)) -> Any:
    """Return a row's base model with PEFT's LoRA on all linears, starting as comingle's does.

    Args:
        work: Contents of the row; its number format is that of the base, the LoRA is float32.
        adapters: Names of the adapters.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(work["folder"] / "base", dtype=getattr(torch, work["dtype"]))
    base.config.use_cache = False
    config = LoraConfig(
        r=work["rank"],
        lora_alpha=work["rank"] * work["scale"],
        target_modules=work["linears"],
        fan_in_fan_out=work["turned"],
        task_type="CAUSAL_LM",
    )
    model: Any = get_peft_model(base, config, adapter_name=adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, config)
    if work.get("lora"):
        own_names = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, parameter in own_names.items():
                parameter.copy_(work["lora"][name])
    return model


def next_token_loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the mean loss of windows ``(n, context + 1)``: inputs and their targets."""
    logits = model(input_ids=tokens[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.no_grad()
def test_loss(model: Any, work: Work) -> dict[str, Any]:
    """Return the mean loss on all users' test windows."""
    return {"loss": next_token_loss(model.eval(), work["test"].flatten(0, 1)).item()}


def peft(work: Work) -> Side:
    """Return PEFT: an adapter for each user on one base, trained one after another."""
    users = work["users"]
    names = [f"user{i}" for i in range(users)]
    model = load_model(work, adapters=names)
    tokens = torch.randint(work["vocab"], (users, work["batch"], work["context"] + 1))
    optimizers = []
    for user in names:
        model.set_adapter(user)
        optimizers.append(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=work["rate"]))

    def turn() -> None:
        for user, optimizer, user_tokens in zip(names, optimizers, tokens, strict=True):
            model.set_adapter(user)
            optimizer.zero_grad()
            next_token_loss(model, user_tokens).backward()
            optimizer.step()

    return Side(turn=turn)


def flower_client(message: Any, context: Any, folder: Path, dtype: str) -> Any:
    """Take a Flower client's local steps; the base model stays in memory between messages to the same actor.

    Args:
        message: Flower's message, with the server's LoRA.
        context: Flower's context, with the number of the user.
        folder: Folder of the work.
        dtype: Number format of the base.
    """
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    if folder not in _LOADED:
        torch.set_num_threads(1)  # an actor for each core
        work = read_work(folder, dtype)
        _LOADED[folder] = (work, load_model(work))
    work, model = _LOADED[folder]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=work["rate"], betas=(0.9, 0.95))
    windows = work["train"][context.node_config["partition-id"]]
    for batch in windows[torch.randperm(len(windows))].split(work["batch"]):
        optimizer.zero_grad()
        next_token_loss(model.train(), batch).backward()
        optimizer.step()
    trained = {name: p.detach() for name, p in parameters.items()}
    content = {"arrays": ArrayRecord(trained), "metrics": MetricRecord({"num-examples": len(windows)})}
    return Message(RecordDict(content), reply_to=message)


_LOADED: dict[Path, tuple[Work, Any]] = {}


def flower(work: Work) -> None:
    """Answer turns from within Flower's simulation: FedAvg of one LoRA, an actor for each core."""
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    class Strict(FedAvg):
        """FedAvg that ends the measurement when a client fails, rather than leave its work out."""

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            received = list(replies)
            failed = [reply.error.reason for reply in received if reply.has_error()]
            if failed or len(received) != users:
                raise RuntimeError(f"{len(received)} of {users} clients replied, {len(failed)} failed: {failed[:1]}")
            return super().aggregate_train(server_round, received)

    folder, dtype, users = work["folder"], work["dtype"], work["users"]
    client, server = ClientApp(), ServerApp()

    @client.train()
    def local_steps(message: Any, context: Any) -> Any:
        return flower_client(message, context, folder, dtype)

    @server.main()
    def take_turns(grid: Any, context: Any) -> None:
        del context
        model = load_model(work)
        lora = [ArrayRecord({name: p.detach() for name, p in model.named_parameters() if p.requires_grad})]
        strategy = Strict(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=users, min_available_nodes=users)

        def turn() -> None:
            lora[0] = strategy.start(grid, lora[0], num_rounds=1).arrays

        def score() -> dict[str, Any]:
            model.load_state_dict(lora[0].to_torch_state_dict(), strict=False)
            return test_loss(model, work)

        answer(Side(turn=turn, score=score))

    cores = torch.get_num_threads()
    settings: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": cores}}
    run_simulation(server, client, users, backend_config=settings)


def pfl_turn(model: Any, users: Sequence[Any], rate: float, *, batch: int, clip: float | None = None) -> Side:
    """Return rounds of pfl-research's FedAvg over all users; the score is left to the caller.

    Args:
        model: The model, as pfl-research wraps it.
        users: Data set of each user.
        rate: Learning rate of the local SGD.
        batch: Samples in a step.
        clip: Largest norm of a gradient; None for no limit.
    """
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams

    turns = iter(range(10**9))
    data = FederatedDataset(lambda user: users[user], lambda: next(turns) % len(users))
    hyper = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=rate, local_batch_size=batch, local_max_grad_norm=clip
    )
    backend = SimulatedBackend(training_data=data, val_data=data)
    params = NNAlgorithmParams(
        central_num_iterations=10**9, evaluation_frequency=10**9, train_cohort_size=len(users), val_cohort_size=None
    )
    algorithm = FederatedAveraging()

    def turn() -> None:
        # Iteration 1, in which nothing is evaluated.
        contexts, _, _ = algorithm.get_next_central_contexts(model, 1, params, hyper, hyper)
        gathered, metrics = backend.gather_results(model, algorithm, central_context=contexts[0])
        algorithm.process_aggregated_statistics(contexts[0], metrics, model, gathered)

    return Side(turn=turn)


def pfl_llm(work: Work) -> Side:
    """Return pfl-research's ``benchmarks/llm``: its wrapper of the model, local SGD, FedAvg; users are partitions."""
    sys.path.insert(0, str(work["checkout"] / "benchmarks"))
    from model.hugging_face import causal_lm_metrics_fn, wrap_hugging_face_model
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.model.pytorch import PyTorchModel

    module = wrap_hugging_face_model(load_model({**work, "dtype": "float32"}), None, causal_lm_metrics_fn)
    central = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 1.0)
    model = PyTorchModel(module, torch.optim.SGD, central, amp_dtype=getattr(torch, work["dtype"]))
    users = []
    for number, windows in enumerate(work["train"]):
        inputs = windows[:, :-1].contiguous()
        columns = {"input_ids": inputs, "attention_masks": torch.ones_like(inputs), "labels": inputs}
        users.append(PyTorchTensorDataset(columns, user_id=str(number)))
    rounds = pfl_turn(model, users, work["rate"], batch=work["batch"], clip=work["clip"])
    return Side(turn=rounds.turn, score=lambda: test_loss(module, work))


def opacus(work: Work, *, ghost: bool = False) -> Side:
    """Return Opacus: the sum of clipped gradients of single windows, for a LoRA.

    Args:
        work: Contents of the row.
        ghost: Whether norms are computed without gradients of single windows, in two backward passes.
    """
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = load_model(work).train()
    windows, bound = work["train"][0][: work["batch"]], work["clip"]
    options: dict[str, Any] = {"loss_reduction": "sum", "strict": False}
    rule: dict[str, Any] = {"max_grad_norm": bound, "expected_batch_size": len(windows), "loss_reduction": "sum"}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    plain = torch.optim.SGD(list(parameters.values()), 1.0)
    if ghost:
        wrapped: Any = GradSampleModuleFastGradientClipping(model, max_grad_norm=bound, **options)
        optimizer: Any = DPOptimizerFastGradientClipping(plain, noise_multiplier=0.0, **rule)
    else:
        wrapped = GradSampleModule(model, **options)
        optimizer = DPOptimizer(plain, noise_multiplier=0.0, **rule)

    def window_losses(logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of each window."""
        return nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)

    def turn() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = wrapped(input_ids=windows[:, :-1]).logits.float()
        if ghost:
            loss: Any = DPLossFastGradientClipping(wrapped, optimizer, window_losses, loss_reduction="sum")
            loss(logits, windows[:, 1:]).backward()
            optimizer.accumulate()
        else:
            window_losses(logits, windows[:, 1:]).sum().backward()
            optimizer.clip_and_accumulate()

    def score() -> dict[str, Any]:
        ours = torch.load(work["folder"] / "sums.pt", weights_only=True)
        theirs = {name.replace(".default", ""): p.summed_grad for name, p in parameters.items()}
        difference = math.sqrt(sum(float((ours[name] - value).square().sum()) for name, value in theirs.items()))
        return {"difference": difference / math.sqrt(sum(float(value.square().sum()) for value in ours.values()))}

    return Side(turn=turn, score=score)


# -------------------------------------------------------------------- nets


def small_net() -> nn.Module:
    """Return the net of PyTorch's CIFAR-10 tutorial, which BlazeFL's example trains: inputs ``(3, 32, 32)``."""
    features = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*features, *head)


@torch.no_grad()
def training_score(net: nn.Module, work: Work) -> dict[str, Any]:
    """Return the shared net's loss and accuracy on all users' training samples."""
    net.eval()
    inputs, targets = work["inputs"].flatten(0, 1), work["targets"].flatten()
    outputs = torch.cat([net(part) for part in inputs.split(500)])
    accuracy = (outputs.argmax(1) == targets).double().mean().item()
    return {"loss": nn.functional.cross_entropy(outputs, targets).item(), "accuracy": accuracy}


def load_in_order(net: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Set a net's parameters to tensors in the same order, by whatever name, and return it."""
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), state.values(), strict=True):
            parameter.copy_(value)
    return net


class Classifier(nn.Module):
    """A net as pfl-research wants it: with its loss, and no metrics."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return nn.functional.cross_entropy(self.net(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Return no metrics."""
        return {}


def pfl_nets(work: Work) -> Side:
    """Return pfl-research's FedAvg of a net with one hidden layer."""
    from pfl.data.dataset import Dataset
    from pfl.model.pytorch import PyTorchModel

    hidden, inputs = next(iter(work["state"].values())).shape
    net = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    load_in_order(net, work["state"])
    model = PyTorchModel(
        Classifier(net),
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        torch.optim.SGD(net.parameters(), 1.0),
        amp_dtype=getattr(torch, work["dtype"]),
    )
    users = [Dataset(pair) for pair in zip(work["inputs"], work["targets"], strict=True)]
    rounds = pfl_turn(model, users, work["rate"], batch=work["batch"])
    return Side(turn=rounds.turn, score=lambda: training_score(net, work))


class FilesOfUsers:
    """Users' samples as BlazeFL reads them: a file for each.

    Args:
        folder: Folder of the files, named after the user's number.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def get_dataset(self, type_: str, cid: int | None) -> Any:
        """Return the samples of user ``cid``."""
        return torch.utils.data.TensorDataset(*torch.load(self.folder / f"{cid}.pt", weights_only=True))

    def set_dataset(self, **written: Any) -> None:
        """Do nothing: the samples do not change."""

    def get_dataloader(self, *, cid: int, type_: str, **options: Any) -> Any:
        """Return a loader of a user's samples in random order."""
        return torch.utils.data.DataLoader(self.get_dataset(type_, cid), shuffle=True, **options)


@dataclass(frozen=True)
class NetSelector:
    """The initial net of a row, as BlazeFL asks for it."""

    state: Mapping[str, Tensor]

    def select_model(self, model_name: str) -> nn.Module:
        """Return a net with the initial values."""
        return load_in_order(small_net(), self.state)


def blazefl(work: Work, *, processes: bool = False) -> Side:
    """Return BlazeFL's FedAvg with its example's net, with a thread or a process for each core.

    Args:
        work: Contents of the row.
        processes: Whether clients run in a pool of processes rather than of threads.
    """
    from blazefl.contrib import FedAvgBaseServerHandler, FedAvgProcessPoolClientTrainer, FedAvgThreadPoolClientTrainer

    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=work["folder"]))
    for number, pair in enumerate(zip(work["inputs"], work["targets"], strict=True)):
        torch.save(tuple(t.clone() for t in pair), folder / f"{number}.pt")

    def make_turn(users: int, *, processes: bool) -> tuple[Callable[[], None], nn.Module]:
        """Return a round, and the server's net."""
        common: dict[str, Any] = {"model_selector": NetSelector(work["state"]), "model_name": "CNN", "device": "cpu"}
        common |= {"dataset": FilesOfUsers(folder), "num_clients": users, "batch_size": work["batch"], "seed": 42}
        server = FedAvgBaseServerHandler(global_round=10**9, sample_ratio=1.0, **common)
        local: dict[str, Any] = {"epochs": work["epochs"], "lr": work["rate"], "num_parallels": cores}
        if processes:
            states = Path(tempfile.mkdtemp(dir=work["folder"]))
            clients: Any = FedAvgProcessPoolClientTrainer(state_dir=states, **common, **local)
        else:
            clients = FedAvgThreadPoolClientTrainer(**common, **local)

        def turn() -> None:
            clients.local_process(server.downlink_package(), server.sample_clients())
            for package in clients.uplink_package():
                server.load(package)

        return turn, server.model

    turn, net = make_turn(work["users"], processes=processes)

    def final(users: int, *, processes: bool) -> Tensor:
        """Return the model after a round from the start."""
        once, model = make_turn(users, processes=processes)
        once()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    def score() -> dict[str, Any]:
        few = min(4, work["users"])
        first = final(few, processes=processes)
        same = {  # bit by bit, with few users
            "is_repeatable": torch.equal(first, final(few, processes=processes)),
            "is_same_in_other_pool": torch.equal(first, final(few, processes=not processes)),
        }
        return {**training_score(net, work), **same}

    return Side(turn=turn, score=score)


def pfllib(work: Work) -> Side:
    """Return PFLlib's FedAvg with its 4-layer CNN; its users' models stay in memory, their data in files."""
    sys.path.insert(0, str(work["checkout"] / "system"))
    import numpy as np
    from flcore.servers.serveravg import FedAvg
    from flcore.trainmodel.models import BaseHeadSplit, FedAvgCNN

    home = work["folder"] / "pfllib"
    for split in ("train", "test"):
        files = home / "dataset" / "images" / split
        files.mkdir(parents=True, exist_ok=True)
        for number, (inputs, targets) in enumerate(zip(work["inputs"], work["targets"], strict=True)):
            count = len(targets) if split == "train" else 1
            with open(files / f"{number}.npz", "wb") as file:
                np.savez_compressed(file, data={"x": inputs[:count].numpy(), "y": targets[:count].numpy()})  # type: ignore[arg-type]
    (home / "system").mkdir(exist_ok=True)
    os.chdir(home / "system")  # PFLlib reads ../dataset

    net = load_in_order(FedAvgCNN(in_features=3, num_classes=work["classes"], dim=1600), work["state"])
    head, net.fc = net.fc, nn.Identity()
    settings: dict[str, Any] = {"model": BaseHeadSplit(net, head), "device": "cpu", "dataset": "images"}
    settings |= {"num_classes": work["classes"], "global_rounds": 1, "local_epochs": work["epochs"]}
    settings |= {"batch_size": work["batch"], "num_clients": work["users"], "local_learning_rate": work["rate"]}
    # The rest are its defaults.
    settings |= {"join_ratio": 1.0, "random_join_ratio": False, "few_shot": 0, "algorithm": "FedAvg", "goal": "test"}
    settings |= {"time_select": False, "time_threthold": 10000, "top_cnt": 100, "save_folder_name": "items"}
    settings |= {"auto_break": False, "eval_gap": 1, "client_drop_rate": 0.0, "train_slow_rate": 0.0}
    settings |= {"send_slow_rate": 0.0, "dlg_eval": False, "dlg_gap": 100, "num_new_clients": 0}
    settings |= {"batch_num_per_client": 2, "fine_tuning_epoch_new": 0, "learning_rate_decay": False}
    settings |= {"learning_rate_decay_gamma": 0.99}
    server: Any = FedAvg(SimpleNamespace(**settings), 0)

    def turn() -> None:  # its round, without the evaluation
        server.selected_clients = server.select_clients()
        server.send_models()
        for client in server.selected_clients:
            client.train()
        server.receive_models()
        server.aggregate_parameters()

    return Side(turn=turn, score=lambda: training_score(server.global_model, work))


PEERS: dict[str, Callable[[Work], Side | None]] = {
    "peft": peft,
    "flower": flower,
    "pfl-llm": pfl_llm,
    "pfl-nets": pfl_nets,
    "opacus": opacus,
    "opacus-ghost": lambda work: opacus(work, ghost=True),
    "blazefl-threads": blazefl,
    "blazefl-processes": lambda work: blazefl(work, processes=True),
    "pfllib": pfllib,
}
"""Peers by name. A peer whose simulation calls our code, and not the other way round, answers by itself: None."""


def main() -> None:
    """Make the peer's side and answer turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(PEERS))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--checkout", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    replies()
    torch.set_num_threads(args.threads)
    side = PEERS[args.name](read_work(args.work, args.dtype, args.checkout))
    if side is not None:
        answer(side)


if __name__ == "__main__":
    from peers_theirs import main as importable_main  # so that other processes can import what they are sent

    importable_main()
