"""The curve: in the terminal, and as a picture."""

from __future__ import annotations

from pathlib import Path

WINDOW = 10


def smoothed(rewards: list[float]) -> list[float]:
    """The mean of each reward and up to nine before it."""
    windows = [rewards[max(0, end - WINDOW) : end] for end in range(1, len(rewards) + 1)]
    return [sum(window) / len(window) for window in windows]


def chart(rewards: list[float]) -> None:
    """Print the curve."""
    import plotext

    figure = plotext.figure
    figure.plot_size(76, 15)
    figure.title("mean reward by iteration")
    line = figure.signal(list(range(1, len(rewards) + 1)), smoothed(rewards), marker="braille")
    figure.draw(line.lines())
    figure.show(colorless=True)


def picture(rewards: list[float], file: Path) -> None:
    """Write the curve as a PNG or SVG, as the file's suffix says."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    iterations = range(1, len(rewards) + 1)
    axes.plot(iterations, rewards, linewidth=0.8, alpha=0.5, label="one iteration")
    axes.plot(iterations, smoothed(rewards), label=f"mean of {WINDOW}")
    axes.axhline(0.1, linestyle=":", color="grey", label="guessing")
    axes.set(xlabel="iteration", ylabel="mean reward", ylim=(0, 1), title="Sorting four digits, by GRPO")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
