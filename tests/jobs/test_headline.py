"""No stage of a chain trains on rows that hold items of a headline task: the chain stops before, and says which rows."""

import json
from pathlib import Path

import pytest

from megatron_nb import cascade, headline
from megatron_nb.chain import CascadeConfig, StageConfig, links_of
from megatron_nb.chain_check import check_links, refuse
from megatron_nb.config import ConfigError, compose, from_yaml
from megatron_nb.evals import overlap
from megatron_nb.headline import HeadlineConfig
from megatron_nb.ledger import GATE_EXIT, GateShut, LedgerConfig, check_gate, read_chain

SMALL = ["model=tiny", "parallel=cpu1", "context=2k", "data=files"]
RIDDLES = [
    "A farmer has seventeen sheep and all but nine of them run away during the storm, so how many are left in the field?",
    "Which two rivers meet below the old mill, and in which year was the first bridge built that crossed both at one place?",
]


def write_rows(path, *prompts):
    rows = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "9"}]} for text in prompts]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """A chain of two stages whose rows are clean; `begun` are the links that were begun. Searches are made here."""
    riddles = [{"id": f"r{number}", "question": text, "answer": "9"} for number, text in enumerate(RIDDLES)]
    (tmp_path / "riddles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in riddles))
    write_rows(tmp_path / "one.jsonl", "Name a colour.", "Name a river.")
    write_rows(tmp_path / "two.jsonl", "Name a town.")

    class Chain:
        begun = []
        folder = tmp_path
        words = SMALL
        stages = {
            "one": StageConfig("sft", [f"data.sources.a.path={tmp_path}/one.jsonl"]),
            "two": StageConfig("rl_code_pass_rate", ["answers=short", f"prompts.sources.a.path={tmp_path}/two.jsonl"], "one"),
        }
        ledger = LedgerConfig(headline=["riddles"], of=[], words=[
            "tasks.riddles.kind=math", f"tasks.riddles.path={tmp_path}/riddles.jsonl", "tasks.riddles.limit=1",
            "tasks.other.kind=math", "tasks.other.path=nothing.jsonl", "only=[other]", "exclude={chain}", "concurrency=3",
        ])  # fmt: skip

        def config(self, **more):
            return CascadeConfig("a", str(tmp_path), self.stages, self.words, self.ledger, **more)

        def run(self, **more):
            self.begun.clear()
            cascade.run(self.config(**more))

    made = Chain()

    def run(module, words, ranks):
        folder = Path(words[0].removeprefix("--config-dir="))
        made.begun.append(folder.name)
        if module == "megatron_nb.headline":
            try:
                headline.main(from_yaml(folder / "stage.yaml", HeadlineConfig))
            except SystemExit as end:
                return end.code
            return 0
        (folder / "summary.json").write_text("{}")
        return 0

    monkeypatch.setattr(cascade.processes, "run", run)
    monkeypatch.setattr(cascade, "check_links", lambda links: {})
    return made


def stopped(chain, **more):
    with pytest.raises(SystemExit) as end:
        chain.run(**more)
    return end.value.code


def test_rows_without_headline_items_are_trained_on(chain):
    chain.run()
    assert chain.begun == ["headline_one", "one", "headline_two", "two"]
    assert json.loads((chain.folder / "a/headline_one/summary.json").read_text())["rows"] == 2


def test_a_planted_item_stops_the_chain_before_the_stage_trains_and_its_row_is_named(chain, capfd):
    write_rows(chain.folder / "two.jsonl", "Name a town.", f"Please tell me: {RIDDLES[1]}")
    assert stopped(chain) == GATE_EXIT
    assert chain.begun == ["headline_one", "one", "headline_two"]
    said = capfd.readouterr().err
    assert f"riddles: 1 of 2 items, in {chain.folder}/two.jsonl:2\n" in said and "Take these rows out" in said
    states = {row["name"]: row["state"] for row in json.loads((chain.folder / "a/ledger.json").read_text())["stages"]}
    assert states == {"headline_one": "done", "one": "done", "headline_two": "gate shut", "two": "not started"}
    gate = next(link.gate for link in read_chain(chain.folder / "a") if link.name == "headline_two")
    with pytest.raises(GateShut, match="found 1. See .*headline_two; then take out the rows that its overlap_report"):
        check_gate(chain.folder / "a", "headline_two", gate)  # what tools/status.py says


def test_the_same_command_stays_shut_until_the_rows_are_taken_out_and_then_goes_on(chain):
    write_rows(chain.folder / "two.jsonl", "Name a town.", RIDDLES[0])
    assert [stopped(chain), stopped(chain)] == [GATE_EXIT] * 2
    assert chain.begun == ["headline_two"]
    write_rows(chain.folder / "two.jsonl", "Name a town.")
    chain.run()
    assert chain.begun == ["headline_two", "two"]
    chain.run()
    assert chain.begun == []


def test_rows_that_became_others_after_the_search_are_searched_before_they_are_trained_on(chain):
    run = cascade.processes.run
    cascade.processes.run = lambda module, words, ranks: 1 if words[0].endswith("/two") else run(module, words, ranks)
    assert stopped(chain) == 1  # killed, say
    cascade.processes.run = run
    write_rows(chain.folder / "two.jsonl", RIDDLES[1])
    assert stopped(chain) == GATE_EXIT and chain.begun == ["headline_two"]


def test_what_was_searched_is_not_read_through_again_and_what_was_trained_on_is_not_asked_again(chain, monkeypatch):
    chain.run()
    (chain.folder / "a/two/summary.json").unlink()
    looked = []
    monkeypatch.setattr(overlap, "look_through", lambda *given: looked.append(given))
    write_rows(chain.folder / "one.jsonl", RIDDLES[0])
    chain.run()
    assert chain.begun == ["headline_two", "two"] and looked == []


def test_a_stage_that_is_made_anew_is_searched_anew_and_one_before_it_is_not(chain):
    chain.run()
    chain.run(from_stage="two")
    assert chain.begun == ["headline_two", "two"]
    write_rows(chain.folder / "one.jsonl", RIDDLES[0])
    assert stopped(chain, from_stage="one") == GATE_EXIT and chain.begun == ["headline_one"]


def test_a_headline_that_is_named_later_is_looked_for_in_what_was_trained_on(chain):
    names, chain.ledger.headline = chain.ledger.headline, []
    write_rows(chain.folder / "one.jsonl", RIDDLES[0])
    chain.run()
    assert chain.begun == ["one", "two"]
    chain.ledger.headline = names
    assert stopped(chain) == GATE_EXIT and chain.begun == ["headline_one"]


def test_rows_that_are_not_there_are_no_clean_rows(chain):
    chain.stages["one"].words.append(f"data.sources.b.path={chain.folder}/more.jsonl")
    with pytest.raises(ValueError, match="more.jsonl' names no data file"):
        chain.run()
    assert chain.begun == ["headline_one"]


# ------------------------------------------------------------------ the links
@pytest.mark.parametrize(
    ("stage", "section", "words", "searched"),
    [("sft", "data", SMALL, True), ("sft_complexity_judge", "data", SMALL[:3], True),
     ("reward_pointwise", "data", SMALL[:3], True), ("rl_pairwise", "prompts", [*SMALL[:2], "answers=short"], True),
     ("synthesize_preferences", "prompts", [], False)],
)  # fmt: skip
def test_stages_that_train_are_searched_before_and_others_are_not(chain, stage, section, words, searched):
    rows = [f"{section}.sources.a.path=a.jsonl", f"{section}.sources.b.path='b *.jsonl'"]
    chain.stages, chain.words = {"x": StageConfig(stage, [*words, *rows])}, []
    links = links_of(chain.config())
    assert [link.name for link in links] == (["headline_x", "x"] if searched else ["x"])
    if searched:
        search, stage = links
        assert (search.searches, stage.waits_for, search.config.only) == ("x", ["headline_x"], ["riddles"])
        assert search.config.rows == [source.path for source in getattr(stage.config, section).sources.values()]
        assert search.config.rows[-2:] == ["a.jsonl", "b *.jsonl"]


def test_a_search_waits_for_those_who_make_the_rows_and_not_for_the_checkpoint(chain):
    rows = "prompts.sources.a.path={questions}/questions/rl.jsonl"
    chain.stages["questions"] = StageConfig("synthesize_questions")
    chain.stages["last"] = StageConfig("rl_code_complexity", ["answers=short", rows], "two")
    links = {link.name: link for link in links_of(chain.config())}
    assert links["headline_last"].waits_for == ["questions"]
    assert links["headline_last"].config.rows == [f"{chain.folder}/a/questions/questions/rl.jsonl"]
    assert links["last"].waits_for == ["questions", "two", "headline_last"]


def test_the_dry_run_names_the_search_its_tasks_and_its_rows(chain, capsys):
    links = links_of(chain.config())[:1]
    checked = check_links(links)
    refuse(links, checked)
    cascade.describe(links, checked)
    said = capsys.readouterr().out
    assert "== headline_one" in said and "gate         items_met <= 0" in said
    assert "looks for    riddles (2 items)" in said and f"in           {chain.folder}/one.jsonl" in said


def test_a_headline_that_is_no_task_is_refused_before_any_work(chain):
    chain.ledger.headline = ["riddle"]
    with pytest.raises(ConfigError, match=r"ledger \(headline_one\): .*there is no task riddle; there are riddles, other"):
        chain.run()
    assert chain.begun == []
    with pytest.raises(ValueError, match="ledger.words is empty, so there are no tasks"):
        LedgerConfig(headline=["riddles"])


def test_a_search_is_no_stage_to_be_placed_by_hand(chain):
    chain.stages["search"] = StageConfig("headline")
    with pytest.raises(ConfigError, match="stages.search: name the tasks in ledger.headline"):
        links_of(chain.config())
    with pytest.raises(ValueError, match="are names of the chain's own"):
        CascadeConfig(stages={"headline_one": StageConfig("sft")})


def test_on_slurm_a_stage_waits_for_its_search_and_one_in_the_queue_is_not_searched_again(chain, monkeypatch):
    submitted = []

    class Ready:
        def __init__(self, config, name, module):
            self.config, self.name = type("Slurm", (), {})(), name

        def submit(self):
            submitted.append((self.name, self.config.after))
            return f"job-{self.name}"

    monkeypatch.setattr(cascade, "slurm_job", Ready)
    links, config = links_of(chain.config()), cascade.slurm.SlurmConfig()
    cascade.submit(links, config)
    assert submitted == [
        ("headline_one", []), ("one", ["job-headline_one"]),
        ("headline_two", []), ("two", ["job-one", "job-headline_two"]),
    ]  # fmt: skip
    submitted.clear()
    monkeypatch.setattr(cascade.slurm, "running", lambda run: "7" if run.name == "one" else None)
    monkeypatch.setattr(cascade.slurm, "state", lambda job: "PENDING")
    cascade.submit(links, config)
    assert submitted == [("headline_two", []), ("two", ["7", "job-headline_two"])]


def test_a_search_by_hand_says_what_it_found_by_its_exit_code(chain):
    given = ["tasks.riddles.kind=math", f"tasks.riddles.path={chain.folder}/riddles.jsonl", f"runs_dir={chain.folder}/runs"]
    headline.main(compose(HeadlineConfig, "headline", [*given, f"rows=[{chain.folder}/one.jsonl]"]))
    with pytest.raises(SystemExit, match=str(GATE_EXIT)):
        headline.main(compose(HeadlineConfig, "headline", [*given, f"rows=[{chain.folder}/riddles.jsonl]"]))
    with pytest.raises(ValueError, match="rows is empty"):
        headline.main(compose(HeadlineConfig, "headline", given))
    with pytest.raises(ValueError, match="no task is named"):
        headline.main(HeadlineConfig(rows=["a.jsonl"]))
