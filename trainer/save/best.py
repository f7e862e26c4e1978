"""The best policy by a held-out metric, kept as output_dir/best, and the decision to stop early.

    best/  config.json  model-*.safetensors  tokenizer…  commit.json

This is a Hugging Face folder, made of the very files that the sampler loaded and scored, or a peft
folder if adapters are published.

When an evaluation ends, the trainer is a batch further, so the weights come from the published
version and not from the engine. Everything is decided from eval.jsonl. A resume cuts that file back
to its checkpoint, so patience is counted as if the run had never been interrupted. best/ is written
before its evaluation is recorded. After a crash between the two, the resumed run evaluates and
keeps the version once more.

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


class Best:
    """Keeps the best policy. Every rank calls every method, and rank 0 decides for all.

    `stops_early` is equal on all ranks.
    """

    def __init__(
        self,
        config: Config,
        collectives: Any,
        say: Callable[[str], None],
        recorded: Callable[[], list[Record]],  # reads the evaluations before this start of the run
    ):
        self.config = config
        self.collectives = collectives
        self.folder = config.run.output_dir / BEST
        self.records: list[Record] = []  # every evaluation of the run, on rank 0
        self.stops_early = False
        self._say = say
        self._recorded = recorded
        self._metric = config.eval.metric_for_best_model

    def load_history(self) -> None:
        """Reads the evaluations that earlier starts of this run recorded, on rank 0.

        It is called before the first step. If these evaluations had stopped the run early, a
        resumed run stops again, so it also sets `stops_early`.
        """
        if self._metric is not None:
            self.records = self._recorded()
            self._check_patience()

    def _commit_record(self) -> Record:
        """Returns the contents of best/commit.json that follow from the evaluations."""
        best = best_so_far(self.records, self.config.eval)
        return {"policy_version": best.version, "metric": self._metric, "value": best.value}

    def _is_of_this_history(self) -> bool:
        """Returns whether best/ is what these evaluations name.

        It may be of steps that a resumed run has repeated, or the best by another metric.
        """
        path = self.folder / COMMIT
        return path.is_file() and json.loads(path.read_bytes()) == self._commit_record()

    def update(
        self, record: Record | None, published: Published, engine: Any, tokenizer: Any
    ) -> None:
        """Keeps the published policy if this evaluation of it is the best of the run.

        record: the evaluation, on rank 0; None without an evaluation and on other ranks.
        """
        if self._metric is None:
            return
        is_best = False
        if record is not None:
            self.records.append(record)
            best = best_so_far(self.records, self.config.eval)
            is_best = best.version == record["step"]
        if self.collectives.agree(is_best):
            keep = partial(self._keep, published, engine, tokenizer)
            write_folder(self.collectives, self.folder, keep)
        self._check_patience()

    def _keep(self, published: Published, engine: Any, tokenizer: Any, folder: Path) -> None:
        keep_version(folder, published, engine, tokenizer)
        commit_record = json.dumps(self._commit_record(), indent=1)
        durable.write_file(folder / COMMIT, commit_record.encode())

    def commit_as_final(self, write_card: Callable[[Path, int], None] | None = None) -> bool:
        """Makes output_dir/final a copy of best/, if eval.load_best_model_at_end is set.

        write_card: writes a model card into a folder, which is its first argument; the second one
        is the policy version. None: no card. Returns False if no copy was made, because it was not
        asked for, or because no evaluation of this run names best/.
        """
        is_wanted = self.config.eval.load_best_model_at_end and self._is_of_this_history()
        if not self.collectives.agree(is_wanted):
            return False
        final = self.config.run.output_dir / FINAL
        write_folder(self.collectives, final, partial(self._copy, write_card))
        return True

    def _copy(self, write_card: Callable[[Path, int], None] | None, folder: Path) -> None:
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
                f"stopping early: {self._metric} was not above what version {best.version}, "
                f"the best with a measured {best.value:.4g}, is worth in "
                f"{best.without_improvement} evaluations in a row (eval.early_stopping_patience)"
            )


def keep_version(folder: Path, published: Published, engine: Any, tokenizer: Any) -> None:
    """Writes the version that the sampler loaded, to the bit, as a Hugging Face or peft folder."""
    folders = [Path(version.weights_dir) for version, _ in weights.lineage(published)]
    full_version = folders[0]
    later_versions = folders[1:]  # each is a delta to the version before
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
    from safetensors import safe_open

    files: dict[str, str] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 safe_open has no iterator
                files[name] = shard.name
    return files
