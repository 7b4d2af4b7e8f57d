"""The segment server: the only kind of process that owns pool memory."""
