"""The cluster's secret between workers of prefill and decode: both prove it before anything else is said."""

import asyncio

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
    message = await read_to_prefill(reader)
    if secret is None:
        if isinstance(message, Knock):
            await _refuse(writer, f"prefill knows no secret; set {TOKEN} there too")
        return message
    if not isinstance(message, Knock):
        await _refuse(writer, f"the cluster has a secret; set its {TOKEN} for decode")
    assert isinstance(message, Knock)
    nonce = new_nonce()
    writer.write(pack(Challenge(nonce, secret.proof(SERVER, message.nonce, nonce))))
    answer = await read_to_prefill(reader)
    if not isinstance(answer, Prove) or not secret.proves(answer.proof, CLIENT, message.nonce, nonce):
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
