"""The best policy by a held-out metric: it is kept as output_dir/best, and tells when to stop early.

    best/  config.json  model-*.safetensors  tokenizer…  commit.json      a Hugging Face folder, made of the very files
                                                                          that the sampler loaded and scored; or a
                                                                          peft folder, where adapters are published

An evaluation ends when the trainer is a batch further, so the weights come from the published version and not from the
engine. Everything is decided from eval.jsonl, which a resume cuts back to its checkpoint: patience is counted as if the
run had never been interrupted. best/ is written before its evaluation is recorded, so after a crash between the two the
resumed run evaluates, and keeps, the version once more. Left out: several metrics at once.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import durable
from common.config import Config
from common.files import delta, pieces, weights
from common.files.run_folder import BEST, COMMIT, FINAL
from common.files.weights import Published
from model.files import lora
from report.versions import BestSoFar, best_so_far
from trainer.save.disk import write_folder
from trainer.save.model_files import write_index, write_side_files

Record = dict[str, Any]  # a line of eval.jsonl


class Best:
    """Keeps the best policy. Every rank calls the same methods; rank 0 decides. `stops_early` is equal on all ranks."""

    def __init__(self, config: Config, exchange: Any, say: Callable[[str], None], recorded: Callable[[], list[Record]]):
        self.config, self.exchange, self._say = config, exchange, say
        self.folder, self._metric = config.run.output_dir / BEST, config.eval.metric_for_best_model
        self.stops_early = False
        self._recorded, self.records = recorded, list[Record]()

    def load_history(self) -> None:
        """Reads past evaluations, before the first step: a run that stopped early may be resumed, and stops again."""
        if self._metric is not None:
            self.records = self._recorded()
            self._check_patience()

    def _is_of_this_history(self) -> bool:
        """Returns whether these evaluations name best/, which may be of repeated steps or of another metric."""
        commit, now = self.folder / COMMIT, best_so_far(self.records, self.config.eval)
        return commit.is_file() and json.loads(commit.read_bytes()) == self._record_of(now)

    def _record_of(self, best: BestSoFar) -> dict[str, Any]:
        return {"policy_version": best.version, "metric": self._metric, "value": best.value}

    def update(self, record: Record | None, published: Published, engine: Any, tokenizer: Any) -> None:
        """Keeps the published policy if this evaluation of it is the best. record: rank 0's; None = no evaluation."""
        if self._metric is None:
            return
        self.records += [record] if record else []
        now = best_so_far(self.records, self.config.eval)
        if self.exchange.agree(record is not None and now.version == record["step"]):

            def keep(folder: Path) -> None:
                keep_version(folder, published, engine, tokenizer)
                durable.write_file(folder / COMMIT, json.dumps(self._record_of(now), indent=1).encode())

            write_folder(self.exchange, self.folder, keep)
        self._check_patience()

    def commit_as_final(self, describe: Callable[[Path, int], None] = lambda *_: None) -> bool:
        """Makes output_dir/final a copy of best/. Returns False if that is not set, or no evaluation has succeeded.

        describe: adds a model card of this version to the folder.
        """

        def copy(folder: Path) -> None:
            shutil.copytree(self.folder, folder, copy_function=pieces.copy, dirs_exist_ok=True)
            describe(folder, json.loads((folder / COMMIT).read_bytes())["policy_version"])

        if not self.exchange.agree(self.config.eval.load_best_model_at_end and self._is_of_this_history()):
            return False
        write_folder(self.exchange, self.config.run.output_dir / FINAL, copy)
        return True

    def _check_patience(self) -> None:
        patience = self.config.eval.early_stopping_patience
        if patience is None or self.stops_early:
            return
        now = best_so_far(self.records, self.config.eval)
        self.stops_early = self.exchange.agree(now.without_improvement >= patience)
        if self.stops_early and self.exchange.rank == 0:
            self._say(
                f"stopping early: {self._metric} was not above what version {now.version}, the best with a measured "
                f"{now.value:.4g}, is worth in {now.without_improvement} evaluations in a row "
                "(eval.early_stopping_patience)"
            )


def keep_version(folder: Path, published: Published, engine: Any, tokenizer: Any) -> None:
    """Writes the version that the sampler loaded, bit by bit, as a Hugging Face folder, or a peft folder."""
    whole, *changed = (Path(version.weights_dir) for version, _ in weights.lineage(published))
    shards = [folder / path.name for path in sorted(whole.glob("*.safetensors"))]
    for shard in shards:
        pieces.copy(whole / shard.name, shard, [later / f"{shard.name}{delta.SUFFIX}" for later in changed])
    if engine.published_settings is not None:
        shutil.copyfile(Path(published.weights_dir) / lora.SETTINGS, folder / lora.SETTINGS)
    else:
        write_index(folder, _file_of_each_tensor(shards), sum(shard.stat().st_size for shard in shards))
    write_side_files(engine, tokenizer, folder, is_whole=engine.published_settings is None)


def _file_of_each_tensor(shards: Sequence[Path]) -> dict[str, str]:
    from safetensors import safe_open

    names: dict[str, str] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            names |= dict.fromkeys(file.keys(), shard.name)
    return names
