"""Batches of named fields in the pool (docs/structured.md)."""

from mooncake.structured.parts import (
    BundleTransferPolicy,
    StructuredMemberSlice,
    raw_destination,
    tensor_object_buffer,
)
from mooncake.structured.refs import MooncakeDataProtoRef, export_dataproto_ref, import_dataproto_ref
from mooncake.structured.transfer import MooncakeBundleTransfer

__all__ = [
    "BundleTransferPolicy",
    "MooncakeBundleTransfer",
    "MooncakeDataProtoRef",
    "StructuredMemberSlice",
    "export_dataproto_ref",
    "import_dataproto_ref",
    "raw_destination",
    "tensor_object_buffer",
]
