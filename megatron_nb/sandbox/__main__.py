"""python -m megatron_nb.sandbox judge | complexity | serve: see README.md beside this file."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from itertools import islice
from pathlib import Path

from megatron_nb.sandbox.batch import Progress, done_before, rows, stream
from megatron_nb.sandbox.compare import MODES, CompareConfig
from megatron_nb.sandbox.judge import Judge
from megatron_nb.sandbox.pool import IsolationMissing, Pool
from megatron_nb.sandbox.rows import READERS, complexity_row, judge_row, read_judge_row

LANGUAGE_OF = {".py": "python", ".cpp": "cpp", ".cc": "cpp", ".cxx": "cpp"}
ROWS_AT_ONCE = 4  # per worker: while a slow test holds one worker, the tests of other rows fill the rest


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_nb.sandbox", description="Runs untrusted programs.")
    commands = parser.add_subparsers(dest="command", required=True)
    judge = commands.add_parser("judge", help="programs against tests")
    judge.add_argument("input", type=Path, help="rows (.jsonl), or with --tests one program (.py, .cpp)")
    judge.add_argument("--tests", type=Path, help="tests of one program: a JSON list, an object with `tests`, or JSON lines")
    judge.add_argument("--stop-at-first", action="store_true", help="leave out the tests after the first that fails")
    judge.add_argument("--compare", choices=MODES, default="tokens", help="how outputs are compared where a test does not say")
    judge.add_argument("--time-limit", type=float, help="seconds a test, with --tests")
    judge.add_argument("--memory-limit", type=float, help="MB, with --tests")
    judge.add_argument("--entry", help="the function under test of assertions, with --tests")
    complexity = commands.add_parser("complexity", help="time complexity of functions")
    complexity.add_argument("input", type=Path, help="rows (.jsonl)")
    serve = commands.add_parser("serve", help="both over HTTP")
    for command in (judge, complexity):
        command.add_argument("--out", type=Path, help="answers (.jsonl); rows that it has already are not done again")
        command.add_argument("--bad-rows", choices=("error", "skip"), default="error",
                             help="a row that cannot be judged; default %(default)s, before any work")  # fmt: skip
    for command in (judge, complexity, serve):
        command.add_argument("--workers", type=int, help="programs at once; the number of cores if not given")
        command.add_argument("--isolation", choices=("bubblewrap", "none"), default="bubblewrap",
                             help="none runs programs unprotected; default %(default)s")  # fmt: skip
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; default %(default)s")
    serve.add_argument("--port", type=int, default=8700, help="default %(default)s; 0: a free one, told on stderr")
    serve.add_argument("--token-env", help="environment variable that holds the token")
    serve.add_argument("--token-file", help="file that holds the token")
    serve.add_argument("--without-token", action="store_true", help="listen beyond this machine without one")
    serve.add_argument("--queue", type=int, default=512, help="rows at once, waiting ones included; default %(default)s")
    asked = parser.parse_args(words)
    try:
        if asked.command == "serve":
            return _serve(asked)
        if asked.command == "judge" and asked.tests:
            return _one_program(asked)
        return _batch(asked)
    except (ValueError, OSError, IsolationMissing) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"failed: {error}; the same command goes on from here", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130


def _batch(asked: argparse.Namespace) -> int:
    """Rows of a file; the whole file is checked before the first program runs."""
    if asked.out is None:
        raise ValueError("--out is missing: name the file for the answers")
    for path in (asked.input, asked.out):
        if path.exists() and not path.is_file():  # a pipe or a device: rows are read more than once, and answers are resumed
            raise ValueError(f"{path} is no regular file; copy the rows to one, and name one for the answers")
    if asked.out.exists() and asked.out.samefile(asked.input):
        raise ValueError(f"--out {asked.out} is the file of the rows; name another one for the answers")
    check, skip, bad = READERS[asked.command], asked.bad_rows == "skip", []
    total = sum(1 for _ in rows(asked.input, check, skip, bad))
    if not total and not bad:
        raise ValueError(f"{asked.input} holds no row: at least one is needed; check the path")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    done = done_before(asked.out, (row.get("id") for row in rows(asked.input, check, skip)))
    for words in bad[:10]:
        print(f"skipped: {words}", file=sys.stderr)
    if bad:
        print(f"skipped {len(bad)} bad row{'s' if len(bad) > 1 else ''}", file=sys.stderr)
    if done:
        print(f"{done} of {total} rows are in {asked.out} already", file=sys.stderr)
    if done == total:
        asked.out.touch()
        return 0
    with Pool(asked.workers, asked.isolation) as pool:
        if asked.command == "judge":
            judge = Judge(pool, CompareConfig(asked.compare))

            async def work(row: dict) -> dict:
                return await judge_row(judge, {**row, **({"stop_at_first": True} if asked.stop_at_first else {})})
        else:

            async def work(row: dict) -> dict:
                return await complexity_row(pool, row)

        left = islice(rows(asked.input, check, skip), done, None)
        asyncio.run(stream(left, work, asked.out, ROWS_AT_ONCE * pool.workers, Progress(total, done)))
        if asked.command == "judge":
            judge.close()
    return 0


def _one_program(asked: argparse.Namespace) -> int:
    """One program; exit code 0 if every test accepts it, else 1."""
    language = LANGUAGE_OF.get(asked.input.suffix)
    if language is None:
        raise ValueError(f"{asked.input}: the ending must be one of {', '.join(LANGUAGE_OF)}: it says the language")
    text = asked.tests.read_text(encoding="utf-8")
    try:
        tests = json.loads(text)
    except ValueError:
        tests = list(rows(asked.tests, lambda row: None))
    tests = tests.get("tests", [tests]) if isinstance(tests, dict) else tests
    row = {"id": asked.input.name, "language": language, "program": asked.input.read_text(encoding="utf-8"), "tests": tests}
    row |= {"time_limit_s": asked.time_limit, "memory_limit_mb": asked.memory_limit, "entry": asked.entry}
    try:
        read_judge_row(row)
    except ValueError as error:
        raise ValueError(f"{asked.tests}: {error}") from None
    with Pool(asked.workers, asked.isolation) as pool:
        judge = Judge(pool, CompareConfig(asked.compare))
        answer = asyncio.run(judge_row(judge, {**row, "stop_at_first": asked.stop_at_first}))
        judge.close()
    for number, (verdict, wall, detail) in enumerate(zip(answer["verdicts"], answer["wall_s"], answer["details"]), 1):
        print(f"test {number}: {verdict}, {wall:.3f} s" + (f": {detail}" if detail else ""))
    print(f"{answer['passed']} of {answer['total']} tests passed; isolation {answer['isolation']}")
    if asked.out:
        asked.out.write_text(json.dumps(answer) + "\n", encoding="utf-8")
    return 0 if answer["passed"] == answer["total"] else 1


def _serve(asked: argparse.Namespace) -> int:
    from megatron_nb.sandbox.service import ServiceConfig, serve

    names = ("host", "port", "token_env", "token_file", "without_token", "queue")
    serve(ServiceConfig(**{name: getattr(asked, name) for name in names}), asked.workers, asked.isolation)
    return 0


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)  # tests may hold longer numbers
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a stopped job leaves no control group either
    sys.exit(main())
