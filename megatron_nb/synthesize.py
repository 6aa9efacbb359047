"""Synthesis of training data: the stage file says what is made.

python -m megatron_nb.synthesize --config-name synthesize_preferences [overrides]
"""

from __future__ import annotations

import importlib

from megatron_nb.config import schema_of_stage

JOBS = {  # the schema that a stage file begins with -> the job
    "PreferencesConfig": "megatron_nb.synthesize_preferences",
    "ComplexityConfig": "megatron_nb.synthesize_complexity",
    "QuestionsConfig": "megatron_nb.synthesize_questions",
    "TrajectoriesConfig": "megatron_nb.synthesize_trajectories",
    "RefineConfig": "megatron_nb.refine_solutions",
}


def main() -> None:
    """Run the job of the stage that the command line names. Another file than those of this project may name it too."""
    schema = schema_of_stage(JOBS)
    importlib.import_module(JOBS[schema]).main()


if __name__ == "__main__":
    main()
