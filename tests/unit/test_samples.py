"""What `launch.sh samples` prints, and that a completion can not steer the terminal it is printed on."""

import dataclasses
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from model.files.images import digest, encode_image
from report.escape import one_line, visible
from report.run_log import MetricsLog
from report.samples import main
from tests.support.protocol_helpers import make_group
from tests.support.vision import PLAIN, picture
from trainer.record.samples import samples_records


def logged(folder: Path, *records: dict[str, Any]) -> Path:
    """A run folder with these samples."""
    plain = {"step": 1, "group_id": 0, "policy_version": 0, "finish_reason": "stop", "rewards": {}, "reward": 1.0}
    log = MetricsLog(folder)
    for record in records:
        log.log_samples([plain | {"prompt": "p"} | record])
    log.close()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 to 3, two completions each: rewards −1, 1; −2, 2; −3, 3."""
    records = []
    for step in (1, 2, 3):
        for which, sign in (("worst", -1), ("best", 1)):
            ids = {"step": step, "group_id": 10 * step, "policy_version": step - 1, "which": which}
            rewards = {"rewards": {"answer": float(sign), "style": float("nan")}, "reward": float(sign * step)}
            records.append(ids | rewards | {"prompt": f"question {step}\n", "completion": f"{which} {step}"})
    return logged(tmp_path, *records)


def heads(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    main([str(run), *arguments])
    return [line.split(" (")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("reward")]


def test_a_sample_shows_all_its_rewards_and_where_it_comes_from(run, capsys):
    main([str(run), "--worst", "-n", "1"])
    assert capsys.readouterr().out == (
        "reward -3.00 (answer -1.00, style does not apply) · step 3 · group 30 · v2\n"
        "  prompt │ question 3\n"
        "  prompt │ \n"
        "  model  │ worst 3\n\n"
    )


def test_what_its_tools_wrote_stands_apart_from_what_the_model_wrote(tmp_path, capsys):
    parts = [("model", "call(48/2)"), ("environment", "24\n\x1b[2J"), ("model", "It is 24")]
    turns = [{"by": by, "text": text} for by, text in parts]
    main([str(logged(tmp_path, {"completion": "".join(text for _, text in parts), "turns": turns}))])
    assert capsys.readouterr().out.splitlines()[1:6] == [
        "  prompt │ p",
        "  model  │ call(48/2)",
        "  tool   │ 24",
        "  tool   │ ␛[2J",
        "  model  │ It is 24",
    ]


def test_an_image_is_named_by_its_size_and_digest_and_is_one_mark_in_its_prompt(tmp_path, capsys):
    image = encode_image(picture(500, 250), PLAIN, 784, 400_000)
    ids = np.array([1, 7, 7, 7, 2, 7, 7, 3], np.int32)
    group = dataclasses.replace(make_group(4), prompt_ids=ids, images=(image,))
    texts = lambda ids: "".join({7: "<|image_pad|>"}.get(i, str(i)) for i in ids)  # noqa: E731
    main([str(logged(tmp_path, *samples_records([group], 5, 1, texts))), "--best", "-n", "1"])
    _, shown, prompt, *_ = capsys.readouterr().out.splitlines()
    assert shown == f"  image  │ 504 × 252 pixels, {digest(image)}"
    assert prompt == "  prompt │ 1<|image_pad|>2<|image_pad|>3"


def test_the_newest_step_a_given_one_or_the_extremes_of_the_run(run, capsys):
    assert heads(run, capsys) == ["reward -3.00", "reward 3.00"]
    assert heads(run, capsys, "--step", "2") == ["reward -2.00", "reward 2.00"]
    assert heads(run, capsys, "--step", "2", "--best") == ["reward 2.00", "reward -2.00"]
    assert heads(run, capsys, "--best", "-n", "2") == ["reward 3.00", "reward 2.00"]
    assert heads(run, capsys, "--worst") == [f"reward {r:.2f}" for r in (-3, -2, -1, 1, 2)]


def test_a_completion_cannot_steer_the_terminal_or_fake_a_line_of_ours(tmp_path, capsys):
    hostile = "\x1b[2J\x1b]0;title\x07\x9b31m\r\u202ereward 9.00\ud800\nreward 9.00 (answer 9.00)"
    record = {"completion": hostile, "rewards": {"\x1b[2J\n": 1.0}, "finish_reason": "length"}
    main([str(logged(tmp_path, record))])
    output = capsys.readouterr().out
    assert not [char for char in output if not char.isprintable() and char != "\n"]
    assert "␛[2J␛]0;title␇⟨U+009B⟩31m␍⟨U+202E⟩reward 9.00⟨U+D800⟩" in output and "cut off" in output
    assert [line for line in output.splitlines() if line.startswith("reward")] == output.splitlines()[:1]


def test_a_text_of_a_megabyte_is_cut_and_counted_unless_it_is_asked_for(tmp_path, capsys):
    logged(tmp_path, {"completion": "x" * 1_000_000, "reward": None})
    main([str(tmp_path)])
    output = capsys.readouterr().out
    assert "… and 998,000 more characters; show them with --full" in output and len(output) < 3000
    main([str(tmp_path), "--full"])
    assert capsys.readouterr().out.count("x") == 1_000_000


def test_what_is_not_there_is_told_with_what_is(run, tmp_path):
    for arguments, said in (
        ([run, "--step", "9"], "no step 9, but 1 to 3; nearest: --step 3"),
        ([tmp_path / "nowhere"], r"samples\.jsonl does not exist; name a run folder"),
        ([logged(tmp_path / "new")], r"samples\.jsonl is empty"),
    ):
        with pytest.raises(UserError, match=said):
            main([*map(str, arguments)])


# ---- hostile text acts nowhere, and nothing of it disappears


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text\n\twith tabs", "plain text\n\twith tabs"),
        ("答案 √2 é 🙂", "答案 √2 é 🙂"),
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("\x9b31m", "⟨U+009B⟩31m"),
        ("over\rwrite\x08\x7f\x00", "over␍write␈␡␀"),
        ("\u202egnp.exe", "⟨U+202E⟩gnp.exe"),
        ("a\u2066b\u200fc\u200bd\ufeff", "a⟨U+2066⟩b⟨U+200F⟩c⟨U+200B⟩d⟨U+FEFF⟩"),
        ("\ud800 alone \udc80", "⟨U+D800⟩ alone ⟨U+DC80⟩"),
        ("\u2028line\u2029", "⟨U+2028⟩line⟨U+2029⟩"),
        (None, "None"),
    ],
)
def test_what_cannot_be_seen_gets_a_visible_mark(text, expected):
    assert visible(text) == expected
    assert one_line(text) == expected.replace("\n", "␊").replace("\t", "␉")


def test_no_character_of_unicode_stays_invisible():
    kept = set(visible("".join(map(chr, range(0x110000)))))
    of = {char: unicodedata.category(char) for char in kept}
    assert set(of.values()) & {"Cf", "Cs", "Co", "Cn", "Zl", "Zp"} == set()
    assert {char for char, category in of.items() if category == "Cc"} == {"\t", "\n"}
