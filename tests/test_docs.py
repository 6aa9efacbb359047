"""Documentation: every command it shows can be given, every example in it runs, every link leads somewhere."""
from __future__ import annotations

import ast
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.doc_commands import ROOT, blocks, check, commands_in, head_of


@pytest.fixture(autouse=True)
def same_limit_of_digits():
    """Commands run in this process, and the judge's lifts Python's limit for its own."""
    limit = sys.get_int_max_str_digits()
    yield
    sys.set_int_max_str_digits(limit)


FOLDERS = ("kernels", "slurm", *(str(path.parent.relative_to(ROOT)) for path in sorted(ROOT.glob("megatron_nb/*/README.md"))))
PAGES = ["README.md", *(f"{folder}/README.md" for folder in FOLDERS)]
PAGES += sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))
HEADS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("hydra_conf/*.yaml"))
COMMANDS = [one for page in PAGES for one in commands_in((ROOT / page).read_text(), page)]
COMMANDS += [one for head in HEADS for one in commands_in(head_of(ROOT / head), head)]
INLINE = re.compile(r"(?<!`)`((?:make (?=[a-z])|pytest |python tools/|python -m megatron_nb\.(?:sandbox|search))[^`\n]*)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

ASKED = "Who knew Person 3?"
QUESTION = {
    "question": ASKED, "answer": "Person 4", "messages": [{"role": "user", "content": ASKED}], "path": [{"title": "Person 3"}],
}  # fmt: skip
HUMANEVAL = {
    "task_id": "HumanEval/0", "prompt": "def one():\n", "entry_point": "one", "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
}  # fmt: skip
IFEVAL = {"key": 1, "prompt": "No commas, please.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
NAMES = [f"Person {number}" for number in range(12)]
ARTICLES = [  # what `python -m megatron_nb.search build` reads: everybody knows everybody
    {"title": name, "text": f"{name} knew {', '.join(NAMES)}.\n\n{name} wrote a book.", "links": NAMES, "date": "2025-01-01"}
    for name in NAMES
]
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "max_position_embeddings": 262144, "tie_word_embeddings": True, "hidden_act": "silu", "dtype": "float32",
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
MODELS = ("MODEL_FOLDER", "BASE_MODEL_FOLDER", "runs/SFT", "runs/SFT_EARLY", "runs/RL", "runs/RUN")  # where starts are
QUESTION_FILES = (
    "runs/questions/questions/train.jsonl", "runs/Q/questions/train.jsonl", "runs/QUESTIONS/questions/train.jsonl",
    "questions.jsonl", "gsm8k_test.jsonl", "prompts.jsonl", "problems.jsonl", "rows/mine.jsonl", "pairs.jsonl",
)  # fmt: skip
CORPORA = ("corpora/wiki", "corpora/enwiki", "INDEX_FOLDER", "INDEX", "corpora/mine")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder where the inputs that documents name are there, small, and the files that their examples write."""
    here, home = tmp_path_factory.mktemp("docs"), Path.cwd()
    for name in QUESTION_FILES:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(json.dumps(QUESTION) + "\n")
    for name in MODELS:
        (here / name).mkdir(parents=True)
        (here / name / "config.json").write_text(json.dumps(MODEL))
    (here / "runs/recipe").mkdir()
    step = here / "runs/RL_AGENTIC/checkpoints/step-00000010"
    step.mkdir(parents=True)
    (step / "COMPLETE").touch()
    (here / "people.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ARTICLES))
    for page in PAGES:
        for info, lines in blocks((ROOT / page).read_text()):
            if len(info.split()) == 2:
                file = here / info.split()[1]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("\n".join(line for _, line in lines) + "\n")
    os.chdir(here)
    sys.path.insert(0, str(here))
    from megatron_nb.search.build import build

    build(here / "people.jsonl", here / "corpus")
    for name in CORPORA:
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).symlink_to(here / "corpus")
    (here / "FOLDER").symlink_to(here / "corpus")
    for folder in (here, here / "evaluation", here / "FOLDER"):
        folder.mkdir(exist_ok=True)
        (folder / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(HUMANEVAL).encode()))
        (folder / "ifeval_input_data.jsonl").write_text(json.dumps(IFEVAL) + "\n")
    yield here
    os.chdir(home)
    sys.path.remove(str(here))


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_of_the_documentation_can_be_given(place, command, capfd):
    try:
        check(command.text)
    except (AssertionError, ValueError, OSError, subprocess.CalledProcessError) as error:
        said = capfd.readouterr().err.strip().splitlines()[-4:]
        pytest.fail(f"{command}: {command.text}\n{error}\n" + "\n".join(said), pytrace=False)


@pytest.mark.parametrize("page", PAGES)
def test_commands_within_sentences_name_what_there_is(page, capfd):
    for text in INLINE.findall((ROOT / page).read_text()):
        if "..." in text or text.endswith(("=", "=`")):  # cut short: the first words are looked at
            text = text.partition(" --")[0] + " --help" if text.startswith("python") else text.partition(" ...")[0]
        check(text)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    lost = lost_links((ROOT / page).read_text(), (ROOT / page).parent)
    assert not lost, f"{page} links to what is not there: {', '.join(lost)}"


def lost_links(text: str, folder: Path) -> list[str]:
    lost = []
    for link in LINK.findall(text):
        target, _, heading = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        file = folder / target
        there = file.exists() if target else True
        if not there or (heading and heading not in headings(file.read_text() if target else text)):
            lost.append(link)
    return lost


def headings(text: str) -> set[str]:
    """Anchors as hosts of Markdown make them."""
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_message_that_operations_quote_is_in_the_code():
    """In its tables, the second column: `...` stands for what differs."""
    said = "\n".join(texts_of_the_code())
    rows = [line.split("|")[2] for line in (ROOT / "docs/operations.md").read_text().splitlines() if line.startswith("|")]
    quoted = [text for row in rows for text in re.findall(r"`([^`]*)`", row) if " " in text]
    assert len(quoted) > 30
    lost = [text for text in quoted if not re.search("[^\n]*".join(map(re.escape, filter(None, text.split("...")))), said)]
    assert not lost, "docs/operations.md quotes what the code does not say:\n" + "\n".join(lost)


def texts_of_the_code() -> Iterator[str]:
    """Every text of our modules in one line, ... for what is filled in."""
    for path in [*ROOT.glob("megatron_nb/**/*.py"), *ROOT.glob("tools/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                yield "".join(parts).replace("\n", " ")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[sdg]|%\.\df", "...", node.value.replace("\n", " "))


@pytest.mark.parametrize("page", PAGES)
def test_examples_are_of_the_language_they_say(page):
    for info, lines in blocks((ROOT / page).read_text()):
        text, language = "\n".join(line for _, line in lines), info.split()[0]
        if language == "python":
            ast.parse(text)
        elif language == "yaml":
            yaml.safe_load(text)
        elif language == "jsonl":
            assert all(isinstance(json.loads(line), dict) for line in text.splitlines())


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    assert [page for page in PAGES if page.startswith("docs/") and f"({page[5:]})" not in index] == ["docs/README.md"]


@pytest.mark.parametrize(
    "text",
    [
        "pyhton -m megatron_nb.sft", "make recipe-of-nothing", "make test SEED_TYPO=1", "python tools/plan.py --modle dense_3b",
        "python tools/no_such_tool.py", "python -m megatron_nb.sft lr_typo=1", "python -m megatron_nb.cascade stages.x.word=[]",
        "torchrun --nproc-per-node 4 -m megatron_nb.sft parallel=h100_8", "python -m megatron_nb.search bild X --out Y",
        "pip install '.[nothing]'", "pytest tests/test_nothing.py", "tools/no_such.sh",
    ],
)  # fmt: skip
def test_a_wrong_command_is_found(place, text):
    with pytest.raises((AssertionError, ValueError, OSError, subprocess.CalledProcessError)):
        check(text)


def test_blocks_are_read_as_shells_read_them():
    text = "x\n\n    make a   # says a\n    python -m m \\\n        b='c d' # e\n    ... f=1\n\n"
    text += "```bash\nmake b && make c\n```\n```yaml\nmake: d\n```\n"
    assert [one.text for one in commands_in(text, "")] == [
        "make a", "python -m m b='c d'", "python -m m ... f=1", "make b", "make c",
    ]  # fmt: skip


def test_lost_links_are_found(tmp_path):
    (tmp_path / "a.md").write_text("# A title, here\n")
    assert lost_links("[1](a.md#a-title-here) [2](b.md) [3](a.md#c) [4](https://x.org/y)", tmp_path) == ["b.md", "a.md#c"]
