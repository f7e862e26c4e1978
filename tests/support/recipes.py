"""What stands in for the data and the model of configs/recipes and docs/recipes.md."""

import json
import re
from pathlib import Path

from common.paths import ROOT

RECIPES = ROOT / "configs" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
_PAGE = (ROOT / "docs" / "recipes.md").read_text()
PAGE = {part.split("\n")[0]: part for part in _PAGE.split("\n## ")[1:]}  # by heading
TINY = (
    "model.dtype=float32", "sampler.devices=[]", "sampler.num_generations=4", "sampler.max_completion_length=16",
    "trainer.devices=[]", "trainer.prompts_per_step=2", "trainer.max_steps=2", "trainer.warmup_steps=0",
    "trainer.save_steps=null", "data.max_prompt_length=256", "eval.steps=null", "eval.num_generations=1", "vllm={}",
)  # fmt: skip


def of_page(heading: str, folder: Path) -> str:
    """The page's recipe as folder/recipe.yaml, with the files beside it that it brings. A run of yours is the model."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE[heading], re.MULTILINE | re.DOTALL)
    files = {name[1]: text for _, text in blocks if (name := re.match(r"# (\S+\.\w+)", text))}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    settings = "".join(text for kind, text in blocks if kind == "yaml")
    for name in files:
        settings = settings.replace(name, str(folder / name))
    settings = settings.replace("org/reward-model", str(folder / "reward"))
    settings = re.sub(r"\b\w+\.jsonl", str(folder / "rows.jsonl"), settings)
    settings = re.sub(r"\bruns/[\w/]*final\b", str(folder / "model"), settings)
    (folder / "recipe.yaml").write_text(settings)
    return str(folder / "recipe.yaml")


def beside(heading: str, folder: Path) -> list[str]:
    """`local` and TINY, but for held-out data of the recipe's own."""
    own = "eval: {" in PAGE[heading]
    return [given for given in (*local(folder), *TINY) if not (own and given.startswith("data.eval="))]


def local(task: Path) -> list[str]:
    """task/model, and rows of every recipe's columns in the place of those on the hub."""
    row = {
        "question": "What is 2+2?", "problem": "What is 2+2?", "prompt": [{"role": "user", "content": "What is 2+2?"}],
        "answer": "#### 4", "solution": "It is \\boxed{4}.", "reward_model": {"ground_truth": "4"},
    }  # fmt: skip
    (task / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    return [f"model.path={task}/model", f"data.train={task}/rows.jsonl", f"data.eval={task}/rows.jsonl"]
