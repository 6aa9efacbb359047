"""Labelled programs: the label is what a count of operations says, and no held-out template is ever trained on."""

import ast
import json
import random
from collections import Counter

import pytest

from megatron_nb.rewards.witness import read_answer
from megatron_nb.sandbox.ladder import LADDER
from megatron_nb.synthesis.complexity_pieces import LEAVES, LOOPS, pieces_of, product
from megatron_nb.synthesis.complexity_programs import Nest, compose, nests, program
from megatron_nb.synthesis.complexity_rows import LabelledSource, labelled_rows
from tests.synthesis.count_operations import SIZES, class_by_count, cost_of

PIECES = [*LOOPS, *LEAVES]


def counted(made) -> str:
    sizes = SIZES[made.complexity]
    return class_by_count(sizes, [cost_of(made.plain, made.function, made.generator, n) for n in sizes])


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.name)
def test_each_piece_costs_what_it_says_at_three_sizes(piece):
    outer = (LOOPS[0],) if "$up" in piece.text else ()  # within a loop over n
    nest = Nest((), piece) if piece in LEAVES else Nest((*outer, piece), None)
    made = compose(nest, random.Random(3), extras=0)
    assert counted(made) == nest.cost == made.complexity


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("cost", LADDER)
def test_a_whole_program_costs_what_its_label_says(cost, split):
    made = program(cost, split, random.Random(f"{cost}{split}"))
    assert counted(made) == cost == made.complexity, made.plain


def test_a_wrong_label_is_noticed():
    made = program("n", "train", random.Random(5), extras=0)
    made.complexity = "n log n"
    assert counted(made) == "n"


def test_templates_of_heldout_programs_are_in_no_training_program():
    rng, seen = random.Random(1), {}
    for split in ("train", "heldout"):
        seen[split] = {program(cost, split, rng).template for cost in LADDER for _ in range(60)}
    assert not seen["train"] & seen["heldout"] and all(len(found) > 100 for found in seen.values())
    held = {piece.name for piece in PIECES if piece.held}
    assert not {part for template in seen["train"] for part in template.split(">")} & held
    assert any(not set(template.split(">")) & held for template in seen["heldout"])  # new nests of seen pieces too


def test_held_pieces_are_nowhere_in_the_text_of_training_programs():
    signs = ("** 2):", "= math.factorial(", "reversed(range(", ">>= 1", "bisect_right", "+= min(")  # of some held pieces
    texts = {split: [program(cost, split, random.Random(f"{cost}{i}")).plain for cost in LADDER for i in range(30)]
             for split in ("train", "heldout")}  # fmt: skip
    assert not [text for text in texts["train"] if any(sign in text for sign in signs)]
    assert all(any(sign in text for text in texts["heldout"]) for sign in signs)


def test_every_class_has_several_templates_on_both_sides():
    for cost in LADDER:
        for split, least in (("train", 5), ("heldout", 3)):
            assert len({nest.name for nest in nests(cost, split, random.Random(0), 100)}) >= least, (cost, split)


def test_programs_parse_in_every_form_and_their_answer_ends_with_the_class():
    rng, forms = random.Random(4), Counter()
    for number in range(240):
        made = program(LADDER[number % 12], "train", rng)
        ast.parse(made.source)
        forms["Solution" if "class Solution" in made.source else "stdin" if "input()" in made.source else "function"] += 1
        row = made.row("r")
        asked, answer = (message["content"] for message in row["messages"])
        assert read_answer(answer) == row["complexity"] == made.complexity and "#" not in asked.split("```")[1]
        assert json.loads(json.dumps(row)) == row
    assert min(forms.values()) > 20 and len(forms) == 3


def test_the_same_seed_makes_the_same_programs():
    made = [[program(cost, "train", random.Random(f"7/{cost}")).source for cost in LADDER] for _ in range(2)]
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (["n", "n"], "n^2"), (["n", "log n"], "n log n"), (["sqrt n", "n"], "n sqrt n"), (["n", "n log n"], "n^2 log n"),
        (["n^2", "n^2"], "n^k"), (["log n", "log n"], None), (["n", "2^n"], None), (["n!"], "n!"), (["n^3", "log n"], None),
    ],
)  # fmt: skip
def test_loops_within_each_other_multiply(costs, expected):
    assert product(costs) == expected


def test_a_piece_is_read_with_its_helper_and_flags():
    (piece,) = pieces_of("## twice, 2^n, held: two calls, 2^n\ndef $g($k):\n    return 1\n--\n$s += $g($n)\n")
    assert (piece.name, piece.cost, piece.held, piece.said) == ("twice", "2^n", True, "two calls, 2^n")
    assert piece.helper == "def $g($k):\n    return 1" and piece.text == "$s += $g($n)"


# ------------------------------------------------------------------ rows of others
@pytest.mark.parametrize(
    ("form", "row", "expected"),
    [
        ("codecomplex", {"src": "class A {}", "complexity": "nlogn", "language": "java"}, ["n log n"]),
        ("codecomplex", {"src": "x = 1", "complexity": "constant"}, ["1"]),
        ("codecomplex", {"src": "x = 1", "complexity": "np"}, ["2^n"]),
        ("bigobench", {"solution_code": "x = 1", "time_complexity_inferred": "O(n**2)"}, ["n^2"]),
        ("bigobench", {"solution_code": "x = 1", "time_complexity_inferred": "o(nlogn)"}, ["n log n"]),
        ("taco", {"solutions": ["x = 1", "x = 2", "x = 3"], "Expected Time Complexity": "O(N)"}, ["n", "n"]),
        ("taco", {"solutions": '["x = 1"]', "Expected Time Complexity": "O(LogN)."}, ["log n"]),
        ("taco", {"solutions": [{"code": "x = 1"}], "Expected Time Complexity": "O(sqrt(N))"}, ["sqrt n"]),
        ("taco", {"solutions": ["x = 1"], "Expected Time Complexity": "O(N*M)"}, {"label_not_on_ladder": 1}),
        ("taco", {"solutions": ["x = 1"]}, {"no_label": 1}),
        ("taco", {"solutions": "[]", "Expected Time Complexity": "O(N)"}, {"no_program": 1}),
        ("bigobench", {"solution_code": "x = 1\n" * 9000, "time_complexity": "O(1)"}, {"program_too_long": 1}),
    ],
)
def test_labels_of_others_are_read_onto_the_ladder_or_counted_by_reason(tmp_path, form, row, expected):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    dropped = Counter()
    rows = list(labelled_rows(LabelledSource(f"{tmp_path}/rows.jsonl", form, per_row=2), "other", dropped))
    if isinstance(expected, dict):
        assert not rows and dropped == expected
    else:
        assert [made["complexity"] for made in rows] == expected and not dropped
        assert all(read_answer(made["messages"][1]["content"]) == made["complexity"] for made in rows)
        assert ("```java" in rows[0]["messages"][0]["content"]) == ("language" in row)


def test_columns_of_other_names_can_be_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "x = 1", "class": "linear"}) + "\n")
    source = LabelledSource(f"{tmp_path}/rows.jsonl", "codecomplex", program="text", label="class")
    assert [row["complexity"] for row in labelled_rows(source, "mine", Counter())] == ["n"]
