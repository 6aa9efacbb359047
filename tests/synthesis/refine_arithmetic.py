"""Work on solutions of gsm8k's form: <<16-3-4=9>> states a calculation, #### 9 (or A: 9) the end. Nobody here knows answers."""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass

STEP = re.compile(r"<<([^<>=]+)=([^<>=]+)>>(\$?\s?[\d,]*\.?\d*)")
END = re.compile(r"^(####|A:)\s*(.*)$", re.MULTILINE)
NUMBER = re.compile(r"\d[\d,]*\.?\d*|\.\d+")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SPOKEN = {
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "half": 0.5, "twice": 2, "double": 2, "triple": 3, "thrice": 3, "third": 3, "quarter": 4, "dozen": 12,
    "twelve": 12, "twenty": 20,
    "fifteen": 15, "thirty": 30, "fifty": 50, "hundred": 100, "thousand": 1000, "couple": 2, "pair": 2,
}  # fmt: skip
EVERYDAY = {0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 7.0, 10.0, 12.0, 24.0, 30.0, 52.0, 60.0, 100.0, 365.0}


def value_of(expression: str) -> float | None:
    """What a calculation gives; None when it is none."""
    text = re.sub(r"(\d+(?:\.\d+)?)%", r"(\1/100)", expression.replace(",", "").replace("$", "").replace("x", "*"))
    try:
        return float(_of(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        return None


def _of(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_of(node.operand)
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_of(node.left), _of(node.right))
    raise ValueError(ast.dump(node))


def plain(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def number(text: str) -> float | None:
    found = NUMBER.search(text.replace(",", ""))
    return float(found[0]) if found else None


def near(a: float | None, b: float | None) -> bool:
    """Equal, up to a rounding of cents."""
    return a is not None and b is not None and abs(a - b) <= max(0.011, 1e-4 * abs(b))


@dataclass
class Fault:
    kind: str  # calculation | operand | end | nothing
    told: str


def numbers_of(question: str) -> set[float]:
    """Every number that a task gives, in figures or in words."""
    found = {float(one.replace(",", "").rstrip(".")) for one in NUMBER.findall(question) if one.strip(",.")}
    return found | {float(value) for word, value in SPOKEN.items() if re.search(rf"\b{word}s?\b", question, re.IGNORECASE)}


def faults_of(question: str, answer: str) -> list[Fault]:
    """What a careful reader finds by redoing the sums: wrong results, numbers from nowhere, an end that is not the result."""
    steps, found = list(STEP.finditer(answer)), []
    if not steps or END.search(answer) is None:
        return [Fault("nothing", "it shows no calculation" if not steps else "it does not say what the result is")]
    known = numbers_of(question) | EVERYDAY
    for step in steps:
        for operand in operands_of(step[1]):
            if operand not in known and not any(near(100 - operand, one) or near(operand * 100, one) for one in known):
                found.append(Fault("operand", f"{plain(operand)} in {step[1]} is neither in the task nor a result"))
        value = value_of(step[1])
        if value is not None and not near(number(step[2]), abs(value)):
            found.append(Fault("calculation", f"{step[1]} is {plain(value)}, not {step[2]}"))
        known |= {one for one in (number(step[2]), value) if one is not None}
    last, end = number(steps[-1][2]), number(END.findall(answer)[-1][1])
    if not near(end, last):
        found.append(Fault("end", f"the end says {end}, the last calculation {last}"))
    return found


def operands_of(expression: str) -> list[float]:
    return [float(one.replace(",", "").rstrip(".")) for one in NUMBER.findall(expression) if one.strip(",.")]


def revised(question: str, answer: str, slip: int | None = None) -> str:
    """The answer with its sums redone from the first to the last; a number from nowhere becomes the task's unused one.

    slip: of this step the result is wrong by one.
    """
    strangers = [re.search(r"(\S+) in ", one.told)[1] for one in faults_of(question, answer) if one.kind == "operand"]
    used = {one for step in STEP.finditer(answer) for one in operands_of(step[1])}
    unused = sorted(numbers_of(question) - used)
    for stranger in strangers:
        if unused:
            best = min(unused, key=lambda one: (sorted(plain(one)) != sorted(stranger), abs(one - float(stranger))))
            answer = replaced(answer, {float(stranger): best})
    done, rest, changed, result = "", answer, {}, None
    for place in range(len(STEP.findall(answer))):
        found = STEP.search(rest)
        expression = replaced(found[1], changed)
        value = value_of(expression)
        said = number(found[2]) if value is None else value + (slip == place)
        if said is not None and not near(number(found[2]), said):
            changed[number(found[2])] = said
        else:
            said = number(found[2])
        shown = plain(said)
        done += f"{replaced(rest[: found.start()], changed)}<<{expression}={shown}>>{'$' * ('$' in found[3])}{shown}"
        rest, result = rest[found.end() :], said
    if result is None:
        return answer
    end = END.sub(lambda line: f"{line[1]} {plain(result)}", replaced(rest, changed))
    return done + end


def replaced(text: str, changed: dict[float, float]) -> str:
    """The text with numbers changed; None as a key is no number."""

    def new(found: re.Match) -> str:
        kept = found[0].rstrip(".,")
        value = changed.get(float(kept.replace(",", "") or "nan"))
        return found[0] if value is None else plain(value) + found[0][len(kept) :]

    return NUMBER.sub(new, text) if changed else text


def planted(answer: str, kind: str, rng) -> str:
    """A wrong draft from a right one: slip (a result, carried on), misread (an operand, carried on), end, or noise."""
    steps = list(STEP.finditer(answer))
    if kind == "noise" or not steps:
        return rng.choice(["I am not sure what is meant.", "This reminds me of the sea.\nIt is deep.", "#### ?"])
    if kind == "end":
        return END.sub(lambda line: f"{line[1]} {plain((number(line[2]) or 0) + rng.randint(1, 9))}", answer)
    place = rng.randrange(len(steps))
    step = steps[place]
    if kind == "misread":
        operand = rng.choice(operands_of(step[1]))
        other = operand * 10 + rng.randint(1, 9)
        text = answer[: step.start()] + answer[step.start() :].replace(step[1], replaced(step[1], {operand: other}), 1)
        return _carried(text)
    wrong = (number(step[2]) or 0) + rng.randint(1, 9)
    carried = replaced(answer[step.end() :], {number(step[2]): wrong})
    return answer[: step.start()] + f"<<{step[1]}={plain(wrong)}>>{plain(wrong)}" + _carried(carried)


def _carried(text: str) -> str:
    """The text with every sum redone, as somebody does who goes on from a wrong number."""
    return revised(text, text)
