"""A store behind HTTP (docs/rest.md)."""
