from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

import comingle
from comingle.config import parse_recipe
from comingle.data import sources
from comingle.data.sources import check_sources, read_dataset, read_documents
from comingle.runs.session import prepare
from comingle.utils.errors import DataError

ROWS = [
    {"text": "eins", "who": "anna", "part": "train"},
    {"text": "zwei", "who": "ben", "part": "train"},
    {"text": "drei", "who": "anna", "part": "test"},
    {"text": "vier", "who": "anna", "part": "train"},
    {"text": " \n", "who": "carl", "part": "train"},
]
GROUPED = {"anna": {"train": ["eins", "vier"], "test": ["drei"]}, "ben": {"train": ["zwei"]}}


@pytest.fixture(autouse=True)
def private_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whatever a test leaves in the data sets' own cache is seen, and not left to the next."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    return cache


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_as(folder: Path, kind: str) -> Path:
    """The rows in one of the formats a user may bring."""
    path = folder / f"rows{kind}"
    table = datasets.Dataset.from_list(ROWS)
    if kind == ".parquet":
        table.to_parquet(path)
    elif kind in (".csv", ".tsv"):
        table.to_csv(path, sep="," if kind == ".csv" else "\t", index=False)
    elif kind == ".json":
        path.write_text(json.dumps(ROWS))
    elif kind == ".jsonl.gz":
        with gzip.open(path, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in ROWS)
    elif kind == "_saved":
        table.save_to_disk(path)
    elif kind == "_dict":
        datasets.DatasetDict({"first": table.select([0, 1]), "second": table.select([2, 3, 4])}).save_to_disk(path)
    else:
        write_jsonl(path, ROWS)
    return path


KINDS = [".jsonl", ".json", ".jsonl.gz", ".csv", ".tsv", ".parquet", "_saved", "_dict"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_format_become_documents(tmp_path: Path, kind: str):
    path = write_as(tmp_path, kind)
    assert read_documents(path) == ["eins", "zwei", "drei", "vier"]
    assert read_documents(path, column="who") == ["anna", "ben", "anna", "anna", "carl"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_format_are_grouped_by_user_and_split(tmp_path: Path, kind: str):
    assert read_dataset(write_as(tmp_path, kind), user="who", split="part") == GROUPED


def test_own_splits_of_a_data_set_are_kept(tmp_path: Path):
    grouped = read_dataset(write_as(tmp_path, "_dict"), user="who")
    assert grouped == {
        "anna": {"first": ["eins"], "second": ["drei", "vier"]},
        "ben": {"first": ["zwei"]},
    }


def test_own_splits_of_a_folder_of_files_are_kept(tmp_path: Path):
    write_jsonl(tmp_path / "train.jsonl", ROWS[:2])
    write_jsonl(tmp_path / "test.jsonl", ROWS[2:])
    grouped = read_dataset(tmp_path, user="who")
    assert grouped == {"anna": {"train": ["eins"], "test": ["drei", "vier"]}, "ben": {"train": ["zwei"]}}
    by_name = read_dataset(tmp_path, user="who", data_files={"held": "test.jsonl"})
    assert by_name == {"anna": {"held": ["drei", "vier"]}}


def test_several_files_are_one_data_set_whatever_other_columns_they_have(tmp_path: Path):
    first = write_jsonl(tmp_path / "first.jsonl", [row | {"extra": 1} for row in ROWS[:2]])
    second = write_jsonl(tmp_path / "second.jsonl", ROWS[2:])
    assert read_dataset([first, second], user="who", split="part") == GROUPED


def test_a_builder_with_data_files_is_read(tmp_path: Path):
    path = write_as(tmp_path, ".jsonl")
    assert read_dataset("json", data_files=str(path), user="who", split="part") == GROUPED


def test_the_first_so_many_users_are_taken_with_all_that_they_have(tmp_path: Path):
    path = write_as(tmp_path, ".jsonl")
    for number in (1, 2):
        assert read_dataset(path, user="who", split="part", users=number) == dict(list(GROUPED.items())[:number])
    with pytest.raises(DataError, match=r"rows\.jsonl: 9 users .*2 .*anna, ben$"):
        read_dataset(path, user="who", users=9)


def test_reading_a_data_set_ends_when_the_first_users_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [{"text": f"{who}{i}", "who": who} for i in range(9) for who in ("ann", "bob", "cem")]
    path = write_jsonl(tmp_path / "many.jsonl", rows)
    seen: list[str] = []
    real = sources.iterate_texts

    def counted(*args: Any) -> Any:
        for row in real(*args):
            seen.append(row[0])
            yield row

    monkeypatch.setattr(sources, "iterate_texts", counted)
    found = read_dataset(path, user="who", users=2, max_documents=2)
    assert found == {"ann": {"train": ["ann0", "ann1"]}, "bob": {"train": ["bob0", "bob1"]}}
    assert len(seen) == 5


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[31m"])
def test_a_column_with_a_name_that_cannot_be_one_is_refused(tmp_path: Path, name: str):
    path = write_jsonl(tmp_path / "odd.jsonl", [{"text": "a", "who": name}, {"text": "b", "who": "ben"}])
    with pytest.raises(DataError) as raised:
        read_dataset(path, user="who")
    assert str(raised.value).startswith(f"{path}: column 'who': ")
    assert "\n" not in str(raised.value)
    assert list(read_dataset(path, user="who", users=["ben"])) == ["ben"]


def test_users_come_in_the_order_asked_for(tmp_path: Path):
    grouped = read_dataset(write_as(tmp_path, ".jsonl"), user="who", users=["ben", "anna"])
    assert list(grouped) == ["ben", "anna"]
    assert list(read_dataset(write_as(tmp_path, ".jsonl"), user="who", users=["ben"])) == ["ben"]


def test_max_documents_bounds_every_user_and_split(tmp_path: Path):
    grouped = read_dataset(write_as(tmp_path, ".jsonl"), user="who", split="part", max_documents=1)
    assert grouped == {"anna": {"train": ["eins"], "test": ["drei"]}, "ben": {"train": ["zwei"]}}


def test_labels_and_numbers_name_users(tmp_path: Path):
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "topic": datasets.ClassLabel(names=["sport", "world"]),
            "id": datasets.Value("int32"),
        }
    )
    rows = {"text": ["a", "b", "c"], "topic": [1, 0, None], "id": [7, 7, None]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    assert read_dataset(tmp_path / "saved", user="topic") == {"world": {"train": ["a"]}, "sport": {"train": ["b"]}}
    assert read_dataset(tmp_path / "saved", user="id") == {"7": {"train": ["a", "b"]}}


def test_words_that_look_like_missing_values_are_words(tmp_path: Path):
    path = tmp_path / "words.csv"
    path.write_text("text,who\nNone,NA\nnull,NA\n,NA\n")
    assert read_dataset(path, user="who") == {"NA": {"train": ["None", "null"]}}


def test_rows_without_text_or_user_are_dropped(tmp_path: Path):
    rows = [{"text": None, "who": "anna"}, {"text": "lost", "who": None}, {"text": "kept", "who": "anna"}]
    assert read_dataset(write_jsonl(tmp_path / "rows.jsonl", rows), user="who") == {"anna": {"train": ["kept"]}}


def test_a_changed_file_is_read_anew_and_leaves_no_copy(tmp_path: Path, private_cache: Path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "old", "who": "anna"}])
    before = os.stat(path)
    assert read_documents(path) == ["old"]
    write_jsonl(path, [{"text": "new", "who": "anna"}])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time: only the content differs
    assert read_documents(path) == ["new"]
    assert read_dataset(path, user="who") == {"anna": {"train": ["new"]}}
    assert [entry for entry in private_cache.rglob("*") if entry.is_file()] == []


def test_reading_rows_prints_nothing_and_leaves_the_settings_of_datasets_alone(tmp_path: Path, capfd):
    datasets.enable_progress_bars()
    level = datasets.logging.get_verbosity()
    read_documents(write_as(tmp_path, ".jsonl"))
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert not datasets.are_progress_bars_disabled()
    assert datasets.logging.get_verbosity() == level


def test_a_broken_file_is_one_line_and_nothing_else(tmp_path: Path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{bad\n')
    code = f"""if 1:
        from comingle.data.sources import read_documents
        from comingle.utils.errors import DataError
        try:
            read_documents({str(tmp_path / "bad.jsonl")!r})
        except DataError as error:
            print(error)"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.match(rf"{re.escape(str(tmp_path))}/bad\.jsonl: line 2: .*Expecting property name", run.stdout)
    assert (run.stdout.count("\n"), run.stderr) == (1, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"user": "whom"}, r"column 'whom'; found: text, who, part\. Did you mean 'who'"),
        ({"user": "who", "text": "body"}, r"column 'body'; found: text, who, part\.$"),
        ({"user": "who", "split": "parts"}, r"column 'parts'; found: text, who, part\. Did you mean 'part'"),
        ({"user": "who", "users": ["anna", "bern"]}, r"user 'bern'; found: anna, ben\. Did you mean 'ben'"),
        ({"user": "who", "users": ["carl"]}, r"user 'carl'; found: anna, ben\.$"),
    ],
)
def test_a_wrong_name_gets_the_names_found(tmp_path: Path, options: dict, message: str):
    path = write_as(tmp_path, ".jsonl")
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: .*{message}"):
        read_dataset(path, **options)


def test_a_wrong_column_of_one_user_gets_the_columns_found(tmp_path: Path):
    path = write_as(tmp_path, ".csv")
    message = r"'test'; found: text, who, part\. Did you mean 'text'"
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: .*{message}"):
        read_documents(path, column="test")


def test_many_users_are_not_all_printed(tmp_path: Path):
    path = write_jsonl(tmp_path / "many.jsonl", [{"text": "t", "who": f"user{index}"} for index in range(30)])
    with pytest.raises(DataError, match=r"many\.jsonl: .*'nobody'; found: user0, .*user19 and 10 more\."):
        read_dataset(path, user="who", users=["nobody"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "bad.jsonl",
            '{"text": "a"}\n{bad\n',
            "line 2: .*Expecting property name",
        ),
        ("numbers.jsonl", '{"text": 1}\n', "line 1: column 'text' .*int"),
        ("empty.jsonl", "", "no text"),
        ("blank.jsonl", '{"text": " "}\n', "no text"),
        ("ragged.csv", "text,who\na,b\na,b,c,d\n", "line 3: .*4 fields.* 2 columns"),
        ("fake.parquet", "no parquet", ".*Parquet: "),
    ],
)
def test_a_file_of_rows_that_gives_no_text_is_named(tmp_path: Path, name: str, content: str, message: str):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: {message}") as raised:
        read_documents(path)
    assert "\n" not in str(raised.value)


def test_a_data_set_without_a_single_row_to_use_is_an_error(tmp_path: Path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a", "who": None}, {"text": "", "who": "anna"}])
    with pytest.raises(DataError, match=r"rows\.jsonl: .*'text' .*'who'"):
        read_dataset(path, user="who")


def test_a_text_file_is_no_data_set(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("text")
    with pytest.raises(DataError, match=r"notes\.txt: .*; allowed: \.jsonl, .*\.parquet.*\.xz"):
        read_dataset(path, user="who")


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/at/all", "rows.jsonl", "a/b/c", "data.csv.gz"])
def test_a_mistyped_path_is_not_looked_up_on_the_hub(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(DataError, match=f"^{re.escape(source)}: no such file"):
        read_dataset(source, user="who")


def test_a_hub_name_goes_to_the_hub_with_its_configuration(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return datasets.DatasetDict({"validation": datasets.Dataset.from_list(ROWS)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    grouped = read_dataset("owner/name", name="de", user="who", users=["ben"])
    assert grouped == {"ben": {"validation": ["zwei"]}}
    assert asked == [(("owner/name",), {"name": "de", "data_files": None})]


def test_a_hub_out_of_reach_is_one_line():
    code = """if 1:
        from comingle.data.sources import read_dataset
        from comingle.utils.errors import DataError
        try:
            read_dataset("owner/name", user="who")
        except DataError as error:
            print(error)"""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.startswith("owner/name: ")
    assert run.stdout.count("\n") == 1


def test_without_the_packages_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_as(tmp_path, ".parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: .*pip install 'comingle\[data\]'"):
        read_documents(path)
    with pytest.raises(DataError, match=r"^hub:owner/name: .*pip install 'comingle\[data\]'"):
        read_documents("hub:owner/name")
    (tmp_path / "notes.txt").write_text("plain text needs no package")
    assert read_documents(tmp_path / "notes.txt") == ["plain text needs no package"]
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    assert len(read_documents(tmp_path / "rows.json")) == 4


def test_reading_plain_text_does_not_import_datasets(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("text")
    code = f"""if 1:
        import sys
        from comingle.data.sources import read_documents
        print(read_documents({str(tmp_path / "notes.txt")!r}), "datasets" in sys.modules, "torch" in sys.modules)"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "['text'] False False\n"


def test_ag_news_as_it_is(shared_data: Path):
    grouped = read_dataset(shared_data / "ag_news" / "ag_news.jsonl.xz", user="category", split="split")
    assert {name: sum(map(len, splits.values())) for name, splits in grouped.items()} == {
        "Sports": 3478,
        "Sci/Tech": 5703,
        "Business": 3569,
        "World": 5495,
    }
    assert Counter({split: sum(len(s[split]) for s in grouped.values()) for split in ("train", "test")}) == {
        "train": 10_646,
        "test": 7_599,
    }
    assert sum(len(document) for part in grouped["World"].values() for document in part) == 1_318_186


def test_wikipedia_as_it_is(shared_data: Path):
    path = shared_data / "wiki_ner" / "wiki_ner.jsonl.xz"
    grouped = read_dataset(path, user="category", split="split", users=["nl", "de"])
    assert {
        name: sum(len(document) for part in splits.values() for document in part) for name, splits in grouped.items()
    } == {
        "nl": 2_166_885,
        "de": 2_546_699,
    }


def test_categories_in_files_with_different_columns(shared_data: Path):
    names = ["code", "arxiv", "books", "stackexchange"]
    grouped = read_dataset([shared_data / "slim4" / f"{name}.jsonl.xz" for name in names], user="category")
    assert {name: len(splits["train"]) for name, splits in grouped.items()} == {
        "code": 744,
        "arxiv": 603,
        "books": 537,
        "stackexchange": 2735,
    }


def test_447_natural_users(shared_data: Path):
    grouped = read_dataset(shared_data / "users" / "shakespeare_roles.jsonl.xz", user="user")
    assert len(grouped) == 447
    assert sum(len(splits["train"]) for splits in grouped.values()) == 25_641


def test_fields_of_csv_files_are_text_as_typed(tmp_path: Path):
    rows = "who,text\n007,NA\n7,1.50\nTrue,x\n"
    (tmp_path / "ids.csv").write_text(rows)
    wanted = {"007": ["NA"], "7": ["1.50"], "True": ["x"]}
    whole = {who: {"train": texts} for who, texts in wanted.items()}
    assert read_dataset(tmp_path / "ids.csv", user="who") == whole
    assert read_dataset("csv", data_files=str(tmp_path / "ids.csv"), user="who") == whole
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.tsv").write_text(rows.replace(",", "\t"))
    (folder / "test.tsv").write_text("who\ttext\n007\tb, c\n")
    assert read_dataset(folder, user="who") == whole | {"007": {"train": ["NA"], "test": ["b, c"]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("who,text\nada,hello, you\n", "line 2: .*3 fields.* 2 columns; .*','"),
        ("who,text\nada,x\nben,a,b\n", "line 3: .*3 fields.* 2 columns"),
        ('who,text\nada,x\nben,"a\nada,c\n', "line 4: unexpected end of data"),
        ('who,text\nada,"x" y\n', "line 2: ',' expected after '\"'"),
        ("wo,text\n", ".*'who'; found: wo, text"),
        ("who,text\n", "no rows$"),
        ("who,text\nada,\n", "no row .*'text' .*'who'"),
    ],
)
def test_a_csv_file_whose_fields_do_not_fit_its_columns_is_refused(tmp_path: Path, content: str, message: str):
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: {message}"):
        read_dataset(path, user="who")


def test_names_that_look_like_dates_are_text_as_typed(tmp_path: Path):
    path = write_jsonl(tmp_path / "days.jsonl", [{"who": "2024-01-01", "text": "a"}])
    assert read_dataset(path, user="who") == {"2024-01-01": {"train": ["a"]}}


def test_spreadsheets_may_have_blank_lines_and_columns_of_no_or_one_name(tmp_path: Path):
    path = tmp_path / "sheet.csv"
    path.write_text("\n\nwho,text,text,,\nada,a,b,,\n\nben,c\n")
    assert read_dataset(path, user="who") == {"ada": {"train": ["a"]}, "ben": {"train": ["c"]}}


def test_csv_files_with_options_of_their_own_are_left_to_datasets(tmp_path: Path):
    (tmp_path / "train.csv").write_text("hello,ada\nthere,ben\n")
    options = 'data_files: "train.csv"\n  column_names: ["text", "who"]'
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {options}\n---\n")
    assert read_dataset(tmp_path, user="who") == {"ada": {"train": ["hello"]}, "ben": {"train": ["there"]}}


def test_a_file_may_have_brackets_in_its_name(tmp_path: Path):
    path = write_jsonl(tmp_path / "rows [1].jsonl", [{"who": "ada", "text": "a"}])
    assert read_dataset(path, user="who") == {"ada": {"train": ["a"]}}


@pytest.mark.parametrize("kind", ["text", "conversations"])
def test_rows_that_name_their_split_say_which_keys_read_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"user": "ann", "text": f"a{i}", "prompt": f"p{i}", "response": f"r{i}", "part": ("train", "dev")[i % 5 == 0]}
        for i in range(40)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    for column, found in ((None, "train"), ("part", "train, dev|dev, train")):
        dataset = {"path": str(path), "user": "user", **({"split": column} if column else {})}
        data = {"kind": kind, "dataset": dataset, "split": {"given": True}}
        with pytest.raises(DataError) as caught:
            comingle.run({"base": "random:llama?layers=1&dim=16&heads=2", "data": data})
        message = str(caught.value)
        assert re.search(rf"user 'ann': no split 'test'; found: ({found}); ", message), message
        assert "data.split.train_name, valid_name and test_name" in message
        assert ("set data.dataset.split" in message) == (column is None)
        assert ("values of column 'part'" in message) == (column is not None)


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({"kind": "text", "users": {"ada": "texts/no.txt"}}, "data.users.ada: texts/no.txt"),
        ({"kind": "conversations", "users": {"ada": "chats/no.jsonl"}}, "data.users.ada: chats/no.jsonl"),
        ({"kind": "samples", "users": {"ada": {"train": "no.npz", "test": "no.npz"}}}, "data.users.ada.train: no.npz"),
    ],
)
def test_a_missing_file_is_named_with_its_user_before_the_base_is_loaded(data: dict[str, Any], place: str) -> None:
    recipe = parse_recipe(
        {"base": "net:mlp" if data["kind"] == "samples" else "no/base", "method": "fedavg", "data": data}
    )
    with pytest.raises(DataError, match=f"^{re.escape(place)}: "):
        prepare(recipe)


def test_names_on_the_hub_and_of_demo_users_are_no_missing_files() -> None:
    users = {"ada": "demo:library", "ben": "hub:someone/chats", "cem": "https://example.com/texts.txt"}
    check_sources(parse_recipe({"base": "no/base", "method": "fedavg", "data": {"users": users}}).data)
    chats = {"kind": "conversations", "users": {"ada": "someone/chats"}}
    check_sources(parse_recipe({"base": "no/base", "method": "fedavg", "data": chats}).data)
