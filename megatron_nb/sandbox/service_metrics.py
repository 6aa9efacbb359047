"""What the judge service counts, in Prometheus' text form."""

from __future__ import annotations

from collections import Counter
from typing import Any

PREFIX = "megatron_nb_judge"


class ServiceMetrics:
    """Counters since the start of the service."""

    def __init__(self):
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.rows: Counter[str] = Counter()  # answered, by path
        self.seconds: Counter[str] = Counter()  # of the clock from a row's turn to its answer
        self.verdicts: Counter[str] = Counter()
        self.cpu_s = 0.0  # of the programs
        self.failures = 0  # rows that failed for the sandbox's sake

    def request(self, path: str, status: int) -> None:
        self.requests[path, status] += 1

    def row(self, path: str, answer: dict[str, Any], seconds: float) -> None:
        self.rows[path] += 1
        self.seconds[path] += seconds
        self.verdicts.update(answer.get("verdicts", ()))
        self.cpu_s += sum(answer.get("cpu_s", ()))

    def mean_s(self, path: str) -> float:
        """Seconds a row has taken so far, on the mean; 1 before the first."""
        return self.seconds[path] / self.rows[path] if self.rows[path] else 1.0

    def text(self, gauges: dict[str, float], isolation: str) -> str:
        """All of it. gauges: of the present moment, by name."""
        lines: list[str] = []

        def add(name: str, kind: str, values: dict[str, float]) -> None:
            lines.append(f"# TYPE {PREFIX}_{name} {kind}")
            lines.extend(f"{PREFIX}_{name}{labels} {float(value):.10g}" for labels, value in values.items())

        add("requests_total", "counter", {f'{{path="{path}",status="{status}"}}': count
                                          for (path, status), count in sorted(self.requests.items())})  # fmt: skip
        add("rows_total", "counter", {f'{{path="{path}"}}': count for path, count in sorted(self.rows.items())})
        add("row_seconds_total", "counter", {f'{{path="{path}"}}': total for path, total in sorted(self.seconds.items())})
        add("verdicts_total", "counter", {f'{{verdict="{name}"}}': count for name, count in sorted(self.verdicts.items())})
        add("program_cpu_seconds_total", "counter", {"": self.cpu_s})
        add("infrastructure_failures_total", "counter", {"": self.failures})
        for name, value in gauges.items():
            add(name, "gauge", {"": value})
        add("isolation", "gauge", {f'{{kind="{isolation}"}}': 1})
        return "\n".join(lines) + "\n"
