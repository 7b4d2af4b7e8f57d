"""Snapshots of what a master knows and the segments' tables do not hold (docs/snapshots.md).

    settings   the flags and variables, checked       contents   what is written, a slice at a time
    file       one snapshot as bytes, checked         stores, s3, catalog   where snapshots lie
    child      the process that writes and reads      keeper     has one written at intervals
    restore    a new master begins with one

The master imports `settings` always and the rest when it is used; only the child imports what speaks to S3 or redis.
"""
