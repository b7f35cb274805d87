"""The server's side of a round whose uploads are summed behind masks: three tasks more, and then a sum or none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from comingle.federation.coordinator import AN_EVENT, Coordinator
from comingle.federation.taking import is_enough
from comingle.federation.tasks import Answer
from comingle.privacy import secure_client
from comingle.privacy.secure_server import SumCollector
from comingle.protocol.messages import Download, Upload
from comingle.protocol.wire import pack, unpack
from comingle.training.privacy import terms_of
from comingle.utils.errors import MessageError, NoSumError

logger = logging.getLogger("comingle")


def sum_up(coordinator: Coordinator, answers: Mapping[str, Answer], done: int) -> list[str]:
    """Sum what users have trained in round ``done`` (from 1), of those who advertised; who is in the sum, if there is.

    Where too few are left the round ends without: nothing is revealed, the model stays, and that is told.
    """
    server = coordinator.server
    assert server.sums is not None
    terms = terms_of(coordinator.house.training, coordinator.run, done, server.size)
    work = _Sum(coordinator=coordinator, collection=SumCollector(terms=terms))
    try:
        total = work.total(answers, server.sums.largest(done))
    except NoSumError as error:
        logger.warning("%s", error, extra=AN_EVENT)
        coordinator.observe({"event": "no_sum", "round": done, "reason": str(error)})
        if server.guard is not None and work.revealing:  # users may have opened what the server has not understood
            server.guard.charge([server.users.index(user) for user in work.collection.survivors])
        server.pass_over(done)
        return []
    survivors = work.collection.survivors
    if not is_enough(coordinator, survivors, answers, done):
        return []
    server.aggregate_sum(total, survivors, done)
    return survivors


@dataclass(kw_only=True)
class _Sum:
    """``revealing`` says whether users have been asked to open their shares."""

    coordinator: Coordinator
    collection: SumCollector
    revealing: bool = False

    def total(self, answers: Mapping[str, Answer], largest: int) -> np.ndarray:
        """All steps.

        Raises:
            NoSumError: too few users have answered in one.
        """
        server, terms, done = self.collection, self.collection.terms, self.collection.terms.round
        self._take(answers, lambda name, got: server.advertised(name, secure_client.read_keys(got, name, done)))
        server.require(server.roster, "have advertised")

        def share(name: str, got: Upload | Download) -> None:
            others = [other for other in server.roster if other != name]
            server.shared(name, secure_client.read_shares(got, name, done, others, sealed=True))

        self._ask("share", server.roster, lambda name: secure_client.roster_message(name, done, server.roster), share)
        server.require(server.sealed, "have shared")

        def add(name: str, got: Upload | Download) -> None:
            server.added(name, secure_client.read_masked(got, name, done, terms.entries, terms.word))

        self._ask("mask", server.sharers, lambda n: secure_client.sealed_message(n, done, server.sealed_for(n)), add)
        server.require(server.survivors, "have masked")
        survivors, self.revealing = list(server.survivors), True

        def opened(name: str, got: Upload | Download) -> None:
            server.unmasked(name, secure_client.read_shares(got, name, done, server.sharers, sealed=False))

        self._ask("unmask", survivors, lambda name: secure_client.survivors_message(name, done, survivors), opened)
        return server.total(largest)

    def _ask(
        self,
        step: str,
        names: Iterable[str],
        say: Callable[[str], Download],
        take: Callable[[str, Upload | Download], None],
    ) -> None:
        """Have users do a step, and take what they answer."""
        said = {name: pack(say(name)) for name in names}
        asked = dict.fromkeys(said, (step,))
        self._take(self.coordinator.ask(asked, self.collection.terms.round - 1, messages=said), take)

    def _take(self, answers: Mapping[str, Answer], take: Callable[[str, Upload | Download], None]) -> None:
        """Whatever is not as it must be is left out, in everybody's order."""
        for name in (one for one in self.coordinator.public.users if one in answers):
            answer = answers[name]
            try:
                if "left_out" in answer.told or not answer.messages:
                    raise MessageError(str(answer.told.get("left_out", "nothing for a sum in the answer")))
                take(name, unpack(answer.messages[0]))
            except MessageError as error:
                number = self.collection.terms.round
                logger.warning("user %r is left out of round %d: %s", name, number, error, extra=AN_EVENT)
                event = {"event": "rejected", "round": number, "user": name}
                self.coordinator.observe({**event, "reason": str(error)})
