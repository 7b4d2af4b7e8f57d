"""The demonstration: two real vLLM instances share one pool (`python -m mooncake.demo`, started by `scripts/demo`)."""
