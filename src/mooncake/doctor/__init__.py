"""`mooncake doctor`: what is wrong with a pool, its host and its instances, and what to do about it."""
