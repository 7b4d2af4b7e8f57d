"""`mooncake bench`: how fast a pool moves bytes, and how prefill and decode instances answer a stream of requests."""
