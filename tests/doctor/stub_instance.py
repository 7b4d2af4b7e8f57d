"""What a vLLM instance tells of itself, and no more: `stub_instance.py vllm --port P [--stub JSON] [vLLM's flags]`.

The JSON may hold `labels` (of vllm:cache_config_info), `version`, `root`, `engines`, `server_info`, `hang`, and what
each answer does: `saves` (keys), `loads` (tokens) and `declines` (blocks); `identity` is what mooncake.vllm tells: keys
and seed.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# As vLLM 0.32 has them.
LABELS = {
    "block_size": "32", "cache_dtype": "auto", "effective_attention_block_size": "32", "enable_prefix_caching": "True",
    "gpu_memory_utilization": "0.92", "hash_block_size": "None", "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]", "kv_cache_layout": "None", "mamba_block_size": "None",
    "num_cpu_blocks": "None", "num_gpu_blocks": "512", "prefix_caching_hash_algo": "sha256",
    "sliding_window": "None", "user_specified_block_size": "True",
}  # fmt: skip


def value(flag: str, default: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else default


STUB = json.loads(value("--stub", "{}"))


asked = 0  # answers so far


def metrics() -> str:
    lines = [
        "# TYPE vllm:external_prefix_cache_hits_total counter",
        f'vllm:external_prefix_cache_hits_total{{engine="0"}} {asked * STUB.get("loads", 0)}.0',
        "# TYPE vllm:mooncake_store_operation_keys_total counter",
        f'vllm:mooncake_store_operation_keys_total{{operation="save_put"}} {asked * STUB.get("saves", 0)}.0',
        'vllm:mooncake_store_operation_keys_total{operation="lookup_exists"} 99.0',
        "# HELP vllm:num_requests_running Number of requests in model execution batches.",
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0',
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig",
        "# TYPE vllm:cache_config_info gauge",
    ]
    if "identity" in STUB:
        keys, seed = STUB["identity"]
        lines.insert(0, f'vllm:mooncake_identity_info{{engine="0",keys="{keys}",seed="{seed}"}} 1.0')
        lines.insert(0, "# TYPE vllm:mooncake_identity_info gauge")
    declined = asked * STUB.get("declines", 0)
    lines.insert(0, f'vllm:mooncake_skipped_blocks_total{{reason="slower_than_computing"}} {declined}.0')
    lines.insert(0, "# TYPE vllm:mooncake_skipped_blocks_total counter")
    for engine in range(STUB.get("engines", 1)):
        labels = {**LABELS, **STUB.get("labels", {}), "engine": str(engine)}
        told = ",".join(f'{name}="{text}"' for name, text in labels.items())
        lines.append(f"vllm:cache_config_info{{{told}}} 1.0")
    return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if STUB.get("hang"):
            time.sleep(3600)
        path = self.path.partition("?")[0]
        root = STUB.get("root", "/models/tiny")
        bodies = {
            "/metrics": metrics(),
            "/v1/models": json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model", "root": root}]}),
            "/version": json.dumps({"version": STUB.get("version", "0.32.0")}),
        }
        if "server_info" in STUB:
            bodies["/server_info"] = json.dumps({"vllm_config": STUB["server_info"], "vllm_env": {}})
        body = bodies.get(path, "").encode()
        self.send_response(200 if path in bodies else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        global asked
        asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"choices":[{"index":0,"text":"a","finish_reason":"length"}]}'
        self.send_response(STUB.get("status", 200))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(value("--port", "0"))), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
