"""The whole of question synthesis on an invented wiki: splits, duplicates, models that write and try, resumes, the report."""

import asyncio
import json
from collections import Counter

import pytest

from megatron_nb.asking.ledger import Ledger
from megatron_nb.client import ClientConfig
from megatron_nb.rewards.answer_search import normalised
from megatron_nb.rollout.toolbox import Toolbox
from megatron_nb.search.backend import LocalSearch
from megatron_nb.synthesis.question_report import write_questions
from megatron_nb.synthesis.question_solver import Solver, SolverConfig
from megatron_nb.synthesis.question_verify import verify_chain
from megatron_nb.synthesis.question_writer import EndpointWriter, Templates, WriterConfig
from megatron_nb.synthesis.question_writer import _read as read_question
from megatron_nb.synthesis.questions import Kept, Maker, make_all, make_part
from megatron_nb.synthesis.walk import WalkConfig, Walker
from tests.synthesis.question_stub import Stub
from tests.synthesis.small_wiki import small_corpus

WALK = WalkConfig(min_steps=2, max_steps=4, cutoff="none", min_degree=0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("wiki"), pages=72)


@pytest.fixture
def stub():
    server = Stub()
    yield server
    server.close()


def make(corpus, folder, counts=None, writer=None, solver=None, *, apart="path", heldout_pages=None, same_links=0.5,
         concurrency=4, attempts=60):  # fmt: skip
    ledger = Ledger(folder, "attempts", 0)
    maker = Maker(corpus, writer or Templates(), solver, WALK.min_steps, 3, "small")
    try:
        return asyncio.run(make_all(
            counts or {"train": 12, "heldout": 4}, apart, heldout_pages, same_links, WALK, maker, ledger, concurrency, attempts,
        ))  # fmt: skip
    finally:
        ledger.close()


def client(stub, **more) -> ClientConfig:
    return ClientConfig(stub.url, "m", retries=1, pause_s=0.01, timeout_s=20, **more)


def model_writer(stub) -> EndpointWriter:
    return EndpointWriter(WriterConfig(client(stub)), 800, 15)


def trying(stub, corpus, **more) -> Solver:
    config = SolverConfig(client(stub), closed_book_tries=2, search_tries=2, **more)
    return Solver(config, Toolbox(config.tools, search=LocalSearch(corpus.folder)), 0)


@pytest.mark.parametrize("apart", ["path", "answer"])
def test_the_parts_share_no_answer_and_no_page_that_they_may_not_share(corpus, tmp_path, apart):
    kept = make(corpus, tmp_path, apart=apart)
    train, heldout = kept.of("train"), kept.of("heldout")
    assert (len(train), len(heldout)) == (12, 4) and all(verify_chain(corpus, row) is None for row in kept.rows)
    answers = [{normalised(row["answer"]) for row in rows} for rows in (train, heldout)]
    assert not answers[0] & answers[1]
    if apart == "path":
        assert not kept.pages("train") & kept.pages("heldout")
    else:
        last = [{row["path"][-1]["title"] for row in rows} for rows in (train, heldout)]
        assert not last[0] & last[1] and kept.pages("train") & kept.pages("heldout")
    assert all(2 <= row["hops"] <= 4 for row in kept.rows)


def test_held_out_walks_keep_to_a_neighbourhood_that_training_walks_avoid(corpus, tmp_path):
    kept = make(corpus, tmp_path, {"train": 12, "heldout": 4}, apart="answer", heldout_pages=0.4)
    assert (len(kept.of("train")), len(kept.of("heldout"))) == (12, 4)
    assert not kept.pages("train") & kept.pages("heldout") and len(kept.pages("heldout")) <= 0.4 * 72


def test_every_check_by_a_model_is_recorded_as_not_checked_without_one(corpus, tmp_path):
    for row in make(corpus, tmp_path).rows:
        assert {name: row["checks"][name] for name in ("closed_book", "from_evidence", "by_search")} == dict.fromkeys(
            ("closed_book", "from_evidence", "by_search"), "not checked")  # fmt: skip


def test_concurrency_and_a_resume_change_nothing_and_whole_chunks_are_not_made_again(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_nb.synthesis.questions.CHUNK", 8)
    whole = make(corpus, tmp_path / "whole")
    assert make(corpus, tmp_path / "one", concurrency=1).rows == whole.rows
    made, chain = [], Maker.chain

    def counted(self, name, titles):
        made.append(name)
        return chain(self, name, titles)

    monkeypatch.setattr(Maker, "chain", counted)
    again = make(corpus, tmp_path / "one", concurrency=1)
    assert again.rows == whole.rows and len(made) == sum(whole.attempts[part] % 8 for part in whole.attempts)


def test_a_model_that_writes_is_asked_once_for_each_attempt_whatever_is_resumed(corpus, tmp_path, stub):
    first = make(corpus, tmp_path, writer=model_writer(stub))
    asked = stub.asked["write"]
    again = make(corpus, tmp_path, writer=model_writer(stub))
    assert again.rows == first.rows and len(first.rows) == 16
    assert stub.asked["write"] == asked <= len(first.rows) + sum(first.dropped[part].total() for part in first.dropped) + 8


@pytest.mark.parametrize("spoils", [("answer",), ("title",), ("answer", "title")])
def test_a_question_that_breaks_a_rule_is_written_again(corpus, tmp_path, stub, spoils):
    stub.spoils = spoils
    kept = make(corpus, tmp_path, {"train": 3, "heldout": 0}, model_writer(stub))
    assert len(kept.rows) == 3 and all(verify_chain(corpus, row) is None for row in kept.rows)
    assert stub.asked["write"] >= 3 * (len(spoils) + 1)


def test_a_writer_that_never_writes_what_was_asked_for_stops_the_job(corpus, tmp_path, stub):
    stub.spoils = ("nonsense",)
    with pytest.raises(OSError, match="in a row without an answer; the last: .* no question in the JSON"):
        make(corpus, tmp_path, writer=model_writer(stub), concurrency=1)


def test_a_question_that_stays_broken_is_dropped_by_the_rule_it_breaks(corpus, tmp_path, stub):
    stub.spoils = ("answer", "title", "title")
    kept = make(corpus, tmp_path, {"train": 1, "heldout": 0}, writer=model_writer(stub), attempts=5)
    assert not kept.rows and set(kept.dropped["train"]) == {"path_hidden"}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"knows": 2.0}, "answered_closed_book"),
        ({"blind": True}, "evidence_not_enough"),
        ({"searches": (False,)}, "not_found_by_search"),
        ({"searches": (True,)}, "never_failed_by_search"),
        ({}, None),
    ],
)
def test_what_a_model_makes_of_a_question_keeps_or_drops_it(corpus, tmp_path, stub, settings, rule):
    vars(stub).update(settings)
    solver = trying(stub, corpus)
    kept = make(corpus, tmp_path, {"train": 2, "heldout": 0}, model_writer(stub), solver, attempts=5)
    if rule:
        assert not kept.rows and set(kept.dropped["train"]) == {rule}
        return
    assert len(kept.rows) == 2
    for row in kept.rows:
        checks = {name: row["checks"][name] for name in ("closed_book", "from_evidence", "by_search")}
        assert checks == {"closed_book": {"right": 0, "tries": 2}, "from_evidence": {"right": 1, "tries": 1},
                          "by_search": {"right": 1, "tries": 2}}  # fmt: skip
    assert stub.asked["search"] >= 8  # each try searched, then answered


def test_an_endpoint_that_is_down_stops_the_job_and_is_no_verdict(corpus, tmp_path, stub):
    stub.down = True
    with pytest.raises(OSError, match="without an answer"):
        make(corpus, tmp_path, writer=model_writer(stub), concurrency=2)
    stub.down = False
    assert len(make(corpus, tmp_path, writer=model_writer(stub)).rows) == 16  # nothing was written down as dropped


def sample_row(number: int, titles: str, answer: str = "1900") -> dict:
    path = [{"title": title, "link": link} for title, link in zip(titles, [*titles[1:], None])]
    return {"question": f"question {number}", "answer": answer, "path": path, "hops": len(titles) - 1}


@pytest.mark.parametrize(
    ("row", "part", "rule"),
    [
        (sample_row(1, "ABCDE", "17"), "train", "answer_is_held_out"),
        (sample_row(1, "FGHIE", "18"), "train", "answer_page_is_held_out"),
        (sample_row(0, "FGHI", "18"), "heldout", "duplicate_question"),
        (sample_row(1, "FGE", "17"), "heldout", "duplicate_answer"),
        (sample_row(1, "ABCDX", "18"), "train", "duplicate_path"),  # three of its four links
        (sample_row(1, "ABCX", "18"), "train", "duplicate_path"),  # two of three
        (sample_row(1, "ABCXY", "18"), "train", None),  # two of four
    ],
)
def test_what_repeats_an_earlier_question_is_dropped(row, part, rule):
    kept = Kept()
    kept.add(sample_row(0, "ABCDE", "17"), "heldout")
    assert kept.repeats(row, part) == rule


def test_too_few_walks_give_fewer_questions_and_a_warning(corpus, tmp_path, caplog):
    kept = make(corpus, tmp_path, {"train": 100, "heldout": 0}, attempts=1)
    assert 0 < len(kept.rows) < 100 and "raise attempts" in caplog.text
    assert kept.attempts["train"] == 100 == len(kept.rows) + kept.dropped["train"].total()


def test_when_held_out_pages_are_all_pages_the_held_out_questions_are_kept_and_it_is_told(corpus, tmp_path, caplog):
    kept = make(corpus, tmp_path, {"train": 5, "heldout": 500}, attempts=2)
    assert kept.of("heldout") and not kept.of("train")
    assert "train, apart=path and heldout_pages=None leave out 71 pages: no page can be a head" in caplog.text
    with pytest.raises(ValueError, match=r"heldout_pages=0.01 leave out 7\d pages: no page can be a head"):
        make(corpus, tmp_path / "few", heldout_pages=0.01)


@pytest.mark.parametrize("reply", ['{"question": "\\ud800", "clues": ["a"]}', '{"question": "q", "clues": ["\\udc00"]}'])
def test_a_reply_that_no_file_can_hold_is_no_question(reply):
    with pytest.raises(ValueError, match="surrogates"):
        read_question(reply)


def test_a_part_ends_as_soon_as_it_has_enough(corpus, tmp_path):
    ledger, kept = Ledger(tmp_path, "a", 0), Kept()
    maker = Maker(corpus, Templates(), None, 2, 0, "small")
    asyncio.run(make_part("train", 1, kept, Walker(corpus.graph, WALK), maker, ledger, 4, 1000))
    assert len(kept.rows) == 1 and kept.attempts["train"] < 30


def test_the_files_say_what_was_kept_and_dropped(corpus, tmp_path):
    kept = make(corpus, tmp_path / "ledger")
    facts = {"source": "small", "pages": "72", "links": "432", "steps": "2 to 4", "apart": " and no page of a path",
             "heads": "anywhere", "writer": "Written by templates."}  # fmt: skip
    measured = write_questions(tmp_path / "q", kept, facts)
    files = {name: [json.loads(line) for line in (tmp_path / "q" / f"{name}.jsonl").read_text().splitlines()]
             for name in ("questions", "train", "heldout")}  # fmt: skip
    assert files["questions"] == kept.rows and files["train"] + files["heldout"] == kept.of("train") + kept.of("heldout")
    report = json.loads((tmp_path / "q" / "report.json").read_text())
    assert report["all"]["questions"] == 16 == measured["questions"]
    assert report["all"]["hops"] == {str(hops): count for hops, count in sorted(Counter(r["hops"] for r in kept.rows).items())}
    for part in ("train", "heldout"):
        assert report["walks"][part] == len(kept.of(part)) + sum(report["dropped"][part].values())
    card = (tmp_path / "q" / "README.md").read_text()
    assert "16 questions" in card and "closed_book | not checked" in card and "share no answer and no page of a path" in card
    assert all(f"| {rule} |" in card for part in report["dropped"].values() for rule in part)
