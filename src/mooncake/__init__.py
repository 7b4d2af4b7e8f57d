"""A pool of KV-cache memory shared by inference engines: a drop-in for Mooncake in pure Python.

Users import from `mooncake.store`, `mooncake.engine` and `mooncake.mooncake_config`; importing this package alone
loads nothing and starts nothing.
"""
