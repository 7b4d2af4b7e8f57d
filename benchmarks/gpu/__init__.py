"""Measurements on a machine with one NVIDIA GPU.

`python -m benchmarks.gpu` runs real vLLM: what a pool's connectors cost and gain (see `__main__`).
`python -m benchmarks.gpu.memory` measures what lies below it: the store's and the engine's calls on GPU memory.
"""
