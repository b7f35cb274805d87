"""A federation by hand: every user a :class:`Client` with a folder of its own, tasks handed over in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from comingle.config import Recipe, parse_recipe
from comingle.federation.client import Client
from comingle.federation.files import split_recipe
from comingle.federation.messages import unpack_answer
from comingle.federation.participant import Own
from comingle.federation.run_folder import Plan, run_federation
from comingle.federation.server_session import NetworkSection
from comingle.protocol.messages import Upload
from comingle.protocol.wire import unpack


class Direct:
    """Nodes in this process; ``recorded`` is all that went to and fro."""

    def __init__(self, nodes: Mapping[str, Client]):
        self.nodes = dict(nodes)
        self.recorded: list[tuple[str, bytes, bytes]] = []

    def present(self) -> Sequence[str]:
        """All who have a node."""
        return list(self.nodes)

    def exchange(self, requests: Mapping[str, bytes], *, timeout: float) -> Iterator[tuple[str, bytes | str]]:
        """One after the other."""
        for name, task in requests.items():
            answer = self.nodes[name].handle(task)
            self.recorded.append((name, task, answer))
            yield name, answer

    @property
    def told(self) -> list[Mapping[str, Any]]:
        """What users have said in words."""
        return [unpack_answer(answer).reported for _, _, answer in self.recorded]

    @property
    def uploads(self) -> list[Upload]:
        """All messages that users have sent, of which there are some, and nothing but uploads."""
        sent = [unpack(data) for _, _, answer in self.recorded for data in unpack_answer(answer).messages]
        found = [message for message in sent if isinstance(message, Upload)]
        assert found
        assert len(found) == len(sent)
        return found


def nodes_of(recipe: Recipe, folder: Path) -> tuple[Plan, dict[str, Client]]:
    """What a server and its users have of an ordinary recipe, each its part."""
    plan, owns = split_recipe(recipe)
    return plan, {own.name: Client(folder / own.name, own) for own in owns}


def federated(content: Mapping[str, Any], folder: Path, **options: Any) -> tuple[dict[str, Any], Direct]:
    """The metrics of a recipe's federation, and what went to and fro."""
    plan, nodes = nodes_of(parse_recipe(content), folder)
    channel = Direct(nodes)
    return run_federation(plan, channel, folder / "server", **options), channel


__all__ = ["Direct", "NetworkSection", "Own", "federated", "nodes_of"]
