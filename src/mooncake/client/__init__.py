"""The store client: where a put's and a get's steps are put together."""
