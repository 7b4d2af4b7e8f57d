"""The cluster's secret between workers of prefill and decode: both prove it before anything else is said."""

import asyncio
import contextlib

from mooncake.rpc.handshake import MOST_BYTES
from mooncake.security.secret import CLIENT, SERVER, TOKEN, Secret, new_nonce, read_secret
from mooncake.vllm.push.wire import (
    BrokenError,
    Challenge,
    Knock,
    Prove,
    Refused,
    ToPrefill,
    pack,
    read_to_decode,
    read_to_prefill,
)


async def first_message(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: Secret | None) -> ToPrefill:
    """Of a decode that may speak, on prefill's side.

    Raises BrokenError, having said why, if it may not; as `read_to_prefill`.
    """
    if secret is None:
        message = await read_to_prefill(reader)
        if isinstance(message, Knock):
            await _refuse(writer, f"prefill knows no secret; set {TOKEN} there too")
        return message
    knock: ToPrefill | None = None
    with contextlib.suppress(BrokenError):  # the long greeting of a decode that knows of no secret
        knock = await read_to_prefill(reader, MOST_BYTES)
    if not isinstance(knock, Knock):
        await _refuse(writer, f"the cluster has a secret; set its {TOKEN} for decode")
    assert isinstance(knock, Knock)
    nonce = new_nonce()
    writer.write(pack(Challenge(nonce, secret.proof(SERVER, knock.nonce, nonce))))
    answer = await read_to_prefill(reader, MOST_BYTES)
    if not isinstance(answer, Prove) or not secret.proves(answer.proof, CLIENT, knock.nonce, nonce):
        await _refuse(writer, f"prefill's and decode's {TOKEN} differ")
    return await read_to_prefill(reader)


async def prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Refused | None:
    """Decode's side: why the two do not go together, if they do not.

    Raises ConfigError if the secret cannot be read, BrokenError; as `read_to_decode`.
    """
    secret = read_secret()
    if secret is None:
        return None
    nonce = new_nonce()
    writer.write(pack(Knock(nonce)))
    answer = await read_to_decode(reader)
    if isinstance(answer, Refused):
        return answer
    if not isinstance(answer, Challenge):
        raise BrokenError("it did not answer with a challenge")
    if not secret.proves(answer.proof, SERVER, nonce, answer.nonce):
        return Refused(f"prefill's and decode's {TOKEN} differ")
    writer.write(pack(Prove(secret.proof(CLIENT, nonce, answer.nonce))))
    return None


async def _refuse(writer: asyncio.StreamWriter, reason: str) -> None:
    writer.write(pack(Refused(reason)))
    await writer.drain()
    raise BrokenError(reason)
