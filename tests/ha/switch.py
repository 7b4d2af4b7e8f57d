"""A way to a server that can lead to another one, or nowhere, from one moment to the next."""

import contextlib
import socket
import threading


class Switch:
    """Passes connections on to `port` of this host; 0: takes them and is silent."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.own_port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.own_port}"
        self._near: list[socket.socket] = []
        self._far: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def turn(self, port: int) -> None:
        """From now on there; who is connected is cut off, of which his former server hears nothing."""
        self.port = port
        near, self._near = self._near, []
        for sock in near:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def silence(self) -> None:
        """What is connected stays so, and nothing passes any more."""
        self.port = 0

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._near.append(near)
            if not self.port:
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                near.close()
                continue
            self._far.append(far)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, target, self.port), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, port: int) -> None:
        """While the switch stands as it did; in silence nothing passes, and nothing is cut off."""
        while self.port in (0, port):
            try:
                data = source.recv(1 << 16)
                if self.port == port:
                    target.sendall(data)
            except OSError:
                data = b""
            if not data and self.port in (0, port):
                source.close()
                target.close()
                return

    def close(self) -> None:
        self.turn(-1)
        self._listener.close()
        for sock in self._far:
            sock.close()
