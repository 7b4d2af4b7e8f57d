"""KV events, the indexer, and routing by what it knows."""
