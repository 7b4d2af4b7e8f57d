"""One value from disk back into the memory that the master gave out for it."""

import ctypes

import msgspec

from mooncake.rpc.disk_messages import Promotion
from mooncake.rpc.record_messages import Body
from mooncake.segment.disk.files import blocks
from mooncake.segment.disk.log import DiskLog
from mooncake.segment.disk.records import Record
from mooncake.segment.disk.staging import Staging
from mooncake.segment.owner import Owner
from mooncake.transfer import table

_WAIT = 1.0  # seconds for room to read into
_decode = msgspec.msgpack.Decoder(Body).decode


def promote(log: DiskLog, staging: Staging, owner: Owner, promotion: Promotion, term: int) -> bool:
    """Whether the record is whole and stands now.  `term`: of the master that ordered it."""
    record = log.pin(promotion.disk_seq)
    if record is None:
        return False
    slot = promotion.part.slots[0]
    owner.hold(slot)
    try:
        ticket = staging.take(record.size, _WAIT)
        if ticket is None:
            return False
        try:
            memory = owner.memory
            if not log.read([record], memory.data[ticket.offset : ticket.offset + blocks(record.size)])[0]:
                return False
            return _fill(owner, promotion, record, term, memory.address + ticket.offset)
        finally:
            staging.give_back([ticket.number])
    finally:
        owner.let_go(slot)
        log.unpin(record)


def _fill(owner: Owner, promotion: Promotion, record: Record, term: int, source: int) -> bool:
    memory, seq, part = owner.memory, promotion.seq, promotion.part
    slot, extents = part.slots[0], part.extents
    if sum(extents[1::2]) != record.size or not memory.table.may_write(slot, seq, term):
        return False
    body = msgspec.structs.replace(_decode(record.body), extents=extents, version=0, from_disk=promotion.disk_seq)
    memory.table.begin(part.slots, seq, term, 0, body)
    table.fence()
    if not memory.table.may_write(slot, seq, term):
        memory.table.abandon(slot, seq)
        return False
    for i in range(0, len(extents), 2):
        ctypes.memmove(memory.address + extents[i], source, extents[i + 1])
        source += extents[i + 1]
    memory.table.set_state(slot, table.COMPLETE)
    table.fence()
    return memory.table.may_write(slot, seq, term)
