"""Each kind of back end for elections as a real server, which can be stopped, killed and started again."""

from pathlib import Path

from tests.engine.services import Etcd, Redis, start_service
from tests.ha.kubernetes_api import KubernetesApi

KINDS = ("etcd", "redis", "k8s")


class LastingEtcd(Etcd):
    """It finds its data again when it is restarted."""

    def command(self) -> list[str]:
        if not self.lives:
            self._command = super().command()
        return self._command


class Backend:
    """`address` is what clients are told, `flags` what masters are."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        if kind == "k8s":
            self.service = KubernetesApi()
            self.address = where = "k8s://kv/pool"
        else:
            self.service = start_service(kind, folder, make={"etcd": LastingEtcd, "redis": Redis}[kind])
            self.address = where = self.service.address
        self.flags = ("--enable_ha", f"--ha_backend_type={kind}", f"--ha_backend_connstring={where}")

    @property
    def environment(self) -> dict[str, str]:
        return {"MOONCAKE_K8S_API_SERVER": self.service.url} if self.kind == "k8s" else {}
