"""A plan as a picture: KV against context, beside the weights and the memory."""

from pathlib import Path

from kvire.plan.plan import Plan
from kvire.report import charts

USERS = (1, 10, 100)
GIB = 1 << 30


def draw_plan(plan: Plan, path: Path) -> None:
    """Write `path`. Raises ConfigError for another ending, or where the file cannot be written."""
    labels = charts.Labels(
        f"KV of {plan.title}, {plan.storage.dtype}",
        "memory that the KV takes against the length of the context, by number of users",
        "context, tokens",
        "GiB",
    )
    levels = [("weights", plan.weights_bytes / GIB)]
    if plan.memory is not None:
        levels.append(("memory", plan.memory.total_bytes / GIB))
    figure = charts.draw_lines(_curves(plan), labels, log_x=True, log_y=True, levels=levels)
    charts.save(figure, labels, path)


def _curves(plan: Plan) -> list[charts.Series]:
    end = plan.shape.context_tokens or 131072
    contexts = [*(1 << power for power in range(8, end.bit_length()) if 1 << power < end), end]
    return [
        charts.Series(
            f"{count} user{'s' if count > 1 else ''}",
            y=[count * plan.shape.sequence_bytes(tokens, plan.storage) / GIB for tokens in contexts],
            x=contexts,
        )
        for count in sorted({*USERS, plan.use.users})
    ]
