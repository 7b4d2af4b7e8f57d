"""The proxy: splits each request over prefill and decode instances, which may come, go and die while it serves."""
