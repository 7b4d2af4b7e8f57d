"""The demo's figures, as a table and as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

_MIB = 1 << 20


@dataclass(frozen=True)
class Figures:
    model: str
    ttft_cold_s: float  # instance A, which computes the whole prompt
    ttft_warm_s: float  # instance B, which takes it from the pool
    ratio: float  # warm / cold
    ttft_without_pool_s: float  # an instance that has no connector
    prompt_tokens: int
    block_size: int
    pool_tokens: int  # of B's prompt
    pool_keys: int
    pool_used_bytes: int
    pool_capacity_bytes: int
    same_answer: bool  # A's, B's and the one without a pool: the same token ids
    answer: str

    @property
    def complaint(self) -> str:
        """Why the demo did not pass; empty if it did."""
        if not self.same_answer:
            return "the answers with and without a pool differ"
        return "" if self.pool_tokens > 0 else "instance B took nothing from the pool"

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def show(self, console: Console) -> None:
        table = Table(title=f"{self.model}: one pool, two vLLM instances", title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_row("time to first token, cold on A", f"{self.ttft_cold_s:.2f} s")
        table.add_row("time to first token, warm on B", f"{self.ttft_warm_s:.2f} s")
        table.add_row("warm / cold", f"{self.ratio:.3f}")
        table.add_row("without a pool", f"{self.ttft_without_pool_s:.2f} s")
        table.add_row("prompt", f"{self.prompt_tokens} tokens")
        table.add_row("taken from the pool by B", f"{self.pool_tokens} tokens")
        used, capacity = self.pool_used_bytes / _MIB, self.pool_capacity_bytes / _MIB
        table.add_row("pool use", f"{used:.0f} of {capacity:.0f} MiB, {self.pool_keys} keys")
        table.add_row("same answer as without a pool", "[green]yes[/]" if self.same_answer else "[red]no[/]")
        console.print(table)
        console.print(f"Answer: {self.answer.strip()}", markup=False, highlight=False)
