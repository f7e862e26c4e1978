"""What stands in for the data and the model of configs/recipes."""

import json
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "configs" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


def local(task: Path) -> list[str]:
    """task/model, and rows of every recipe's columns in the place of those on the hub."""
    row = {
        "question": "What is 2+2?", "problem": "What is 2+2?", "prompt": [{"role": "user", "content": "What is 2+2?"}],
        "answer": "#### 4", "solution": "It is \\boxed{4}.", "reward_model": {"ground_truth": "4"},
    }  # fmt: skip
    (task / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    return [f"model.path={task}/model", f"data.train={task}/rows.jsonl", f"data.eval={task}/rows.jsonl"]
