"""A plan as a picture: KV against context, beside the weights and the memory."""

from pathlib import Path
from typing import Any

from kvire.core.errors import ConfigError
from kvire.plan.plan import Plan

FORMATS = (".svg", ".png")
USERS = (1, 10, 100)
GIB = 1 << 30


def draw(plan: Plan, path: Path) -> None:
    """Write `path`. Raises ConfigError for another ending, without matplotlib, or where the file cannot be written."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"a picture ends in {' or '.join(FORMATS)}, not {path.suffix!r}")
    try:
        import matplotlib as mpl  # noqa: PLC0415  (slow, and seldom needed)
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    _lines(plan, axes)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="context, tokens",
        ylabel="GiB",
        title=f"KV of {plan.title}, {plan.storage.dtype}",
    )
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(loc="upper left")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    finally:
        plt.close(figure)


def _lines(plan: Plan, axes: Any) -> None:
    end = plan.shape.context_tokens or 131072
    contexts = [1 << power for power in range(8, end.bit_length())] + [end]
    for count in sorted({*USERS, plan.use.users}):
        sizes = [count * plan.shape.sequence_bytes(tokens, plan.storage) / GIB for tokens in contexts]
        axes.plot(contexts, sizes, label=f"{count} user{'s' if count > 1 else ''}")
    axes.axhline(plan.weights_bytes / GIB, color="black", linestyle="--", label="weights")
    if plan.memory is not None:
        axes.axhline(plan.memory.total_bytes / GIB, color="red", linestyle=":", label="memory")
