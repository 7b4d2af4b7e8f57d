"""Which of several available instances gets a request.

`choose` is called with at least one instance and must not wait.  `key` is the beginning of the prompt.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count
from typing import Protocol

from mooncake.proxy.instances import Instance

_BOUND = 1.25  # a preferred instance may be this much busier than the mean


class Policy(Protocol):
    def choose(self, instances: Sequence[Instance], key: bytes) -> Instance: ...


class RoundRobin:
    def __init__(self) -> None:
        self._turns = count()

    def choose(self, instances: Sequence[Instance], key: bytes) -> Instance:
        return instances[next(self._turns) % len(instances)]


class LeastLoaded:
    """The instance with the fewest requests in flight; those that are equal take turns."""

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, instances: Sequence[Instance], key: bytes) -> Instance:
        first = next(self._turns) % len(instances)
        rotated = [*instances[first:], *instances[:first]]
        return min(rotated, key=lambda instance: instance.in_flight)


class PrefixAffinity:
    """Prompts that begin alike go to one instance, as long as it is not much busier than the others.

    Rendezvous hashing: an instance that comes or goes changes the choice only for its own share of the prompts.
    """

    def __init__(self) -> None:
        self._otherwise = LeastLoaded()

    def choose(self, instances: Sequence[Instance], key: bytes) -> Instance:
        preferred = max(instances, key=lambda instance: blake2b(instance.name + key, digest_size=8).digest())
        mean = sum(instance.in_flight for instance in instances) / len(instances)
        if preferred.in_flight > max(1.0, _BOUND * mean):
            return self._otherwise.choose(instances, key)
        return preferred


POLICIES: dict[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_affinity": PrefixAffinity,
}
