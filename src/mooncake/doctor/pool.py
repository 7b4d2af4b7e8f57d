"""A pool's master, its segments, its keys, and the metadata service, asked as their clients ask them."""

import re
import secrets
import socket
from collections import Counter, defaultdict
from dataclasses import dataclass
from urllib.parse import quote

from mooncake.config_text import without_password
from mooncake.doctor import processes, web
from mooncake.doctor.findings import Finding, fail, ok, unknown, warn
from mooncake.election.places import master_place
from mooncake.errors import ConfigError, ErrorCode, StoreError
from mooncake.rpc import frame
from mooncake.rpc.client import Connection
from mooncake.rpc.messages import PROTOCOL, Hello, Ping
from mooncake.rpc.place import parse_address
from mooncake.rpc.sockets import connect, set_time_limit
from mooncake.security.secret import authorization
from mooncake.security.tls_files import scheme
from mooncake.transfer.host import host_id
from mooncake.transfer.listening import join_host
from mooncake.version import __version__

AREA = "pool"

_NEARLY_FULL = 0.9  # of the capacity; above it the master evicts by default
_MOST_KEYS = 1 << 20  # bytes of the list of keys that are looked at
_SIZED_KEYS = 50  # of each kind whose sizes are asked for

# vLLM's own MooncakeStoreConnector: [prefix@]model@tp_rank:T@pcpP@dcpD@pp_rank:R@group:G@hash
_KEY = re.compile(r"(.+)@tp_rank:(\d+)@pcp(\d+)@dcp(\d+)@pp_rank:(\d+)@group:(\d+)@([0-9a-f]+)")

# mooncake.vllm's: vllm/fingerprint/rank/[further parts/]hash
_OWN_KEY = re.compile(r"vllm/([0-9a-f]{16,})/[^/]+/(?:[^/]+/)*([0-9a-f]+)")


@dataclass
class PoolPlace:
    """Where a pool's services are; learned as they answer."""

    master: str = ""  # host:port, or how to find who leads
    metrics_port: int = 9003
    metadata: str = ""  # a URL, or P2PHANDSHAKE
    metrics_given: bool = False
    limit: float = 2.0  # seconds of one question
    origin: str = ""  # what named the master, for people

    @property
    def host(self) -> str:
        return parse_address(self.master)[0]


def look_at_master(place: PoolPlace) -> list[Finding]:
    """Its RPC port: reachable, ours, awake, of our version."""
    subject = f"master {without_password(place.master)}"
    try:
        named = master_place(place.master)
    except ConfigError as error:
        return [fail(AREA, subject, str(error), f"Correct it in {place.origin}.")]
    try:
        host, port = named.find()
    except OSError as error:
        advice = "Start the back end, and masters with --enable_ha; the cluster's name must be theirs too."
        return [fail(AREA, subject, str(error), advice)]
    if "://" not in place.master:
        return _ask_master(place, subject, host, port)
    place.master = join_host(host, port)
    return [ok(AREA, subject, f"{place.master} leads"), *_ask_master(place, f"master {place.master}", host, port)]


def _ask_master(place: PoolPlace, subject: str, host: str, port: int) -> list[Finding]:
    try:
        sock = connect(host, port, place.limit)
    except OSError as error:
        return [_unreachable(subject, host, port, error)]
    connection = Connection(sock)
    try:
        set_time_limit(sock, place.limit)
        hello = Hello(PROTOCOL, __version__, "client", f"{secrets.randbits(63)}-{secrets.randbits(63)}", host_id())
        welcome = connection.greet_as_tenant(hello)
        connection.call(Ping())
    except BlockingIOError:
        return [_silent(subject, host, port, place.limit)]
    except StoreError as error:
        if error.code == ErrorCode.UNAVAILABLE_IN_CURRENT_STATUS:
            return [fail(AREA, subject, str(error), "Give the address of the masters' back end instead of this one's.")]
        return [fail(AREA, subject, str(error), "Install one version of mooncake-py everywhere.")]
    except (OSError, frame.FramingError) as error:
        return [
            fail(
                AREA,
                subject,
                f"what listens there is no master of mooncake-py ({type(error).__name__}){_owner(host, port)}",
                "Give the rpc_port of mooncake_master (50051 by default); a C++ master serves C++ clients only.",
            )
        ]
    finally:
        connection.close()
    text = f"answers; version {welcome.version}, term {welcome.term}, leases of {welcome.lease_ms / 1e3:g} s"
    if welcome.version != __version__:
        return [warn(AREA, subject, f"{text}; this side is {__version__}", "Install one version everywhere.")]
    return [ok(AREA, subject, text + _owner(host, port))]


def _unreachable(subject: str, host: str, port: int, error: OSError) -> Finding:
    if isinstance(error, socket.gaierror):
        return fail(AREA, subject, f"the name {host} is not known here", "Correct the name, or give an address.")
    if isinstance(error, TimeoutError):
        advice = "Open the port in the firewall between the hosts, or correct the address."
        return fail(AREA, subject, "no connection could be made in time", advice)
    if isinstance(error, ConnectionRefusedError) and processes.is_local(host):
        return fail(AREA, subject, "nothing listens there", f"Start it: mooncake_master --rpc_port={port}")
    return fail(AREA, subject, f"it cannot be reached: {error.strerror or error}", "Start it, or correct the address.")


def _silent(subject: str, host: str, port: int, limit: float) -> Finding:
    pids = processes.listeners(port) if processes.is_local(host) else []
    found = processes.process(pids[0]) if pids and pids[0] else None
    if found and found.stopped:
        text = f"pid {found.pid} ({found.name}) is stopped: it takes connections and answers nothing"
        return fail(AREA, subject, text, f"Let it go on: kill -CONT {found.pid}")
    text = f"it takes connections but did not answer within {limit:g} s{_owner(host, port)}"
    return fail(AREA, subject, text, "Look at its log and at the load of its host; restart it if it hangs.")


def _owner(host: str, port: int) -> str:
    """Who listens, if it is to be seen from here."""
    if not processes.is_local(host):
        return ""
    pids = [pid for pid in processes.listeners(port) if pid]
    return f"; pid {pids[0]}" if pids else ""


# ------------------------------------------------------------ what its HTTP interface tells


def look_at_state(place: PoolPlace) -> list[Finding]:
    """Metrics, capacity, segments and keys."""
    url, reason = _find_http(place)
    subject = "metrics of the master"
    if not url:
        advice = "Give its metrics_port with --metrics-port (9003 by default), or open it in the firewall."
        return [unknown(AREA, subject, f"its HTTP interface was not found: {reason}", advice)]
    found = [ok(AREA, subject, f"{url} answers")]
    found += _segments(url, place.limit)
    return found + _keys(url, place.limit)


def _find_http(place: PoolPlace) -> tuple[str, str]:
    """The URL of the master's HTTP interface; "" and why, if there is none.

    Where no port was given, the ports that a master of this host listens on are tried as well.
    """
    if "://" in place.master:
        return "", "it is not known who leads"
    host = place.host
    shown = f"[{host}]" if ":" in host else host
    ports = [place.metrics_port]
    if not place.metrics_given and processes.is_local(host):
        for pid in processes.listeners(parse_address(place.master)[1]):
            ports = [port for port in processes.listening_ports(pid) if port != parse_address(place.master)[1]] or ports
    reason = ""
    for port in ports:
        url = f"{scheme()}://{shown}:{port}"
        try:
            web.get(f"{url}/health", place.limit, cluster=True)
        except web.NoAnswerError as error:
            reason = f"{url}: {error}"
        else:
            return url, ""
    return "", reason


def _segments(url: str, limit: float) -> list[Finding]:
    try:
        segments = web.get_json(f"{url}/get_segments_detail", limit, authorization(), cluster=True)["segments"]
    except web.NoAnswerError as error:
        return [unknown(AREA, "segments", str(error))]
    if not segments:
        advice = "Start one with mooncake_client, or give engines a global_segment_size above 0."
        return [warn(AREA, "segments", "nobody gives memory to this pool: nothing can be put", advice)]
    used = sum(one["allocator_used_bytes"] for one in segments)
    size = sum(one["size_bytes"] for one in segments)
    text = f"{len(segments)} with {size / (1 << 30):.2f} GiB, {100 * used / size:.0f} % used"
    state = warn if used > _NEARLY_FULL * size else ok
    found = [state(AREA, "segments", text)]
    unreachable = {}
    for one in segments:
        endpoint = str(one["te_endpoint"])
        if reason := _refuses(endpoint, limit / 2):
            unreachable[f"{one['segment_name']} ({endpoint})"] = reason
    for name, reason in unreachable.items():
        advice = "Its values can only be read on its own host; let local_hostname be an address that others reach."
        found.append(warn(AREA, "segment", f"{name} cannot be reached from here: {reason}", advice))
    if not unreachable:
        found.append(ok(AREA, "data ports", f"all {len(segments)} can be reached from here"))
    silent = [one["segment_name"] for one in segments if one["status"] != "OK"]
    if silent:
        found.append(warn(AREA, "segments", f"not in order: {', '.join(silent)}", "Look at those servers' logs."))
    return found


def _refuses(endpoint: str, limit: float) -> str:
    """Why nothing can be connected there; empty if it can."""
    try:
        host, port = parse_address(endpoint)
        connect(host, port, limit).close()
    except ValueError:
        return "it is no address"
    except OSError as error:
        return error.strerror or str(error)
    return ""


# ------------------------------------------------------------ what the keys tell


def _keys(url: str, limit: float) -> list[Finding]:
    try:
        text = web.get(f"{url}/get_all_keys", limit, _MOST_KEYS, authorization(), cluster=True)
    except web.NoAnswerError as error:
        return [unknown(AREA, "keys", str(error))]
    keys = text.split("\n")[:-1]
    matches = [match for key in keys if (match := _KEY.fullmatch(key))]
    ours = [match for key in keys if (match := _OWN_KEY.fullmatch(key))]
    more = " of the first ones" if len(text) >= _MOST_KEYS else ""
    if not matches and not ours:
        return [ok(AREA, "keys", f"{len(keys)}{more}, none by vLLM's connectors: they tell nothing of instances")]
    counts = [f"{len(matches)} by vLLM's own connector"] if matches else []
    counts += [f"{len(ours)} by mooncake.vllm's"] if ours else []
    found = [ok(AREA, "keys", f"{len(keys)}{more}, {', '.join(counts)}"), *_own_keys(ours)]
    by_model: dict[str, list[re.Match[str]]] = defaultdict(list)
    for match in matches:
        by_model[match[1]].append(match)
    for model, own in by_model.items():
        found += _model_keys(url, limit, model, own)
    return found


def _own_keys(matches: list[re.Match[str]]) -> list[Finding]:
    """Keys of mooncake.vllm: one fingerprint for each model with its settings, whose engines share among themselves."""
    subject = "keys of mooncake.vllm"
    counts = Counter(match[1] for match in matches)
    if len(counts) < 2:
        return [ok(AREA, subject, f"one fingerprint, {next(iter(counts))[:8]}")] if counts else []
    kinds = ", ".join(f"{fingerprint[:8]} ({count} keys)" for fingerprint, count in counts.most_common())
    text = f"{len(counts)} fingerprints, {kinds}: engines of different ones never find each other's blocks"
    advice = "That is right for different models. If instances of one model are to share, compare them with --instance."
    return [warn(AREA, subject, text, advice)]


def _model_keys(url: str, limit: float, model: str, matches: list[re.Match[str]]) -> list[Finding]:
    """What the keys of one model say about those that wrote them: hash lengths, rank layouts, sizes of values."""
    subject = f"keys of {model}"
    found: list[Finding] = []
    lengths = Counter(len(match[7]) for match in matches)
    if len(lengths) > 1:
        kinds = ", ".join(f"{count} with {4 * length} bits" for length, count in lengths.items())
        text = f"hashes of different algorithms ({kinds}): those instances never find each other's blocks"
        found.append(warn(AREA, subject, text, "Give all instances the same --prefix-caching-hash-algo."))
    ranks: dict[str, set[str]] = defaultdict(set)
    for match in matches:
        ranks[match[7]].add(match[2])
    widths = Counter(len(held) for held in ranks.values())
    if len(widths) > 1:
        kinds = ", ".join(f"{count} blocks of {width} TP ranks" for width, count in sorted(widths.items()))
        text = f"blocks of different TP sizes, or some ranks' parts are gone: {kinds}"
        advice = "Give instances of another --tensor-parallel-size a cache_prefix of their own."
        found.append(warn(AREA, subject, text, advice))
    found += _sizes(url, limit, subject, matches)
    if not found:
        found.append(ok(AREA, subject, f"one hash length, one layout of ranks, one size of block in {len(matches)}"))
    return found


def _sizes(url: str, limit: float, subject: str, matches: list[re.Match[str]]) -> list[Finding]:
    """Blocks of one group and rank that have different sizes were written with different settings."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for match in matches:
        groups[match.group(2, 3, 4, 5, 6)].append(match[0])
    for keys in groups.values():
        step = max(len(keys) // _SIZED_KEYS, 1)
        asked = ",".join(quote(key) for key in keys[::step][:_SIZED_KEYS])
        try:
            data = web.get_json(f"{url}/batch_query_keys?keys={asked}", limit, authorization(), cluster=True)["data"]
        except web.NoAnswerError as error:
            return [unknown(AREA, subject, f"sizes of blocks: {error}")]
        sizes = sorted({place["size_"] for one in data.values() for place in one["values"] or []})
        if len(sizes) > 1:
            text = f"blocks of one kind have {' and '.join(map(str, sizes))} bytes: block size, dtype or layers differ"
            advice = "Compare the instances that use this pool with --instance; set a cache_prefix for each kind."
            return [warn(AREA, subject, text, advice)]
    return []


# ------------------------------------------------------------ metadata


def look_at_metadata(place: PoolPlace) -> list[Finding]:
    """The metadata service that the configuration names."""
    subject = "metadata service"
    if place.metadata.upper() == "P2PHANDSHAKE":
        return [ok(AREA, subject, "P2PHANDSHAKE: none is needed")]
    if not place.metadata.startswith(("http://", "https://")):
        text = f"{place.metadata} was only tried for a connection"
        address = re.sub(r"^[a-z0-9]+://", "", place.metadata).split("/")[0]
        reason = _refuses(address, place.limit)
        if reason:
            return [fail(AREA, subject, f"{place.metadata} cannot be reached: {reason}", "Start it, or correct it.")]
        return [ok(AREA, subject, f"{text}, which it takes")]
    try:
        web.get(f"{place.metadata}?key=mooncake-doctor", place.limit, headers=authorization(), cluster=True)
    except web.StatusError as error:
        if error.status == 404:  # what it says of a key that is not there
            return [ok(AREA, subject, f"{place.metadata} answers")]
        return [fail(AREA, subject, f"{place.metadata} answers {error}", "Give the URL of its /metadata.")]
    except web.NoAnswerError as error:
        return [fail(AREA, subject, f"{place.metadata}: {error}", "Start mooncake_http_metadata_server there.")]
    return [ok(AREA, subject, f"{place.metadata} answers")]
