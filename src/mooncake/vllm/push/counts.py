"""What the halves say happened; `stats.Tally` collects it for vLLM."""

from typing import Protocol


class Counts(Protocol):
    """Thread-safe."""

    def sent(self, seconds: float, size: int, pieces: int) -> None:
        """A prompt was pushed to one worker of decode: the sum of its copies' times, bytes, contiguous pieces."""

    def failed_to_send(self) -> None: ...

    def failed_to_receive(self) -> None: ...

    def expired(self) -> None: ...
