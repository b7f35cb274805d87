"""Results of an audit, and their page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from comingle.config.settings import protects_examples
from comingle.reports.comparisons import interval
from comingle.reports.formatting import Table
from comingle.utils.errors import RunError
from comingle.utils.records import plural, write_json, write_text
from comingle.utils.terminal import literal_text, printable

VIEWS = {"server": "the server, from uploads", "users": "other users, from what is published"}
"""Who observes a run in an audit, with what they observe."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Lower bound on epsilon that the guesses of one attacker prove.

    Args:
        view: Who attacks, a key of :data:`VIEWS`.
        coins: Number of coins, that is of canaries that were inserted or not.
        guesses: Number of coins that the attacker guessed.
        correct: Number of correct guesses.
        epsilon: The bound that they prove.
        provable: The bound if all guesses were correct.
        upper: Epsilon of the privacy accounting against this attacker, for a user whose data is replaced; None without
            any.
    """

    view: str
    coins: int
    guesses: int
    correct: int
    epsilon: float
    provable: float
    upper: float | None

    @property
    def contradicts(self) -> bool:
        """True if the proven bound exceeds the accounted epsilon."""
        return self.upper is not None and self.epsilon > self.upper


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Membership inference from the final shared model for one user.

    Args:
        user: The user.
        members: Number of training windows or conversations.
        others: Number of held-out ones.
        auc: AUC of the loss minus the loss of the base model.
        auc_of_loss: AUC of the loss alone.
        found: Share of members found at 1% false positives; None with fewer than 100 held-out ones.
    """

    user: str
    members: int
    others: int
    auc: float
    auc_of_loss: float
    found: float | None


@dataclass(frozen=True, kw_only=True)
class Shadowed:
    """Membership inference with reference models for one user.

    Args:
        view: Who attacks, a key of :data:`VIEWS`.
        user: The user.
        members: Number of training windows or conversations.
        others: Number of held-out ones.
        auc: AUC of likelihood ratios.
        auc_of_scores: AUC without the reference models.
        found: Share of members found at 1% false positives; None with fewer than 100 held-out ones.
    """

    view: str
    user: str
    members: int
    others: int
    auc: float
    auc_of_scores: float
    found: float | None


@dataclass(frozen=True, kw_only=True)
class Inversion:
    """Reconstruction of an input of each user from one upload.

    ``errors`` are ``|guess - x| / |x|``; ``guesses`` are the same for the mean input as the guess.
    """

    what: str
    errors: Sequence[float]
    guesses: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Recovery of tokens from one upload of each user.

    Args:
        what: Kind of the attacked upload.
        tokens: Number of different tokens in the batches of each user's upload.
        recovered: Share of these tokens that the attack finds, if it makes as many guesses.
        guesses: The same share if the guesses are the most common tokens of all users' test text.
    """

    what: str
    tokens: Sequence[int]
    recovered: Sequence[float]
    guesses: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class AuditedRun:
    """The run that an audit attacks; ``privacy`` is its entry in the metrics, None without privacy."""

    run: str
    method: str
    users: int
    privacy: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Audit(AuditedRun):
    """Results of all attacks on one run.

    Args:
        trials: Number of runs with canaries.
        rounds: Number of rounds of each of these runs.
        delta: Delta of the privacy accounting.
        confidence: Confidence of the proofs.
        proofs: Bounds on epsilon.
        members: Membership inference from the final shared model, by user.
        inserted: Exposures of inserted canaries, in bits.
        absent: Exposures of canaries that were not inserted, in bits.
        most: The largest possible exposure, in bits.
        inversions: Reconstructions of inputs.
        shadows: Number of runs that trained reference models.
        shadowed: Membership inference with reference models.
        recoveries: Recoveries of tokens.
        kind: The users' kind of data.
    """

    trials: int
    rounds: int
    delta: float
    confidence: float
    proofs: Sequence[Proof]
    members: Sequence[Membership]
    inserted: Sequence[float]
    absent: Sequence[float]
    most: float
    inversions: Sequence[Inversion] = ()
    shadows: int = 0
    shadowed: Sequence[Shadowed] = ()
    recoveries: Sequence[Recovery] = ()
    kind: str = "text"

    @property
    def data(self) -> str:
        """Word for the users' data in sentences."""
        return "conversations" if self.kind == "conversations" else "text"

    @property
    def unit_plural(self) -> str:
        """Name of the pieces of text that an attacker tries to recognise as training data: conversations or windows."""
        return "conversations" if self.kind == "conversations" else "windows"

    def as_dict(self) -> dict[str, object]:
        """Return the content of the audit's JSON file."""
        return {**asdict(self), "verdict": conclusions(self)}


def exposure(rank: int, references: int) -> float:
    """Return how much a canary's rank reveals that a model has memorised it, in bits: ``log2(candidates / rank)``.

    The candidates are the canary and the reference canaries, which were never trained on (Carlini et al. 2019,
    arXiv:1802.08232, Definition 5).

    Args:
        rank: Rank of the canary's loss among all candidates; 1 is the lowest loss.
        references: Number of reference canaries.
    """
    return math.log2(references + 1) - math.log2(rank)


# -------------------------------------------------------------------- conclusions


def conclusions(audit: Audit) -> list[str]:
    """Return sentences on what the audit shows and what it does not show."""
    if audit.inversions:  # the users have samples
        sentences = [_inversion_sentence(inversion) for inversion in audit.inversions]
        sentences.append("No other attacks were run; canaries need users with text or conversations.")
        return sentences

    sentences = [_proof_sentence(proof, audit) for proof in audit.proofs]
    sentences.append(_membership_sentence(audit))
    if audit.shadowed:
        sentences += [_shadowed_sentence(audit, view) for view in VIEWS]
    sentences.append(_exposure_sentence(audit))
    sentences += [_recovery_sentence(recovery) for recovery in audit.recoveries]
    if audit.kind == "conversations":
        sentences.append("The attack that recovers tokens from one upload was not run: it needs users with text.")
    runs = f"{plural(audit.trials, 'run')} of {plural(audit.rounds, 'round')}"
    reference_runs = f", the reference models in {audit.shadows} more" if audit.shadowed else ""
    sentences.append(
        f"The canaries were trained in {runs} of their own{reference_runs}, not in the audited run; longer runs may "
        "leak more. A failed attack says nothing about better attacks."
    )
    return sentences


def _proof_sentence(proof: Proof, audit: Audit) -> str:
    """Return the sentence on the epsilon that an attacker's guesses prove, and on what the accountant guarantees.

    Args:
        proof: The attacker's guesses, and the lower bound on epsilon that they prove.
        audit: Results of all attacks on one run.
    """
    attackers = {"server": "The server", "users": "A recipient of the shared model"}
    attacker = attackers[proof.view]
    guesses = f"{proof.correct} of {proof.guesses} guesses right"
    if proof.upper is None:  # no accounting against this attacker
        guarantee = "the run gives no guarantee here"
    else:
        protects_one_example = audit.privacy is not None and protects_examples(audit.privacy["mechanism"])
        protected = "one example" if protects_one_example else f"the {audit.data}"
        guarantee = f"the accountant guarantees at most {proof.upper:.2f} for the replacement of {protected}"
    if proof.contradicts:
        return (
            f"{attacker} learns more than the accountant allows: epsilon is at least {proof.epsilon:.2f} ({guesses}), "
            f"and {guarantee}. The accountant or this audit is wrong: please report it."
        )
    if proof.epsilon == 0:
        return (
            f"{attacker} is not shown to learn which users have a canary ({guesses}), which proves nothing; "
            f"{guarantee}."
        )
    return (
        f"{attacker} can infer whether a canary was in a user's {audit.data}: epsilon is at least {proof.epsilon:.2f} "
        f"with {audit.confidence:.0%} ({guesses}, at most {proof.provable:.2f} could be proven this way); {guarantee}."
    )


def _membership_sentence(audit: Audit) -> str:
    """Return the sentence on membership inference from the final shared model.

    Training windows count as distinguishable from held-out ones if the confidence interval of the mean AUC over users
    is above 0.5, the AUC of guessing.
    """
    aucs = [result.auc for result in audit.members]
    if not aucs:
        return "Membership inference was not run."
    mean, bounds = fmean(aucs), interval(aucs)
    if bounds is None:  # a single user
        return f"Training {audit.unit_plural}: AUC {mean:.2f} for one user, so there is no interval and no conclusion."
    auc_text = f"AUC {mean:.2f} on average over users ({bounds_text(bounds)})"
    low, _ = bounds
    if low > 0.5:
        return (
            f"Training {audit.unit_plural} can be distinguished from held-out ones of the same user with the final "
            f"shared model: {auc_text}. Other differences between training and test data contribute to this."
        )
    return (
        f"Training {audit.unit_plural} are not shown to be distinguishable from held-out ones with the final shared "
        f"model: {auc_text}."
    )


def _shadowed_sentence(audit: Audit, view: str) -> str:
    """Return the sentence on membership inference with reference models, for one attacker.

    Membership counts as inferable if the interval of the mean AUC over users is above 0.5, the AUC of guessing.

    Args:
        audit: Results of all attacks on one run.
        view: The attacker, "server" or "users".
    """
    sources = {"server": "a user's uploads", "users": "what other users receive"}
    source = sources[view]
    aucs = [result.auc for result in audit.shadowed if result.view == view]
    bounds = interval(aucs)
    if bounds is None:  # fewer than two users
        return f"With reference models: too few observations of {source} for a conclusion."
    auc_text = f"AUC {fmean(aucs):.2f} on average over users ({bounds_text(bounds)})"
    membership = f"With reference models, membership of {audit.unit_plural} in the training data"
    low, _ = bounds
    if low > 0.5:
        return f"{membership} can be inferred from {source}: {auc_text}."
    return f"{membership} is not shown to be inferable from {source}: {auc_text}."


def _recovery_sentence(recovery: Recovery) -> str:
    """Return the sentence on tokens that the server recovers from one upload of each user.

    The attack counts as successful if it finds more tokens than guessing common ones does: the interval of the mean
    difference over users is above 0.
    """
    differences = []  # one per user
    for recovered_share, guessed_share in zip(recovery.recovered, recovery.guesses, strict=True):
        differences.append(recovered_share - guessed_share)
    bounds = interval(differences)
    shares_text = (
        f"{_mean_percent(recovery.recovered)} of {fmean(recovery.tokens):.0f} different tokens; "
        f"guessing common ones gives {_mean_percent(recovery.guesses)}"
    )
    if bounds is not None:
        low, _ = bounds
        if low > 0:
            return f"The server recovers tokens from the upload of {recovery.what}: {shares_text}."
    return (
        f"This attack recovers no more tokens from the upload of {recovery.what} than guessing does; others may: "
        f"{shares_text}."
    )


def _mean_percent(values: Sequence[float]) -> str:
    """Return the mean of shares as a percentage."""
    return f"{fmean(values):.0%}"


def _exposure_sentence(audit: Audit) -> str:
    """Return the sentence on the exposure of canaries, which measures memorisation (:func:`exposure`).

    Canaries count as memorised if the interval of the mean exposure of inserted ones is above that of absent ones,
    which the model was not trained on.
    """
    exposures = (
        f"exposure {mean_text(audit.inserted)} of {audit.most:.0f} bits if it was trained on, "
        f"{mean_text(audit.absent)} if not"
    )
    inserted_interval, absent_interval = interval(audit.inserted), interval(audit.absent)
    if inserted_interval and absent_interval:
        inserted_low, _ = inserted_interval
        _, absent_high = absent_interval
        if inserted_low > absent_high:
            return f"The model that other users receive has memorised a canary of one user: {exposures}."
    return f"The model that other users receive is not shown to have memorised a canary of one user: {exposures}."


_MAX_RELATIVE_ERROR = 0.1
"""Largest relative error at which an input counts as reconstructed."""


def _inversion_sentence(inversion: Inversion) -> str:
    """Return the sentence on inputs that were reconstructed from one upload of each user.

    An input counts as reconstructed if its relative error is below :data:`_MAX_RELATIVE_ERROR`. The sentence compares
    the errors with those of a guess without an attack, the mean input.
    """
    num_reconstructed = sum(error < _MAX_RELATIVE_ERROR for error in inversion.errors)
    errors_text = (
        f"relative error {mean_text(inversion.errors, 3)}; the mean input has {mean_text(inversion.guesses, 3)}"
    )
    if num_reconstructed == 0:
        return f"This attack reconstructs no input from the upload of {inversion.what}; others may: {errors_text}."
    users = f"{num_reconstructed} of {len(inversion.errors)} users"
    return f"The server reconstructs an input from the upload of {inversion.what} for {users}: {errors_text}."


def mean_text(values: Sequence[float], digits: int = 1) -> str:
    """Return a mean and its 95% interval as text, such as "0.6 (0.5 to 0.7)".

    A single value has no interval: "0.6". Without values the text is "unknown".

    Args:
        values: Independent values, such as one for each user.
        digits: Number of digits after the decimal point.
    """
    if not values:
        return "unknown"
    mean = f"{fmean(values):.{digits}f}"
    bounds = interval(values)
    if bounds is None:  # a single value
        return mean
    return f"{mean} ({bounds_text(bounds, digits)})"


def bounds_text(bounds: tuple[float, float], digits: int = 2) -> str:
    """Return an interval as text, such as "0.52 to 0.71"."""
    low, high = bounds
    return f"{low:.{digits}f} to {high:.{digits}f}"


def proof_rows(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of lower bounds on epsilon that attackers' guesses prove.

    A guess is whether a canary was among a user's training data.
    """
    header = ["attacker", "correct guesses", "epsilon at least", "with all guesses correct", "accountant: at most"]
    rows = []
    for proof in audit.proofs:
        rows.append(
            [
                VIEWS[proof.view],
                f"{proof.correct} of {proof.guesses}",
                f"{proof.epsilon:.2f}",
                f"{proof.provable:.2f}",
                "no accountant" if proof.upper is None else f"{proof.upper:.2f}",
            ]
        )
    return header, rows


def member_rows(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of membership inference from the final shared model.

    It has a row for each user, and the mean over users. Columns "members" and "others" have the numbers of training
    and held-out examples; "found" is the share of members that the attack finds at 1% false positives.
    """
    header = ["user", "members", "others", "AUC", "AUC of loss alone", "found at 1% false alarms"]
    rows = []
    for result in audit.members:
        rows.append(
            [
                printable(result.user),
                str(result.members),
                str(result.others),
                f"{result.auc:.2f}",
                f"{result.auc_of_loss:.2f}",
                _found_text(result.found),
            ]
        )
    auc = _mean_and_interval([result.auc for result in audit.members])
    auc_of_loss = _mean_and_interval([result.auc_of_loss for result in audit.members])
    found = _mean_and_interval([result.found for result in audit.members if result.found is not None])
    rows.append(["mean", "", "", auc, auc_of_loss, found])
    return header, rows


def _found_text(found: float | None) -> str:
    """Return the share of members found at 1% false positives as text; None stands for too few others."""
    return "fewer than 100 others" if found is None else f"{found:.2f}"


def inversion_rows(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of reconstructed inputs.

    The relative error of the reconstruction is beside that of a guess without an attack: the mean input.
    """
    header = ["upload of", "users", "relative error", "of the mean input"]
    rows = []
    for inversion in audit.inversions:
        num_users = str(len(inversion.errors))
        rows.append([inversion.what, num_users, mean_text(inversion.errors, 3), mean_text(inversion.guesses, 3)])
    return header, rows


def shadow_rows(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of membership inference with reference models.

    It has a row for each attacker ("server" or "users") and attacked user, and each attacker's mean over users. Columns
    are those of :func:`member_rows`, with the AUC without reference models in place of that of the loss.
    """
    header = ["user", "attacker", "members", "others", "AUC", "AUC without references", "found at 1% false alarms"]
    rows = []
    for attacker in VIEWS:
        results = [result for result in audit.shadowed if result.view == attacker]
        if not results:
            continue
        for result in results:
            rows.append(
                [
                    printable(result.user),
                    attacker,
                    str(result.members),
                    str(result.others),
                    f"{result.auc:.2f}",
                    f"{result.auc_of_scores:.2f}",
                    _found_text(result.found),
                ]
            )
        auc = _mean_and_interval([result.auc for result in results])
        auc_of_scores = _mean_and_interval([result.auc_of_scores for result in results])
        found = _mean_and_interval([result.found for result in results if result.found is not None])
        rows.append(["mean", attacker, "", "", auc, auc_of_scores, found])
    return header, rows


def recovery_rows(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of tokens that the server recovers from one upload of each user.

    Shares are means over users; "guessing" takes the most common tokens, without the upload.
    """
    header = ["upload of", "users", "different tokens", "share recovered", "by guessing common ones"]
    rows = []
    for recovery in audit.recoveries:
        num_users = str(len(recovery.tokens))
        num_tokens = f"{fmean(recovery.tokens):.0f}"
        share, share_guessed = mean_text(recovery.recovered, 2), mean_text(recovery.guesses, 2)
        rows.append([recovery.what, num_users, num_tokens, share, share_guessed])
    return header, rows


def _tables_by_title(audit: Audit) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Return the tables of an audit: header and rows by title. The title ends with the confidence of the intervals."""
    if audit.inversions:  # the users have samples
        return {"inputs out of one upload; 95%": inversion_rows(audit)}
    runs = f"{plural(audit.trials, 'run')}, {plural(audit.rounds, 'round')}"
    canaries_title = f"canaries: {runs}; {audit.confidence:.0%}, delta {audit.delta:g}"
    members_title = f"training {audit.unit_plural}, by the final shared model; 95%"
    tables = {canaries_title: proof_rows(audit), members_title: member_rows(audit)}
    if audit.shadowed:
        shadows_title = f"training {audit.unit_plural}, with reference models: {audit.shadows} runs; 95%"
        tables[shadows_title] = shadow_rows(audit)
    if audit.recoveries:
        tables["tokens out of one upload; 95%"] = recovery_rows(audit)
    return tables


def _mean_and_interval(values: Sequence[float]) -> str:
    """Return a mean with its interval as text, such as "0.60 (0.52 to 0.68)"; empty without values."""
    return mean_text(values, digits=2) if values else ""


def render_audit(audit: Audit) -> list[Table]:
    """Return the tables of an audit's results for the terminal."""
    tables = []
    for title, (header, rows) in _tables_by_title(audit).items():
        table = Table(title=title, title_justify="left", box=None)
        for name in header:
            table.add_column(name, no_wrap=name == "user")
        for row in rows:
            table.add_row(*(literal_text(cell) for cell in row))
        tables.append(table)
    return tables


def markdown(audit: Audit) -> str:
    """Return the page of an audit as Markdown: its conclusions in sentences, then the tables."""
    lines = [f"# What leaks: {printable(audit.run)}", "", f"{audit.method}, {audit.users} users.", ""]
    for sentence in conclusions(audit):
        lines.append(f"- {sentence}")
    for header, rows in _tables_by_title(audit).values():
        rule = ["---"] * len(header)
        lines.append("")
        for cells in (header, rule, *rows):
            lines.append(_markdown_row(cells))
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


FILES = ("audit.json", "audit.md")
"""Files that an audit writes."""


def check_targets(folder: Path, *, force: bool) -> None:
    """Check that the report of an audit can be written to a folder.

    Args:
        folder: The folder, which need not exist.
        force: Allow that files of an older report are replaced.

    Raises:
        RunError: The folder is a file, or it has one of the report's files and ``force`` is false.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; --out names a folder")
    for name in FILES:
        if (folder / name).exists() and not force:
            raise RunError(f"{folder / name}: exists; give --force to replace it, or --out another folder")


def write_audit(folder: Path, audit: Audit) -> None:
    """Write an audit's page, ``audit.md``, and its results, ``audit.json``, to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "audit.json", audit.as_dict())
    write_text(folder / "audit.md", markdown(audit))
