"""The client half: all that users do with their rows, data and optimiser state. Nothing of the server's.

Users are a batch dimension over one frozen base; nothing couples them. A user on a machine of its own is one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from comingle.engines.cohort import Cohort
from comingle.engines.scoring import AnyScore, Models
from comingle.engines.training import cohorts
from comingle.engines.users import Users
from comingle.privacy.guard import without_bound
from comingle.protocol.messages import COUNT, LOSS, LOWEST, Download, Upload, compress_kept, fill_ranks, insert_own
from comingle.protocol.wire import packed_bytes
from comingle.utils.trees import Tree, assign, restrict


class Clients(Users):
    """What everybody receives, sends, and scores."""

    # ---------------------------------------------------------------- messages

    def behind(self, version: int, members: Sequence[int]) -> list[int]:
        """Whoever of these has not received what the server has had since ``version``."""
        versions = self.state.received(members)
        return [member for member, received in zip(members, versions, strict=True) if received < version]

    @torch.no_grad()
    def receive(self, download: Download) -> None:
        """Everybody who is addressed takes one model, or makes one of several."""
        members = self.numbers(download.users)
        layout, state = self.model.layout, self.state.without_moments()
        cohort = self.cohort(members, download.version, state=state)
        bounds, tensors = without_bound(download.tensors)
        models, made = self._completed(cohort, replace(download, tensors=fill_ranks(tensors, layout))), None
        for part in self.method.client.parts:
            made = part.receive(cohort, models, download.senders) if made is None else made
        taken = {name: t[:, 0] for name, t in models.items()} if made is None else made
        assign(cohort.tensors, layout, self.method.received, taken)
        if cohort.mask is not None:  # a server may answer users of unequal size alike
            cohort.part.rows.mul_(cohort.mask)
        if self.shield is not None:
            self.shield.remember(cohort.kept, restrict(cohort.tensors, layout, self.method.shared), bounds)
        for part in self.method.client.parts:
            part.received(cohort)
        cohort.part.versions.fill_(download.version)
        state.put(members, cohort.part)

    def hear(self, verdict: Download) -> None:
        """Keep what everybody has, if the server says that it is the best so far."""
        if bool(verdict.tensors[LOWEST].all()):
            self.state.remember(verdict.version)

    def _completed(self, cohort: Cohort, download: Download) -> Tree:
        """What peers have sent, with what a wire left out because its receiver has it."""
        models = download.tensors
        if len(download.senders) <= next(iter(models.values())).shape[1]:
            return models
        at = [download.senders.index(name) for name in cohort.names]
        return insert_own(models, restrict(cohort.tensors, self.model.layout, self.method.shared), at)

    def upload(self, members: Sequence[int], round_number: int, losses: Tree, *, counts: bool = False) -> Upload:
        """What these users send after their local steps: copies of what is shared, and what they report.

        What rounding takes away is kept for their next upload, unless this one is only made so that it ``counts``.
        """
        state = self.state.without_moments()
        cohort = self.cohort(list(members), round_number, state=state)
        tensors = restrict(cohort.tensors, self.model.layout, self.method.shared)
        copies = {name: t.clone() for name, t in tensors.items()}
        reports = losses if self.training.privacy is None else {}
        if self.shield is not None:
            amounts = [len(self.trainers[owner].train) for owner in cohort.owners]
            copies, reports = self.shield.protect(copies, cohort, amounts, round_number)
        form, places = self.training.uploads, list(range(len(cohort.rows)))
        sent = compress_kept(copies, form, cohort.kept, places, remembers=not counts)
        if form == "int8" and not counts:
            state.put(cohort.rows, cohort.part)
        return Upload(
            round=round_number,
            users=tuple(cohort.names),
            tensors=sent,
            ranks=cohort.ranks.cpu().clone(),
            reports={name: t.clone() for name, t in self._reports(cohort, members).items()} | reports,
        )

    def _reports(self, cohort: Cohort, members: Sequence[int]) -> Tree:
        counts = {COUNT: torch.tensor([len(self.trainers[member].train) for member in members])}
        reports = counts if self.training.weighting != "uniform" and self.training.privacy is None else {}
        for part in self.method.client.parts:
            reports = reports | part.report(cohort)
        return reports

    # ---------------------------------------------------------------- scores

    @property
    def models(self) -> Models:
        """Everybody's tensors as they are now, by row."""
        owners = range(self.rows) if self.rows == len(self.trainers) else self.owners(range(self.rows))
        return Models(rows=self.state.rows_of, owners=owners)

    def evaluate(self) -> Sequence[AnyScore]:
        """Test score of whoever is evaluated with the model that it has now, and how much each of its experts said."""
        if not self.scored:
            return []
        return self.scorer.examine(self.models, [user.test for user in self.scored_users], self.scored_rows)

    def validate(self) -> dict[str, float]:
        """Mean loss in nats on the validation data of all who are evaluated and have any."""
        pairs = zip(self.scored_rows, self.scored_users, strict=True)
        held = [(row, user) for row, user in pairs if len(user.valid)]
        if not held:
            return {}
        scores = self.scorer.score(self.models, [user.valid for _, user in held], [row for row, _ in held])
        return {user.name: score.mean_loss for (_, user), score in zip(held, scores, strict=True)}

    @property
    def chosen_round(self) -> int:
        """After how many rounds users have had the models with which the run ends."""
        if self.state.best:
            return int(self.state.best["round"])
        return self.rounds_done

    @property
    def rounds_done(self) -> int:
        """After how many rounds the run ends: as planned, or before the privacy budget would be exceeded."""
        return self.training.rounds * self.method.trains if self.stopped_after is None else self.stopped_after

    def choose(self) -> None:
        """End with the models of the best round, where that is asked for."""
        if self.state.best:
            self.state = self.state.recalled()
            self.resized()

    def trainable_parameters(self) -> list[int]:
        """Number of parameters that each user who is evaluated really trains."""
        trained = self.model.layout.mask(self.method.client.trained).to(self.mask.device)
        copies, counts = range(self.method.placement.copies), dict[int, int]()
        for some in cohorts(self.scored_trainers, self.at_once):
            rows = [copy * len(self.trainers) + trainer for copy in copies for trainer in some]
            masks = self.masks(rows, self.state.without_moments().take(rows))
            counts |= dict(zip(some, (masks & trained).sum(1).view(len(copies), -1).sum(0).tolist(), strict=True))
        return [counts[owner] for owner in self.owners(self.scored_rows)]

    def upload_bytes(self) -> list[int]:
        """Bytes that each of them sends in an exchange in which it takes part; 0 where there is none."""
        if not self.shares:
            return [0] * len(self.scored)
        if (sums := self.training.sums) is not None:
            size = self.model.layout.count(self.method.shared)
            return [sums.sent_bytes(self.name(row), size) for row in self.scored_rows]
        sent: dict[int, int] = {}
        for some in cohorts(self.scored_trainers, self.at_once):
            message = self.upload(some, 1, {LOSS: torch.zeros(len(some))}, counts=True)
            sent |= dict(zip(some, packed_bytes(message), strict=True))
        return [sent[owner] for owner in self.owners(self.scored_rows)]
