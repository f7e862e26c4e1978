"""The best policy by a held-out metric, kept as output_dir/best, and the decision to stop early.

    best/  config.json  model-*.safetensors  tokenizer…  commit.json

best/ is a Hugging Face folder, or a peft folder if adapters are published. Its weights are copied
from the files that the sampler loaded and scored. They cannot come from the engine, because the
trainer has already trained on the next batch when an evaluation ends.

All decisions follow from eval.jsonl. A resume cuts this file back to its checkpoint, so patience is
counted as if the run had never been interrupted. best/ is written before its evaluation is
recorded. After a crash between the two, the resumed run repeats the evaluation and writes best/
again.

Not supported: several metrics at once.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import durable
from common.config import Config
from common.files import delta, pieces, weights
from common.files.run_folder import BEST, COMMIT, FINAL
from common.files.weights import Published
from model.files import lora
from report.versions import best_so_far
from trainer.save.disk import write_folder
from trainer.save.model_files import write_index, write_side_files

Record = dict[str, Any]  # a line of eval.jsonl
WriteCard = Callable[[Path, int], None]  # gets a folder and the policy version that it holds


class Best:
    """Keeps the best policy in best/, and decides when to stop early.

    Every rank calls every method. Rank 0 makes the decisions and the other ranks receive them, so
    `stops_early` is equal on all ranks.
    """

    def __init__(
        self,
        config: Config,
        collectives: Any,
        say: Callable[[str], None],
        read_recorded: Callable[[], list[Record]],  # reads the evaluations in eval.jsonl
    ):
        self.config = config
        self.collectives = collectives
        self.folder = config.run.output_dir / BEST
        self.records: list[Record] = []  # every evaluation of the run, on rank 0
        self.stops_early = False
        self._say = say
        self._read_recorded = read_recorded
        self._metric = config.eval.metric_for_best_model

    def load_history(self) -> None:
        """Reads the evaluations that were recorded before this start of the run, on rank 0.

        It is called before the first step. If these evaluations had already ended the run early, it
        sets `stops_early`, so that the resumed run ends, too.
        """
        if self._metric is not None:
            self.records = self._read_recorded()
            self._check_patience()

    def _commit_record(self) -> Record:
        """Returns what best/commit.json must contain, given the evaluations so far."""
        best = best_so_far(self.records, self.config.eval)
        return {"policy_version": best.version, "metric": self._metric, "value": best.value}

    def _matches_evaluations(self) -> bool:
        """Returns whether best/ holds the version that the recorded evaluations rank best.

        It may hold a different version: one from steps that a resumed run has repeated, or one that
        was chosen by a different metric.
        """
        path = self.folder / COMMIT
        return path.is_file() and json.loads(path.read_bytes()) == self._commit_record()

    def update(
        self, record: Record | None, published: Published, engine: Any, tokenizer: Any
    ) -> None:
        """Writes best/ if the published policy has the best evaluation of the run so far.

        record: the evaluation of this policy, on rank 0; None if there was no evaluation, and on
        the other ranks. Also sets `stops_early` when patience has run out.
        """
        if self._metric is None:
            return
        is_best = False
        if record is not None:
            self.records.append(record)
            best = best_so_far(self.records, self.config.eval)
            is_best = best.version == record["step"]  # "step" is the evaluated policy version
        if self.collectives.agree(is_best):
            write_files = partial(self._write_files, published, engine, tokenizer)
            write_folder(self.collectives, self.folder, finish=write_files)
        self._check_patience()

    def _write_files(self, published: Published, engine: Any, tokenizer: Any, folder: Path) -> None:
        """Writes the files of best/ into `folder`, with the commit record last."""
        keep_version(folder, published, engine, tokenizer)
        commit_record = json.dumps(self._commit_record(), indent=1)
        durable.write_file(folder / COMMIT, commit_record.encode())

    def commit_as_final(self, write_card: WriteCard | None = None) -> bool:
        """Makes output_dir/final a copy of best/, if eval.load_best_model_at_end is set.

        write_card: writes a model card into the copy; None: the copy gets no card. Returns False
        without copying if the setting is off, or if best/ is not the version that the recorded
        evaluations rank best.
        """
        is_wanted = self.config.eval.load_best_model_at_end and self._matches_evaluations()
        if not self.collectives.agree(is_wanted):
            return False
        final = self.config.run.output_dir / FINAL
        write_folder(self.collectives, final, finish=partial(self._copy_best, write_card))
        return True

    def _copy_best(self, write_card: WriteCard | None, folder: Path) -> None:
        """Copies best/ into this folder, and adds a model card as in `commit_as_final`."""
        shutil.copytree(self.folder, folder, copy_function=pieces.copy, dirs_exist_ok=True)
        if write_card is not None:
            commit_record = json.loads((folder / COMMIT).read_bytes())
            write_card(folder, commit_record["policy_version"])

    def _check_patience(self) -> None:
        """Sets `stops_early` after too many evaluations in a row without an improvement."""
        patience = self.config.eval.early_stopping_patience
        if patience is None or self.stops_early:
            return
        best = best_so_far(self.records, self.config.eval)
        self.stops_early = self.collectives.agree(best.without_improvement >= patience)
        if self.stops_early and self.collectives.rank == 0:
            self._say(
                f"stopping early: {best.without_improvement} evaluations in a row did not improve "
                f"{self._metric} over the estimated value of version {best.version}, the best so "
                f"far with a measured {best.value:.4g} (eval.early_stopping_patience)"
            )


def keep_version(folder: Path, published: Published, engine: Any, tokenizer: Any) -> None:
    """Writes a published version into `folder` as a Hugging Face folder, or peft's for adapters.

    The weights are the bits that the sampler loaded. They are copied from the published files, with
    any deltas applied, and never from the engine.
    """
    folders = [Path(version.weights_dir) for version, _ in weights.lineage(published)]
    full_version = folders[0]
    later_versions = folders[1:]  # each holds only deltas to the version before it
    shards = []
    for source in sorted(full_version.glob("*.safetensors")):
        deltas = [version / f"{source.name}{delta.SUFFIX}" for version in later_versions]
        shard = folder / source.name
        pieces.copy(source, shard, deltas)
        shards.append(shard)

    is_adapter = engine.published_settings is not None
    if is_adapter:
        shutil.copyfile(Path(published.weights_dir) / lora.SETTINGS, folder / lora.SETTINGS)
    else:
        num_bytes = sum(shard.stat().st_size for shard in shards)
        write_index(folder, _file_of_each_tensor(shards), num_bytes)
    write_side_files(engine, tokenizer, folder, with_config=not is_adapter)


def _file_of_each_tensor(shards: Sequence[Path]) -> dict[str, str]:
    """Returns the name of the file that holds each tensor, by the tensor's name."""
    from safetensors import safe_open

    files: dict[str, str] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 safe_open has no iterator
                files[name] = shard.name
    return files
