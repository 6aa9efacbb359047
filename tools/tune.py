"""Search for settings with Optuna: trials are runs of one job, here or on Slurm, several at a time; the same command goes on.

    python tools/tune.py --name lr --trials 12 --at-once 3 --metric heldout_loss_after -- \
        megatron_nb.sft launch=slurm ... 'optimizer.lr=log(1e-6,1e-3)' 'optimizer.beta2=interval(0.9,0.99)' 'seed=choice(1,2)'

Runs lie in runs_dir/NAME/trial-K, their history in runs_dir/NAME/optuna.journal; tools/sweep.py shows them as any sweep.
A trial that fails is told to the sampler as failed and stops no other. Needs `pip install megatron_nb[tune]`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.run import run_folder, write_atomic
from megatron_nb.sweep import SWEEP_FILE
from tools.status import DEAD, status_of

SPACE = re.compile(r"(?P<key>[\w.]+)=(?P<kind>log|interval|integer|choice)\((?P<values>.*)\)")
LOOK_S = 2.0


def spaces_of(words: list[str]) -> tuple[dict[str, tuple[str, list[str]]], list[str]]:
    """({key: (kind, values)} of what is searched, the other words). ValueError for a space that is none."""
    spaces, fixed = {}, []
    for word in words:
        found = SPACE.fullmatch(word)
        if found is None:
            fixed.append(word)
            continue
        kind, values = found["kind"], [value.strip() for value in found["values"].split(",")]
        if kind != "choice" and (len(values) != 2 or not float(values[0]) < float(values[1])):
            raise ValueError(f"{word}: {kind}(LOW,HIGH) takes two numbers, the lower one first")
        if kind == "log" and float(values[0]) <= 0:
            raise ValueError(f"{word}: log(LOW,HIGH) takes numbers above 0")
        spaces[found["key"]] = kind, values
    if not spaces:
        raise ValueError("nothing to search for: give KEY=log(LOW,HIGH), interval(LOW,HIGH), integer(LOW,HIGH) or choice(A,B)")
    return spaces, fixed


def propose(trial, spaces: dict[str, tuple[str, list[str]]]) -> list[str]:
    """KEY=VALUE words of a new trial."""
    words = []
    for key, (kind, values) in spaces.items():
        if kind == "choice":
            value = trial.suggest_categorical(key, values)
        elif kind == "integer":
            value = trial.suggest_int(key, int(values[0]), int(values[1]))
        else:
            value = f"{trial.suggest_float(key, float(values[0]), float(values[1]), log=kind == 'log'):.6g}"
        words.append(f"{key}={value}")
    trial.set_user_attr("words", words)
    return words


class Trials:
    """The runs of a study: `start` begins or continues one, `outcome` tells what became of it."""

    def __init__(self, root: Path, module: str, fixed: list[str], metric: str):
        self.root, self.module, self.fixed, self.metric = root, module, fixed, metric
        self.here: dict[int, subprocess.Popen] = {}  # commands that this process has started

    def folder(self, number: int) -> Path:
        return self.root / f"trial-{number}"

    def start(self, number: int, words: list[str]) -> None:
        where = [f"runs_dir={self.root}", f"name=trial-{number}"]
        self.here[number] = subprocess.Popen([sys.executable, "-m", self.module, *self.fixed, *words, *where])

    def outcome(self, number: int) -> float | str | None:
        """The metric's value, or the words for why there is none; None while the trial runs."""
        folder, process = self.folder(number), self.here.get(number)
        if process is not None and process.poll() is None:
            return None
        if (folder / "summary.json").exists():
            summary = json.loads((folder / "summary.json").read_text())
            if self.metric not in summary:
                sys.exit(f"error: --metric {self.metric}: a finished run has {', '.join(summary)}")
            return float(summary[self.metric])
        status = status_of(folder, folder.name, 1) if folder.is_dir() else None
        if status is None or status.job is None or process.returncode:
            return f"its command ended with {process.returncode}"
        if status.state.upper().replace(" ", "_") in DEAD:
            return status.reason or status.state
        return None


def search(study, trials: Trials, spaces: dict[str, tuple[str, list[str]]], count: int, at_once: int) -> None:
    """Ask, run and tell until `count` trials have ended."""
    import optuna

    def under_way() -> list:
        return study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING])

    for trial in under_way():  # of an earlier start of this command
        trials.start(trial.number, trial.user_attrs["words"])
    while True:
        for trial in under_way():
            found = trials.outcome(trial.number)
            if isinstance(found, float):
                study.tell(trial.number, found)
                print(f"trial {trial.number}: {trials.metric} {found:.6g} with {' '.join(trial.user_attrs['words'])}")
            elif found is not None:
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
                print(f"trial {trial.number} failed with {' '.join(trial.user_attrs['words'])}: {found}")
        while len(study.trials) < count and len(under_way()) < at_once:
            trial = study.ask()
            trials.start(trial.number, propose(trial, spaces))
        told = [{"name": f"trial-{one.number}", "words": one.user_attrs["words"]} for one in study.trials]
        write_atomic(trials.root / SWEEP_FILE, json.dumps(told, indent=1))
        if not under_way():
            return
        time.sleep(LOOK_S)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="of the study; its runs lie in RUNS_DIR/NAME")
    parser.add_argument("--trials", type=int, default=20, help="in all, those of earlier starts too (%(default)s)")
    parser.add_argument("--at-once", type=int, default=1, help="runs or jobs at a time (%(default)s)")
    parser.add_argument("--metric", required=True, help="a number of summary.json, such as heldout_loss_after")
    parser.add_argument("--maximize", action="store_true", help="the metric shall be high (it shall be low)")
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--seed", type=int, default=1, help="of the sampler (%(default)s)")
    parser.add_argument("job", help="module of the job: megatron_nb.sft, megatron_nb.rl, ...")
    parser.add_argument("words", nargs="+", help="its command line, with what is searched as KEY=log(LOW,HIGH) and so on")
    args = parser.parse_args()
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        sys.exit("error: Optuna is not installed: pip install 'megatron_nb[tune]'")
    try:
        spaces, fixed = spaces_of(args.words)
    except ValueError as error:
        sys.exit(f"error: {error}")
    root = run_folder(args.runs_dir, args.name)
    root.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name=args.name, storage=optuna.storages.JournalStorage(JournalFileBackend(str(root / "optuna.journal"))),
        direction="maximize" if args.maximize else "minimize", sampler=optuna.samplers.TPESampler(seed=args.seed),
        load_if_exists=True,
    )  # fmt: skip
    search(study, Trials(root, args.job, fixed, args.metric), spaces, args.trials, args.at_once)
    done = [trial for trial in study.trials if trial.value is not None]
    if not done:
        sys.exit(f"error: none of {len(study.trials)} trials ended well: python tools/sweep.py {root}")
    print(f"best: {args.metric} {study.best_value:.6g} with {' '.join(study.best_trial.user_attrs['words'])}")
    print(f"all: python tools/sweep.py {root}")


if __name__ == "__main__":
    main()
