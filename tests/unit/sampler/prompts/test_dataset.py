"""Every notation of data.train, the messages for what can go wrong with it, and the order of the run's groups."""

import bz2
import gzip
import json
import math
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import yaml

from common.config import Data
from common.config.data import entries
from common.errors import UserError
from common.types import Problem
from sampler.prompts.columns import look_up
from sampler.prompts.dataset import load_data, load_rows, permutation, problem_index, sampling_seed
from sampler.prompts.pictures import read_file, sources
from sampler.prompts.sources import read_rows, require_source

ODD = [{"question": f"{i}+1?", "answer": answer} for i, answer in enumerate(["1", "007", "None", "NA", "null", "1e5"])]
ROWS = [{"question": f"{i}+1?", "answer": f"#### {i + 1}", "level": i % 3} for i in range(10)]


@pytest.fixture(scope="module", autouse=True)
def private_cache(tmp_path_factory):
    """`datasets` converts local files into a cache; keep it out of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        yield


def write_jsonl(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path, rows=ROWS):
    from pyarrow import Table, parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(Table.from_pylist(rows), path)
    return str(path)


def load_problems(spec, **keys):
    return load_rows(entries(spec), Data(train=spec, **keys))[0]


def message(spec, **keys):
    with pytest.raises(UserError) as error:
        load_problems(spec, **keys)
    return str(error.value)


BAD = {
    "bad.jsonl": "{not json\n",
    "x.txt": "question,answer\n1,2\n",
    "torn.jsonl": '{"a": 1}\n{"a": \n',
    "deep.jsonl": "[" * 5000 + "]" * 5000 + "\n",
    "text.jsonl": '{"a": 1}\n"text"\n',
    "numbers.jsonl": "[1, 2]",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """One data set in every form that is read: files, folders, saved by `datasets`, and a clone of a hub repository."""
    import pyarrow
    from datasets import Dataset, DatasetDict

    root = tmp_path_factory.mktemp("data")
    (root / "x.json").write_text(json.dumps(ROWS))
    write_parquet(root / "x.parquet")
    write_jsonl(root / "me@host" / "x.jsonl")
    text = Path(write_jsonl(root / "x.jsonl")).read_bytes()
    (root / "x.jsonl.gz").write_bytes(gzip.compress(text))
    (root / "x.json.bz2").write_bytes(bz2.compress((root / "x.json").read_bytes()))
    (root / "x.jsonl.zst").write_bytes(pyarrow.compress(text, "zstd", asbytes=True))
    (root / "tables").mkdir()
    for separator, name in (",", "x.csv"), ("\t", "x.tsv"), (",", "tables/train.csv"):
        lines = [ODD[0], *(row.values() for row in ODD)]
        (root / name).write_text("".join(separator.join(map(str, line)) + "\n" for line in lines))
    (root / "x.csv.gz").write_bytes(gzip.compress((root / "x.csv").read_bytes()))
    write_jsonl(root / "folder" / "train.jsonl")
    write_jsonl(root / "folder" / "test.jsonl", ROWS[:2])
    write_jsonl(root / "mixed" / "train.jsonl")
    write_parquet(root / "mixed" / "test.parquet")
    rows = Dataset.from_list(ROWS)
    rows.save_to_disk(str(root / "saved"))
    DatasetDict({"train": rows, "test": rows.select(range(2))}).save_to_disk(str(root / "saved_splits"))
    DatasetDict({"easy": rows, "hard": rows}).save_to_disk(str(root / "no_train"))
    subsets = []
    for subset, n in (("main", 7), ("socratic", 3)):  # as `git clone` of openai/gsm8k gives
        write_parquet(root / "clone" / subset / "train.parquet", ROWS[:n])
        write_parquet(root / "clone" / subset / "test.parquet", ROWS[:2])
        files = [{"split": split, "path": f"{subset}/{split}.parquet"} for split in ("train", "test")]
        subsets.append({"config_name": subset, "data_files": files})
    (root / "clone" / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': subsets})}---\n")
    write_jsonl(root / "dates" / "train.jsonl", [{"question": "next day?", "answer": "2021-05-03"}] * 3)
    for name, text in BAD.items():
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("x.jsonl", range(10)),
        ("x.json", range(10)),
        ("x.parquet", range(10)),
        ("x.jsonl@train", range(10)),
        ("x.jsonl@train[:3]", [0, 1, 2]),
        ("x.jsonl@train[-20%:]", [8, 9]),
        ("x.jsonl@train[:1]+train[-1:]", [0, 9]),
        ("x.jsonl.gz", range(10)),
        ("x.json.bz2@train[:2]", range(2)),
        ("x.jsonl.zst", range(10)),
        ("x.jsonl[:3]", range(3)),
        ("x.parquet[-20%:]", [8, 9]),
        ("me@host/x.jsonl", range(10)),
        ("me@host/x.jsonl@train[:4]", range(4)),
        ("folder", range(10)),
        ("folder@test", [0, 1]),
        ("saved", range(10)),
        ("saved@train[:3]", [0, 1, 2]),
        ("saved_splits@test", [0, 1]),
        ("clone:main@train", range(7)),
        ("clone:socratic@train[:2]", [0, 1]),
    ],
)
def test_a_notation_reads_these_rows_each_with_its_place_and_all_its_columns(data, spec, wanted):
    assert require_source(f"{data}/{spec}"), "it is local"
    assert load_problems(f"{data}/{spec}") == [Problem(place, ROWS[i]) for place, i in enumerate(wanted)]


@pytest.mark.parametrize("spec", ["x.csv", "x.csv.gz[:4]", "x.tsv", "tables", "tables[:4]"])
def test_cells_of_a_table_are_text_as_it_stands(data, spec):
    wanted = [{name: str(value) for name, value in row.items()} for row in ODD[: 4 if "[" in spec else None]]
    assert [problem.columns for problem in load_problems(f"{data}/{spec}".replace("[", "@train["))] == wanted


@pytest.mark.parametrize("key", ["extra_info.answer", "answer"])
@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
def test_a_column_that_is_null_in_the_first_row_is_found(tmp_path, write, key):
    rows = [{"question": "1", "extra_info": None}, {"question": "2", "extra_info": {"answer": "4"}}]
    path = write(tmp_path / ("x.jsonl" if write is write_jsonl else "x.parquet"), rows)
    rename = {"extra_info.answer": "answer"} if key == "answer" else {}
    found = load_problems(path, answer_key=key, rename=rename)
    assert [problem.columns["answer"] for problem in found] == [None, "4"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("mixed", ".jsonl and .parquet"),
        ("clone@train", "DATA/clone has subsets main, socratic. Write DATA/clone:main@train"),
        ("clone:socratix@train", "no subset 'socratix'; its subsets are main, socratic. Write DATA/clone:socratic@"),
        ("clone:main@validation", 'split "validation" is not in DATA/clone:main; it has train (7), test (2)'),
        ("no_train", "has splits easy (10), hard (10); write for example DATA/no_train@easy"),
        ("x.jsonl@train[:x]", "train[:512]"),
        ("x.jsonl@train[:0]", "has no rows"),
        ("bad.jsonl", "cannot be read"),
        ("deep.jsonl", "deep.jsonl, line 1, cannot be read: maximum recursion depth"),
        ("x.txt", ".jsonl, .json, .parquet, .csv, .tsv, nor one of them behind which .gz, .zst, .bz2 stands"),
        ("torn.jsonl", "torn.jsonl, line 2, cannot be read: Expecting value"),
        ("text.jsonl", "text.jsonl: row 2 is 'text', not an object"),
        ("numbers.jsonl", "numbers.jsonl: row 1 is 1, not an object"),
        ("dates", "column answer of DATA/dates holds text that is read as dates"),
        ("x.jsnol@train[:3]", "no file or folder DATA/x.jsnol. Did you mean DATA/x.json"),
    ],
)
def test_a_notation_that_finds_nothing_says_what_to_write(data, spec, said):
    assert said.replace("DATA", str(data)) in message(f"{data}/{spec}")


@pytest.mark.parametrize("spec", ["./nothing", "nothing.parquet", "~/no/such", "a/b/c"])
def test_what_looks_like_a_path_is_not_asked_of_the_hub(spec):
    assert "no file or folder" in message(spec)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"prompt_key": "problem"}, "Set data.prompt_key: question"),
        ({"prompt_key": "questions"}, "Set data.prompt_key: question"),
        ({"prompt_key": "xyz"}, "Set data.prompt_key: <one of them>"),
        ({"answer_key": "solution"}, "Set data.answer_key: answer, or null when no reward needs one"),
        ({"rename": {"questoin": "ask"}}, "Write data.rename: {question: <its new name>}"),
        ({"rename": {"level": "answer"}}, "has a column 'answer' already; rename that too, or use another name"),
    ],
)
def test_a_missing_or_hidden_column_is_named_with_what_to_write(data, keys, said):
    found = message(f"{data}/x.jsonl", **keys)
    assert found.endswith(said) and ("already" in found or "columns are question, answer, level" in found)


SOLVED = {"problem": "1+1?", "solution": "so 2", "answer": "2"}


@pytest.mark.parametrize(
    ("row", "keys", "changed"),
    [
        ({"problem": "1+1?", "solution": "2"}, {"prompt_key": "problem", "answer_key": "solution"}, {"answer": "2"}),
        (SOLVED, {"rename": {"problem": "question", "solution": "working"}}, {"question": "1+1?", "working": "so 2"}),
        (
            SOLVED,
            {"prompt_key": "problem", "rename": {"answer": "solution", "solution": "answer"}},
            {"solution": "2", "answer": "so 2"},
        ),
        # the old name of a renamed answer still means it
        ({"question": "1+1?", "answer": "2"}, {"rename": {"answer": "solution"}}, {"solution": "2", "answer": "2"}),
    ],
)
def test_columns_are_renamed_first_and_the_answer_is_there_under_its_name(tmp_path, row, keys, changed):
    [problem] = load_problems(write_jsonl(tmp_path / "x.jsonl", [row]), **keys)
    kept = {name: value for name, value in row.items() if name not in keys.get("rename", {})}
    assert problem.columns == kept | changed


def test_a_dotted_key_looks_inside_a_column_unless_a_column_has_that_name():
    row = {"a": [{"b": 3}], "c.d": 1, "c": {"d": 2}}
    assert look_up(row, "a.0.b") == 3
    assert look_up(row, "c.d") == 1
    assert look_up(row, "a.1.b", "none") == look_up(row, "a.0.b.x", "none") == look_up(row, "x", "none") == "none"


def test_rows_of_verl_and_of_orz_which_are_lists_are_read_through_dotted_keys(tmp_path):
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"style": "rule", "ground_truth": "4"}}
    path = write_parquet(tmp_path / "train.parquet", [row])
    [problem] = load_problems(path, prompt_key="prompt", answer_key="reward_model.ground_truth")
    assert problem.columns == {**row, "answer": "4"}
    rename = {"reward_model.ground_truth": "ground_truth"}
    [problem] = load_problems(path, prompt_key="prompt", answer_key="ground_truth", rename=rename)
    assert problem.columns["ground_truth"] == problem.columns["answer"] == "4"
    assert "Set data.answer_key: reward_model.ground_truth, or null" in message(path, prompt_key="prompt")
    talk = [{"from": "human", "value": "2+2?"}, {"from": "assistant", "ground_truth": {"value": "4"}}]
    (tmp_path / "orz.json").write_text(json.dumps([talk], indent=1))
    renamed = {"conversation.0.value": "question"}
    [problem] = load_problems(f"{tmp_path}/orz.json", answer_key="conversation.1.ground_truth.value", rename=renamed)
    assert problem.columns == {"conversation": talk, "question": "2+2?", "answer": "4"}


def test_a_json_file_is_read_as_it_is(tmp_path):
    """`datasets` would give a datetime, 1.2345678901234568e+22 and 9007199254740992.0."""
    answers = ["2021-05-03", 12345678901234567890123, 9007199254740993, 0.5, "a\u2028b", ["2021-05-03"], {"a": None}]
    for file, text in (
        ("rows.jsonl", "\n".join(json.dumps({"q": "", "a": a}, ensure_ascii=False) for a in answers) + "\n\n"),
        ("rows.json", json.dumps([{"q": "", "a": a} for a in answers], indent=1)),
        ("bom.jsonl", "\ufeff" + "\n".join(json.dumps({"q": "", "a": a}) for a in answers)),
    ):
        (tmp_path / file).write_text(text, encoding="utf-8")
        assert [row["a"] for row in read_rows(str(tmp_path / file))] == answers
    (tmp_path / "some.jsonl").write_text('{"b": 1}\n{"a": 2, "b": 3}\n')
    rows = [list(row.items()) for row in read_rows(str(tmp_path / "some.jsonl"))]
    assert rows == [[("b", 1), ("a", None)], [("b", 3), ("a", 2)]], "the columns of all, in the order of the file"


def test_what_is_no_number_is_null_and_its_answer_is_empty(tmp_path, capsys):
    nan = float("nan")
    text = '{"question": "1", "answer": NaN, "more": {"gold": [NaN, Infinity]}}\n{"question": "2"}'
    (tmp_path / "x.jsonl").write_text(text)
    [row, _] = read_rows(str(tmp_path / "x.jsonl"))
    assert row == {"question": "1", "answer": None, "more": {"gold": [None, float("inf")]}}
    rows = [
        {"question": "1", "answer": nan, "at": None, "reward_model": {"ground_truth": nan}},
        {"question": "2", "answer": 2.0, "at": datetime(2021, 5, 3), "reward_model": {"ground_truth": 2.0}},
        {"question": None, "answer": 3.0, "at": None, "reward_model": None},
    ]  # as pandas leaves NaN and NaT behind
    write_parquet(tmp_path / "x.parquet", rows)
    first, second, last = read_rows(str(tmp_path / "x.parquet"))
    assert first["answer"] is first["at"] is last["question"] is None
    assert first["reward_model"] == {"ground_truth": None}
    path = f"{tmp_path}/x.parquet"
    for key in ("answer", "reward_model.ground_truth"):
        found = load_data("data.train", path, Data(train=path, answer_key=key))
        assert found[0].columns["answer"] == second["answer"] == 2.0
    assert "1 of 3 rows have an empty 'answer'" in capsys.readouterr().err


def test_integers_of_a_table_that_64_bits_cannot_hold_stay_integers(tmp_path):
    from decimal import Decimal

    rows = [{"a": Decimal(math.factorial(30)), "b": Decimal("1.50")}, {"a": None, "b": Decimal("2.00")}]
    path = write_parquet(tmp_path / "x.parquet", rows)
    assert read_rows(path) == [{"a": math.factorial(30), "b": Decimal("1.5")}, {"a": None, "b": 2}]


@pytest.mark.parametrize("saved", [False, True])
def test_files_in_a_table_are_not_read_with_it(tmp_path, saved):
    """Pictures beside a text model, nested ones too: neither decoded nor copied, in whatever format they were saved."""
    import datasets
    from PIL import Image

    picture = Image.new("RGB", (8, 8))
    features = {"q": datasets.Value("string"), "image": datasets.Image(), "many": datasets.List(datasets.Image())}
    features |= {"in": {"image": datasets.Image(), "x": datasets.Value("float32")}, "raw": datasets.Value("binary")}
    features |= {"a": datasets.Array2D((1, 2), "float32"), "other": datasets.Json()}
    row = {"q": "?", "image": picture, "many": [picture], "in": {"image": picture, "x": math.nan}, "raw": b"ab"}
    row |= {"a": [[1, math.nan]], "other": {"n": 1}}
    rows = datasets.Dataset.from_list([row] * 3, features=datasets.Features(features))
    path = str(tmp_path / ("rows" if saved else "x.parquet"))
    rows.with_format("numpy").save_to_disk(path) if saved else rows.to_parquet(path)
    first, _ = read_rows(f"{path}@train[1:]")
    assert list(first) == list(row)
    views = [first["image"]["bytes"], first["many"][0]["bytes"], first["in"]["image"]["bytes"], first["raw"]]
    assert all(isinstance(view, memoryview) for view in views) and views[3] == b"ab"
    assert views[0] == views[1] == views[2] and bytes(views[0][1:4]) == b"PNG"
    assert [*map(read_file, sources(first["many"], tmp_path))] == [bytes(views[0])], "as images of a row"
    assert (first["in"]["x"], first["a"], first["other"]) == (None, [[1.0, None]], {"n": 1})


@pytest.mark.parametrize(
    ("names", "rename", "remedy"),
    [
        (["trainer_state"], {}, "trainer_state. Set data.rename: {trainer_state: given_trainer_state}"),
        (["prompts", "completion_ids"], {}, "{completion_ids: given_completion_ids, prompts: given_prompts}"),
        (["self"], {}, "{self: given_self}"),
        (["x"], {"x": "completions"}, "completions. Set data.rename: {x: given_completions}"),
        (["log_metric", "x"], {"x": "y"}, "{log_metric: given_log_metric, x: y}"),
    ],
)
def test_a_column_whose_name_the_run_uses_itself_is_refused_and_the_remedy_works(tmp_path, names, rename, remedy):
    path = write_jsonl(tmp_path / "x.jsonl", [{"question": "?", "answer": "4", **dict.fromkeys(names, 1)}])
    said = message(path, rename=rename)
    assert said.endswith(remedy)
    plain = write_jsonl(tmp_path / "plain.jsonl", ROWS)
    pasted = yaml.safe_load(said.partition("data.rename: ")[2])
    specs = [path] if rename else [plain, path]  # a name that is taken need not be in all data sets
    assert load_problems(specs, rename=pasted)[-1].columns["question"] == "?"


def test_another_column_as_the_answer_is_said_to_stand_in_the_place_of_the_one_of_that_name(tmp_path, capsys):
    path = write_jsonl(tmp_path / "x.jsonl", [{"question": "?", "answer": "4", "solution": "so 4"}])
    load_problems(path, answer_key="solution")
    assert "rewards get 'solution' as their `answer`, in the place of the column 'answer'" in capsys.readouterr().err
    for keys in ({}, {"answer_key": "solution", "rename": {"answer": "short"}}):
        load_problems(path, **keys)
        assert capsys.readouterr().err == ""


def test_half_a_character_in_a_question_or_answer_is_named_by_row_and_left_out_and_elsewhere_it_stays(tmp_path, capsys):
    rows = [{"question": "?", "answer": "4", "note": "4 \ud83d"}] * 9
    rows[3] = {"question": "?", "answer": "\ud83d", "note": ""}
    rows[5] = {"question": "?", "answer": {"golds": ["a", "\udc00b"]}, "note": ""}
    rows[6] = {"question": [{"role": "user", "content": "\ud83d?"}], "answer": "4", "note": ""}
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    found = load_data("data.train", path, Data(train=path))
    assert [problem.index for problem in found] == [0, 1, 2, 4, 7, 8]
    assert found[0].columns["note"] == "4 \ud83d"
    said = capsys.readouterr().err
    for part in ("3 of 9 rows", "are left out", "row 3: half a character", "in 'answer'", "row 5:", "in 'question'"):
        assert part in said


def test_several_data_sets_are_one_after_the_other_with_the_columns_of_all(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"question": "1", "answer": "1", "level": 3}])
    b = write_jsonl(tmp_path / "b.jsonl", [{"question": "2", "answer": "2", "topic": "sums"}])
    assert [(p.index, dict(p.columns)) for p in load_problems([a, b])] == [
        (0, {"question": "1", "answer": "1", "level": 3, "topic": None}),
        (1, {"question": "2", "answer": "2", "level": None, "topic": "sums"}),
    ]
    assert f"no file or folder {tmp_path}/c.jsonl" in message([a, f"{tmp_path}/c.jsonl"])
    assert "empty list" in message([])


def test_rows_with_an_empty_answer_are_left_out_and_counted(tmp_path, capsys):
    golds = ["4", "", None, "  ", "0", 0, 0.0, False]
    path = write_jsonl(tmp_path / "x.jsonl", [{"question": "2+2?", "answer": gold} for gold in golds])
    assert [p.index for p in load_data("data.train", path, Data(train=path))] == [0, 4, 5, 6, 7]
    no_key = Data(train=path, answer_key=None)
    assert len(load_data("data.train", path, no_key)) == 8
    said = capsys.readouterr().err
    assert said == "tandem: data.train: 3 of 8 rows have an empty 'answer' and are left out: row 1, 2, 3\n"
    with pytest.raises(UserError, match=r"data\.eval: each of the 3 rows has an empty 'answer'\. Set data\.answer_key"):
        load_data("data.eval", f"{path}@train[1:4]", Data(train=path))


def test_a_hub_data_set_that_cannot_be_had_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    said = message("openai/gsm8k:main@train")
    assert said.startswith("data set 'openai/gsm8k' is not a folder and cannot be had from the hub")
    assert f"(HF_HOME={tmp_path}; HF_HUB_OFFLINE=1). Download: hf download --repo-type dataset openai/gsm8k," in said


def test_every_epoch_asks_every_problem_once_in_an_order_that_seed_and_epoch_alone_make():
    epochs = [[problem_index(epoch * 10 + i, seed=3, num_problems=10) for i in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    expected = np.random.Generator(np.random.PCG64(np.random.SeedSequence([5, 2]))).permutation(100)
    assert permutation(5, 2, 100).tolist() == expected.tolist()
    assert problem_index(2 * 100 + 7, seed=5, num_problems=100) == expected[7]
    assert permutation(-1, 0, 100).tolist() != permutation(1, 0, 100).tolist()
    assert [problem_index(g, seed=1, num_problems=4, shuffle=False) for g in range(6)] == [0, 1, 2, 3, 0, 1]
    with pytest.raises(ValueError, match="read-only"):  # it is cached
        permutation(0, 0, 5)[0] = 1


def test_sampling_seeds_are_31_bits_of_blake2b_and_differ_by_seed_and_group():
    # printf '%s' 0:7 | b2sum -l 64
    assert sampling_seed(0, 7) == 0x1815CBE0CBAF29DC & 0x7FFFFFFF
    seeds = {sampling_seed(seed, group) for seed in (-1, 0, 1) for group in range(1000)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**31 for seed in seeds)
