"""What our vLLM connector costs the scheduler, and how fast a pool hit is with it and with vLLM's own.

    python -m benchmarks.connector [--steps 3000] [--repeats 7] [--events]

Needs the environment of `scripts/install --vllm`.  The first table: vLLM's real scheduler with 100 requests waiting and
a master whose answers come 50 ms late; processor time of the connector's methods on the scheduler's thread, per step,
and the time a step spends in them.  The second: two vLLM instances on CPUs, the time of a one-token answer to
a prompt that the other one has saved, both connectors in turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
WAITING, LATE, PROMPT = 100, 0.05, 900
METHODS = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "update_connector_output",
    "get_kv_connector_stats", "take_events", "request_finished", "has_pending_push_work",
)  # fmt: skip  # that vLLM's scheduler calls
KINDS = ("full", "hybrid", "mamba")  # of models: see tests/connector/kinds.py
BLOCKS = 60  # of the second table's prompts


def measure_steps(model: str, steps: int, kind: str, *, events: bool) -> dict[str, float]:
    """Runs in the vLLM environment."""
    import gc
    import logging
    import random

    from tests.connector.engine import BLOCK_BYTES, Engine
    from tests.connector.relay import Relay
    from tests.processes import Master

    from mooncake.cli.engine_settings import write_pool_config

    logging.disable(logging.ERROR)
    master = Master()
    folder = tempfile.TemporaryDirectory(prefix="bench-")
    relay = Relay(master.port, LATE)
    config = Path(folder.name) / "pool.json"
    os.environ["MOONCAKE_CONFIG_PATH"] = str(config)
    os.environ["MOONCAKE_REQUESTER_LOCAL_HOSTNAME"] = "127.0.0.1"
    write_pool_config(config, int(relay.address.rpartition(":")[2]), 12000 * BLOCK_BYTES)
    engine = Engine(model, 400, kind=kind, lookup_budget_ms=1000, events=events)
    gc.collect()
    gc.freeze()  # as vLLM's engine does once it has started
    connector, spent = engine.scheduler.connector, [0.0, 0.0]

    def timed(method):
        def call(*arguments):
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return method(*arguments)
            finally:
                spent[0] += time.thread_time() - cpu
                spent[1] += time.perf_counter() - wall

        return call

    for name in METHODS:
        setattr(connector, name, timed(getattr(connector, name)))
    numbers = random.Random(1)
    prompts = [[numbers.randrange(5, 1000) for _ in range(PROMPT)] for _ in range(80)]  # more than the KV cache holds
    taken, count = [], 0
    for _ in range(steps):
        while len(engine.requests) < WAITING + 8:
            count += 1
            engine.add(f"r{count}", numbers.choice(prompts)[: numbers.randrange(100, PROMPT)], 8)
        spent[:] = [0.0, 0.0]
        engine.step()
        taken.append(tuple(spent))
    for name in list(engine.requests):
        engine.abort(name)
    while engine.busy:
        engine.step()
    engine.close()
    relay.close()
    master.stop()
    cpu, wall = (sorted(one[i] * 1e3 for one in taken) for i in range(2))
    at = int(len(taken) * 0.999)
    return {"requests": count, "loaded": engine.external, "p50": cpu[len(cpu) // 2], "p99.9": cpu[at], "wall": wall[at]}


def measure_hits(python: Path, model: Path, folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    from tests.e2e.servers import BLOCK, Server, Zygote
    from tests.e2e.test_vllm_store import prompt, wait_saved
    from tests.processes import Master

    from mooncake.cli.engine_settings import own_store_config, pool_environment, transfer_config, write_pool_config

    zygote, master = Zygote(python, folder / "zygote.log"), Master()
    master.config = folder / "pool.json"
    write_pool_config(master.config, master.port, 256 << 20)
    servers: dict[str, list[Server]] = {}
    try:
        for kind in ("own", "in-tree"):
            servers[kind] = []
            for i in range(2):
                transfer = own_store_config(decline_slow_loads=False) if kind == "own" else transfer_config(10 + i)
                name = f"{kind}{i}"
                servers[kind].append(Server(zygote, name, model, folder, transfer, pool_environment(master.config)))
                servers[kind][-1].wait_ready()
        taken: dict[str, dict[str, list[float]]] = {kind: {"cold": [], "hit": []} for kind in servers}
        saved = 0
        for repeat in range(repeats + 1):
            for number, (kind, (first, second)) in enumerate(servers.items()):
                ids = prompt(1000 + repeat * 2 + number, BLOCKS)
                for phase, server in (("cold", first), ("hit", second)):
                    began = time.perf_counter()
                    found = server.ask(ids, tokens=1).from_pool
                    if repeat:  # the first warms up
                        taken[kind][phase].append(time.perf_counter() - began)
                        assert found == (BLOCKS * BLOCK if phase == "hit" else 0), (kind, phase, found)
                    saved += BLOCKS if phase == "cold" else 0
                    wait_saved(master, saved)
    finally:
        for server in (each for pair in servers.values() for each in pair):
            server.stop()
        master.stop()
        zygote.close()
    return {
        kind: {phase: statistics.median(values) * 1e3 for phase, values in phases.items()}
        for kind, phases in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.connector", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000, help="of the scheduler (default 3000)")
    parser.add_argument("--repeats", type=int, default=7, help="of each pool hit (default 7)")
    parser.add_argument("--events", action="store_true", help="with KV events published in the first table")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        print(json.dumps(measure_steps(options.model, options.steps, options.kind, events=options.events)))
        return
    from tests.e2e.servers import HERE, vllm_python

    python = vllm_python()
    if python is None:
        raise SystemExit("there is no vLLM environment; `scripts/install --vllm` makes it")
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        model = folder / "tiny"
        subprocess.run([python, HERE / "tiny_model.py", model], check=True)
        command = [python, "-m", "benchmarks.connector", "--model", model, "--steps", str(options.steps)]
        command += ["--events"] if options.events else []
        print(f"{WAITING} requests waiting, a master that answers {LATE * 1e3:.0f} ms late, {options.steps} steps:")
        for kind in KINDS:
            result = subprocess.run([*command, "--kind", kind], capture_output=True, text=True, check=False)
            if result.returncode:
                sys.exit(result.stderr)
            step = json.loads(result.stdout.splitlines()[-1])
            print(
                f"  {kind:8} processor time a step p50 {step['p50']:.3f} ms, p99.9 {step['p99.9']:.3f} ms (limit 2); "
                f"time in the connector p99.9 {step['wall']:.3f} ms; {step['loaded']} tokens loaded meanwhile"
            )
        if options.repeats:
            print(f"{BLOCKS * 32 + 5} tokens, one answered (ms, median of {options.repeats}):")
            for kind, phases in measure_hits(python, model, folder, options.repeats).items():
                print(f"  {kind:8} cold {phases['cold']:7.1f}   pool hit {phases['hit']:7.1f}")


if __name__ == "__main__":
    main()
