"""Ways to a server that do something to what passes."""

import contextlib
import socket
import threading
import time


class Relay:
    """Passes streams on to `address`, as `changed` makes them."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._far = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def changed(self, data: bytes, at: int, back: bool) -> bytes:
        """What becomes of `data`, which begins `at` bytes after the stream's beginning and goes there or `back`."""
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._far)
            self._open += (near, far)
            threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        passed = 0
        while True:
            try:
                data = source.recv(1 << 16)
                target.sendall(self.changed(data, passed, back))
            except OSError:
                data = b""
            if not data:
                target.close()
                return
            passed += len(data)


class SlowRelay(Relay):
    """What comes back is `delay` seconds late."""

    def __init__(self, address: str, delay: float) -> None:
        self.delay = delay
        super().__init__(address)

    def changed(self, data: bytes, at: int, back: bool) -> bytes:
        if back:
            time.sleep(self.delay)
        return data


class DamagingRelay(Relay):
    """The byte number `spoil` of what comes `back` (or goes there) is changed, once."""

    def __init__(self, address: str, back: bool, spoil: int) -> None:
        self._back, self._spoil, self.spoilt = back, spoil, 0
        super().__init__(address)

    def changed(self, data: bytes, at: int, back: bool) -> bytes:
        if back != self._back or self.spoilt or not at <= self._spoil < at + len(data):
            return data
        self.spoilt += 1
        spoilt = bytearray(data)
        spoilt[self._spoil - at] ^= 1
        return bytes(spoilt)
