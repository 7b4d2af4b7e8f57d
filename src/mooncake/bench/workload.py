"""What is asked of the engines, and when: drawn from one seed, so that every step and every run gets the same."""

import random
import re
from dataclasses import dataclass

_LENGTHS = re.compile(r"(\d+)(?::(\d+))?")
DEFAULT_VOCABULARY = 32_000  # token ids that nearly every model has


@dataclass(frozen=True)
class Lengths:
    """Tokens, drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """ "512" or "256:1024".  Raises ValueError with the end of a sentence."""
        match = _LENGTHS.fullmatch(text)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 0 < low <= high:
            raise ValueError(f'expected tokens as "512" or a range as "256:1024", but found "{text}"')
        return cls(low, high)

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True)
class Workload:
    """`rate` is arrivals a second on average, infinite for all at once."""

    requests: int
    rate: float
    input_len: Lengths
    output_len: Lengths
    shared_prefix: int  # tokens that all prompts begin with
    vocabulary: int
    seed: int

    def draw(self) -> "list[Planned]":
        """The requests in order of arrival: gaps of a Poisson process, prompts of random tokens."""
        source = random.Random(self.seed)
        common = self._tokens(source, self.shared_prefix)
        planned, at = [], 0.0
        for _ in range(self.requests):
            length = self.input_len.draw(source)
            prompt = (common + self._tokens(source, max(length - len(common), 0)))[:length]
            planned.append(Planned(at, prompt, self.output_len.draw(source)))
            if self.rate < float("inf"):
                at += source.expovariate(self.rate)
        return planned

    def warm_up(self, count: int) -> "list[Planned]":
        """Requests of the same lengths with other prompts, one after the other."""
        source = random.Random(f"warm-up {self.seed}")
        lengths = [(self.input_len.draw(source), self.output_len.draw(source)) for _ in range(count)]
        return [Planned(0.0, self._tokens(source, asked), min(given, 8)) for asked, given in lengths]

    def _tokens(self, source: random.Random, count: int) -> list[int]:
        """Ordinary words: the first ids of a vocabulary are special tokens and single bytes."""
        lowest = min(1000, self.vocabulary // 4)
        return [source.randrange(lowest, self.vocabulary) for _ in range(count)]


@dataclass(frozen=True)
class Planned:
    """One request: seconds after the start, the prompt's token ids, how many tokens are wanted."""

    at: float
    prompt: list[int]
    output_len: int
