"""The operators of a whole step in the trainer's own engine, beside those of transformers alone."""

import json
import sys

from tests.support.own_process import run


def test_a_step_of_four_groups_takes_no_more_operators_than_transformers_alone() -> None:
    words = ("trainer.groups_per_micro_batch=4", "trainer.logprob_chunk_size=4096")
    lines = run([sys.executable, "tools/benchmarks/count_operators.py", *words]).splitlines()
    tandem, transformers = (json.loads(line) for line in lines if line.startswith("{"))
    assert tandem["tandem"]["total"] <= transformers["transformers"]["total"]
    assert len(tandem["tandem"]["micro_batches"]) == 1 and tandem["tandem"]["step"] < 20
