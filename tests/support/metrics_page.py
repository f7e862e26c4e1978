"""The metrics that docs/metrics.md explains."""

import re

from common.paths import ROOT

PAGE = (ROOT / "docs" / "metrics.md").read_text()


def documented() -> set[str]:
    """Names in front of the colons of the page's lists, <function> and the like as <>."""
    items = re.findall(r"^- ((?:`[^`]+`,?\s+)*`[^`]+`):", PAGE, re.MULTILINE)
    return {re.sub(r"<\w+>", "<>", name) for item in items for name in re.findall(r"`([^`]+)`", item)}


def unexplained(names: set[str]) -> list[str]:
    """Of names as they stand in a metrics.jsonl."""
    patterns = [re.compile(re.escape(name).replace("<>", "[^/]+")) for name in documented()]
    return sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in patterns))
