"""How the two sides of a connection find that they speak the same protocol and know the same secret.

    Hello(nonce) → Welcome                                     no secret is set on either side
    Hello(nonce) → Welcome(challenge, proof), Prove → Welcome  both know it

A side that has the secret speaks with nobody who cannot prove to know it.
"""

from collections.abc import Callable
from typing import Protocol as Shape
from typing import cast

import msgspec

from mooncake.errors import ConfigError, ErrorCode, StoreError
from mooncake.rpc.message import Message
from mooncake.rpc.messages import PROTOCOL, Hello, Prove, Welcome
from mooncake.security.credential import TENANT_TOKEN, Credential
from mooncake.security.secret import CLIENT, SERVER, TOKEN, Secret, new_nonce, read_secret
from mooncake.version import __version__

ANYBODY = "default"  # the tenant of who says nothing
MOST_BYTES = 4096  # of a message from somebody who has proved nothing yet


Vet = Callable[[bytes, bytes, bytes], None]  # a tenant's proof, the client's nonce, the server's


class Guard:
    """Of one connection, on the side that answers.  `is_open`: requests may be served."""

    __slots__ = ("_client_nonce", "_nonce", "_secret", "_vet", "is_open")

    def __init__(self, secret: Secret | None, vet: Vet | None = None) -> None:
        """`vet`: what else somebody who knows the secret must prove; it raises StoreError."""
        self._secret = secret
        self._vet = vet
        self._client_nonce = self._nonce = b""
        self.is_open = secret is None

    def answer(self, message: Message, welcome: Callable[[], Welcome]) -> Welcome | None:
        """The reply to a Hello or Prove; None for a request, which may be served.

        Raises StoreError (ILLEGAL_CLIENT) with a sentence for whoever may not ask anything.
        """
        if isinstance(message, Hello):
            if self._secret is None:
                return welcome()
            if not message.nonce:
                raise StoreError(ErrorCode.ILLEGAL_CLIENT, f"the cluster has a secret; set its {TOKEN}")
            self.is_open = False
            self._client_nonce, self._nonce = message.nonce, new_nonce()
            proof = self._secret.proof(SERVER, self._client_nonce, self._nonce)
            return Welcome(PROTOCOL, __version__, 0, 0, 0, self._nonce, proof)
        if isinstance(message, Prove):
            if self._secret is None:
                raise StoreError(ErrorCode.INVALID_PARAMS, "nothing has to be proved here")
            nonce, self._nonce = self._nonce, b""  # one try each
            if not self._secret.proves(message.proof, CLIENT, self._client_nonce, nonce):
                raise StoreError(ErrorCode.ILLEGAL_CLIENT, f"the two sides' {TOKEN} differ")
            if self._vet is not None:
                self._vet(message.tenant_proof, self._client_nonce, nonce)
            self.is_open = True
            return welcome()
        if not self.is_open:
            raise StoreError(ErrorCode.ILLEGAL_CLIENT, "a connection starts with Hello, and with a proof of the secret")
        return None


class Caller(Shape):
    """What sends a request and waits for the reply to it."""

    def call(self, message: Message) -> Message: ...


def greet(connection: Caller, hello: Hello, credential: Credential | None = None) -> Welcome:
    """Say Hello, and prove the secret if there is one, and to a master the tenant's credential.

    Raises StoreError with a sentence when the protocols differ or one side does not know the other's secret, OSError.
    """
    try:
        secret = read_secret()
    except ConfigError as error:
        raise StoreError(ErrorCode.ILLEGAL_CLIENT, str(error)) from None
    nonce = b"" if secret is None else new_nonce()
    welcome = cast(Welcome, connection.call(msgspec.structs.replace(hello, nonce=nonce)))
    if welcome.protocol != PROTOCOL:
        raise StoreError(
            ErrorCode.INVALID_VERSION,
            f"the other side speaks protocol {welcome.protocol} (mooncake-py {welcome.version}), this side "
            f"{PROTOCOL} ({__version__}); install the same version on both",
        )
    if secret is None:
        return welcome
    if not welcome.challenge:
        raise StoreError(ErrorCode.ILLEGAL_CLIENT, f"the other side knows no secret; set {TOKEN} there too")
    if not secret.proves(welcome.proof, SERVER, nonce, welcome.challenge):
        raise StoreError(ErrorCode.ILLEGAL_CLIENT, f"the two sides' {TOKEN} differ")
    proof = secret.proof(CLIENT, nonce, welcome.challenge)
    of_tenant = b"" if credential is None else credential.proof(nonce, welcome.challenge)
    return cast(Welcome, connection.call(Prove(proof, of_tenant)))


def of_tenant(hello: Hello, credential: Credential | None) -> Hello:
    """As a client says it to a master: who has a credential is the tenant that it names.  Raises StoreError if another
    is asked for."""
    if credential is None or hello.tenant == credential.tenant:
        return hello
    if hello.tenant != ANYBODY:
        raise StoreError(
            ErrorCode.ILLEGAL_CLIENT,
            f"tenant_id {hello.tenant[:200]!r} was asked for, but the credential in {TENANT_TOKEN} is that of "
            f"{credential.tenant[:200]!r}",
        )
    return msgspec.structs.replace(hello, tenant=credential.tenant)
