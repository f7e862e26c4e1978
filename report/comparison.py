"""Held-out evaluations in words, of the terminal and the model card: before, after, and how sure that is. Pure."""

from __future__ import annotations

from report.escape import strip_escapes
from report.full_marks import Record, Records, compared, scored, share_of_full_marks


def comparison(evaluations: Records) -> list[str]:
    """A line for every reward function: the first of these evaluations with the last; [] without any.

    "held-out answer: 41.0 % → 72.3 %  (n = 512; 95 % intervals [36.8, 45.3] → [68.2, 76.0])"
    "held-out length: mean 0.12 → 0.31  (n = 512; for an accuracy set rewards.full_marks={length: …})"
    """
    ends = [evaluations[0], evaluations[-1]] if len(evaluations) > 1 else list(evaluations)
    return [_line(name, ends) for name in compared(ends)]


def _line(name: str, records: Records) -> str:
    shown, marked = strip_escapes(name), [record for record in records if name in record["full_marks"]]
    having = marked or [record for record in records if name in record["mean"]]
    counts = " → ".join(dict.fromkeys(_count(record, name) for record in having))
    if not marked:
        setting = f"rewards.full_marks={{{strip_escapes(name.rpartition('/')[2])}: …}}"  # of hard/style, too
        means = " → ".join(dict.fromkeys(f"{record['mean'][name]:.2f}" for record in having))
        return f"held-out {shown}: mean {means}  (n = {counts}; for an accuracy set {setting})"
    marks = [share_of_full_marks(record, name) for record in marked]
    shares = " → ".join(f"{100 * share:.1f} %" for share, _, _ in marks)
    intervals = " → ".join(f"[{100 * low:.1f}, {100 * high:.1f}]" for _, low, high in marks)
    plural = "s" if len(marks) > 1 else ""
    return f"held-out {shown}: {shares}  (n = {counts}; 95 % interval{plural} {intervals})"


def _count(record: Record, name: str) -> str:
    n, problems = scored(record, name)
    return str(n) if problems == n else f"{n} completions of {problems} problems"
