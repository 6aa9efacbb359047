"""The job by its command line, with a teacher behind a real endpoint and an index on disk: files, resume, refusals."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_nb import synthesize_trajectories
from megatron_nb.data.formats import read
from megatron_nb.search.build import build
from tests.data.data_tokenizers import write_rows
from tests.synthesis.scripted_teacher import PAGES, ROW, WAY


class Endpoint(ThreadingHTTPServer):
    """Plays the roles of a teacher; the searcher follows WAY by the number of results it is shown. broken: answers nothing."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies, self.broken = [], False
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        at = sum(message["role"] == "tool" for message in body["messages"])
        message = {"role": "assistant", "content": "Look for the town."}
        if "tools" in body and at < len(WAY):
            thought, name, arguments = WAY[at]
            call = {"id": f"s{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            message = {"role": "assistant", "content": None, "reasoning_content": thought, "tool_calls": [call]}
        elif "tools" in body:
            message["content"] = "Done."
        elif "Answer: THE SHORT ANSWER" in body["messages"][0]["content"]:
            known = "Dunmere" if "hill town" in body["messages"][1]["content"] else "Po"
            message["content"] = f"It is the river.\nAnswer: {known}"
        text = b"{}" if self.server.broken else json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def endpoint():
    made = Endpoint()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rows = [{"title": title, "text": text} for title, text in PAGES.items()]
    build(write_rows(folder / "pages.jsonl", rows), folder / "made", 1)
    return folder / "made"


@pytest.fixture
def words(tmp_path, endpoint, corpus):
    rows = [{**ROW, "id": f"q{number}"} for number in range(3)]
    rows.append({"id": "other", "question": "Which river crosses the plain?", "answer": "Ticino"})
    return [
        f"questions={write_rows(tmp_path / 'questions.jsonl', rows)}", f"runs_dir={tmp_path}", "name=made", "attempts=2",
        f"tools.search={corpus}", "tools.names=[search,open_page,find_in_page]", "concurrency=2",
        f"teacher.endpoint.base_url=http://127.0.0.1:{endpoint.server_port}", "teacher.endpoint.model=m",
        "teacher.endpoint.retries=0", "teacher.roles.writer.base_url=" + f"http://127.0.0.1:{endpoint.server_port}",
        "teacher.roles.writer.model=w",
    ]  # fmt: skip


def run(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["synthesize_trajectories", *words])
    synthesize_trajectories.main()


def test_the_job_writes_rows_report_card_and_summary_and_goes_on_where_it_was(words, tmp_path, endpoint, monkeypatch):
    endpoint.broken = True
    with pytest.raises(SystemExit):
        run(words, monkeypatch)  # no attempt is kept: all questions are left open
    assert json.loads((tmp_path / "made/trajectories/report.json").read_text())["left_open"] == 4
    endpoint.broken, endpoint.bodies = False, []
    run(words, monkeypatch)
    folder, asked = tmp_path / "made/trajectories", len(endpoint.bodies)
    assert asked == (3 + 2) * 7  # a plan, five searcher's turns, an answer; two attempts at the question that stays wrong
    assert {body["model"] for body in endpoint.bodies} == {"m", "w"}
    assert len({body["seed"] for body in endpoint.bodies}) == asked
    summary = json.loads((tmp_path / "made/summary.json").read_text())
    wanted = {"questions": 4, "questions_kept": 3, "tries": 5, "trajectories": 3, "dropped_wrong": 2, "left_open": 0}
    assert {key: summary[key] for key in wanted} == wanted and summary["flagged_share"] == 1.0
    rows = list(read(str(folder / "trajectories.jsonl"), "deep_search"))
    assert [row.sample_id for row in rows] == ["q0/0", "q1/0", "q2/0"]
    assert rows[0].messages[1]["reasoning_content"].startswith("Look for the town.")
    assert all((folder / name).exists() for name in ("README.md", "report.md", "report.json"))
    before = (folder / "trajectories.jsonl").read_bytes()
    run(words, monkeypatch)
    assert len(endpoint.bodies) == asked and (folder / "trajectories.jsonl").read_bytes() == before
    run([*words, "wire=mcp", "critic.reference=false"], monkeypatch)  # other rows of the same attempts
    assert len(endpoint.bodies) == asked and b"use_mcp_tool" in (folder / "trajectories.jsonl").read_bytes()
    run([*words, "seed=5"], monkeypatch)
    assert len(endpoint.bodies) == 2 * asked


def test_the_dry_run_tells_what_would_run_and_asks_nobody(words, endpoint, monkeypatch, capsys):
    run([*words, "--dry-run"], monkeypatch)
    said = capsys.readouterr().out
    assert "4, 3 of them with their path" in said and "writer: w at" in said and "critic       rules, with" in said
    assert not endpoint.bodies


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["teacher.kind=oracle"], "teacher.kind=oracle needs no endpoint"),
        (["teacher.kind=oracle", "~teacher.endpoint", "~teacher.roles"], "1 of 4 questions have no path to walk"),
        (["teacher.roles.judge.base_url=http://x", "teacher.roles.judge.model=m"], "must be some of planner, searcher, writer"),
        (["teacher.endpoint.model=''"], "teacher.endpoint.model is not set"),
        (["keep=3"], "keep=3 must not be more than attempts=2"),
        (["critic.judge=endpoint"], "judge=endpoint needs endpoint.base_url"),
        (["answer.mode=judged"], "judged needs an endpoint"),
        (["attempt.max_turns=1"], "attempt.max_turns=1 must be at least 2"),
        (["tools.search=/nowhere"], "'/nowhere' is no folder"),
        (["questions=''"], "questions is not set"),
        (["teacher.max_tokens=0"], "teacher.max_tokens=0 must be at least 1"),
        (["tools.code.workers=0"], "tools.code.workers=0 must be more than 0"),
    ],
    ids=["oracle", "no path", "role", "model", "keep", "critic", "judge", "turns", "index", "questions", "tokens", "workers"],
)
def test_what_cannot_run_is_refused_before_anything_is_asked(words, endpoint, monkeypatch, capsys, more, complaint):
    with pytest.raises(SystemExit):
        run([*words, *more], monkeypatch)
    assert complaint in capsys.readouterr().err and not endpoint.bodies


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"question": "Who?"}, ":2: answer is 'None'"),
        ({"question": " ", "answer": "x"}, ":2: question is ' '"),
        ({"id": "a", "question": "Who?", "answer": "x"}, "id 'a' stands in an earlier row"),
    ],
    ids=["no answer", "no question", "same id"],
)
def test_a_bad_question_row_is_named_with_file_and_line(tmp_path, row, complaint):
    file = write_rows(tmp_path / "rows.jsonl", [{"id": "a", "question": "What?", "answer": "y"}, row])
    with pytest.raises(ValueError, match="rows.jsonl:2") as raised:
        synthesize_trajectories.read_questions(str(file))
    assert complaint in str(raised.value)
