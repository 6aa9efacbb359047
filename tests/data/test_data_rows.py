"""Files of rows: every kind is read, and what is broken is named by file, line, rule and remedy."""

import gzip
import json

import pytest

from megatron_nb.data.formats import read
from megatron_nb.data.rows import BadRow, data_files, raw_rows
from tests.data.data_tokenizers import chat, write_rows

ROWS = [chat("a", "b"), chat("c", "d")]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json lines", "json array", "json.gz", "parquet"])
def test_every_kind_of_file_gives_the_same_conversations(tmp_path, kind):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    array = json.dumps(ROWS, indent=2)
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        file = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    elif kind.endswith(".gz"):
        file = tmp_path / f"rows.{kind}"
        file.write_bytes(gzip.compress((array if kind == "json.gz" else lines).encode()))
    else:
        file = tmp_path / f"rows.{kind.split()[0]}"
        file.write_text(array if kind == "json array" else lines)
    found = list(read(str(file), "source"))
    assert [item.messages[1]["content"] for item in found] == ["b", "d"]
    assert [item.sample_id for item in found] == [f"{file.name}:1", f"{file.name}:2"]


def test_parquet_columns_that_are_null_are_not_taken_for_values(tmp_path):
    import pyarrow
    import pyarrow.parquet

    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    other = {"type": "function", "function": {"name": "g", "arguments": {"y": 2}}}
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [one]}]}
        for one in (call, other)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    first, second = read(str(tmp_path / "rows.parquet"), "source")
    assert first.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert second.messages[1]["tool_calls"][0]["function"]["arguments"] == {"y": 2}


def test_folders_and_globs_name_files_in_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        write_rows(tmp_path / name, ROWS)
    assert [file.name for file in data_files(str(tmp_path))] == ["a.jsonl", "b.jsonl"]
    assert [file.name for file in data_files(f"{tmp_path}/b*.jsonl")] == ["b.jsonl"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"messages": [}\n', ["bad.jsonl:2", "malformed JSON", "data.bad_rows=skip"]),
        (b'["a"]\n', ["bad.jsonl:2", "found a list", "one JSON object"]),
        (b'{"text": "\xff\xfe"}\n', ["bad.jsonl:2", "malformed JSON"]),
        (b'{"question": "a"}\n', ["bad.jsonl:2", "keys are question", "messages, conversations or text"]),
    ],
)
def test_a_broken_line_is_named_with_file_line_rule_and_remedy(tmp_path, content, words):
    (tmp_path / "bad.jsonl").write_bytes(json.dumps(ROWS[0]).encode() + b"\n" + content)
    with pytest.raises(BadRow) as error:
        list(read(str(tmp_path / "bad.jsonl"), "source"))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_an_error(tmp_path, content):
    (tmp_path / "empty.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match="empty.jsonl: the file is empty"):
        list(raw_rows(tmp_path / "empty.jsonl"))


def test_a_cut_off_gzip_file_is_an_error_that_names_it(tmp_path):
    whole = gzip.compress("".join(json.dumps(chat(str(i), "b")) + "\n" for i in range(999)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut.jsonl.gz: cannot be read to its end"):
        list(raw_rows(tmp_path / "cut.jsonl.gz"))


@pytest.mark.parametrize("name", ["absent.jsonl", "nothing/*.jsonl", "notes.txt"])
def test_a_path_without_data_files_is_an_error(tmp_path, name):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match="no data file|unknown kind"):
        data_files(str(tmp_path / name))
