"""Settings of one proxy.  Every wait has a limit; all are in seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

DEFAULT_BOOTSTRAP_PORT = 8998  # VLLM_MOONCAKE_BOOTSTRAP_PORT


class Connector(StrEnum):
    """How KV cache gets from prefill to decode."""

    AUTO = "auto"  # mooncake for prefill instances with a bootstrap port, store for the others
    MOONCAKE = "mooncake"  # straight: vLLM's MooncakeConnector; both halves are asked at once
    STORE = "store"  # through the pool, or as the answer's kv_transfer_params say: prefill first, then decode


class ResumeBy(StrEnum):
    """What a lost stream is resumed from."""

    TOKENS = "tokens"  # the engine's own token ids: exact; asks engines for return_token_ids
    TEXT = "text"  # prompt and emitted text, tokenized again
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    connect_s: float = 2.0
    first_byte_s: float = 300.0  # a streamed answer's first event
    chunk_s: float = 60.0  # between two pieces of a streamed answer
    response_s: float = 1200.0  # an answer in one piece
    prefill_s: float = 300.0
    wait_s: float = 10.0  # for an instance to become available
    drain_s: float = 300.0  # for requests of an instance that is being removed
    retries: int = 3  # further tries without progress after an engine failed


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChecks:
    interval_s: float = 1.0
    timeout_s: float = 2.0
    failures: int = 3  # in a row, until an instance gets no more requests; a refused connection is enough at once
    successes: int = 1  # in a row, until it gets requests again
    ejected_interval_s: float = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    policy: str = "round_robin"
    prefix_length: int = 1024  # characters (or token ids) of a prompt that prefix_affinity looks at
    indexer: str = ""  # URL of an indexer that prefix_affinity asks, if any
    indexer_headers: Mapping[str, str] = field(default_factory=dict)  # that it asks for
    indexer_s: float = 0.05  # that a request may wait for it
    connector: Connector = Connector.AUTO
    resume_by: ResumeBy = ResumeBy.TOKENS
    admin_key: str = ""
    limits: Limits = field(default_factory=Limits)
    health: HealthChecks = field(default_factory=HealthChecks)
