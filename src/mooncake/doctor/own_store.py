"""Instances with mooncake.vllm's connector, whose keys hold everything that must be alike.

Such an instance tells, once it has served a request, a number of how its keys begin (content of the weights, data
types, layout, ranks, settings) and one of the seed of its block hashes.  Equal numbers are a proof, and so are
different ones.
"""

from collections.abc import Callable, Sequence

from mooncake.doctor.findings import Finding, fail, ok, unknown
from mooncake.doctor.instance import Instance

AREA = "block hashes"
NO_MATCH = "their blocks never match"

_FIRST = "an instance tells it once it has served a request"


def look_at_kinds(instances: Sequence[Instance]) -> list[Finding]:
    """Both connectors in one pool share its memory and no block."""
    groups = groups_of(
        instances,
        lambda one: "mooncake.vllm's" if one.has_own_store else "vLLM's own" if one.store is not None else None,
    )
    if len(groups) < 2:
        return []
    parts = [f"{listed([one.name for one in group])} {have(group)} {kind}" for kind, group in groups.items()]
    advice = 'Give all, or none, "kv_connector_module_path": "mooncake.vllm".'
    return [fail(AREA, "connector", f"{', '.join(parts)}: their keys differ, {NO_MATCH}", advice)]


def look_at_identities(instances: Sequence[Instance]) -> list[Finding]:
    """Whether their keys begin alike."""
    groups = groups_of(instances, lambda one: one.known.get("key identity"))
    missing = [one.name for one in instances if "key identity" not in one.known]
    if len(groups) > 1:
        parts = [f"{listed([one.name for one in group])} {have(group)} {value}" for value, group in groups.items()]
        text = f"{', '.join(parts)}: weights, data types, layout, ranks or settings differ, {NO_MATCH}"
        advice = (
            "Compare the settings below. If all are alike, the files of the model are not, or cache_prefix or "
            "weights_id of kv_connector_extra_config."
        )
        return [fail(AREA, "keys", text, advice)]
    if missing:
        return [
            unknown(AREA, "keys", f"not known of {listed(missing)}: {_FIRST}", "Send each a request, or use --probe.")
        ]
    return [ok(AREA, "keys", "weights, data types, layout, ranks and settings are the same everywhere")]


def look_at_seeds(instances: Sequence[Instance]) -> Finding | None:
    """Whether their hashes are chained from one seed; None where an instance does not tell."""
    groups = groups_of(instances, lambda one: one.known.get("hash seed"))
    if sum(map(len, groups.values())) < len(instances):
        return None
    if len(groups) == 1 and " and " not in next(iter(groups)):
        return ok(AREA, "PYTHONHASHSEED", "block hashes are chained from the same seed everywhere")
    parts = [f"{listed([one.name for one in group])} {have(group)} {value}" for value, group in groups.items()]
    return fail(
        AREA,
        "PYTHONHASHSEED",
        f"block hashes are chained from different seeds ({', '.join(parts)}): {NO_MATCH}",
        "Set PYTHONHASHSEED to the same number for all of them (an environment variable, before vLLM starts).",
    )


# ------------------------------------------------------------ words


def groups_of(instances: Sequence[Instance], value: Callable[[Instance], str | None]) -> dict[str, list[Instance]]:
    """Instances by the value that they have; those of which it is not known are left out."""
    groups: dict[str, list[Instance]] = {}
    for one in instances:
        if (found := value(one)) is not None:
            groups.setdefault(found, []).append(one)
    return groups


def listed(words: Sequence[str] | dict[str, None]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def have(group: Sequence[Instance]) -> str:
    return "has" if len(group) == 1 else "have"
