"""Batches of named fields in the pool: each field one value, a manifest that says what they are, and a small handle
that processes pass on.  Users import `mooncake.structured_object_store`."""
