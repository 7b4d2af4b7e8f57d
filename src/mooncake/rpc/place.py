"""Where a master is: at an address, or wherever whoever leads now has said (see `mooncake.election`)."""

from mooncake.rpc.sockets import connect


def parse_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port".  Raises ValueError with a sentence."""
    host, colon, port = address.strip().rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536 or not host:
        raise ValueError(
            f"{address[:200]!r} is not an address; expected host:port with a port from 1 to 65535, "
            "such as 127.0.0.1:50051"
        )
    return host.strip("[]"), int(port)


class MasterPlace:
    """One address.  A name in it is looked up at each connection, so a master may come back elsewhere behind it."""

    wait_s = 0.0  # how long a process that begins waits for a master

    def __init__(self, text: str) -> None:
        """Raises ValueError with a sentence."""
        self.text = text
        self._address = parse_address(text)

    def find(self) -> tuple[str, int]:
        """Host and port to connect to now.  Raises OSError if there is no master."""
        return self._address

    def accept(self, term: int) -> None:
        """A master of this term has answered there.  Raises OSError if a later one is known."""

    def unreachable(self, error: Exception) -> str:
        """Why a master that was never reached cannot be, and what to do, for the user."""
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        return (
            f"the master at {self.text} cannot be reached ({reason}); start mooncake_master there, or correct the "
            "address (the port is its rpc_port, 50051 by default)"
        )


def is_reachable(place: MasterPlace, limit: float) -> bool:
    """Whether something listens where a master should be now."""
    try:
        connect(*place.find(), limit).close()
    except OSError:
        return False
    return True
