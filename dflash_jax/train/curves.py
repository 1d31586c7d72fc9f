"""A picture of how a training run goes, from its metrics.jsonl."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger("dflash_jax")
Series = dict[str, np.ndarray]
"""By name, values [steps] or [steps, B−1]; `step` among them."""
PANELS = {
    "loss": "loss", "accuracy": "accuracy by block position", "accept_length": "simulated accept length",
}  # fmt: skip
_INCHES, _DOTS_PER_INCH = (15, 4.5), 100


def read_metrics(path: Path) -> tuple[Series, Series]:
    """(of training, held out), of the lines that a run has written so far."""
    rows: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        held_out = row.get("held_out")
        rows[held_out is not None].append({"step": row["step"], **(row if held_out is None else held_out)})
    found = [{name: np.array([row[name] for row in part]) for name in part[0]} if part else {} for part in rows]
    return found[0], found[1]


@functools.cache
def can_draw() -> bool:
    """Whether there is a matplotlib; what to do if not is said once."""
    found = importlib.util.find_spec("matplotlib") is not None
    if not found:
        log.warning("no curves are drawn: matplotlib is not installed (pip install 'dflash-jax[train]')")
    return found


def draw_curves(metrics: Path, png: Path) -> bool:
    """Loss, accuracy by block position and simulated accept length by step; False without matplotlib or metrics."""
    if not metrics.exists() or not can_draw():
        return False
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots(1, 3)
    series = read_metrics(metrics)
    for ax, (name, title) in zip(axes, PANELS.items(), strict=True):
        _panel(ax, series, name)
        ax.set(title=title, xlabel="step")
        ax.grid(alpha=0.3)
        if name == "accuracy":
            ax.legend(fontsize="small", title="position", loc="upper left", bbox_to_anchor=(1, 1))
        else:
            ax.legend(fontsize="small")
    aside = png.with_name(f".{png.name}")
    figure.savefig(aside, dpi=_DOTS_PER_INCH, format="png")
    aside.replace(png)
    return True


def _panel(ax: Any, series: tuple[Series, Series], name: str) -> None:
    """Training as lines, held out as dashes with points; of several positions each has its colour."""
    for part, kind in zip(series, ("train", "held out"), strict=True):
        if name not in part:
            continue
        columns = part[name].reshape(len(part["step"]), -1).T
        style = "-" if kind == "train" else "o--"
        for k, values in enumerate(columns):
            label = kind if len(columns) == 1 else f"{k + 1}" if kind == "train" else None
            ax.plot(part["step"], values, style, color=f"C{k % 10}", markersize=3, linewidth=1, label=label)
