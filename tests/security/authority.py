"""A certificate authority for tests, made by the openssl command; and the variables that name its files."""

import subprocess
from pathlib import Path

HOSTS = "IP:127.0.0.1,DNS:localhost"


class Authority:
    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path, self._key = folder, folder / f"{name}.pem", folder / f"{name}.key"
        _run("req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.path, "-subj", f"/CN={name}", "-days", "30")

    def issue(self, name: str = "node", hosts: str = HOSTS, days: int = 30) -> tuple[Path, Path]:
        """(certificate, key); with negative `days` it has expired."""
        cert, key, request = (self.folder / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={hosts}\n")
        _run("req", "-new", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signed = ("-in", request, "-CA", self.path, "-CAkey", self._key, "-CAcreateserial", "-extfile", extensions)
        _run("x509", "-req", *signed, "-days", str(days), "-out", cert)
        return cert, key

    def variables(self, cert: Path, key: Path) -> dict[str, str]:
        return {"MOONCAKE_TLS_CERT": str(cert), "MOONCAKE_TLS_KEY": str(key), "MOONCAKE_TLS_CA": str(self.path)}


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _run(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
