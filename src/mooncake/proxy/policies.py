"""Which of several available instances gets a request.

`choose` is called with at least one instance and must not wait.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count
from typing import Protocol

from mooncake.proxy.instances import Instance, Prompt

_BOUND = 1.25  # a preferred instance may be this much busier than the mean


class Policy(Protocol):
    def choose(self, instances: Sequence[Instance], prompt: Prompt) -> Instance: ...


class RoundRobin:
    def __init__(self) -> None:
        self._turns = count()

    def choose(self, instances: Sequence[Instance], prompt: Prompt) -> Instance:
        return instances[next(self._turns) % len(instances)]


class LeastLoaded:
    """The instance with the fewest requests in flight; those that are equal take turns."""

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, instances: Sequence[Instance], prompt: Prompt) -> Instance:
        first = next(self._turns) % len(instances)
        rotated = [*instances[first:], *instances[:first]]
        return min(rotated, key=lambda instance: instance.in_flight)


class PrefixAffinity:
    """The instance that has most of the prompt's KV cache, of those that are not much busier than the others.

    Where nobody is known to have any, prompts that begin alike go to one instance.  Rendezvous hashing: an instance
    that comes or goes changes the choice only for its own share of the prompts.
    """

    def __init__(self) -> None:
        self._otherwise = LeastLoaded()

    def choose(self, instances: Sequence[Instance], prompt: Prompt) -> Instance:
        most = max(1.0, _BOUND * sum(instance.in_flight for instance in instances) / len(instances))
        if prompt.matched:
            able = [instance for instance in instances if instance.in_flight <= most]
            longest = max(prompt.matched.get(instance.url, 0) for instance in able)
            if longest:
                return self._otherwise.choose([one for one in able if prompt.matched.get(one.url) == longest], prompt)
        preferred = max(instances, key=lambda one: blake2b(one.name + prompt.key, digest_size=8).digest())
        if preferred.in_flight > most:
            return self._otherwise.choose(instances, prompt)
        return preferred


POLICIES: dict[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_affinity": PrefixAffinity,
}
