"""What a text names as the master: one address, or a back end of elections that knows who leads.

    HOST:PORT                                                  one master
    etcd://HOST:PORT[,HOST:PORT][?cluster_id=NAME]
    redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE][?cluster_id=NAME]   (or rediss)
    k8s://NAMESPACE/LEASE

What elections need is imported when there are any.
"""

from mooncake.errors import ConfigError
from mooncake.rpc.place import MasterPlace


def master_place(text: str) -> MasterPlace:
    """Raises ConfigError, with a sentence; connects to nothing."""
    if "://" in text:
        from mooncake.election.leader import LeaderPlace

        return LeaderPlace(text.strip())
    try:
        return MasterPlace(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None
