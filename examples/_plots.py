"""The two pictures that `train_forces.py` writes."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
import numpy as np
from _data import Frames
from matplotlib.axes import Axes


def plot_parity(path: Path, frames: Frames, energies: np.ndarray, forces: np.ndarray) -> None:
    """Predicted against GFN2 energies and force components of held-out frames."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    reference = frames.energies.mean()
    draw_parity(left, frames.energies - reference, energies - reference, "energy - mean", "eV", 12.0)
    draw_parity(right, frames.forces.ravel(), forces.ravel(), "force component", "eV/Å", 4.0)
    figure.suptitle("Held-out frames: a separate trajectory at 500 K")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_parity(axes: Axes, reference: np.ndarray, predicted: np.ndarray, what: str, unit: str, size: float) -> None:
    low, high = min(reference.min(), predicted.min()), max(reference.max(), predicted.max())
    margin = 0.04 * (high - low)
    limits = (low - margin, high + margin)
    axes.plot(limits, limits, color="0.6", linewidth=1, zorder=1)
    axes.scatter(reference, predicted, s=size, alpha=0.5, linewidths=0, color="tab:blue", zorder=2)
    rmse = np.sqrt(np.mean((predicted - reference) ** 2))
    axes.text(0.05, 0.92, f"RMSE {rmse:.3f} {unit}", transform=axes.transAxes)
    axes.set(xlim=limits, ylim=limits, aspect="equal")
    axes.set(xlabel=f"GFN2-xTB {what} ({unit})", ylabel=f"model {what} ({unit})")


def plot_learning_curve(
    path: Path, losses: np.ndarray, steps: np.ndarray, force_errors: np.ndarray, mean_predictor: float
) -> None:
    """Training loss per step, and the held-out force error during training beside the mean predictor's."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    window = max(1, len(losses) // 100)
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    left.plot(np.arange(1, len(losses) + 1), losses, color="tab:blue", alpha=0.25, linewidth=0.7)
    left.plot(np.arange(window, len(losses) + 1), smooth, color="tab:blue", label=f"mean of {window} steps")
    left.set(xlabel="step", ylabel="training loss", yscale="log")
    left.legend(frameon=False)
    right.plot(steps, force_errors, marker="o", markersize=3, color="tab:orange", label="model")
    right.axhline(mean_predictor, color="0.4", linestyle="--", label="mean predictor")
    right.axhline(mean_predictor / 4, color="0.7", linestyle=":", label="a quarter of it")
    right.set(xlabel="step", ylabel="held-out force MAE (eV/Å)", yscale="log")
    right.set_yticks([tick for tick in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if tick > min(force_errors) / 2])
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter("")
    right.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.9))
    figure.savefig(path, dpi=150)
    plt.close(figure)
