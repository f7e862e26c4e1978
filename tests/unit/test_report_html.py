"""report.html: what it says, what hostile text becomes in it, and how it looks in a browser, if there is one."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from report.html_page import SHOWN, _trouble, content_of, time_split, write_report
from report.run_log import MetricsLog
from tests.support.speed import limit

CANARY = "document.title='a script ran'"
HOSTILE = {
    "script": f"</pre></title></style></script><script>{CANARY}</script>",
    "image": f'<img src=x onerror="{CANARY}">',
    "attribute": f'" onmouseover="{CANARY}" \'><svg onload={CANARY}>',
    "comment": f"--><![CDATA[<script>{CANARY}</script>]]>",
    "template": "{{ 7 * 7 }} {% raw %} {{ config }}",
    "terminal": "\x1b[2J\x1b]0;title\x07\x9b31m",
    "direction": "\u202egnp.exe \u2066 abc",
    "surrogate": "\ud800 alone",
    "long": "x" * 1_000_000,
}
SECRET = "hf_abcdefghij"


def hostile_run(folder: Path, steps: int = 12) -> Path:
    """A run whose every text is hostile: function names, prompts, completions, settings and the folder's own name."""
    log = MetricsLog(folder)
    name = "<u>f</u>"
    for step in range(1, steps + 1):
        values = {"reward": step / 10, "completions/clipped_ratio": 0.92, "step_time": 2.0, "wait/trainer_s": 0.5}
        values |= {f"rewards/{name}/mean": step / 10, f"rewards/{name}/std": 0.1, f"rewards/{name}/accuracy": step / 20}
        log.log(step, values | {"frac_reward_zero_std": 0.5, "timing/all_s": 3.0, "timing/backward_s": 1.0})
    for index, text in enumerate(HOSTILE.values()):
        parts = {"which": "best", "prompt": text, "completion": text, "finish_reason": "length"}
        scores = {"rewards": {name: 1.0, "<img src=x>": float("nan")}, "reward": float(index)}
        if index % 2:
            parts["turns"] = [{"by": "model", "text": text}, {"by": "environment", "text": text}]
        log.log_samples([{"step": steps, "group_id": index // 2, "policy_version": 1, **parts, **scores}])
    for version, marks in ((0, 100), (steps, 150)):
        record = {"n": 200, "problems": 200, "full_marks": {name: marks}, "mean": {name: 0.5}}
        log.log_eval({"step": version, "eval_id": f"v{version}", **record})
    log.close()
    config = {"vllm": {"hf_token": SECRET, "<script>": HOSTILE["script"]}, "run": {"output_dir": HOSTILE["image"]}}
    (folder / "config.json").write_text(json.dumps(config | {"trainer": {"max_steps": 20}}))
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report(hostile_run(tmp_path_factory.mktemp("run") / "<s>run</s>")).read_text()


class Elements(HTMLParser):
    """Every tag with its attributes, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_hostile_text_makes_no_element_and_no_attribute(page):
    tags = Elements(page).tags
    assert not {tag for tag, _ in tags} & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "link",
        "form",
        "base",
        "b1",
        "i1",
    }
    for tag, attributes in tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("href", "src", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert "http-equiv" in str(tags) and "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in page


def test_hostile_text_is_shown_as_it_was_written_with_marks_for_what_cannot_be_seen(page):
    text = Elements(page).text
    for name in ("script", "image", "attribute", "comment", "template"):
        assert HOSTILE[name] in text, name
    assert "␛[2J␛]0;title␇⟨U+009B⟩31m" in text
    assert "⟨U+202E⟩gnp.exe ⟨U+2066⟩ abc" in text
    assert "⟨U+D800⟩ alone" in text
    assert not [char for char in text if ord(char) < 32 and char not in "\n\t"]


def test_a_completion_of_a_megabyte_is_cut_and_counted_and_the_page_stays_small(page):
    assert f"… and {1_000_000 - SHOWN:,} more characters in samples.jsonl" in Elements(page).text
    assert len(page) < 1_000_000


def test_nothing_is_loaded_from_anywhere_and_no_secret_is_in_the_page(page):
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert {address.split("/")[2] for address in addresses} <= {"www.w3.org"}  # names of SVG, never requested
    assert not re.search(r"@import|url\((?!#)", page)
    assert SECRET not in page and "***" in page


def test_the_page_says_what_happened(page):
    text = " ".join(Elements(page).text.split())
    assert "12 of 20 optimizer steps · not finished" in text
    assert "50.0 %[43.1, 56.9] 75.0 %[68.6, 80.5]" in text  # Wilson, n = 200: ½ ± ½·z/√(n + z²), and 0.75 by hand
    assert "92% of completions reach max_completion_length 256" in text and "(steps 5 to 12, 8 of them)" in text
    assert "does not apply" in text and "cut off" in text
    assert text.index("Worst samples") < text.index("Best samples") < text.index("Settings")


def test_turns_show_who_wrote_them(tmp_path):
    log = MetricsLog(tmp_path)
    for step in range(1, 21):
        log.log(step, {"reward": 0.0, "rollout/failures": 1.0})
    ids = {"step": 20, "group_id": 0, "policy_version": 0, "finish_reason": "stop", "rewards": {}, "reward": 1.0}
    parts = [("model", "call(48/2)"), ("environment", "24" + "x" * SHOWN), ("model", "never shown")]
    turns = [{"by": by, "text": text} for by, text in parts]
    log.log_samples([{**ids, "prompt": "p", "completion": "".join(text for _, text in parts), "turns": turns}])
    log.close()
    page = write_report(tmp_path).read_text()
    assert "Rollouts that failed in their environment, and train nothing: 20." in page
    assert re.search(r'<pre>call\(48/2\)</pre>\s*<pre class="observed"[^>]*>24x', page)
    assert "never shown" not in page and f"… and {2 + 10 + 11:,} more characters in samples.jsonl" in page


def test_seconds_are_split_by_activity_and_the_rest_is_named():
    rows = [{"step": s, "timing/all_s": 10.0, "wait/trainer_s": 4.0, "timing/backward_s": 5.0} for s in (1, 2)]
    sampler = {"timing/sampler_generate_s": 6.0, "wait/sampler_s": 4.0}
    trainer, other = time_split([row | sampler for row in rows])
    assert trainer["parts"] == [
        ("waiting for groups", 8.0, 40.0, 0),
        ("forward and backward", 10.0, 50.0, 2),
        ("rest", 2.0, 10.0, 7),
    ]
    assert other["parts"] == [("generating", 12.0, 60.0, 0), ("waiting for the trainer", 8.0, 40.0, 3)]
    assert time_split([{"step": 1}]) == []


def test_samples_are_the_extremes_of_the_last_quarter_and_a_dead_group_is_shown(tmp_path):
    log = MetricsLog(tmp_path)
    for step in range(1, 9):
        log.log(step, {"reward": 0.0, "frac_reward_zero_std": 0.25})
        for which, reward in (("worst", -step), ("best", step if step < 8 else -8)):
            texts = {"prompt": "p", "completion": f"{which} {step}", "finish_reason": "stop", "rewards": {"a": 1.0}}
            ids = {"step": step, "group_id": step, "policy_version": 0, "which": which, "reward": float(reward)}
            log.log_samples([ids | texts])
    log.close()
    content = content_of(tmp_path)
    chosen = {which: [record["completion"] for record in records] for which, records in content["samples"]}
    assert chosen == {"worst": ["worst 8", "best 8"], "best": ["best 7", "worst 7"]}
    assert (content["dead"]["dead"], content["dead"]["logged"]) == (1, 8)
    assert content["dead"]["example"]["completion"] == "worst 8"


def test_a_run_of_evaluations_alone_and_one_of_a_single_step_have_a_page(tmp_path):
    for name, steps, evaluate in (("one", 1, False), ("before", 0, True)):
        log = MetricsLog(tmp_path / name)
        for step in range(1, steps + 1):
            log.log(step, {"reward": 1.0})
        if evaluate:
            log.log_eval({"step": 0, "n": 2, "full_marks": {"answer": 1}, "mean": {}})
        log.close()
        assert "</html>" in write_report(tmp_path / name).read_text()
    with pytest.raises(UserError, match=r"no metrics\.jsonl and no eval\.jsonl"):
        write_report(tmp_path)


# --- in a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


def browse(folder: Path, *arguments: str) -> str:
    """Chromium's answer. Its own sandbox does not work for root; what it opens is the page made above."""
    command: list[Any] = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit(60), check=True).stdout


@in_a_browser
def test_a_browser_runs_no_script_of_the_page_and_would_have_run_one_without_the_escapes(page, tmp_path):
    (tmp_path / "report.html").write_text(page)
    assert "<title>a script ran</title>" not in browse(tmp_path, "--dump-dom", f"file://{tmp_path}/report.html")
    (tmp_path / "canary.html").write_text(f"<title>quiet</title>{HOSTILE['script']}")
    assert "<title>a script ran</title>" in browse(tmp_path, "--dump-dom", f"file://{tmp_path}/canary.html")


@in_a_browser
def test_the_policy_alone_stops_a_script_that_got_past_the_escapes(page, tmp_path):
    (tmp_path / "report.html").write_text(page.replace("<main>", f"<main>{HOSTILE['script']}{HOSTILE['image']}"))
    dom = browse(tmp_path, "--dump-dom", f"file://{tmp_path}/report.html")
    assert f"<script>{CANARY}</script>" in dom and "<title>a script ran</title>" not in dom


@in_a_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_fits_a_wide_and_a_narrow_window_by_day_and_by_night(page, tmp_path, width):
    """Nothing is wider than the window; the page measures itself, in a copy that may run a script."""
    measured = page.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'").replace(
        "</body>", "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script></body>"
    )
    frame = f'<iframe src="measured.html" style="width: {width}px; height: 900px; border: 0"></iframe>'
    (tmp_path / "measured.html").write_text(measured.replace("document.title =", "document.body.dataset.width ="))
    (tmp_path / "frame.html").write_text(
        f"<title>-</title>{frame}<script>onload = () => document.title = "
        "document.querySelector('iframe').contentDocument.body.dataset.width</script>"
    )
    dom = browse(tmp_path, "--allow-file-access-from-files", "--dump-dom", f"file://{tmp_path}/frame.html")
    assert f"<title>{width} of {width}</title>" in dom
    (tmp_path / "report.html").write_text(page)
    pictures = []
    for scheme in ("", "--blink-settings=preferredColorScheme=0"):
        browse(tmp_path, scheme or "--mute-audio", f"--window-size={width},900", f"--screenshot={tmp_path}/p.png",
               f"file://{tmp_path}/report.html")  # fmt: skip
        data = (tmp_path / "p.png").read_bytes()
        assert struct.unpack(">II", data[16:24]) == (max(width, 400), 900)
        pictures.append(data)
    assert pictures[0] != pictures[1]


def test_trouble_is_what_should_be_0_and_an_answer_that_crossed_its_reminder_is_none() -> None:
    row = {"skipped_steps": 2, "tombstones": 0, "num_non_finite": 1}
    row |= {"link/refused/eval_duplicate": 1, "link/refused/version": 3, "link/unsent": 0}
    assert [(key, total) for key, total, _ in _trouble([row])] == [
        ("skipped_steps", "2"),
        ("num_non_finite", "1"),
        ("link/refused/version", "3"),
    ]
