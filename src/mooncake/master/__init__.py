"""The master: the directory of a pool.  It never touches the bytes of a value."""
