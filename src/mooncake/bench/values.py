"""Values that describe themselves: any wrong, shifted, torn or foreign byte shows, and it can be told whose it is.

A value is a run of 64-bit little-endian words, cut at the value's length: eight words that say which value it is
(`MAGIC`, number, length, seed, and the same again inverted), then a ramp that starts at a place of the value's own.
No two words of a value are alike, and those of two values differ at every place.
"""

from typing import Any

import numpy as np

MAGIC = 0x65756C61764B434D  # "MCKvalue"
_WORD = 8
_HEAD = 8  # words
_STEP = np.uint64(0x9E3779B97F4A7C15)  # odd, so the ramp visits every word once
_APART = 0xD1B54A32D192ED03
_MASK = (1 << 64) - 1


class Values:
    """All values of one `length` in bytes and one `seed`; not thread-safe, it has one value's room to compare with."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self._seed = seed & _MASK
        words = -(-length // _WORD)
        self._ramp: np.ndarray[Any, np.dtype[np.uint64]] = np.arange(max(words - _HEAD, 0), dtype=np.uint64) * _STEP
        self._made = np.empty(words, np.uint64)

    def fill(self, room: "np.ndarray[Any, np.dtype[np.uint8]]", number: int) -> None:
        """Write value `number` into `room`, which has `length` bytes."""
        self._make(number)
        room[:] = self._made.view(np.uint8)[: self.length]

    def fault(self, got: "np.ndarray[Any, np.dtype[np.uint8]]", number: int) -> str:
        """What is wrong with `got`, which should be value `number`; empty if every byte is right."""
        self._make(number)
        wanted = self._made.view(np.uint8)[: self.length]
        if np.array_equal(got, wanted):
            return ""
        wrong = np.flatnonzero(got != wanted)
        owner = self._owner(got, number)
        return f"{len(wrong)} of its {self.length} bytes are wrong, the first at offset {wrong[0]}{owner}"

    def _make(self, number: int) -> None:
        head = np.array([MAGIC, number, self.length, self._seed], np.uint64)
        whole = np.concatenate((head, ~head))
        self._made[:_HEAD] = whole[: len(self._made)]
        start = (number * _APART + self._seed) & _MASK
        np.add(self._ramp, np.uint64(start), out=self._made[_HEAD:])

    def _owner(self, got: "np.ndarray[Any, np.dtype[np.uint8]]", number: int) -> str:
        """Whose bytes they seem to be, by their first words."""
        if self.length < _HEAD * _WORD:
            return ""
        head = np.frombuffer(got[: _HEAD * _WORD].tobytes(), np.uint64)
        if int(head[0]) != MAGIC or not np.array_equal(head[:4], ~head[4:]):
            return "; it does not begin as a value of this benchmark does"
        if int(head[1]) == number and int(head[2]) == self.length and int(head[3]) == self._seed:
            return ""
        return f"; it says that it is value {head[1]} of {head[2]} bytes with seed {head[3]}"
