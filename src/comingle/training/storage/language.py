"""Streaming readers of text and of conversations.

Files have as many pieces as the mixture itself: each user's, of each user. In memory is what one user gives, or gets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from comingle.config import Recipe
from comingle.data.conversations.encoding import Encoder, UserAnswers, find_small, too_few
from comingle.data.conversations.reading import UserConversations, file_readers, owned_records, parted, wanted_users
from comingle.data.duplicates import Repeated
from comingle.data.populations import Crowd
from comingle.data.row_files import BadRows
from comingle.data.samples.samples import SPLITS
from comingle.data.sources import iterate_documents, no_texts, where_of
from comingle.data.splits import REPEATED, Overlap, UserText, deal, find_overlap, quota_of, take_turns
from comingle.data.tables import choose_users
from comingle.data.text.reading import check_limits, limits_of, options_of, split_group, user_readers
from comingle.data.text.streams import Shortage, UserData, find_shortage, pack, too_short, with_validation
from comingle.models.base import Base, tokenizer_of
from comingle.models.chat_templates import ChatTemplate
from comingle.models.folders import digest_tokenizer
from comingle.training.kinds import conversations
from comingle.training.kinds.base import Materials, require_rows, rows_key
from comingle.training.kinds.conversations import ConversationsKind
from comingle.training.kinds.text import TextKind, section
from comingle.training.storage.population import PopulationWriter, Spool
from comingle.training.storage.readers import Some, Turns, in_turn
from comingle.utils.errors import DataError
from comingle.utils.names import name_problem


class _OfLanguage:
    """What both have in common."""

    documents = "documents"
    """Plural noun for what users' data consists of."""

    def __init__(self, kind: Any, recipe: Recipe, base: Base, validates: bool):
        self.kind, self.recipe, self.base, self.validates = kind, recipe, base, validates
        self.data: Any = recipe.data
        self.skips = self.data.on_small_user == "skip"
        self.overlaps = Some()
        self.bad, self.repeated = BadRows(self.data.on_bad_row), Repeated(self.data.deduplicate)

    def key(self) -> list[Any]:
        """The tokenizer, the context, and whether there must be validation data."""
        asked = [digest_tokenizer(self.base.tokenizer), self.recipe.training.context, self.validates]
        return [*asked, *rows_key(self.base)]

    def keep(self, writer: PopulationWriter, read: Any, user: Any) -> None:
        """Write down a user whose tokens the base has rows for."""
        require_rows(self.base, user)
        writer.add(user)

    def settle(self) -> None:
        """Refuse rows that are no text or no conversation, or warn of them; say what was there twice."""
        self.bad.settle()
        self.repeated.settle()

    def sources(self) -> list[str]:
        """Files and folders, or names."""
        if self.data.dataset is not None:
            path = self.data.dataset.path
            return [path] if isinstance(path, str) else list(path)
        users = (self.data.users or {}).values()
        return [path for user in users for path in (user.path, user.train, user.valid, user.test) if path is not None]

    def compare(self, text: UserText) -> None:
        """Take note of held-out documents that are trained on too."""
        if (overlap := find_overlap(text)).total:
            self.overlaps.add(text.name, _told(overlap, self.documents))

    def overlapping(self) -> list[str]:
        """What a run says of them."""
        if not self.overlaps.count:
            return []
        return [f"{self.overlaps.count} users have held-out {self.documents} {REPEATED}: {self.overlaps.told}"]

    def materials(self, users: Crowd, about: dict[str, Any]) -> Materials:
        """The base, and users who are read when they are asked for."""
        rows = about.get("skipped_rows", 0)
        return Materials(kind=self.kind, base=self.base, users=users, unread=True, skipped_rows=rows)

    def counted(self) -> dict[str, int]:
        """Return the number of rows that were left out; empty where there are none."""
        return {"skipped_rows": self.bad.skipped} if self.bad.skipped else {}


def _told(overlap: Overlap, documents: str) -> str:
    valid, test = f"{overlap.valid} of {overlap.valid_documents}", f"{overlap.test} of {overlap.test_documents}"
    return f"{valid} validation and {test} test {documents}"


class TextTurns(_OfLanguage, Turns[UserText]):
    """Documents, split and tokenised."""

    nothing, too_little = "text", "too little text"

    def __init__(self, kind: TextKind, recipe: Recipe, base: Base, validates: bool):
        super().__init__(kind, recipe, base, validates)
        self.tokenizer = tokenizer_of(base)

    def key(self) -> list[Any]:
        """Return the same, and whether windows begin with a token that no stream holds, so shorter ones are enough."""
        return [*super().key(), *(["begins"] if self.base.begin is not None else [])]

    def readers(self, spool: Spool) -> Iterator[tuple[str, Callable[[], UserText]]]:
        """Files one after another; rows of a data set when all of them have been grouped."""
        data, seed = self.data, self.recipe.data_seed
        if data.dataset is None:
            yield from user_readers(data, seed, self.bad, self.repeated).items()
            return
        source = data.dataset
        rows = iterate_documents(source.path, **options_of(source), bad=self.bad)
        spool.fill((owner, split, document.encode("utf-8", "surrogatepass")) for owner, split, document in rows)
        where = where_of(source.path)
        if not spool.owners:
            self.bad.settle()
            raise no_texts(source.path, source.text, source.user, name=source.config)
        wanted = choose_users(spool.owners, source.users, where)
        if problem := name_problem(wanted):
            raise DataError(f"{where}: column {source.user!r}: {problem}")
        check_limits(data, wanted)
        for name, groups in spool.groups(wanted):
            splits = {split: [row.decode("utf-8", "surrogatepass") for row in rows] for split, rows in groups.items()}
            yield name, partial(split_group, name, splits, data.split, seed, self.repeated)

    def nobody(self, name: str) -> UserText:
        """A user without documents."""
        return UserText(name=name, train=())

    def encode(self, read: UserText) -> UserData:
        """Three streams of tokens, cut to the recipe's limits."""
        self.compare(read)
        return self.packed(read)

    def packed(self, read: UserText) -> UserData:
        """The streams alone."""
        user = pack(read, self.tokenizer, **limits_of(self.data, read.name))
        return with_validation(user) if self.data.train_on_valid else user

    def lack(self, user: UserData) -> Shortage | None:
        """The first stream that is too short."""
        needed = {"needs_validation": self.validates, "begins": self.base.begin is not None}
        found = find_shortage(user, context=self.recipe.training.context, **needed)
        if found is None and self.data.train_on_valid and not len(user.valid):
            raise DataError(
                f"data.train_on_valid: {user.name!r} has no validation text; give a valid split or fraction"
            )
        return found

    def refused(self, small: Some, users: int) -> DataError:
        """What is said without a store."""
        return too_short(small.first, small.count, users)

    def end(self) -> tuple[dict[str, Any], list[str]]:
        """Whose held-out text is trained on."""
        return self.counted(), self.overlapping()


class ConversationTurns(_OfLanguage, Turns[UserConversations]):
    """Rows with messages, in the base's template."""

    nothing, too_little, documents = "conversations", "too few conversations", "conversations"

    def __init__(self, kind: ConversationsKind, recipe: Recipe, base: Base, validates: bool):
        super().__init__(kind, recipe, base, validates)
        self.encoder = Encoder(
            self.data, ChatTemplate(tokenizer_of(base), base.date), recipe.training.context, self.bad
        )

    def key(self) -> list[Any]:
        """The template besides."""
        template = str(getattr(self.base.tokenizer, "chat_template", None))
        return [*super().key(), template, *([] if self.base.date is None else [self.base.date.isoformat()])]

    def readers(self, spool: Spool) -> Iterator[tuple[str, Callable[[], UserConversations]]]:
        """Files one after another; rows of a data set when all of them have been grouped."""
        data, seed = self.data, self.recipe.data_seed
        if data.dataset is None:
            readers = file_readers(data, self.bad, self.repeated)
            yield from ((name, partial(read, name, seed)) for name, read in readers.items())
            return
        owned = owned_records(data, self.bad)
        records = ((owner, split, [where, row]) for owner, (split, where, row) in owned)
        spool.fill((owner, split, json.dumps(record, default=_no_text).encode()) for owner, split, record in records)
        for name, groups in spool.groups(wanted_users(data.dataset, spool.owners)):
            parts = {split: [(split, *json.loads(row)) for row in rows] for split, rows in groups.items()}
            yield name, partial(parted, data, self.bad, self.repeated, parts, name, seed)

    def settle(self) -> None:
        """As for text, and rows that the template refuses."""
        super().settle()
        self.encoder.bad.settle()

    def nobody(self, name: str) -> UserConversations:
        """A user without conversations."""
        return UserConversations(name=name)

    def encode(self, read: UserConversations) -> UserAnswers:
        """Windows, none longer than the context."""
        self.compare(conversations.as_text_of(read))
        return self.encoder.encode(read)

    def lack(self, user: UserAnswers) -> str | None:
        """In which splits there are none."""
        return find_small([user], needs_validation=self.validates).get(user.name)

    def refused(self, small: Some, users: int) -> DataError:
        """What is said without a store."""
        return too_few(small.told, small.count, users)

    def end(self) -> tuple[dict[str, Any], list[str]]:
        """How many conversations were too long, and whose are trained on that are held out."""
        return self.counted(), [*self.encoder.notes, *self.overlapping()]


def _no_text(value: Any) -> dict[str, str]:
    """What stands for a date, for bytes and the like, in a column that nobody reads: no message, no text, no role."""
    return {"": type(value).__name__}


@in_turn.register
def _of_conversations(kind: ConversationsKind, recipe: Recipe, base: Base | None, validates: bool) -> Turns[Any] | None:
    return None if base is None or recipe.data.given else ConversationTurns(kind, recipe, base, validates)


HELD_OUT = ("valid", "test")


class Pieces:
    """Lists of documents, one after another in a file, read by their numbers."""

    def __init__(self, path: Path):
        self._paths = path.with_suffix(".pieces"), path.with_suffix(".ends")
        self._files: list[Any] = [open(one, "wb") for one in self._paths]  # noqa: SIM115 (closed by finish or remove)
        self._end = 0

    def add(self, documents: Any) -> None:
        """One more; half a pair of surrogates, which a document may have, is written as such."""
        content = json.dumps(list(documents)).encode()
        self._end += len(content)
        self._files[0].write(content)
        self._files[1].write(self._end.to_bytes(8, "little"))

    def finish(self) -> None:
        """All are there, and can be read."""
        for file in self._files:
            file.close()
        self._ends = np.memmap(self._paths[1], dtype="<i8", mode="r")
        self._files = [open(self._paths[0], "rb")]  # noqa: SIM115 (closed by remove)

    def __getitem__(self, number: int) -> list[str]:
        start = int(self._ends[number - 1]) if number else 0
        self._files[0].seek(start)
        return json.loads(self._files[0].read(int(self._ends[number]) - start))

    def remove(self) -> None:
        """Delete what was written."""
        for file in self._files:
            file.close()
        for path in self._paths:
            path.unlink(missing_ok=True)


class Mixture:
    """Users' own text, then the mixtures; :func:`comingle.data.splits.mix_held_out` without a list of all."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.seed, self.names = folder, seed, list[str]()
        self._own = Pieces(folder / "own")
        self._sizes: dict[str, list[int]] = {split: [] for split in HELD_OUT}
        self._dealt: dict[str, Pieces] = {}

    def add(self, text: UserText) -> None:
        """One more user."""
        self.names.append(text.name)
        for split in SPLITS:
            self._own.add(getattr(text, split))
        for split, sizes in self._sizes.items():
            sizes.append(sum(map(len, getattr(text, split))))

    def texts(self) -> Iterator[tuple[str, Callable[[], UserText]]]:
        """Everybody with a mixture of all to be tested on, in the order in which they came.

        Raises:
            DataError: somebody has nothing to give.
        """
        self._own.finish()
        order = sorted(range(len(self.names)), key=self.names.__getitem__)
        quotas = {split: quota_of(self._named(sizes), split) for split, sizes in self._sizes.items()}
        for split in (split for split, quota in quotas.items() if quota):
            self._dealt[split] = pieces = Pieces(self.folder / split)
            for giver in order:
                own = self._own[3 * giver + SPLITS.index(split)]
                for share in deal(own, quotas[split], len(order), split, self.seed, self.names[giver]):
                    pieces.add(share)
            pieces.finish()
        places = {user: place for place, user in enumerate(order)}
        for user, name in enumerate(self.names):
            yield name, partial(self._text, user, places[user], order)

    def _named(self, sizes: list[int]) -> dict[str, int]:
        return dict(zip(self.names, sizes, strict=True))

    def _text(self, user: int, place: int, order: list[int]) -> UserText:
        count = len(order)
        held_out = {
            split: take_turns({self.names[giver]: pieces[at * count + place] for at, giver in enumerate(order)})
            for split, pieces in self._dealt.items()
        }
        return UserText(name=self.names[user], train=tuple(self._own[3 * user]), **held_out)

    def remove(self) -> None:
        """Delete what was written."""
        for pieces in (self._own, *self._dealt.values()):
            pieces.remove()


class MixedTurns(TextTurns):
    """Users whose own text has been read, with a mixture to be tested on; who has too little of it is not left out."""

    def __init__(self, kind: TextKind, recipe: Recipe, base: Base, validates: bool):
        super().__init__(kind, recipe, base, validates)
        self.skips = False
        self.mixture: Mixture | None = None

    def before(self, folder: Path) -> Iterator[Turns[UserText]]:
        """Everybody's own text."""
        self.mixture = Mixture(folder, self.recipe.data_seed)
        yield _Own(self, self.mixture)

    def readers(self, spool: Spool) -> Iterator[tuple[str, Callable[[], UserText]]]:
        """In the order in which they came."""
        assert self.mixture is not None
        yield from self.mixture.texts()

    def close(self) -> None:
        """The files go."""
        if self.mixture is not None:
            self.mixture.remove()


class _Own(TextTurns):
    """Users' own text; who has too little of it is left out, where the recipe asks for that."""

    def __init__(self, whole: MixedTurns, mixture: Mixture):
        super().__init__(whole.kind, whole.recipe, whole.base, whole.validates)
        self.mixture = mixture

    def encode(self, read: UserText) -> Any:
        """Tokenised where that decides who is left out."""
        return self.packed(read) if self.skips else read

    def lack(self, user: Any) -> Any:
        """The first stream that is too short."""
        context = self.recipe.training.context
        return find_shortage(user, context=context, needs_validation=self.validates) if self.skips else None

    def keep(self, writer: PopulationWriter, read: UserText, user: Any) -> None:
        """For the mixture."""
        self.mixture.add(read)


@in_turn.register
def _of_text(kind: TextKind, recipe: Recipe, base: Base | None, validates: bool) -> Turns[Any] | None:
    if base is None or (data := section(recipe)).given:
        return None
    return (MixedTurns if data.held_out == "mixture" else TextTurns)(kind, recipe, base, validates)
