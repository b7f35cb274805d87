"""Conversations: users train on the responses, and models are scored on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    check_shortages,
    check_validation_questions,
    count_conversations,
    pool_answers,
    widen,
)
from comingle.data.conversations.messages import Columns
from comingle.data.conversations.reading import may_be_conversations, records_with_users
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

    A batch is as wide as its longest conversation; with ``fixed_shape`` all batches are ``context`` wide.
    """

    def __init__(
        self,
        trainers: Sequence[UserAnswers],
        plan: RunPlan,
        batch_size: int,
        *,
        tokenizer: PreTrainedTokenizerBase,
        fixed_shape: bool = False,
    ):
        """Store the conversations and how to batch them.

        Args:
            trainers: Owners of the conversations: each user, or a single one if the method pools the data of all users.
            plan: Settings of the run, in the form that training uses.
            batch_size: Number of conversations in a batch.
            tokenizer: Decodes generated responses.
            fixed_shape: Pad all batches to ``context`` tokens, not to their longest conversation, so that a user's
                padding does not depend on other users' conversations.
        """
        super().__init__(trainers, plan, batch_size)
        self.tokenizer, self.fixed_shape = tokenizer, fixed_shape

    def count(self, trainer: int, stream: Stream) -> int:
        """Return the number of conversations of a trainer."""
        return len(self._set(trainer, stream))

    def _set(self, trainer: int, stream: Stream) -> Answers:
        """Return the training or validation conversations of a trainer."""
        owner = self.trainers[trainer]
        return owner.valid if stream == "valid" else owner.train

    def pass_size(self, device: torch.device, columns: int) -> PassSize:
        """Return how many users and sequences one pass takes, as if all conversations were as long as the longest.

        Args:
            device: Device of the model.
            columns: Not used.
        """
        if self.fixed_shape:
            width = self.plan.training.context
        elif "most_width" in self.trainers.about:  # stored with users that are read from disk
            width = self.trainers.about["most_width"]
        else:
            width = max(trainer.train.windows.shape[1] for trainer in self.trainers)
        return pass_size(self.plan.updated("training", context=width), device, self.batch_size)

    def draw(
        self, trainers: Sequence[int], phase: Phase, round_number: int, step: int, repeat: int
    ) -> Int64[Tensor, "users batch window"]:
        """Return the conversations of the next batch of each trainer, one per window; see :meth:`Batches.draw`.

        A trainer with fewer conversations than the batch has windows of ``PAD``.
        """
        numbers = self.numbers(trainers, phase, round_number, step, repeat)
        return self._windows(trainers, phase.stream, numbers)

    def examples_at(
        self, trainers: Sequence[int], indices: Int[Tensor, "users batch"], round_number: int
    ) -> Int64[Tensor, "users batch window"]:
        """Return training conversations by index, one per window, for example-level privacy.

        All windows are ``training.context`` tokens wide, not as wide as the longest conversation of the batch: so the
        clipped gradient of an example does not depend on which others are drawn.

        Args:
            trainers: Numbers of the users who train (a single number if one model is trained on all users' data).
            indices: Indices of the conversations of each trainer; ``PAD`` gives a window of ``PAD``.
            round_number: Not used, as conversations are not augmented.
        """
        return self._windows(trainers, "train", indices.long(), full_width=True)

    def sweep(self, trainers: Sequence[int], round_number: int) -> Iterator[Int64[Tensor, "users batch window"]]:
        """Yield token windows of all training conversations of each trainer, a batch at a time, in stored order.

        Args:
            trainers: Indices of the users who train (a single index if one model is trained on all users' data).
            round_number: Not used, as the order is the same in every round.
        """
        for numbers in self.all_numbers(trainers):
            yield self._windows(trainers, "train", numbers)

    def held_out(self, trainers: Sequence[int]) -> Iterator[Int64[Tensor, "users batch window"]]:
        """Yield token windows of all validation conversations of each trainer, a batch at a time, in stored order."""
        for numbers in self.all_numbers(trainers, "valid"):
            yield self._windows(trainers, "valid", numbers)

    def _windows(
        self,
        trainers: Sequence[int],
        stream: Stream,
        numbers: Int64[Tensor, "users batch"],
        *,
        full_width: bool = False,
    ) -> Int64[Tensor, "users batch window"]:
        """Return some conversations of each trainer as windows of tokens, padded to the longest of all with ``PAD``.

        Args:
            trainers: Numbers of the users who train (a single number if one model is trained on all users' data).
            stream: Split to read, "train" or "valid".
            numbers: Index of each conversation in the split of its trainer; ``PAD`` gives a window of ``PAD``.
            full_width: Whether to pad to ``training.context`` tokens instead.
        """
        windows_by_trainer = []
        for trainer, numbers_of_trainer in zip(trainers, numbers, strict=True):
            is_missing = numbers_of_trainer == PAD
            windows = self._set(trainer, stream).windows[numbers_of_trainer.clamp(min=0)]
            windows_by_trainer.append(windows.masked_fill(is_missing.unsqueeze(1), PAD))  # all tokens of a window
        all_windows = torch.stack(widen(windows_by_trainer))
        longest_width = max(2, _longest_unpadded(all_windows))  # at least one input and one target
        width = self.plan.training.context if self.fixed_shape or full_width else longest_width
        missing_width = max(0, width - all_windows.shape[-1])
        padded = torch.nn.functional.pad(all_windows, (0, missing_width), value=PAD)
        return padded[..., :width]  # no conversation is longer than ``width``

    def loss_counts(self, drawn: Int[Tensor, "users batch window"]) -> Int[Tensor, " users"]:
        """Return the number of targets with a loss for each user: the tokens of the responses."""
        targets = drawn[..., 1:]
        return (targets >= 0).flatten(1).sum(1)  # hidden tokens and padding are negative

    def scoring_cost(self, split: Answers) -> int:
        """Return an estimate of the time to score a split, from which the interval between evaluations is chosen.

        The unit is the time to compute the losses of one conversation. If responses are generated too, a conversation
        counts as 2: a lower bound, since generating a response takes at least as long as computing its losses.

        Args:
            split: The split; its ``measures`` determine whether responses are generated.
        """
        # ``JUDGES`` are measures that compare a generated response with the true one, such as "exact_match".
        generates_responses = any(name in JUDGES for name in split.measures)
        cost_per_conversation = 2 if generates_responses else 1
        return len(split) * cost_per_conversation

    def score(
        self,
        predict: Predict,
        splits: Sequence[AnySplit],
        model_numbers: Sequence[int],
        pass_size: PassSize,
        gates: Gates | None,
    ) -> list[AnswerScore]:
        """Return the losses of the responses in several splits, each split under a model of its own.

        Args:
            predict: Returns the losses of a batch under several models; see ``Predict``.
            splits: Conversations to score.
            model_numbers: For each split, the number of the model that scores it.
            pass_size: Number of users and sequences in one training pass; scoring passes have as many sequences.
            gates: Collects the gates of routers; None if there are none.
        """
        # A slot holds conversations that one model scores.
        conversations_per_slot, num_slots = pass_size.slots(SCORED_PER_SLOT)
        batches_by_split = []
        for answers in splits:
            numbers_by_width = _by_width(answers.windows)  # batches of similar lengths need little padding
            batches = []
            for numbers_of_batch in numbers_by_width.split(conversations_per_slot):
                batches.append(_trim(answers.windows[numbers_of_batch]))
            batches_by_split.append(batches)
        window_scores = score_windows(predict, batches_by_split, model_numbers, slots=num_slots, gates=gates)
        answer_scores = []
        for window_score, answers in zip(window_scores, splits, strict=True):
            answer_scores.append(score_answers(window_score, len(answers), answers.measures))
        return answer_scores

    def examine(
        self,
        predict: Predict,
        generate: Generate,
        splits: Sequence[AnySplit],
        model_numbers: Sequence[int],
        pass_size: PassSize,
        gates: Gates | None,
    ) -> list[AnswerScore]:
        """Return the losses of the responses and, if a measure requires it, scores of generated responses.

        Args:
            predict: Returns the losses of a batch under several models; see ``Predict``.
            generate: Generates tokens that continue prompts under several models; see ``Generate``.
            splits: Test splits.
            model_numbers: For each split, the number of the model that scores it.
            pass_size: Number of users and sequences in one training pass.
            gates: Collects the gates of routers; None if there are none.
        """
        scores = self.score(predict, splits, model_numbers, pass_size, gates)
        needs_responses = any(name in JUDGES for answers in splits for name in answers.measures)
        if not needs_responses:
            return scores
        responses_by_split = self.generate_responses(generate, splits, model_numbers, pass_size)
        judged_scores = []
        for score, responses, answers in zip(scores, responses_by_split, splits, strict=True):
            judged_scores.append(judge(score, responses, answers.references))
        return judged_scores

    def generate_responses(
        self, generate: Generate, splits: Sequence[Answers], model_numbers: Sequence[int], pass_size: PassSize
    ) -> list[list[str]]:
        """Return responses to all prompts of several splits, generated greedily, each split by a model of its own.

        A response ends at an end token, or at the length of the longest true response of its user.

        Args:
            generate: Generates tokens after prompts from the numbers of models, prompts ``(slots, batch, tokens)``
                and the largest number of new tokens.
            splits: Splits with the prompts.
            model_numbers: For each split, the number of its model.
            pass_size: Number of users and sequences in one training pass, from which the size of passes here follows.

        Returns:
            For each split, the responses in the order of its prompts.
        """
        prompts_per_slot, slots = _generation_shape(splits, pass_size)
        responses_by_split = [[""] * len(answers.references) for answers in splits]
        # Sort prompts by length: with similar lengths in a slot, and in the slots of a pass, there is little padding.
        jobs = []
        for split_number, answers in enumerate(splits):
            numbers_by_length = answers.prompt_tokens.argsort(stable=True)
            jobs += [_Job(split_number, numbers) for numbers in numbers_by_length.split(prompts_per_slot)]

        def longest_prompt(job: _Job) -> int:
            return int(splits[job.split_number].prompt_tokens[job.numbers].max())

        jobs.sort(key=longest_prompt, reverse=True)
        for start in range(0, len(jobs), slots):
            jobs_of_pass = jobs[start : start + slots]
            models = [model_numbers[job.split_number] for job in jobs_of_pass]
            most_new_tokens = max(splits[job.split_number].limit for job in jobs_of_pass)
            generated = generate(models, _prompts(jobs_of_pass, splits), most_new_tokens)
            for job, tokens_of_job in zip(jobs_of_pass, generated, strict=True):
                answers = splits[job.split_number]
                # The last rows of a slot repeat a prompt to fill it; ``zip`` drops them.
                for number, tokens in zip(job.numbers.tolist(), tokens_of_job, strict=False):
                    response = self._text(tokens[: answers.limit], answers.ends)
                    responses_by_split[job.split_number][number] = response
        return responses_by_split

    def _text(self, tokens: Int64[Tensor, " new"], ends: Sequence[int]) -> str:
        """Return generated tokens as text, up to the first one that ends a response or is padding.

        Args:
            tokens: The tokens.
            ends: Tokens that end a response.
        """
        response: list[int] = []
        for token in tokens.tolist():
            if token == PAD or token in ends:
                break
            response.append(token)
        return str(self.tokenizer.decode(response, skip_special_tokens=True)).strip()


MAX_RESPONSES_AT_ONCE, MAX_PROMPT_TOKENS_AT_ONCE = 64, 8192
"""Largest number of responses that are generated at once, and of tokens of their prompts.

Each further token reads all weights, however many responses there are. With larger numbers, passes over the prompts
would need more memory than training."""


def _generation_shape(splits: Sequence[Answers], pass_size: PassSize) -> tuple[int, int]:
    """Return the shape of a pass that generates responses: the number of prompts per slot, and of slots.

    A slot is a place in the pass for one model and several prompts, all of one split.

    Args:
        splits: Splits with the prompts.
        pass_size: Number of users and sequences in one pass of training; there is memory for as many prompts.
    """
    longest_prompt = max(
        (int(answers.prompt_tokens.max()) for answers in splits if len(answers.prompt_tokens)), default=1
    )
    prompts_of_training_pass = pass_size.users * pass_size.sequences
    # Most prompts that are fast to generate from at once and that certainly fit into memory.
    prompts_of_limits = min(MAX_RESPONSES_AT_ONCE, MAX_PROMPT_TOKENS_AT_ONCE // max(1, longest_prompt))
    prompts_per_pass = max(prompts_of_training_pass, prompts_of_limits)  # more prompts in a pass are faster
    largest_split = max((len(answers.references) for answers in splits), default=1)
    prompts_per_split = prompts_per_pass // max(1, len(splits))
    prompts_per_slot = max(1, min(largest_split, prompts_per_split))
    slots = max(1, prompts_per_pass // prompts_per_slot)
    return prompts_per_slot, slots


@dataclass(frozen=True)
class _Job:
    """Numbers of the prompts of one split that share a slot of one generation pass."""

    split_number: int
    numbers: Int64[Tensor, " n"]


def _prompts(jobs: Sequence[_Job], splits: Sequence[Answers]) -> Int64[Tensor, "slots batch prompt"]:
    """Return the prompts for which one pass generates responses as one tensor, padded with ``PAD`` on the left.

    Args:
        jobs: Numbers of the prompts to generate from in one batch under one model, for each such batch (a slot of the
            pass). A job with fewer prompts than others repeats its last prompt.
        splits: Splits with the prompts.
    """
    prompts_by_job = []
    for job in jobs:
        answers = splits[job.split_number]
        prompts_by_job.append([answers.prompt(number) for number in job.numbers.tolist()])
    most_prompts = max(len(prompts) for prompts in prompts_by_job)
    width = max(len(prompt) for prompts in prompts_by_job for prompt in prompts)
    padded = torch.full((len(jobs), most_prompts, width), PAD, dtype=torch.int64)
    for slot, prompts in enumerate(prompts_by_job):
        for row in range(most_prompts):
            last = len(prompts) - 1
            prompt = prompts[min(row, last)]
            padded[slot, row, width - len(prompt) :] = prompt
    return padded


def _longest_unpadded(windows: Int[Tensor, "*batch window"]) -> int:
    """Return the length of the longest window without the padding at its end; 0 if all are padding."""
    has_token = (windows != PAD).flatten(0, -2).any(0)  # for each position, in any window
    positions_with_token = has_token.nonzero()
    if not len(positions_with_token):
        return 0
    return int(positions_with_token.max()) + 1


def _trim(windows: Int64[Tensor, "n window"]) -> Int64[Tensor, "n width"]:
    """Return windows without the columns at their end that are padding in all of them."""
    return windows[:, : _longest_unpadded(windows)]


def _by_width(windows: Int64[Tensor, "n window"]) -> Int64[Tensor, " n"]:
    """Return the numbers of the conversations in order of their lengths, the shortest first.

    Args:
        windows: Conversations as tokens, padded with ``PAD``.
    """
    return (windows != PAD).sum(1).argsort(stable=True)


NOTE = "Conversations are counted at the full context length, the most that training on them can cost."
"""Note on costs that are counted at the full context length."""
ABSENT_NOTE = f"{NOTE} Their number is unknown, so a round is counted as one batch ({{}})."
"""Note on costs if the number of conversations is unknown."""


ACCEPTED_CONVERSATIONS = (
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
            check_validation_questions(user, needs_validation=method.client.needs_validation)

    def model(self, recipe: Recipe, run_data: RunData, plan: RunPlan) -> Model:
        """Return the model that all users train.

        Args:
            recipe: Settings of the run.
            run_data: Base model and users of the run.
            plan: Plan of the run, with its numbers of rounds and local epochs.
        """
        assert run_data.base is not None
        num_tokens = self._count_training_tokens(run_data, plan)  # decides whether the model is compiled
        return language_model(recipe, run_data.base, plan.method, count_trainers(run_data, plan.method), num_tokens)

    def _count_training_tokens(self, run_data: RunData, plan: RunPlan) -> int:
        """Return the number of tokens that the users on this machine train on; 0 if their data was not read.

        Args:
            run_data: Users of the run.
            plan: Settings of the run, in the form that training uses.
        """
        if not run_data.users.in_memory:
            tokens_per_epoch = run_data.users.about.get("tokens", 0)  # counted when the users were stored on disk
            return plan.training.rounds * plan.training.local_epochs * tokens_per_epoch
        if run_data.unread or not run_data.present:
            return 0
        _users, trainers = users_and_trainers(self, run_data, plan.method)
        return training_tokens(trainers, plan)

    def clients(self, recipe: Recipe, run_data: RunData, plan: RunPlan) -> Clients:
        """Return the users on this machine, with their batches of conversations.

        Args:
            recipe: Settings of the run.
            run_data: Base model and users of the run.
            plan: Settings of the run, in the form that training uses.
        """
        plan = with_full_participation(plan)  # a single trainer with the data of all users takes part in every round
        assert run_data.base is not None
        if not run_data.unread:  # conversations that are read on demand are checked when they are read
            self.check_enough(run_data.present, plan.method)
            for user in run_data.present:
                require_rows(run_data.base, user)
        # Trainers own models: they are the users, or one trainer with the data of all users.
        users, trainers = users_and_trainers(self, run_data, plan.method)
        # The load-balancing penalty also counts padding, so padding must not depend on other users.
        penalises_padding = plan.method.placement.routed and plan.training.balance_weight > 0
        batch_source = AnswerBatchSource(
            trainers,
            plan,
            batch_size(plan, len(users)),
            tokenizer=tokenizer_of(run_data.base),
            fixed_shape=penalises_padding,
        )
        return Clients(
            model_here(self.model(recipe, run_data, plan), run_data),
            plan,
            trainers=trainers,
            users=users,
            batch_source=batch_source,
            reads=run_data.checks_validation_data,
            skipped=run_data.skipped,
            skipped_rows=run_data.skipped_rows,
        )

    def pooled(self, users: Sequence[AnyUser]) -> UserAnswers:
        """Return one user with the conversations of all users."""
        return pool_answers(users)


class ConversationsKind(AnswersKind):
    """Conversations as messages, or as prompts with responses."""

    name, accepted_data = "conversations", ACCEPTED_CONVERSATIONS

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

    def accepts(self, data: Any, options: Mapping[str, Any]) -> bool:
        """Return whether ``data`` has rows with messages, or with the prompt and response columns of the section."""
        return may_be_conversations(data, Columns.read(options))

    def check_enough(self, users: Sequence[UserAnswers], method: Method) -> None:
        """Check that every user has enough conversations; names all users that do not."""
        check_shortages(users, needs_validation=method.client.needs_validation)

    def settings(self, run_data: RunData) -> dict[str, Any]:
        """Return what a run folder stores so that prompts stay the same when it is opened later.

        This is the date of today, if the base model's chat template writes the current date into prompts.
        """
        if run_data.base is None or run_data.base.date is None:
            return {}
        return {DATE: run_data.base.date.isoformat()}

    def names_of(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the names of the users; reads rows only if the recipe does not name them."""
        data_section = section(recipe)

        def read_owners() -> Iterator[str]:
            """Yield the user of each row."""
            bad_rows = BadRows("skip")  # wrong rows are reported when the data is read
            for owner, _record in records_with_users(data_section, bad_rows):
                yield owner

        return self.known_names(recipe, data_section.dataset, read_owners, "rows")

    def as_text(self, recipes: Sequence[Recipe], users: int | None) -> tuple[list[Recipe], set[str], str]:
        """Replace recipes with conversations by recipes with text that cost at least as much, to count costs.

        Args:
            recipes: Recipes with the same data.
            users: Number of users, if it is given; then their data need not be readable.

        Returns:
            The text recipes, the names of users with too little data, and a note for the user on how costs are counted.

        Raises:
            DataError: The data cannot be read, and no number of users is given.
        """
        first = recipes[0]
        try:
            counts, small_users = count_conversations(first, section(first), anybody_validates(recipes))
        except DataError as error:
            if users is None:
                raise
            # The number of conversations is unknown: count the costs of one batch of one user.
            one_batch = {"any user": first.training.largest_batch_size}
            return [as_text_recipe(recipe, one_batch) for recipe in recipes], set(), ABSENT_NOTE.format(error)
        return [as_text_recipe(recipe, counts) for recipe in recipes], small_users, NOTE


def as_text_recipe(recipe: Recipe, counts: Mapping[str, int]) -> Recipe:
    """Return a recipe with text that costs as much as a recipe with conversations, to count costs.

    Its ``local_steps`` are those of the user with the most conversations in ``local_epochs`` passes.

    Args:
        recipe: A recipe with conversations.
        counts: Number of training conversations of each user.
    """
    pooled = make(recipe.method.name, **recipe.method.settings).placement.pooled
    recipe = recipe.for_users(tuple(counts))  # per-user settings may list users without enough data
    most_conversations = sum(counts.values()) if pooled else max(counts.values())
    smallest_batch = min(values_in(recipe.training.batch_size))
    most_steps_per_epoch = max(1, ceil(most_conversations / smallest_batch))
    texts = dict.fromkeys(counts, "not read")  # paths, which counting costs does not open
    return recipe.with_changes(
        {"data": {"users": texts}, "training.local_steps": most_steps_per_epoch * recipe.training.local_epochs}
    )


def section(recipe: Recipe) -> ConversationsSection:
    """Return the data section of a recipe with conversations."""
    return cast(ConversationsSection, recipe.data)


def training_tokens(trainers: Sequence[UserAnswers], plan: RunPlan) -> int:
    """Return the number of tokens of the whole run, if all trainers take part in every round.

    It decides whether it is worth to compile the model.
    """
    tokens_per_epoch = 0
    for trainer in trainers:
        tokens_per_epoch += int((trainer.train.windows != PAD).sum())
    return plan.training.rounds * plan.training.local_epochs * tokens_per_epoch


KIND = ConversationsKind()
