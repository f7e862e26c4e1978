"""The lines and the picture a run leaves. Pictures are checked by their size and by what the axes were given."""

import json
import struct

import pytest

from common.errors import UserError
from report.curves import centered_mean, write_curves
from report.main import final_summary, main
from report.run_log import MetricsLog


def evaluation(step: int, answer: int, n: int = 512, problems: int | None = None) -> dict:
    marks = {"answer": answer, "format": n}
    means = {"answer": answer / n, "format": 1.0}
    sizes = {"n": n, "problems": n if problems is None else problems}
    return {"step": step, "eval_id": f"v{step}", **sizes, "full_marks": marks, "mean": means, "mean_length": 20.0}


def write_run(folder, steps: int, evaluations: tuple[dict, ...] = (), **extra: float):
    log = MetricsLog(folder)
    for step in range(1, steps + 1):
        values = {"rewards/answer/mean": 0.1, "rewards/answer/accuracy": step / 100, "reward": step, **extra}
        log.log(step, values | {"completions/mean_length": 20.0, "frac_reward_zero_std": 0.5})
    for record in evaluations:
        log.log_eval(record)
    log.close()
    return folder


@pytest.fixture
def unarranged(monkeypatch):
    """Plots where they fall: to measure every label costs half of the drawing, and one test does it."""
    monkeypatch.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", lambda *_: None)


def size_of_png(path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR"
    return struct.unpack(">II", data[16:24])


def test_centered_mean_averages_neighbours_without_lag_and_fewer_of_them_at_the_ends():
    assert centered_mean([1, 2, 3, 4, 9], 3) == pytest.approx([1.5, 2, 3, 16 / 3, 6.5])


@pytest.mark.parametrize(
    ("evaluations", "lines"),
    [
        # 210/512 and 370/512 by hand: p = 0.41016, (p + 0.003752) / 1.007503 ± 1.96·√(p·q/512 + 0.00000366) / 1.007503
        (
            (evaluation(0, 210), evaluation(20, 300), evaluation(40, 370)),
            [
                "held-out answer: 41.0 % → 72.3 %  (n = 512; 95 % intervals [36.8, 45.3] → [68.2, 76.0])",
                "held-out format: 100.0 % → 100.0 %  (n = 512; 95 % intervals [99.3, 100.0] → [99.3, 100.0])",
            ],
        ),
        # repeated after a resume: once, the later one, and in order of its version
        ((evaluation(40, 1), evaluation(0, 210), evaluation(40, 370)), ["held-out answer: 41.0 % → 72.3 %"]),
        ((evaluation(0, 210),), ["held-out answer: 41.0 %  (n = 512; 95 % interval [36.8, 45.3])"]),
        ((evaluation(0, 1024, 2048, 512),), ["(n = 2048 completions of 512 problems; 95 % interval [45.7, 54.3])"]),
        ((evaluation(0, 210) | {"full_marks": {"\x1b[2Janswer\n": 210}},), ["held-out ␛[2Janswer␊: 41.0 %"]),
        ((), ["no held-out evaluation was made; set data.eval to measure one"]),
        ((evaluation(0, 0) | {"n": 0, "problems": 0},), ["no held-out evaluation was made"]),
    ],
)
def test_the_summary_compares_the_first_and_the_last_evaluation_with_intervals(tmp_path, evaluations, lines):
    found = final_summary(write_run(tmp_path, 1, evaluations)).splitlines()
    assert [line in text for line, text in zip(lines, found, strict=False)] == [True] * len(lines), found


def test_the_summary_tells_how_long_it_took_and_who_waited(tmp_path):
    pace = {"timing/all_s": 10.0, "wait/trainer_s": 5.0, "wait/sampler_s": 4.0, "tokens_per_second": 4762.0}
    write_run(tmp_path, 8, **pace)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 1,', '"step": 1, "timing/first_step_s": 41.2,', 1))
    assert final_summary(tmp_path).splitlines()[-1] == (
        "8 steps in 1:20, the first 41 s after the start; 4,762 tok/s; the trainer waited 50%, the sampler waited 40%"
    )


def test_curves_show_training_and_held_out_accuracy_with_intervals(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("report.curves._draw_head", lambda figure, *_: figures.append(figure))
    values = {"kl": 0.01, "rewards/style/mean": 0.25}
    path = write_curves(write_run(tmp_path, 30, (evaluation(0, 210), evaluation(30, 370)), **values))
    assert path == tmp_path / "curves.png" and size_of_png(path)[0] > 1200
    plots = figures[0].axes
    accuracies = ["answer accuracy", "style reward", "format accuracy"]
    others = ["reward", "KL to the reference", "response length", "dead groups"]
    assert [plot.get_title(loc="left") for plot in plots] == accuracies + others
    dots, smooth = plots[0].lines[:2]
    assert list(dots.get_xdata()) == list(range(1, 31))
    assert dots.get_ydata() == pytest.approx([step / 100 for step in range(1, 31)])
    assert smooth.get_ydata()[10] == pytest.approx(0.11)  # mean of 3 steps of a straight line: the line itself
    point, _, (bar,) = plots[0].containers[0]
    assert point.get_xydata().tolist() == [[0, 210 / 512]]
    assert bar.get_segments()[0][:, 1] == pytest.approx([0.36838, 0.45321], abs=1e-4)


def test_curves_of_one_step_of_evaluations_alone_and_of_null_values_are_drawn(tmp_path, unarranged):
    for name, steps, evaluations, extra in (  # the last one has more functions than there are colours
        ("one", 1, (), {}),
        ("before", 0, (evaluation(0, 512),), {}),
        ("null", 2, (evaluation(0, 0),), {"kl": float("nan")}),
        ("$x_{$ \x1b[2J", 2, (), {"rewards/$\\frac{$/mean": 1.0, **{f"rewards/f{i}/mean": 1.0 for i in range(5)}}),
    ):
        width, height = size_of_png(write_curves(write_run(tmp_path / name, steps, evaluations, **extra)))
        assert width > 1200 and height > 500
        assert not list((tmp_path / name).glob(".tmp-*"))


def test_the_command_draws_prints_and_refuses_a_wrong_folder(tmp_path, capsys, unarranged):
    main([str(write_run(tmp_path / "run", 2, (evaluation(0, 210), evaluation(2, 370))))])
    output = capsys.readouterr().out
    assert output.startswith("held-out answer: 41.0 % → 72.3 %")
    assert output.splitlines()[-1] == f"curves: {tmp_path / 'run' / 'curves.png'}"
    with pytest.raises(UserError, match=r"no metrics\.jsonl and no eval\.jsonl"):
        main([str(tmp_path / "nothing")])


def test_each_held_out_source_has_its_line_and_its_plot(tmp_path, monkeypatch):
    figures, config = [], {"rewards": {"reward_funcs": ["answer", "a.py:mine"], "full_marks": {}}}
    monkeypatch.setattr("report.curves._draw_head", lambda figure, *_: figures.append(figure))
    marks, means = {"answer": 300, "mine": 0, "games/answer": 44, "games/mine": 0}, {"answer": 0.6, "games/mine": 0.2}
    one = evaluation(0, 210) | {"full_marks": marks, "mean": means, "scored": {"games/answer": [64, 64]}}
    (write_run(tmp_path, 2, (one,)) / "config.json").write_text(json.dumps(config))
    write_curves(tmp_path)
    titles = [plot.get_title(loc="left") for plot in figures[0].axes]
    assert titles[:3] == ["answer accuracy", "games/answer accuracy", "reward"]
    said = final_summary(tmp_path)
    assert "held-out games/answer: 68.8 %  (n = 64;" in said and "held-out games/mine: mean 0.20" in said
    assert "rewards.full_marks={mine: …}" in said


@pytest.mark.parametrize(
    ("right", "line"),
    [
        ((0, 0), "held-out mine: mean 0.10 → 0.30  (n = 512; for an accuracy set rewards.full_marks={mine: …})"),
        ((0, 512), "held-out mine: 0.0 % → 100.0 %  (n = 512; 95 % intervals [0.0, 0.7] → [99.3, 100.0])"),
    ],
)
def test_a_reward_of_ones_own_is_compared_by_its_mean_if_nothing_ever_earned_its_full_marks(tmp_path, right, line):
    records = [
        {"step": step, "n": 512, "problems": 512, "full_marks": {"mine": marks}, "mean": {"mine": mean}}
        for step, marks, mean in zip((0, 20), right, (0.1, 0.3), strict=True)
    ]
    folder = write_run(tmp_path, 2, tuple(records), **{"rewards/mine/mean": 0.2, "rewards/mine/accuracy": 0.0})
    (folder / "config.json").write_text(json.dumps({"rewards": {"reward_funcs": ["a.py:mine"], "full_marks": {}}}))
    assert line in final_summary(folder).splitlines()
