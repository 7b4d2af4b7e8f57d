"""The proof: one instance computes and saves a prompt that nobody has seen, and each other one is asked for the same.

Whatever their settings are, an instance that then loads it from the pool matches.  Costs every instance one prompt of a
few blocks, and the pool as many blocks until they are evicted; hence only on demand.
"""

import http.client
import json
import random
import secrets
import time
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from mooncake.doctor import web
from mooncake.doctor.findings import Finding, fail, ok, unknown
from mooncake.doctor.instance import Instance

AREA = "probe"
ANSWER_LIMIT = 60.0  # seconds of one answer

_SAVE_LIMIT = 5.0  # seconds that saving may take behind the answer
_POLL = 0.2
_BLOCKS = 3  # that the prompt fills at least
_USUAL_BLOCK = 128  # tokens, where an instance does not tell
_HITS = "vllm:external_prefix_cache_hits_total"
_SKIPPED, _SLOWER = "vllm:mooncake_skipped_blocks_total", "slower_than_computing"
_SAVED = "vllm:mooncake_store_operation_keys_total"


def probe(instances: Sequence[Instance], limit: float) -> list[Finding]:
    """`limit`: seconds of a question for metrics."""
    able = [one for one in instances if one.answers and one.is_vllm and "served as" in one.known]
    savers = [one for one in able if (one.store or {}).get("kv_role") != "kv_consumer"]
    if len(able) < 2 or not savers:
        return [unknown(AREA, "probe", "it needs two vLLM instances, of which one saves (not kv_consumer)")]
    saver = savers[0]
    prompt = _prompt(able)
    try:
        before = _metric(saver, _SAVED, limit, operation="save_put")
        _ask(saver, prompt)
        saved = _wait_saved(saver, before, limit)
    except web.NoAnswerError as error:
        return [fail(AREA, saver.name, f"it does not answer a request: {error}", "Look at its log.")]
    if not saved:
        text = "it saved nothing to the pool: is it on one, and has its /metrics vllm:mooncake_store_operation?"
        return [unknown(AREA, saver.name, text)]
    return [_probe_one(saver, one, prompt, limit) for one in able if one is not saver]


def _probe_one(saver: Instance, one: Instance, prompt: str, limit: float) -> Finding:
    try:
        before, declined = _metric(one, _HITS, limit), _metric(one, _SKIPPED, limit, reason=_SLOWER)
        _ask(one, prompt)
        loaded = int(_metric(one, _HITS, limit) - before)
        declined = _metric(one, _SKIPPED, limit, reason=_SLOWER) - declined
    except web.NoAnswerError as error:
        return fail(AREA, one.name, f"it does not answer a request: {error}", "Look at its log.")
    if loaded > 0:
        return ok(AREA, one.name, f"loaded {loaded} tokens of a new prompt that {saver.name} had saved")
    if declined:
        return ok(
            AREA, one.name, f"found what {saver.name} had saved, and computed it as that is quicker than loading it"
        )
    advice = "Compare their settings above; what is unknown there may differ."
    return fail(AREA, one.name, f"computed again what {saver.name} had saved: their blocks do not match", advice)


def _prompt(instances: Sequence[Instance]) -> str:
    """Words that begin as no prompt has begun, each a token at least."""
    blocks = [one.known.get("block size", "") for one in instances]
    longest = max([int(text) for text in blocks if text.isdecimal()] or [_USUAL_BLOCK])
    source = random.Random(secrets.token_bytes(16))
    return " ".join(f"w{source.randrange(1000)}" for _ in range(_BLOCKS * longest + 2))


def _wait_saved(saver: Instance, before: float, limit: float) -> bool:
    """Until it has saved blocks, and no more of them come."""
    deadline = time.monotonic() + _SAVE_LIMIT
    last = before
    while time.monotonic() < deadline:
        time.sleep(_POLL)
        now = _metric(saver, _SAVED, limit, operation="save_put")
        if now > before and now == last:
            return True
        last = now
    return last > before


def _metric(instance: Instance, name: str, limit: float, **labels: str) -> float:
    """The sum of a metric's samples that have these labels; 0 if there are none.  Raises NoAnswerError."""
    families = text_string_to_metric_families(web.get(f"{instance.url}/metrics", limit))
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def _ask(instance: Instance, prompt: str) -> None:
    """One token.  Raises NoAnswerError."""
    body = {"model": instance.known["served as"], "prompt": prompt, "max_tokens": 1, "temperature": 0}
    connection = web.connect(instance.url, ANSWER_LIMIT)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise web.NoAnswerError(str(error) or type(error).__name__) from None
    finally:
        connection.close()
    if answer.status != 200:
        raise web.NoAnswerError(f"HTTP {answer.status} {text[:200]}")
