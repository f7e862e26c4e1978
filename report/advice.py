"""What is wrong with a run, in words: its records, in order -> the sentences of report/advice_rules.py that hold.

A rule speaks on the metrics that metrics.jsonl has, so a report made later says what the live run said. Left out:
anything that would act by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from report.advice_rules import RULES
from report.history import EARLY, LATE, AdviceSettings, History, Row


class Adviser:
    """Takes the run's records in order. `step` returns what holds now: {"truncated": "92 % of completions …"}."""

    def __init__(self, settings: AdviceSettings) -> None:
        self._history = History(settings)

    def step(self, step: int, values: Row) -> dict[str, str]:
        h, row = self._history, {"step": step, **values}
        if len(h.early) < EARLY:
            h.early.append(row)
        h.late.append(row)
        if len(h.late) == EARLY:  # they stand for evaluations made before them
            h.at_evaluation = dict.fromkeys(h.evaluations, self._means())
        return self.now()

    def now(self) -> dict[str, str]:
        return {cause: sentence for cause, rule in RULES.items() if (sentence := rule(self._history))}

    def evaluation(self, record: Row) -> None:
        h, version = self._history, record["step"]
        if not record["n"]:
            return
        for middle in sorted(h.evaluations)[1:]:
            del h.evaluations[middle]
            h.at_evaluation.pop(middle, None)
        h.evaluations[version] = record
        if len(h.late) >= EARLY:
            h.at_evaluation[version] = self._means()

    def _means(self) -> dict[str, float]:
        newest = list(self._history.late)[-LATE:]
        whole = [key for key in newest[-1] if all(row.get(key) is not None for row in newest)]
        return {key: fmean(row[key] for row in newest) for key in whole if key.startswith("rewards/")}


def replay(adviser: Adviser, rows: Sequence[Row], evaluations: Sequence[Row]) -> Iterator[tuple[int, dict[str, str]]]:
    """(step, what holds then) for every record of a run folder: an evaluation is made beside the step after it."""
    waiting = sorted(evaluations, key=lambda record: record["step"], reverse=True)
    for row in rows:
        yield row["step"], adviser.step(row["step"], row)
        while waiting and waiting[-1]["step"] < row.get("policy_version", row["step"]):
            adviser.evaluation(waiting.pop())
    for record in reversed(waiting):
        adviser.evaluation(record)
    if rows:
        yield rows[-1]["step"], adviser.now()
