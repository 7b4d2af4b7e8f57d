"""Batches of named fields, structured objects and bundles in the pool (docs/structured.md)."""

from mooncake.structured.objects import (
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
)
from mooncake.structured.parts import (
    BundleTransferPolicy,
    StructuredMemberSlice,
    raw_destination,
    tensor_object_buffer,
)
from mooncake.structured.refs import (
    MooncakeDataProtoRef,
    RemoteBundleRef,
    StructuredFieldLocation,
    export_dataproto_ref,
    import_dataproto_ref,
    is_dataproto_ref_handle,
)
from mooncake.structured.schemas import FieldSchema
from mooncake.structured.transfer import MooncakeBundleTransfer

export_ref = export_dataproto_ref
import_ref = import_dataproto_ref

__all__ = [
    "BundleTransferPolicy",
    "FieldSchema",
    "MooncakeBundleTransfer",
    "MooncakeDataProtoRef",
    "RemoteBundleRef",
    "StructuredFieldLocation",
    "StructuredMemberSlice",
    "StructuredObjectPayload",
    "StructuredObjectReadSpec",
    "StructuredObjectResult",
    "export_dataproto_ref",
    "export_ref",
    "import_dataproto_ref",
    "import_ref",
    "is_dataproto_ref_handle",
    "raw_destination",
    "tensor_object_buffer",
]
