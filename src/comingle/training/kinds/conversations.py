"""Conversations: users train on the responses, and models are scored on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import ceil
from typing import Any, cast

import torch
from jaxtyping import Int, Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from comingle.config import Recipe
from comingle.config.settings import values_in
from comingle.data.conversations.encoding import (
    Answers,
    ConversationReader,
    UserAnswers,
    check_answers,
    check_shortages,
    count_conversations,
    pool_answers,
    widen,
)
from comingle.data.conversations.messages import Columns
from comingle.data.conversations.reading import has_messages, records_with_users
from comingle.data.conversations.scoring import JUDGES, AnswerScore, judge, score_answers
from comingle.data.conversations.section import ConversationsSection
from comingle.data.row_files import BadRows
from comingle.data.text.reading import require_rows
from comingle.methods import make
from comingle.methods.base import Method, Phase, Stream
from comingle.models.base import tokenizer_of
from comingle.models.model import Model
from comingle.models.scoring import PAD, Gates, score_windows
from comingle.training.batch_sources import SCORED_PER_SLOT, AnySplit, AnyUser, Generate, PassBatchSource, Predict
from comingle.training.client import Clients, batch_size
from comingle.training.kinds.base import (
    DataRequest,
    RunData,
    count_trainers,
    language_model,
    model_here,
    users_and_trainers,
    with_full_participation,
)
from comingle.training.kinds.text import LanguageKind, anybody_validates
from comingle.training.settings import PassSize, RunPlan, pass_size
from comingle.utils.errors import DataError
from comingle.utils.inputs import DATE


class AnswerBatchSource(PassBatchSource):
    """Passes over conversations, with the loss on the tokens of the responses.

    A batch is as wide as its longest conversation. With ``even`` all batches have the same number of rows and are
    ``context`` wide. Padding has no loss, but a load-balancing penalty depends on where it is routed; with even batches
    the penalty of a user does not depend on other users' conversations.
    """

    def __init__(
        self,
        trainers: Sequence[UserAnswers],
        plan: RunPlan,
        batch_size: int,
        *,
        tokenizer: PreTrainedTokenizerBase,
        even: bool = False,
    ):
        """Make batches of ``batch_size`` conversations; with ``even`` all have ``context`` tokens, padded if shorter.

        The tokenizer decodes generated responses.
        """
        super().__init__(trainers, plan, batch_size)
        self.tokenizer, self.even = tokenizer, even

    def count(self, trainer: int, stream: Stream) -> int:
        """Return the number of conversations of a trainer."""
        return len(self._set(trainer, stream))

    def _set(self, trainer: int, stream: Stream) -> Answers:
        owner = self.trainers[trainer]
        return owner.valid if stream == "valid" else owner.train

    def pass_size(self, device: torch.device, columns: int) -> PassSize:
        """Return how many users and sequences one pass takes, as if all conversations were as long as the longest."""
        longest = self.trainers.about.get("most_width")  # stored with users that are read from disk
        if longest is None:
            longest = max(trainer.train.windows.shape[1] for trainer in self.trainers)
        width = self.plan.training.context if self.even else longest
        return pass_size(self.plan.updated("training", context=width), device, self.batch_size)

    def draw(
        self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int
    ) -> Int64[Tensor, "users batch window"]:
        """Return the windows of the next batch of each trainer; a window of ``PAD`` stands for no conversation."""
        return self._windows(trainers, phase.stream, self.numbers(trainers, phase, round_number, step, repeat))

    def examples_at(
        self, trainers: Sequence[int], indices: Int[Tensor, "users batch"], round_number: int
    ) -> Int64[Tensor, "users batch window"]:
        """Return whole conversations, ``context`` wide, so that their lengths do not affect each other."""
        return self._windows(trainers, "train", indices.long(), even=True)

    def sweep(self, trainers: Sequence[int], round_number: int) -> Iterator[Int64[Tensor, "users batch window"]]:
        """Yield all training conversations of each trainer, in order."""
        for numbers in self.all_numbers(trainers):
            yield self._windows(trainers, "train", numbers)

    def held_out(self, trainers: Sequence[int]) -> Iterator[Int64[Tensor, "users batch window"]]:
        """Yield all validation conversations of each trainer, in order."""
        for numbers in self.all_numbers(trainers, "valid"):
            yield self._windows(trainers, "valid", numbers)

    def _windows(
        self, trainers: Sequence[int], stream: Stream, numbers: Int64[Tensor, "users batch"], *, even: bool = False
    ) -> Int64[Tensor, "users batch window"]:
        """Return conversations by number, as wide as the longest of them.

        Args:
            trainers: Numbers of the trainers.
            stream: Split to read.
            numbers: Numbers of the conversations of each trainer; ``PAD`` for none, which gives a window of ``PAD``.
            even: Return windows that are ``context`` wide, whatever the conversations.
        """
        windows_of_trainers = []
        for trainer, trainers_numbers in zip(trainers, numbers, strict=True):
            chosen = self._set(trainer, stream).windows[trainers_numbers.clamp(min=0)]
            windows_of_trainers.append(chosen.masked_fill((trainers_numbers == PAD).unsqueeze(1), PAD))
        windows = torch.stack(widen(windows_of_trainers))
        # A window has at least one input and one target.
        width = self.plan.training.context if self.even or even else max(2, _width(windows))
        missing = max(0, width - windows.shape[-1])
        padded = torch.nn.functional.pad(windows, (0, missing), value=PAD)
        return padded[..., :width]  # columns after it are only padding

    def loss_counts(self, drawn: Int[Tensor, "users batch window"]) -> Int[Tensor, " users"]:
        """Return the number of targets, without hidden tokens and padding: the tokens of the responses."""
        return (drawn[..., 1:] >= 0).flatten(1).sum(1)

    def scoring_cost(self, part: Answers) -> int:
        """Return the cost of scoring a set, as a number of conversations; each counts twice if a response is generated.

        This is a lower bound: generating takes as long as training, which takes more than twice as long as scoring.
        """
        generates = any(name in JUDGES for name in part.measures)  # a measure compares generated text
        return len(part) * (2 if generates else 1)

    def score(
        self, predict: Predict, sets: Sequence[AnySplit], rows: Sequence[int], pass_size: PassSize, gates: Gates | None
    ) -> list[AnswerScore]:
        """Return the losses of the responses in each of several sets under a model of its own, each token once.

        Conversations of about the same length are scored in one batch, so that there is little padding.

        Args:
            predict: Runs a pass and returns its losses.
            sets: Conversations to score.
            rows: For each set, the number of the model that scores it.
            pass_size: Number of users and sequences in one training pass; scoring passes have as many sequences.
            gates: Collects the gates of routers; None if there are none.
        """
        batch, slots = pass_size.slots(SCORED_PER_SLOT)
        batches_of_sets = []
        for answers in sets:
            batches = [_trim(answers.windows[numbers]) for numbers in _by_width(answers.windows).split(batch)]
            batches_of_sets.append(batches)
        scores = score_windows(predict, batches_of_sets, rows, slots=slots, gates=gates)
        return [
            score_answers(score, len(answers), answers.measures) for score, answers in zip(scores, sets, strict=True)
        ]

    def examine(
        self,
        predict: Predict,
        generate: Generate,
        sets: Sequence[AnySplit],
        rows: Sequence[int],
        pass_size: PassSize,
        gates: Gates | None,
    ) -> list[AnswerScore]:
        """Return the losses of the responses and, if a measure requires it, scores of generated responses.

        Args:
            predict: Runs a pass and returns its losses.
            generate: Generates tokens after prompts.
            sets: Test sets.
            rows: For each set, the number of the model that scores it.
            pass_size: Number of users and sequences in one training pass.
            gates: Collects the gates of routers; None if there are none.
        """
        scores = self.score(predict, sets, rows, pass_size, gates)
        if not any(name in JUDGES for part in sets for name in part.measures):  # none compares generated text
            return scores
        responses = self.generate_responses(generate, sets, rows, pass_size)
        return [
            judge(score, texts, part.references) for score, texts, part in zip(scores, responses, sets, strict=True)
        ]

    def generate_responses(
        self, generate: Generate, sets: Sequence[Answers], rows: Sequence[int], pass_size: PassSize
    ) -> list[list[str]]:
        """Return responses to all prompts of several sets, generated greedily, each set by a model of its own.

        A response ends where the model ends it, or at the length of the longest response of its user.

        Args:
            generate: Generates tokens after prompts from the numbers of models, prompts ``(slots, batch, tokens)``
                and the largest number of new tokens.
            sets: Sets with the prompts.
            rows: For each set, the number of its model.
            pass_size: Number of users and sequences in one training pass, from which the size of passes here follows.

        Returns:
            For each set, the responses in the order of its prompts.
        """
        batch, slots = _generation_shape(sets, pass_size)
        texts = [[""] * len(part.references) for part in sets]
        # Prompts of about the same length share a slot, and slots of about the same length a pass, the longest first.
        jobs = []
        for set_number, part in enumerate(sets):
            jobs += [_Job(set_number, numbers) for numbers in part.prompt_tokens.argsort(stable=True).split(batch)]
        jobs.sort(key=lambda job: -int(sets[job.set_number].prompt_tokens[job.numbers].max()))
        for start in range(0, len(jobs), slots):
            group = jobs[start : start + slots]
            limit = max(sets[job.set_number].limit for job in group)
            generated = generate([rows[job.set_number] for job in group], _prompts(group, sets), limit)
            for job, continuations in zip(group, generated, strict=True):
                part = sets[job.set_number]
                # Repeated prompts, which only fill the slot, come last and are dropped: hence not strict.
                for number, tokens in zip(job.numbers.tolist(), continuations, strict=False):
                    texts[job.set_number][number] = self._text(tokens[: part.limit], part.ends)
        return texts

    def _text(self, tokens: Int64[Tensor, " new"], ends: Sequence[int]) -> str:
        """Return generated tokens as text, up to the first one that ends a response or is padding.

        Args:
            tokens: The tokens.
            ends: Tokens that end a response.
        """
        response = list(takewhile(lambda token: token != PAD and token not in ends, tokens.tolist()))
        return str(self.tokenizer.decode(response, skip_special_tokens=True)).strip()


SPEAKING, READ_AT_ONCE = 64, 8192
"""Largest number of responses that are generated at once, and of tokens of their prompts.

Each further token reads all weights, however many responses there are. With larger numbers, passes over the prompts
would need more memory than training."""


def _generation_shape(sets: Sequence[Answers], pass_size: PassSize) -> tuple[int, int]:
    """Return the shape of a pass that generates responses: the number of prompts per slot, and of slots.

    A slot is a place in the pass for one model and several prompts, all of one set. A slot needs no more prompts than
    the largest set has.

    Args:
        sets: Sets with the prompts.
        pass_size: Number of users and sequences in one pass of training; there is memory for as many prompts.
    """
    longest_prompt = max((int(part.prompt_tokens.max()) for part in sets if len(part.prompt_tokens)), default=1)
    # Each new token reads all weights once for all prompts, so more prompts per pass are faster: up to SPEAKING (64),
    # if they have at most READ_AT_ONCE (8,192) tokens together.
    prompts_of_pass = max(pass_size.users * pass_size.sequences, min(SPEAKING, READ_AT_ONCE // max(1, longest_prompt)))
    largest_set = max((len(part.references) for part in sets), default=1)
    prompts_per_slot = max(1, min(largest_set, prompts_of_pass // max(1, len(sets))))
    return prompts_per_slot, max(1, prompts_of_pass // prompts_per_slot)


@dataclass(frozen=True)
class _Job:
    """Numbers of the prompts of one set that share a slot of one generation pass."""

    set_number: int
    numbers: Int64[Tensor, " n"]


def _prompts(group: Sequence[_Job], sets: Sequence[Answers]) -> Int64[Tensor, "slots batch prompt"]:
    """Return the prompts of several jobs as one tensor, padded with ``PAD`` on the left.

    A job is a group of prompts of one set, which one model answers in one pass; its place in the pass is a slot. A job
    with fewer prompts than others repeats its last prompt.

    Args:
        group: Jobs of one pass, one per slot.
        sets: Sets with the prompts.
    """
    most_prompts = max(len(job.numbers) for job in group)
    prompts_of_jobs = [[sets[job.set_number].prompt(number) for number in job.numbers.tolist()] for job in group]
    width = max(len(prompt) for prompts in prompts_of_jobs for prompt in prompts)
    padded = torch.full((len(group), most_prompts, width), PAD, dtype=torch.int64)
    for slot, prompts in enumerate(prompts_of_jobs):
        for row in range(most_prompts):
            prompt = prompts[min(row, len(prompts) - 1)]
            padded[slot, row, width - len(prompt) :] = prompt
    return padded


def _width(windows: Int[Tensor, "*batch window"]) -> int:
    """Return the width without columns at the end that are padding in all windows; 0 if all are padding."""
    used_positions = (windows != PAD).flatten(0, -2).any(0).nonzero()
    return int(used_positions.max()) + 1 if len(used_positions) else 0


def _trim(windows: Int64[Tensor, "n window"]) -> Int64[Tensor, "n width"]:
    return windows[:, : _width(windows)]


def _by_width(windows: Int64[Tensor, "n window"]) -> Int64[Tensor, " n"]:
    """Return the numbers of the conversations, the shortest first."""
    return (windows != PAD).sum(1).argsort(stable=True)


NOTE = "Conversations are counted at the full context length, the most that training on them can cost."
"""Note on costs that are counted at the full context length."""
ABSENT_NOTE = f"{NOTE} Their number is unknown, so a round is counted as one batch ({{}})."
"""Note on costs if the number of conversations is unknown."""


TAKEN = (
    "rows with messages, with prompt and response, or with the columns that data.prompt and data.response name "
    "(a list, a datasets.Dataset), or {train, valid, test} of these"
)
"""Description of the data of one user that a program may pass."""


class AnswersKind(LanguageKind):
    """Base of the kinds whose loss is on responses."""

    user = UserAnswers

    def check_enough(self, users: Sequence[UserAnswers], method: Method) -> None:
        """Check that every user has the data that the method uses.

        Raises:
            DataError: A user lacks data.
        """
        for user in users:
            check_answers(user, needs_validation=method.client.needs_validation)

    def model(self, recipe: Recipe, run_data: RunData, plan: RunPlan) -> Model:
        """Return the model that all users train; it is compiled only if the users here have enough training tokens.

        Args:
            recipe: The recipe.
            run_data: Base model and users of the run.
            plan: Plan of the run, with its numbers of rounds and local epochs.
        """
        assert run_data.base is not None
        if not run_data.users.in_memory:  # ``about`` has the tokens, counted when the users were stored on disk
            tokens = plan.training.rounds * plan.training.local_epochs * run_data.users.about.get("tokens", 0)
        elif run_data.unread or not run_data.present:
            tokens = 0  # unknown, so the model is not compiled; data is not read only to count tokens
        else:
            _users, trainers = users_and_trainers(self, run_data, plan.method)
            tokens = training_tokens(trainers, plan)
        return language_model(recipe, run_data.base, plan.method, count_trainers(run_data, plan.method), tokens)

    def clients(self, recipe: Recipe, run_data: RunData, plan: RunPlan) -> Clients:
        """Return the users on this machine, with their batches of conversations.

        Args:
            recipe: The recipe.
            run_data: Base model and users of the run.
            plan: Plan of the run.
        """
        plan = with_full_participation(plan)  # the one trainer of pooled data takes part in every round
        assert run_data.base is not None
        if not run_data.unread:  # conversations that are read on demand are checked when they are read
            self.check_enough(run_data.present, plan.method)
            for user in run_data.present:
                require_rows(run_data.base, user)
        users, trainers = users_and_trainers(self, run_data, plan.method)
        size = batch_size(plan, len(users))
        # A penalty that balances the load of experts counts padding. With batches of one shape (``even``), the padding
        # of a user does not depend on the conversations of others.
        even = plan.method.placement.routed and plan.training.balance_weight > 0
        return Clients(
            model_here(self.model(recipe, run_data, plan), run_data),
            plan,
            trainers=trainers,
            users=users,
            batch_source=AnswerBatchSource(trainers, plan, size, tokenizer=tokenizer_of(run_data.base), even=even),
            reads=run_data.reads,
            skipped=run_data.skipped,
            skipped_rows=run_data.skipped_rows,
        )

    def pooled(self, users: Sequence[AnyUser]) -> UserAnswers:
        """Return one user with the conversations of all users."""
        return pool_answers(users)

    def sample(self, user: Any) -> Any:
        """Return the tokens of the first conversation of the test set."""
        return user.test.tokens(0)


class ConversationsKind(AnswersKind):
    """Conversations as messages, or as prompts with responses."""

    name, accepted_data = "conversations", TAKEN

    def reader(self, request: DataRequest) -> ConversationReader:
        """Return a reader of rows with messages: files, datasets, or data that a program passes."""
        recipe = request.recipe
        return ConversationReader(
            section(recipe),
            recipe.data_seed,
            request.load_base,
            context=recipe.training.context,
            validates=request.validates,
            given=request.given,
        )

    def takes(self, data: Any, options: Mapping[str, Any]) -> bool:
        """Return whether ``data`` has rows with messages, or with the prompt and response columns of the section."""
        return has_messages(data, Columns.read(options))

    def check_enough(self, users: Sequence[UserAnswers], method: Method) -> None:
        """Check that every user has enough conversations; names all users that do not."""
        check_shortages(users, needs_validation=method.client.needs_validation)

    def settings(self, run_data: RunData) -> dict[str, Any]:
        """Return the date that the base model's chat template writes, if it writes the current date."""
        date = None if run_data.base is None else run_data.base.date
        return {} if date is None else {DATE: date.isoformat()}

    def names_of(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the names of the users; reads rows only if the users are named nowhere else."""
        source = section(recipe).dataset

        def owners() -> Iterator[str]:
            assert source is not None
            bad_rows = BadRows("skip")  # wrong rows are reported when the data is read
            return (owner for owner, _record in records_with_users(section(recipe), bad_rows))

        return self.known_names(recipe, source, owners, "rows")

    def as_text(self, recipes: Sequence[Recipe], users: int | None) -> tuple[list[Recipe], set[str], str]:
        """Replace recipes with conversations by recipes with text that cost at least as much, to count costs.

        The text recipes have windows of ``context`` tokens, an upper bound of the width of a batch of conversations.
        They have as many local steps as the user with the most conversations. If the data cannot be read but the number
        of users is given, they have the steps of one batch.

        Args:
            recipes: Recipes with the same data.
            users: Number of users, if it is given; then their data need not be readable.

        Returns:
            The text recipes, the names of users with too little data, and a note for the user on how costs are counted.
        """
        data, one_batch = section(recipes[0]), recipes[0].training.largest_batch_size
        try:
            counts, small_users = count_conversations(recipes[0], data, anybody_validates(recipes))
        except DataError as error:
            if users is None:
                raise
            note = ABSENT_NOTE.format(error)
            # Only the largest number of conversations matters, so one user is enough.
            one_user = {"somebody": one_batch}
            return [as_text_recipe(recipe, one_user) for recipe in recipes], set(), note
        return [as_text_recipe(recipe, counts) for recipe in recipes], small_users, NOTE


def as_text_recipe(recipe: Recipe, counts: Mapping[str, int]) -> Recipe:
    """Return a recipe with text that costs as much as a recipe with conversations, to count costs.

    Its ``local_steps`` are the number of batches in ``local_epochs`` passes over the conversations of the user with the
    most conversations, or of all users if their data is pooled, with the smallest batch size of a user.

    Args:
        recipe: A recipe with conversations.
        counts: Number of training conversations of each user.
    """
    pooled = make(recipe.method.name, **recipe.method.settings).placement.pooled
    recipe = recipe.for_users(tuple(counts))  # lists, as users without enough data are left out of the new recipe
    conversations = sum(counts.values()) if pooled else max(counts.values())
    batches = max(1, ceil(conversations / min(values_in(recipe.training.batch_size))))
    text = {"users": dict.fromkeys(counts, "not read")}  # paths of texts, which counting costs does not open
    return recipe.with_changes({"data": text, "training.local_steps": batches * recipe.training.local_epochs})


def section(recipe: Recipe) -> ConversationsSection:
    """Return the data section of a recipe with conversations."""
    return cast(ConversationsSection, recipe.data)


def training_tokens(trainers: Sequence[UserAnswers], plan: RunPlan) -> int:
    """Return the number of tokens that trainers train on if they take part in every round."""
    every = sum(int((trainer.train.windows != PAD).sum()) for trainer in trainers)
    return plan.training.rounds * plan.training.local_epochs * every


KIND = ConversationsKind()
