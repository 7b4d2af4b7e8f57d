"""The tensor calls of the store: values that say of themselves what tensor, or which shard of one, they hold."""
