"""Steps of a benchmark, such as 2P1D: two prefill instances and one that decodes."""

import re
from dataclasses import dataclass

DEFAULT_STEPS = "1P1D,2P1D,2P2D,2P4D,4P4D"

_STEP = re.compile(r"(\d+)P(\d+)D", re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> "Step":
        """Raises ValueError with the end of a sentence."""
        match = _STEP.fullmatch(text.strip())
        if not match or not int(match[2]):
            raise ValueError(f'expected steps such as 1P1D,2P4D with at least one decode instance, but found "{text}"')
        return cls(int(match[1]), int(match[2]))

    @property
    def instances(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"


def parse_steps(text: str) -> list[Step]:
    """Each step once, in the order given.  Raises ValueError with the end of a sentence."""
    return list(dict.fromkeys(Step.parse(part) for part in text.split(",")))
