"""``dma-hf env``: versions and devices, for bug reports."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from dma_eval import console


def env() -> int:
    """Show versions and devices. Include the output in a bug report.

    Examples:
    dma-hf env
    """
    with console.working("Looking at PyTorch and the devices"):
        from dma_eval.environment import collect

        facts = asdict(collect())
    rows = {"python": facts.pop("python"), **facts.pop("packages"), **facts}
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        table.add_row(name, "none" if shown in (None, "") else str(shown))
    console.out.print(table, highlight=False)
    return 0
