"""The base of every message body (see `rpc.messages`)."""

import msgspec


class Message(msgspec.Struct, array_like=True, gc=False):
    """Base of all bodies."""
