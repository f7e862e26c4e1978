"""`bash launch.sh check config.yaml [key=value …]`: tries the rewards before any GPU time is spent.

Runs the reward functions over right and wrong answers of the config's data (rewards/gold_answers.py), which are
treated like completions of a run. Imports no torch.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import config as settings
from common.config import Config
from common.config.data import entries
from common.errors import UserError
from common.processes import exits
from common.types import Problem, Prompt
from launcher.resources.batch_plan import counted
from model.files.hub import present_file
from model.tokenizer import load_tokenizer
from rewards.gold_answers import Findings, check_gold
from rewards.probes import Probe
from rewards.tally import GoldRow
from sampler.data_source import prompts_of
from sampler.prompts.dataset import by_source, load_data, whole_row
from sampler.prompts.messages import shown_to_rewards
from sampler.prompts.reading import logged_reader, stop_conditions
from sampler.row_checks import rows_with_gold
from sampler.turns.multi_turn import open_multi_turn


def main() -> None:
    """Prints findings on the rewards. Raises UserError, and SystemExit with 1 if a function or a gold answer fails."""
    parser = argparse.ArgumentParser(prog="launch.sh check", description="Try the reward functions of a config.")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rows", type=int, default=1000, help="gold answers to try, evenly spaced (default: 1000)")
    arguments = parser.parse_intermixed_args()
    if arguments.rows < 1:
        raise UserError(f"check --rows {arguments.rows}: at least 1 is tried")
    config = settings.load(arguments.config, arguments.overrides)

    given = by_source(load_data("data.train", config.data.train, config.data), config)
    rows = [row for source, own in given for row in rows_with_gold("data.train", own, source)]
    chosen = rows[:: -(-len(rows) // arguments.rows)]
    paths = ", ".join(entry.path for entry in entries(config.data.train))
    print(f"tandem: gold answers: {len(chosen)} of {len(rows)} rows of {paths}", flush=True)
    problems, doubts = list[str](), list[str]()
    for source, own in by_source(chosen, config):
        found = check(source, own)
        print("\n".join(found.lines))
        for kind, texts in (("problem", found.problems), ("doubt", found.doubts), ("warning", found.warnings)):
            for text in texts:
                print(f"{kind}: {text}", flush=True)
        problems, doubts = problems + found.problems, doubts + found.doubts
    doubted = f"no problem, {counted(len(doubts), 'doubt')}" if doubts else "the rewards look right"
    print(f"\ntandem: {counted(len(problems), 'problem') if problems else doubted}")
    if problems:
        raise SystemExit(1)


def check(config: Config, problems: Sequence[Problem]) -> Findings:
    """Tries rewards on rows. Raises UserError, like a run, if rows become no prompts or functions cannot be called."""
    round_trip = _round_trip(config, problems)
    prompts = round_trip.prompts.values() if round_trip else ()
    shown = [(p.problem, p.for_rewards) for p in prompts] or [(p, shown_to_rewards(p, config)) for p in problems]
    rows = [GoldRow(p.index, prompt, whole_row(p, config.data.image_key)) for p, prompt in shown]
    if round_trip is not None:
        found = check_gold(config.rewards, rows, config.trainer.max_steps, round_trip.run, round_trip.thinks)
        round_trip.report(found)
        return found
    found = check_gold(config.rewards, rows, config.trainer.max_steps)
    found.warnings.append(
        f"model {config.model.path} is not here: neither its prompts nor its tokenizer were tried; check again then"
    )
    return found


@dataclass
class _RoundTrip:
    """The steps of a run between a prompt's last token and the completion's text that the reward functions read."""

    tokenizer: Any
    reader: Any
    ends: Any
    prompts: dict[int, Prompt]  # by row
    changed: dict[str, tuple[int, str, str]] = field(default_factory=dict)  # by form: row, text, text read by rewards
    cut: set[str] = field(default_factory=set)  # forms that a stop condition cuts off

    @property
    def thinks(self) -> bool:
        template = str(getattr(self.tokenizer, "chat_template", ""))
        return "<think>" in template or any("think" in p.text[-2000:].lower() for p in self.prompts.values())

    def run(self, row: GoldRow, probes: Sequence[Probe]) -> tuple[list[str], list[list[int]]]:
        """Returns the texts that the rewards read of these answers to a row, and their token ids."""
        prompt = self.prompts.get(row.index)
        prefix = prompt.turn_prefix if prompt else ""
        written = [probe.behind(prefix) for probe in probes]
        ids = [self._encode_to_end(text, probe.form) for text, probe in zip(written, probes, strict=True)]
        read = [prefix + text for text in self.reader(ids)]
        for probe, text, got in zip(probes, written, read, strict=True):
            if got != prefix + text and probe.form not in self.cut:
                self.changed.setdefault(probe.form, (row.index, prefix + text, got))
        return read, ids

    def _encode_to_end(self, text: str, form: str) -> list[int]:
        end = min((at + len(stop) for stop in self.ends.texts if (at := text.find(stop)) >= 0), default=len(text))
        ids = list(self.tokenizer(text[:end], add_special_tokens=False)["input_ids"])
        stop_at = next((i for i, token in enumerate(ids) if token in self.ends.ids), None)
        if end < len(text) or (stop_at is not None and stop_at < len(ids) - 1):
            self.cut.add(form)
        if stop_at is not None:
            return ids[: stop_at + 1]
        return ids if end < len(text) or not self.ends.own else [*ids, self.ends.own[0]]

    def report(self, findings: Findings) -> None:
        """Adds to the findings how template, tokenizer and stop conditions change answers before rewards read them."""
        starts = {prompt.turn_prefix for prompt in self.prompts.values() if prompt.turn_prefix}
        findings.lines += [f"prompts begin the model's turn with {text!r}: rewards read it" for text in sorted(starts)]
        if self.cut:
            findings.problems.append(
                f"sampler.stop ends completions inside of a right answer ({', '.join(sorted(self.cut))}); remove "
                "the stops that such an answer contains"
            )
        for form, (row, written, got) in list(self.changed.items())[:1]:
            added = [str(token.content) for token in self.tokenizer.added_tokens_decoder.values()]
            lost = [token for token in added if token in written and token not in got]
            what = f"without the special tokens {', '.join(lost)}" if lost else f"as {got[:80]!r}"
            findings.problems.append(
                f"what the model writes reaches the rewards {what} (row {row}, {form}: {written[:80]!r}); set "
                "rewards.special_tokens=auto, or take tags that are no special tokens"
            )


def _round_trip(config: Config, problems: Sequence[Problem]) -> _RoundTrip | None:
    """Returns the prompts and tokenizer for these problems, or None if the tokenizer is not on this machine."""
    path, revision = config.model.path, config.model.revision
    if not Path(path).expanduser().is_dir() and present_file(path, "tokenizer_config.json", revision) is None:
        return None  # the tokenizer would have to be downloaded or built first
    tokenizer = load_tokenizer(path, revision, config.model.trust_remote_code)
    with open_multi_turn(config, tokenizer, problems[0], problems[0].columns) as multi_turn:
        made = [] if config.data.image_key else prompts_of("data.train", problems, tokenizer, config, multi_turn)
    prompts = {prompt.problem.index: prompt for prompt in made}  # answers to rows with images are tried without one
    return _RoundTrip(tokenizer, logged_reader(config, tokenizer), stop_conditions(config, tokenizer), prompts)


if __name__ == "__main__":
    exits.leave(exits.run("check", main))
