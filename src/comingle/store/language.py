"""Users with text and users with conversations, read in turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from comingle.config import Recipe
from comingle.data.conversations.encoding import Encoder, UserAnswers, find_small, too_few
from comingle.data.conversations.reading import UserConversations, file_readers, owned_records, parted, wanted_users
from comingle.data.populations import Crowd
from comingle.data.row_files import BadRows
from comingle.data.sources import Repeated, iterate_documents, no_texts, where_of
from comingle.data.splits import REPEATED, Overlap, UserText, find_overlap
from comingle.data.tables import choose_users
from comingle.data.text.reading import check_limits, limits_of, options_of, split_group, user_readers
from comingle.data.text.streams import Shortage, UserData, find_shortage, pack, too_short, with_validation
from comingle.kinds.base import Materials
from comingle.kinds.conversations import kind as conversations
from comingle.kinds.conversations.kind import ConversationsKind
from comingle.kinds.language import require_rows, rows_key
from comingle.kinds.text.kind import TextKind
from comingle.models.base import Base, tokenizer_of
from comingle.models.chat_templates import ChatTemplate
from comingle.models.folders import digest_tokenizer
from comingle.store.grouping import Spool
from comingle.store.tokens import PopulationWriter
from comingle.store.turns import Some, Turns, in_turn
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
