"""The figures of a run with prefill and decode instances: tables for people, JSON for programs."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Part:
    """What one instance did for one answer."""

    question: str  # "first" or "again"
    instance: str
    computed: int  # prompt tokens
    from_pool: int  # prompt tokens
    from_prefill: int  # prompt tokens, straight from the prefill instance
    made: int  # tokens of the answer; prefill makes one, which is thrown away


@dataclass(frozen=True)
class SplitFigures:
    model: str
    prefill_instances: int
    decode_instances: int
    prompt_tokens: int
    ttft_alone_s: float  # a decode instance that computes the prompt itself
    ttft_first_s: float  # through the proxy: prefill computes it
    ttft_again_s: float  # through the proxy: prefill takes it from the pool
    same_answer: bool  # all three: the same token ids
    answer: str
    parts: tuple[Part, ...]

    @property
    def complaint(self) -> str:
        """Why the demo did not pass; empty if it did."""
        if not self.same_answer:
            return "the answers with and without prefill instances differ"
        if not self._tokens("first", "from_prefill") or not self._tokens("again", "from_prefill"):
            return "decode took nothing from prefill"
        return "" if self._tokens("again", "from_pool") else "nothing was taken from the pool"

    def _tokens(self, question: str, kind: str) -> int:
        return sum(getattr(part, kind) for part in self.parts if part.question == question)

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def show(self, console: Console) -> None:
        title = f"{self.model}: {self.prefill_instances} prefill and {self.decode_instances} decode instances"
        table = Table(title=title, title_justify="left")
        table.add_column("question")
        table.add_column("instance", style="bold")
        for heading in ("computed", "from the pool", "from prefill", "tokens made"):
            table.add_column(heading, justify="right")
        shown = ""
        for part in self.parts:
            question = "" if part.question == shown else part.question
            counts = (part.computed, part.from_pool, part.from_prefill, part.made)
            table.add_row(question, part.instance, *(str(count or "-") for count in counts))
            shown = part.question
        console.print(table)

        times = Table(show_header=False)
        times.add_column(style="bold")
        times.add_column(justify="right")
        times.add_row("prompt", f"{self.prompt_tokens} tokens")
        times.add_row("time to first token, one decode instance by itself", f"{self.ttft_alone_s:.2f} s")
        times.add_row("first: prefill computes, decode takes it over", f"{self.ttft_first_s:.2f} s")
        times.add_row("again: prefill loads from the pool, decode takes it over", f"{self.ttft_again_s:.2f} s")
        times.add_row("the same answer each time", "[green]yes[/]" if self.same_answer else "[red]no[/]")
        console.print(times)
        console.print(f"Answer: {self.answer.strip()}", markup=False, highlight=False)
