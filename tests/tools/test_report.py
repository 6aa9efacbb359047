"""The page tells what the folders hold, as text and never as markup, of runs done, half done and failed; without a network."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
import yaml

from megatron_nb.records import Conversation, Group, Prompt, Rollout, Score, Turn
from megatron_nb.rollout.store import write_step
from tools import report, report_charts, report_read, report_tables

NASTY = "</div></td><script>alert(1)</script><img src=//x onerror=x> [link](http://x) & \x1b[31mred"


class Page(HTMLParser):
    """Tags met, the text, and the text of every table row."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: dict[str, int] = {}
        self.open: list[str] = []
        self.words, self.rows = "", []
        self.feed(html)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        assert not any(name.startswith("on") or name == "src" for name, _ in attributes)
        assert all(value.startswith("#") for name, value in attributes if name == "href")
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag not in ("meta", "br", "path", "circle"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append("")

    def handle_endtag(self, tag):
        if tag not in ("path", "circle"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words += data
        if "tr" in self.open:
            self.rows[-1] += f"{data.strip()} " if data.strip() else ""

    def row(self, *words: str) -> str:
        """The one table row that holds all of these words."""
        found = [row for row in self.rows if all(word in row for word in words)]
        assert len(found) == 1, (words, found)
        return found[0]


def answer(group: str, index: int, text: str, reward: float | None) -> Rollout:
    n = len(text)
    score = Score(None, reason=f"judge {n}: timed out") if reward is None else Score(reward)
    streams = ([5] * n, [True] * n, [-0.5] * n, [0] * n, [0] * n, [Turn(0, n, "assistant")])
    return Rollout([1], *streams, "done", {}, 0, group, index, text=text, score=score)


def groups(step: int, answers: dict[str, list[tuple[str, float | None]]]) -> list[Group]:
    made = []
    for question, its in answers.items():
        name = f"heldout{step}.{question[:3]}"
        conversation = Conversation([{"role": "user", "content": question}], name, "test")
        made.append(Group(name, Prompt(conversation, [1]), [answer(name, k, *one) for k, one in enumerate(its)]))
    return made


def write_run(folder, config, rows=(), summary=None, log=""):
    (folder / "logs" / "attempt-1").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "logs" / "attempt-1" / "rank-0.log").write_text(log)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps({"seed": 1, "wall_s": 61.0} | summary))


SFT = {"name": "sft", "init_from": None, "seq_len": 512, "num_steps": 3, "optimizer": {"lr": 0.001}, "data": {"sources": {
    "chat": {"path": "chat.jsonl", "weight": 3.0}, "code": {"path": "code.jsonl", "weight": 1.0}}}}  # fmt: skip
LOG = """2026-01-01 10:00:00,000 INFO __main__: /runs/sft
model        1,000 parameters
memory of the fullest rank
2026-01-01 10:00:01,000 WARNING megatron_nb.data.dataset: 3 of 7 samples are longer
2026-01-01 10:00:02,000 WARNING megatron_nb.data.dataset: 5 of 9 samples are longer
2026-01-01 10:00:03,000 ERROR megatron_nb.training: lost
"""


@pytest.fixture
def cascade(tmp_path):
    """SFT of two lengths, a reward model whose gate is shut, RL after the first SFT; evaluations of the base and of three."""
    root = tmp_path / "recipe"
    steps = [{"step": k, "loss": 4.0 - k, "lr": 0.1, "seconds": 2.0, "tokens": 100, "clip_low": 0.0} for k in (1, 2, 3)]
    twice = [*steps[:2], {"step": 2, "loss": 1.5}, steps[2]]  # a later attempt did step 2 again
    write_run(root / "sft", SFT, twice, {"share_chat": 0.74, "share_code": 0.26, "loss_first": 3.0, "loss_last": 1.0,
              "tokens": 300}, LOG)  # fmt: skip
    longer = SFT | {"name": "long", "seq_len": 1024, "init_from": str(root / "sft")}
    write_run(root / "long", longer, steps, {"loss_first": 1.0, "loss_last": 0.9})
    accuracy = {"heldout_accuracy_after": 0.5, "heldout_accuracy_before": 0.5}
    write_run(root / "reward", {"kind": "pairwise", "data": {}}, [], accuracy)
    heldout = [{"step": step, "heldout_reward": reward, "heldout_reward_error": 0.05} for step, reward in ((0, 0.2), (4, 0.8))]
    write_run(root / "rl", {"policy": {}, "num_steps": 9, "prompts": {"sources": {"a": {"path": "rl.jsonl"}}}}, heldout,
              {"heldout_reward_before": 0.2, "heldout_reward_after": 0.8, "heldout_reward_error_before": 0.03,
               "heldout_reward_error_after": 0.04})  # fmt: skip
    first = {"one?": [("bad", 0.0), ("worse", 0.0)], "two?": [(NASTY, 1.0)], "lost?": [("x", None)]}
    last = {"one?": [("best", 1.0), ("good", 0.8), ("poor", 0.3)], "two?": [("fell", 0.5)], "lost?": [("xyz", None)]}
    for step, answers in ((0, first), (4, last)):
        write_step(root / "rl", step, groups(step, answers), kind="heldout")
    results = {"base": (0.1, 0.3), "sft": (0.5, 0.8), "long": (0.9, 0.8), "rl": (0.3, 0.2)}
    for name, (code, chat) in results.items():
        told = {"code": {"pass": code, "pass_low": code - 0.05, "pass_high": code + 0.05, "tokens_out": 10.0},
                "chat": {"score": chat, "score_low": chat - 0.7, "score_high": chat + 0.7}}  # fmt: skip
        write_run(root / f"evaluate_{name}", {"tasks": {}}, [], {})
        (root / f"evaluate_{name}" / "results.json").write_text(json.dumps(told))
        (root / f"evaluate_{name}" / "outcomes").mkdir()
        rows = [{"item": item, "index": 0, "score": score, "answer": f"{name} says {item}"}
                for item, score in {"a": code, "b": 0.7, "c": None}.items()]  # fmt: skip
        (root / f"evaluate_{name}" / "outcomes" / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ["evaluate_base", "sft", "evaluate_sft", "long", "evaluate_long", "reward", "rl", "evaluate_rl", "later"]
    starts = {"long": "sft", "reward": "long", "rl": "sft"}
    asked = {"evaluate_base": "", "evaluate_sft": "sft", "evaluate_long": "long", "evaluate_rl": "rl"}
    links = [{"name": name, "start_from": starts.get(name), "evaluates": asked.get(name)} for name in names]
    (root / "chain.json").write_text(json.dumps({"stages": names, "links": links}))
    gate = {"metric": "heldout_accuracy_after", "minus": None, "at_least": 0.6, "at_most": None, "value": 0.5, "passed": False}
    ledger = [{"name": name, "stage": name, "seconds": 65.0, "gate": gate if name == "reward" else None} for name in names]
    ledger[names.index("sft")]["evaluation"] = {"code": {"pass": 0.01, "pass_low": 0.0, "pass_high": 0.02}}  # since asked anew
    (root / "ledger.json").write_text(json.dumps({"stages": ledger, "base_evaluation": None}))
    pair = {"task": "code", "item": NASTY, "by": "words", "excerpt": "run of words", "where": "chat.jsonl:7"}
    tasks = {"code": {"items": 3, "excluded": 2, "stages": {"sft": 2}}}
    overlap = {"tasks": tasks, "missing": ["rl, source a: not there"], "pairs": [pair]}
    (root / "overlap_report.json").write_text(json.dumps(overlap))
    return root


@pytest.fixture
def page(cascade):
    html = report.page(cascade)
    assert "http://" not in html.replace("[link](http://x)", "") and "https://" not in html
    assert "default-src 'none'" in html
    return Page(html)


def test_the_page_runs_nothing_and_what_rows_bring_is_text(page):
    assert not {"script", "img", "link", "iframe", "a:href"} & page.tags.keys()
    assert "<script>alert(1)</script>" in page.words and "\x1b" not in page.words


def test_the_table_of_stages_tells_time_change_gate_and_state(page):
    assert "2 standard errors" not in page.row("sft", "done", "1 min 05 s", "3 300")
    assert "heldout reward 0.2 \u2192 0.8 \u00b1 0.05" in page.row("rl", "4/9")
    assert "heldout_accuracy_after 0.5 \u2265 0.6: NOT PASSED" in page.row("reward", "gate shut")
    assert "not started" in page.row("later")
    assert "4 of 5 stages done" in page.words


def test_evaluations_are_compared_with_the_stage_that_each_goes_back_to(page):
    assert "task metric before sft long rl " in page.rows
    assert page.row("code", "pass").split()[2::4] == ["0.1", "0.5", "0.9", "0.3"]
    assert "code: pass fell from 0.5 (sft) to 0.3 by rl" in page.words
    assert "chat: score fell" not in page.words  # its intervals overlap
    assert "code +0.4" in page.row("sft", "done") and "code -0.2" in page.row("rl", "4/9")


def test_items_that_changed_most_show_the_answers_of_the_first_and_the_last_evaluation(page):
    assert "code a" in page.words and "base says a" in page.words and "rl says a" in page.words
    assert "base says b" not in page.words and "says c" not in page.words


def test_what_training_met_is_named_and_what_was_not_looked_through_too(page):
    assert page.row("code 3 2 sft 2") and "run of words" in page.row("chat.jsonl:7")
    assert "Not looked through: rl, source a: not there" in page.words


def test_the_mixture_is_told_as_asked_and_as_seen(page):
    html_rows = [row for row in page.rows if "chat.jsonl" in row and "%" in row]
    assert html_rows == ["chat 75.0% 74.0% chat.jsonl ", "chat 75.0% chat.jsonl "]  # sft; long has not told its shares


def test_settings_are_compared_with_the_last_stage_of_the_same_job(cascade):
    runs = {run.name: run for run in report_read.stages_of(cascade)}
    other, changed, one_sided = report_read.differences(runs["long"], [runs["sft"], runs["rl"]])
    assert (other.name, changed, one_sided) == ("sft", [("seq_len", 512, 1024)], [])
    other, changed, one_sided = report_read.differences(runs["reward"], [runs["sft"], runs["rl"]])
    assert other.name == "rl" and changed == [] and "kind" in one_sided and "policy" not in changed


def test_a_step_done_twice_counts_as_the_later_attempt_did_it(cascade):
    sft = next(run for run in report_read.stages_of(cascade) if run.name == "sft")
    assert sft.series("loss") == [(1, 3.0), (2, 1.5), (3, 1.0)]


def test_metrics_that_never_change_are_words_and_others_are_curves(page):
    assert "clip_low 0" in page.words and "lr 0.1" in page.words
    assert "loss  3 \u2192 1" in page.words


def test_prompts_that_changed_most_show_a_typical_answer_of_both_steps(page):
    shown = page.words[page.words.index("Held-out prompts that changed most") :]
    assert shown.index("one?") < shown.index("two?")  # rose first, then fell
    assert "mean reward 0.7 of 3; shown: 0.8, 4 tokens" in shown and "good" in shown and "best" not in shown
    assert "lost?" not in shown


def test_troubles_are_counted_by_kind_with_reasons_of_answers_without_reward(page):
    assert page.row("2 warning", "3 of 7 samples") and page.row("1 error", "lost")
    assert page.row("2 judge #: timed out")


def test_what_the_job_said_of_itself_ends_where_its_log_goes_on(page):
    assert "model        1,000 parameters\nmemory of the fullest rank" in page.words


def test_without_errors_there_is_no_verdict(cascade):
    rl = next(run for run in report_read.stages_of(cascade) if run.name == "rl")
    assert report_tables.headline(rl).verdict == "better"
    rl.summary |= {"heldout_reward_error_before": 0.0, "heldout_reward_error_after": 0.0}  # of a single prompt
    assert report_tables.headline(rl) == report_tables.Cell("heldout reward 0.2 \u2192 0.8")


def test_a_run_that_died_shows_the_end_of_its_log(tmp_path):
    write_run(tmp_path / "run", SFT, [{"step": 1, "time": 1, "loss": 2.0}], None, LOG + "Traceback: out of memory\n")
    shown = Page(report.page(tmp_path / "run"))
    assert "run is stopped" in shown.words and "Traceback: out of memory" in shown.words and "1 of 3" in shown.words


def test_runs_without_a_chain_are_shown_in_the_order_begun(cascade):
    (cascade / "chain.json").unlink()
    (cascade / "ledger.json").unlink()
    write_run(cascade / "sft.before-1", SFT)  # moved aside by a chain that made it anew
    names = [run.name for run in report_read.stages_of(cascade)]
    assert names == ["sft", "long", "reward", "rl", "evaluate_base", "evaluate_sft", "evaluate_long", "evaluate_rl"]
    assert Page(report.page(cascade)).words


def test_reports_of_a_synthesis_are_shown_without_their_markup(tmp_path):
    write_run(tmp_path / "run", {"questions": "q"}, [], {"questions": 7})
    (tmp_path / "run" / "questions").mkdir()
    (tmp_path / "run" / "questions" / "report.json").write_text("{}")
    text = f"---\ntags: [x]\n---\n# Title\n\n| a | b |\n|---|---|\n| 1 | {NASTY} |\n"
    (tmp_path / "run" / "questions" / "README.md").write_text(text)
    shown = Page(report.page(tmp_path / "run"))
    assert "tags:" not in shown.words and "Title" in shown.words and "alert(1)" in shown.words
    assert "script" not in shown.tags and shown.tags.keys() >= {"table"}


@pytest.mark.parametrize("make", ["missing", "empty", "broken"])
def test_a_folder_with_nothing_to_show_is_refused_with_a_remedy(tmp_path, capsys, make):
    folder = tmp_path / "x"
    if make != "missing":
        folder.mkdir()
    if make == "broken":
        (folder / "chain.json").write_text("{")
    assert report.main([str(folder)]) == 2
    told = {"missing": "is no folder", "empty": "holds no run", "broken": "chain.json: it is no JSON"}
    assert told[make] in capsys.readouterr().err


def test_the_tool_writes_the_page_into_the_folder(cascade, capsys):
    assert report.main([str(cascade)]) == 0
    assert "<!DOCTYPE html>" in (cascade / "report.html").read_text() and "report.html" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "change", "error", "expected"), [
    ("reward", 0.3, 0.1, "better"), ("heldout_loss", 0.3, 0.1, "worse"), ("truncated", -0.3, 0.1, "better"),
    ("reward", 0.1, 0.1, ""), ("length_mean", 9.0, 0.1, ""),
])  # fmt: skip
def test_better_and_worse_go_by_the_quantity_and_its_error(name, change, error, expected):
    assert report_tables.verdict(name, change, error) == expected


@pytest.mark.parametrize(("value", "expected"), [
    (0, "0"), (2.8e-17, "0"), (1e-14, "1e-14"),
    (0.123456, "0.1235"), (1234.5, "1,234"), (15000, "15k"), (2.5e6, "2.5M"), (None, "-"), (float("nan"), "-"),
])  # fmt: skip
def test_numbers_are_shown_in_four_digits(value, expected):
    assert report_charts.short(value) == expected


def points(chart: str, name: str) -> list[str]:
    return re.findall(rf'd="([^"]*)"[^>]*><title>{name}', chart)


def test_a_curve_breaks_where_a_value_is_missing_and_skips_what_is_not_finite():
    chart = report_charts.curves("t", {"a": [(1, 1.0), (2, 2.0), (3, None), (4, 2.0), (5, float("inf")), (6, 1.0)]})
    assert points(chart, "a")[0].count("M") == 3
    assert report_charts.curves("t", {"a": [(1, None)]}) is None


def test_a_long_curve_keeps_its_ends_and_extremes_in_few_points():
    line = [(float(k), float(k == 5000)) for k in range(10000)]
    chart = report_charts.curves("t", {"a": line})
    assert len(chart) < 20000
    frame = report_charts.Frame([0, 9999], [0.0, 1.0])
    assert f" {frame.down(1.0):.1f}" in chart  # the spike stands in the band


def test_a_histogram_shares_its_bins_and_loses_no_value():
    chart = report_charts.histogram("t", {"a": [0.0, 0.0, 1.0], "b": [1.0]}, bins=2)
    frame = report_charts.Frame([0.0, 1.0], [2 / 3, 1 / 3, 0.0, 1.0], whole_x=False, from_zero=True)
    assert f"{frame.down(2 / 3):.1f}" in points(chart, "a")[0] and f"{frame.down(1.0):.1f}" in points(chart, "b")[0]
    assert "mean 0.3333, n 3" in chart and report_charts.histogram("t", {"a": []}) is None
    assert report_charts.histogram("t", {"a": [2.0, 2.0]})
