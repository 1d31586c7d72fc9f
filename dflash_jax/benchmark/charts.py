"""Charts of a run as PNG files: speed-up by concurrency, acceptance by position, the parts of a round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dflash_jax.benchmark.split import PARTS

Json = Mapping[str, Any]
SIZE, DPI = (8.0, 4.8), 120
REST = "the whole round, as one program"


def draw_all(document: Json, folder: Path) -> list[Path]:
    """Those for which there are figures."""
    made = {"speedup.png": draw_speedup(document), "acceptance.png": draw_acceptance(document),
            "round.png": draw_round(document)}  # fmt: skip
    for name, figure in made.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=DPI)
    return [folder / name for name, figure in made.items() if figure is not None]


def new_figure(title: str, document: Json) -> tuple[Figure, Any]:
    """A figure with one pair of axes; forced acceptance is said in its title."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    forced = document.get("synthetic_acceptance")
    if forced is not None:
        title = f"{title}\nSYNTHETIC: random weights, acceptance forced to {forced:g}"
    axes.set_title(title)
    return figure, axes


def draw_speedup(document: Json) -> Figure | None:
    lines = {
        result["name"]: [(level["level"], level["speedup_over_plain"]) for level in result["levels"]
                         if level["speedup_over_plain"] is not None]
        for result in document["results"]
    }  # fmt: skip
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return None
    figure, axes = new_figure(f"Speed-up over plain decoding · {document['target']}", document)
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xlabel("requests at once (/s: a second)")
    axes.set_ylabel("output tokens a second, plain = 1")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def draw_acceptance(document: Json) -> Figure | None:
    curves = {}
    for result in document["results"]:
        for level in result["levels"][:1]:
            if level["acceptance_rate_per_pos"]:
                curves[f"{result['name']} ({level['accept_length']:.2f} a round)"] = level["acceptance_rate_per_pos"]
    if not curves:
        return None
    figure, axes = new_figure(f"Drafts accepted, by position in the block · {document['target']}", document)
    for name, rates in curves.items():
        axes.plot(range(1, len(rates) + 1), [rate * 100 for rate in rates], marker="o", label=name)
    axes.set_xlabel("position of the draft")
    axes.set_ylabel("accepted, % of those proposed there")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def draw_round(document: Json) -> Figure | None:
    splits = {result["name"]: split for result in document["results"] if (split := result.get("round_split_s"))}
    if not splits:
        return None
    figure, axes = new_figure(f"Time of a round · {document['target']}", document)
    names = list(splits)
    left = [0.0] * len(names)
    for part in PARTS:
        values = [splits[name].get(part, 0.0) * 1e3 for name in names]
        axes.barh(names, values, left=left, height=0.4, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    whole = [splits[name]["whole"] * 1e3 for name in names]
    axes.scatter(whole, range(len(names)), marker="|", s=600, color="black", label=REST)
    axes.set_xlabel("milliseconds (parts launched one by one)")
    axes.set_ylim(-0.6, len(names) - 0.2)
    axes.legend()
    return figure
