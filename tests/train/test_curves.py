"""The picture of a run: what is drawn, and that its absence harms nothing."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.train import curves
from dflash_jax.train.curves import can_draw, draw_curves, read_metrics


def metrics_file(folder: Path) -> Path:
    rows: list[dict] = []
    for step in (10, 20, 30):
        one = {"loss": 5 - step / 10, "accuracy": [0.4, 0.2, 0.1], "accept_length": 1 + step / 30}
        rows.append({"step": step, **one, "gradient_norm": 1.0})
    rows.append({"step": 30, "held_out": {**rows[-1], "loss": 2.5, "accept_length": math.nan}})
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_series_by_name(tmp_path):
    train, held = read_metrics(metrics_file(tmp_path))
    assert train["step"].tolist() == [10, 20, 30] and train["loss"].tolist() == [4, 3, 2]
    assert train["accuracy"].shape == (3, 3) and held["step"].tolist() == [30] and held["loss"].tolist() == [2.5]
    assert np.isnan(held["accept_length"]).all()


def test_a_picture_of_both(tmp_path, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    made = []
    monkeypatch.setattr(figures, "Figure", lambda real=figures.Figure, **how: made.append(real(**how)) or made[-1])
    assert draw_curves(metrics_file(tmp_path), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]
    loss, accuracy, accept = made[0].axes
    assert [line.get_label() for line in loss.lines] == ["train", "held out"]
    assert list(loss.lines[0].get_ydata()) == [4, 3, 2] and list(loss.lines[1].get_ydata()) == [2.5]
    assert len(accuracy.lines) == 6 and [t.get_text() for t in accuracy.get_legend().get_texts()] == ["1", "2", "3"]
    assert [line.get_linestyle() for line in accuracy.lines] == ["-"] * 3 + ["--"] * 3
    assert accept.get_title() == "simulated accept length"


def test_without_metrics_there_is_nothing_to_draw(tmp_path):
    assert not draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")


def test_without_matplotlib_it_is_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    can_draw.cache_clear()
    try:
        with caplog.at_level("WARNING"):
            for _ in range(3):
                assert not draw_curves(metrics_file(tmp_path), tmp_path / "curves.png")
        assert [r.getMessage() for r in caplog.records] == [
            "no curves are drawn: matplotlib is not installed (pip install 'dflash-jax[train]')"
        ]
    finally:
        can_draw.cache_clear()
    assert curves.can_draw.cache_info().currsize == 0
