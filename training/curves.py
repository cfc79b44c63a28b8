"""Draws a loss curve: python -m training.curves runs/flow/curve.csv curve.svg"""

import csv
import sys
from collections import defaultdict

import matplotlib.pyplot as plt


def main() -> None:
    source, target = sys.argv[1:]
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with open(source, newline="", encoding="utf-8") as file:
        for _, seconds, name, loss in csv.reader(file):
            lines[name].append((float(seconds) / 60, float(loss)))
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=name, marker="o" if name == "held out" else None, markersize=4)
    axes.set(xlabel="minutes on one H200", ylabel="flow-matching loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(target)


if __name__ == "__main__":
    main()
