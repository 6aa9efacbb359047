"""The commands that documentation shows, and how each kind is tried without doing its work.

Stages: their dry run with the very words; the cascade: its links composed; tools and services: their own parser; make: its
targets and variables; scripts: bash's own check. What none of the rules knows is an error, so that a new kind gets a rule.
"""
from __future__ import annotations

import argparse
import functools
import importlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from megatron_nb import services
from megatron_nb.config import compose

ROOT = Path(__file__).parents[1]
SHELLS = {"bash", "sh", "shell", "console"}
BEGINS = re.compile(r"(\.\.\.|make|python|torchrun|sudo|srun|sinfo|eval|pip|pytest|curl|tools/\S+\.sh|slurm/\S+\.sh)\s")
STAGES = re.compile(r"megatron_nb\.(sft|reward_model|rl|evaluate|synthesize\w*|refine_solutions|export_model|headline|cascade)")
DOTS = {  # what `...` stands for, by stage: the first choice that goes with the other words
    "sft": ["parallel=h100_64 context=64k"],
    "sft_complexity_judge": ["data.sources.programs.path=rows/*.jsonl"],
    "rl_code_pass_rate": ["init_from=models/base parallel=h100_64 prompts.sources.a.path=problems.jsonl"],
    "refine_solutions": ["prompts.sources.a.path=prompts.jsonl refiner.checkpoint=runs/SFT"],
    "synthesize_preferences": ["prompts.sources.a.path=prompts.jsonl strong.checkpoint=runs/SFT weak.checkpoint=MODEL_FOLDER"],
    "synthesize_trajectories": [
        "questions=questions.jsonl tools.search=INDEX teacher.endpoint.base_url=http://host:8000 teacher.endpoint.model=NAME",
        "questions=questions.jsonl tools.search=INDEX",
    ],
}
PROGRAM = re.compile(r"python -m \S+( --config-name \S+)?|\S+")
ELSEWHERE = {  # programs that are not tried, and why
    "apt-get": "changes the machine",
    "sinfo": "Slurm's own",
    "srun": "needs a cluster; the script it runs is checked",
    "curl": "asks a server that is not here",
}
COMPOSED = {"recipe": "wants the published sets of all its tasks; tests/evals reads each kind"}  # tasks= that are not dry-run


@dataclass(frozen=True)
class Command:
    """A command and where it stands."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Parsed(Exception):
    """A tool's parser has accepted its words."""


# ------------------------------------------------------------------ reading
def blocks(text: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """(info string, [(line, text)]) of every fenced or indented block of Markdown; "indented" is the info of the latter."""
    info, lines = "", []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        if info not in ("", "indented"):
            if fence:
                yield info, lines
                info, lines = "", []
            else:
                lines.append((number, line))
        elif fence:
            if lines:
                yield info, lines
            info, lines = line.strip().removeprefix("```") or "plain", []
        elif line.startswith("    "):
            info = "indented"
            lines.append((number, line))
        elif info:
            yield info, lines
            info, lines = "", []


def is_shell(info: str, lines: list[tuple[int, str]]) -> bool:
    """Whether a block is of commands: it says so, or has no language and a line that begins like one."""
    if info in ("plain", "indented"):
        return any(BEGINS.match(line.strip() + " ") for _, line in lines)
    return info.split()[0] in SHELLS


def commands_in(text: str, name: str) -> list[Command]:
    """The commands of a document, continued lines joined. A line that begins with `...` is of the program before it."""
    found = []
    for info, lines in blocks(text):
        if not is_shell(info, lines):
            continue
        before, held, start = "", "", 0
        for number, line in lines:
            line = re.sub(r"(^|\s)#\s.*", "", line).strip()
            start = start or number
            held += line
            if held.endswith("\\"):
                held = held[:-1].rstrip() + " "
                continue
            if held:
                told = f"{before} {held}" if held.startswith("... ") else held
                before = before if held.startswith("... ") else PROGRAM.match(held)[0]
                found += [Command(name, start, part.strip()) for part in told.split(" && ")]
            held, start = "", 0
    return found


def head_of(path: Path) -> str:
    """The first comment of a YAML file as Markdown: what is set in becomes an indented block, what is told behind it goes."""
    lines = path.read_text().splitlines()
    lines = lines[: next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))]
    lines = [line[:4] + re.sub(r"(\S) {3,}\S.*", r"\1", line[4:]) for line in lines]
    return "\n".join(re.sub(r"^#   ?", "    ", line) if line.startswith("#  ") else line.lstrip("# ") for line in lines)


# ------------------------------------------------------------------ trying
def check(text: str) -> None:
    """Try a command. AssertionError, or what the tried code raises, tells what is wrong with it."""
    text = re.sub(r"\[(--?[^\]]+)\]", r"\1", text)  # [--option VALUE] may be left out; here it is not
    if found := re.fullmatch(r"eval \$\((.*)\)", text):
        text = found[1]
    words = shlex.split(text)
    while words[0] == "sudo" or re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    rules = {"make": check_make, "python": check_python, "torchrun": check_python, "pytest": check_pytest, "pip": check_extras}
    if words[0] in rules:
        rules[words[0]](words)
    elif words[0].endswith(".sh"):
        subprocess.run(["bash", "-n", ROOT / words[0]], check=True)
    else:
        assert words[0] in ELSEWHERE, f"no rule of tests/doc_commands.py knows {words[0]!r}: add one"


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words[1:]:
        if "=" in word:
            assert f"$({word.partition('=')[0]})" in makefile, f"the Makefile reads no variable {word}"
        else:
            assert re.search(rf"^{re.escape(word)}:", makefile, re.M), f"the Makefile has no target {word}"


def check_pytest(words: list[str]) -> None:
    for word in words[1:]:
        if not word.startswith("-") and "/" in word:
            assert (ROOT / word.partition("::")[0]).exists(), f"{word} does not exist"


def check_extras(words: list[str]) -> None:
    for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
        assert re.search(rf"\"{extra}\": ", (ROOT / "setup.py").read_text()), f"setup.py has no extra {extra}"


def check_python(words: list[str]) -> None:
    """`python FILE ...`, `python -m MODULE ...` or `torchrun ... -m MODULE ...`."""
    if "-m" not in words[:4]:
        assert words[0] == "python", f"{words[:3]}: torchrun is given a module by -m"
        return check_parser(ROOT / words[1], words[2:]) if words[1].startswith("tools/") else check_file(words[1])
    at = words.index("-m") + 1
    ranks = int(words[words.index("--nproc-per-node") + 1]) if words[0] == "torchrun" else 1
    if STAGES.fullmatch(words[at]):
        return check_stage(words[at], tuple(words[at + 1 :]), ranks)
    return check_parser(words[at], words[at + 1 :])


def check_file(name: str) -> None:
    found = ROOT / name
    assert found.exists() or name.startswith("/opt/"), f"{name} does not exist"  # /opt: in the container's image


def check_parser(program: Path | str, words: list[str]) -> None:
    """Run a program with these words as far as its parser."""
    kinds, argv = {name: getattr(argparse.ArgumentParser, name) for name in ("parse_args", "parse_intermixed_args")}, sys.argv

    def stopping(parse):
        def stop(self, *given, **named):
            parse(self, *given, **named)
            raise Parsed

        return stop

    for name, parse in kinds.items():
        setattr(argparse.ArgumentParser, name, stopping(parse))
    sys.argv = [str(program), *words]
    try:
        if isinstance(program, Path):
            runpy.run_path(str(program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__")
    except Parsed:
        return
    except SystemExit as end:
        assert end.code == 0 and "--help" in words, f"its parser refuses {shlex.join(words)} (exit code {end.code})"
        return
    finally:
        sys.argv = argv
        for name, parse in kinds.items():
            setattr(argparse.ArgumentParser, name, parse)
    raise AssertionError(f"{program} did not look at its words")


@functools.cache  # the same command stands in several documents
def check_stage(module: str, words: tuple[str, ...], ranks: int) -> None:
    """A stage's dry run with these words, in this process. A sweep's first point; of the cascade its links."""
    at = words.index("--config-name") if "--config-name" in words else None
    stage = words[at + 1] if at is not None else module.rpartition(".")[2]
    named = [] if at is None else ["--config-name", stage]
    told = [word for place, word in enumerate(words) if at is None or place not in (at, at + 1)]
    if {"-m", "--multirun"} & set(told):
        told = [re.sub(r"^([\w.]+=[^,\[{(]*),.*", r"\1", word) for word in told if word not in ("-m", "--multirun")]
    choices = DOTS.get(stage, [""]) if "..." in told else [""]
    told = [word for word in told if word != "..."]
    for number, dots in enumerate(choices, 1):
        try:
            return try_stage(module, stage, named, [*dots.split(), *told], ranks)
        except AssertionError:
            if number == len(choices):
                raise
    return None


def try_stage(module: str, stage: str, named: list[str], words: list[str], ranks: int) -> None:
    job, keys = importlib.import_module(module), [word for word in words if not word.startswith("-")]
    if "--help" not in words and module == "megatron_nb.cascade":
        compose(job.CascadeConfig, stage, keys)
        assert links_without_words(job, stage)
    elif set(COMPOSED) & {word.removeprefix("tasks=") for word in keys} and not any(key.startswith("only=") for key in keys):
        config = compose(job.EvaluateConfig, stage, keys)
        services.check(config.launch.services, config)  # judges and searches that its tasks name are there
        assert all(task.get("classes") != {"retail": "retail:Retail"} for task in config.tasks.values()), "tau2 wants a module"
    else:
        dry_run(job, module, [*named, *words], ranks)


@functools.cache
def links_without_words(job: ModuleType, stage: str) -> int:
    """Links of a chain; composing all of its stages takes seconds, so it is done once."""
    return len(job.links_of(compose(job.CascadeConfig, stage)))


def dry_run(job: ModuleType, module: str, words: list[str], ranks: int) -> None:
    argv, asked = sys.argv, {"--dry-run", "--help", "--cfg"} & set(words)
    sys.argv = [module, *words, *([] if asked else ["--dry-run"])]
    try:
        job.main()
    except SystemExit as end:
        assert end.code in (0, None), f"it ends with code {end.code}: what it said is in the captured output"
    finally:
        sys.argv = argv
    told = dict(word.partition("=")[::2] for word in words if "=" in word)
    if ranks > 1 and not asked and "parallel" in told:
        made_for = re.search(r"_(\d+)(_|$)", told["parallel"])
        assert made_for is None or int(made_for[1]) == ranks, f"torchrun starts {ranks} ranks for parallel={told['parallel']}"
