"""The indexer (Conductor): which instance has how much of a prompt's KV cache, by what engines and masters publish."""
