"""A slow way to a master."""

import socket
import threading
import time


class Relay:
    """Passes a connection on to the master, each answer `delay` seconds late."""

    def __init__(self, port: int, delay: float) -> None:
        self._port, self.delay = port, delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source, target, late: bool) -> None:
        while True:
            try:
                data = source.recv(1 << 16)
                if late:
                    time.sleep(self.delay)
                target.sendall(data)
            except OSError:
                data = b""
            if not data:
                target.close()
                return

    def close(self) -> None:
        self._listener.close()
