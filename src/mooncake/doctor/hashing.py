"""Whether the instances of one pool can find each other's blocks, and read them.

A block's key is made of the model folder's name, the ranks, and a hash that is chained from a seed over blocks of
tokens; its bytes depend on data types and layout, which no key of vLLM's own connector tells.  So each setting that
goes into either is compared over all instances: equal, different (and who has what), or not known of some.
mooncake.vllm's connector has all of that in its keys, and tells a number of them (see `own_store`).
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from mooncake.doctor import own_store
from mooncake.doctor.findings import Finding, Status, fail, ok, unknown, warn
from mooncake.doctor.instance import UNSET, Instance
from mooncake.doctor.own_store import AREA, NO_MATCH, groups_of, have, listed

_FIXED_SEED_SINCE = (0, 32)  # vLLM with sha256 has a fixed seed unless PYTHONHASHSEED is set
_WRONG_BYTES = "their keys match, but not what lies under them"
_RANDOM = "random in every process"
_FIXED = "vLLM's fixed one"
_UNSURE = "not set"
_AUTO = "auto (the model's own)"


class _Rule(NamedTuple):
    """One setting: what it is if instances differ in it, and what to do."""

    name: str
    worst: Status
    effect: str
    advice: str


_RULES = (
    _Rule("model", Status.FAIL, NO_MATCH, "Serve one model from folders of the same name (keys carry that name)."),
    _Rule("revision", Status.FAIL, _WRONG_BYTES, "Serve the same --revision, or set another cache_prefix for each."),
    _Rule("quantization", Status.FAIL, _WRONG_BYTES, "Serve the same weights, or set another cache_prefix for each."),
    _Rule("hash algorithm", Status.FAIL, NO_MATCH, "Give all instances the same --prefix-caching-hash-algo."),
    _Rule("block size", Status.FAIL, NO_MATCH, "Give all instances the same --block-size."),
    _Rule("hash block size", Status.FAIL, NO_MATCH, "Give all instances the same --block-size."),
    _Rule("dtype", Status.FAIL, _WRONG_BYTES, "Give all instances the same --dtype, or another cache_prefix for each."),
    _Rule("KV dtype", Status.FAIL, _WRONG_BYTES,
          "Give all instances the same --kv-cache-dtype, or another cache_prefix for each."),
    _Rule("KV layout", Status.FAIL, _WRONG_BYTES, "Set the same VLLM_KV_CACHE_LAYOUT everywhere."),
    _Rule("tensor parallel", Status.FAIL, "one's ranks hold other heads than the other's",
          "Give all instances the same --tensor-parallel-size, or another cache_prefix for each size."),
    _Rule("pipeline parallel", Status.FAIL, "one's ranks hold other layers than the other's",
          "Give all instances the same --pipeline-parallel-size."),
    _Rule("prefill context parallel", Status.FAIL, NO_MATCH, "Give all the same --prefill-context-parallel-size."),
    _Rule("decode context parallel", Status.FAIL, NO_MATCH, "Give all the same --decode-context-parallel-size."),
    _Rule("vLLM", Status.WARN, "releases may hash, or lay blocks out, in different ways", "Run one release."),
)  # fmt: skip
_IN_CONTENT = frozenset(("model", "vLLM"))  # mooncake.vllm compares files instead of names, and layouts themselves
# Without one of these nothing can be said; of the others vLLM may not have heard in this release.
_ESSENTIAL = frozenset(
    ("model", "hash algorithm", "block size", "dtype", "KV dtype", "tensor parallel", "pipeline parallel")
)


def compare(instances: Sequence[Instance]) -> list[Finding]:
    """Findings about the instances that are on a pool, or may be."""
    found = [finding for one in instances for finding in _alone(one)]
    answering = [one for one in instances if one.answers]
    together = [one for one in answering if not _is_elsewhere(one)] or answering
    if len(together) < 2:
        if instances:
            found.append(
                unknown(AREA, "comparison", "fewer than two instances of a pool are known: nothing to compare")
            )
        return found
    found += _masters(together)
    found += own_store.look_at_kinds(together)
    if all(one.has_own_store for one in together):
        found += own_store.look_at_identities(together)
        rules = [rule._replace(effect=NO_MATCH) for rule in _RULES if rule.name not in _IN_CONTENT]
    else:
        rules = list(_RULES)
    found += [finding for rule in rules for finding in _apply(rule, together)]
    found += _prefixes(together)
    return [*found, own_store.look_at_seeds(together) or _seeds(together)]


def _alone(one: Instance) -> list[Finding]:
    """What is wrong with one instance by itself."""
    found = []
    if one.known.get("prefix caching") == "False":
        found.append(
            fail(AREA, one.name, "prefix caching is off: it hashes no blocks", "Leave --no-enable-prefix-caching out.")
        )
    engines = max(_number(one.known.get("data parallel")), _number(one.known.get("engines")))
    if engines > 1 and _seed(one) == _RANDOM:
        found.append(
            fail(
                AREA,
                one.name,
                f"its {engines} data-parallel engines each hash with a random seed: none finds another's blocks",
                "Set PYTHONHASHSEED to the same number everywhere, or use --prefix-caching-hash-algo sha256.",
            )
        )
    if _is_elsewhere(one):
        found.append(warn(AREA, one.name, "has no MooncakeStoreConnector: it is on no pool"))
    return found


def _is_elsewhere(one: Instance) -> bool:
    return one.connectors is not None and one.store is None


def _apply(rule: _Rule, instances: Sequence[Instance]) -> list[Finding]:
    groups = groups_of(instances, lambda one: _value(rule.name, one))
    missing = [one.name for one in instances if _value(rule.name, one) is None]
    if len(groups) == 2 and _AUTO in groups and _may_be_auto(rule.name, next(v for v in groups if v != _AUTO)):
        text = ", ".join(
            f"{listed([one.name for one in group])} {have(group)} {value}" for value, group in groups.items()
        )
        return [unknown(AREA, rule.name, f"{text}: whether that is the same depends on the model", rule.advice)]
    if len(groups) > 1:
        return [_different(rule, instances, groups)]
    if missing and rule.name in _ESSENTIAL:
        return [unknown(AREA, rule.name, f"not known of {listed(missing)}{_why(instances, missing)}")]
    if missing:
        return []
    value = next(iter(groups))
    sources = listed(dict.fromkeys(one.told_by.get(rule.name, "?").split(" of ")[0] for one in instances))
    return [ok(AREA, rule.name, f"{value} everywhere (from {sources})")]


def _different(rule: _Rule, instances: Sequence[Instance], groups: dict[str, list[Instance]]) -> Finding:
    parts = [f"{listed([one.name for one in group])} {have(group)} {value}" for value, group in groups.items()]
    missing = len(instances) - sum(map(len, groups.values()))
    rest = f"; not known of {missing} more" if missing else ""
    return Finding(rule.worst, AREA, rule.name, f"{', '.join(parts)}{rest}: {rule.effect}", rule.advice)


def _value(name: str, one: Instance) -> str | None:
    value = one.known.get(name)
    if name == "model" and value:
        return value.rstrip("/").rpartition("/")[2]
    return _AUTO if value == "auto" else value


def _may_be_auto(name: str, value: str) -> bool:
    """Whether a model's own type may be this one: caches are only quantised when asked to."""
    return name == "dtype" or value in ("float16", "bfloat16", "float32")


def _masters(instances: Sequence[Instance]) -> list[Finding]:
    groups = groups_of(instances, lambda one: _plain(one.known.get("master")))
    missing = [one.name for one in instances if "master" not in one.known]
    if len(groups) > 1:
        parts = [f"{listed([one.name for one in group])} {have(group)} {value}" for value, group in groups.items()]
        return [
            fail(
                AREA,
                "pool",
                f"{', '.join(parts)}: they are on different pools",
                "Let MOONCAKE_CONFIG_PATH name files with one master_server_address.",
            )
        ]
    if missing:
        return [
            unknown(AREA, "pool", f"which master they use is not known of {listed(missing)}{_why(instances, missing)}")
        ]
    return [ok(AREA, "pool", f"all use the master {next(iter(groups))}")]


def _prefixes(instances: Sequence[Instance]) -> list[Finding]:
    known = [one for one in instances if one.store is not None]
    groups = groups_of(known, lambda one: str((_extra(one).get("cache_prefix")) or "(none)"))
    if len(groups) < 2:
        return []
    parts = [f"{listed([one.name for one in group])} {have(group)} {value}" for value, group in groups.items()]
    return [fail(AREA, "cache_prefix", f"{', '.join(parts)}: {NO_MATCH}", "Give all the same cache_prefix, or none.")]


def _extra(one: Instance) -> dict[str, object]:
    extra = (one.store or {}).get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}


# ------------------------------------------------------------ the seed


def _seeds(instances: Sequence[Instance]) -> Finding:
    """PYTHONHASHSEED and what stands for it: with sha256 a fixed one, with xxhash a random one."""
    advice = "Set PYTHONHASHSEED to the same number for all of them (an environment variable, before vLLM starts)."
    seeds = {one.name: _seed(one) for one in instances}
    random = [name for name, seed in seeds.items() if seed == _RANDOM]
    if random:
        text = f"the seed of {listed(random)} is random at every start (xxhash without PYTHONHASHSEED): {NO_MATCH}"
        return fail(AREA, "PYTHONHASHSEED", text, f"{advice[:-1]}, or use --prefix-caching-hash-algo sha256.")
    groups = groups_of(instances, _seed)
    if len(groups) > 1:
        parts = [f"{listed([one.name for one in group])} {have(group)} {value}" for value, group in groups.items()]
        return fail(AREA, "PYTHONHASHSEED", f"{', '.join(parts)}: {NO_MATCH}", advice)
    missing = [name for name, seed in seeds.items() if seed is None]
    if missing:
        text = f"not known of {listed(missing)}{_why(instances, missing)}"
        return unknown(AREA, "PYTHONHASHSEED", text, "Look at the environment of those instances, or use --probe.")
    (value,) = groups
    if value == _UNSURE:
        text = "not set anywhere, and releases of vLLM before 0.32 may draw a random seed then"
        return warn(AREA, "PYTHONHASHSEED", text, advice)
    return ok(AREA, "PYTHONHASHSEED", f"the seed is {value} everywhere")


def _seed(one: Instance) -> str | None:
    """What an instance's hashes are chained from; None if that is not known."""
    given = one.known.get("PYTHONHASHSEED")
    if given is None:
        return None
    if given != UNSET:
        return f'"{given}"'
    algorithm = one.known.get("hash algorithm", "")
    if algorithm.startswith("xxhash"):
        return _RANDOM
    release = re.match(r"(\d+)\.(\d+)", one.known.get("vLLM", ""))
    if not algorithm or not release:
        return None
    return _FIXED if (int(release[1]), int(release[2])) >= _FIXED_SEED_SINCE else _UNSURE


# ------------------------------------------------------------ words


def _why(instances: Sequence[Instance], names: Sequence[str]) -> str:
    """Which sources those instances lack, in brackets."""
    reasons = dict.fromkeys(
        f"{source}: {reason}" for one in instances if one.name in names for source, reason in one.missing.items()
    )
    return f" ({'; '.join(reasons)})" if reasons else ""


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 1


def _plain(address: str | None) -> str | None:
    return address.replace("localhost:", "127.0.0.1:") if address else address
