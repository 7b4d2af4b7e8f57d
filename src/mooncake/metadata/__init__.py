"""The HTTP metadata server: alone (`mooncake_http_metadata_server`), or as part of the master."""
