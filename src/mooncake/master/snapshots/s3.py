"""Snapshots in a bucket of S3 or of a server that speaks its protocol; needs botocore (mooncake-py[s3]).

Nothing is asked more often than once and again: whoever wants a snapshot written tries again at the next interval.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from mooncake.master.snapshots.settings import S3Settings
from mooncake.master.snapshots.stores import ASIDE, SUFFIX, Store


class Bucket(Store):
    def __init__(self, settings: S3Settings, cluster: str, limit: float | None = None) -> None:
        """Asks nothing yet.  `limit`: seconds that any wait may take at most."""
        self._bucket = settings.bucket
        self._prefix = f"mooncake-snapshots/{cluster}/"
        self._where = f"{settings.endpoint or 'S3'} (bucket {settings.bucket})"
        with self._asking():
            self._client = _client(settings, limit)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError, HTTPClientError, ValueError) as error:
            raise OSError(f"{self._where}: {error}") from None

    def names(self) -> list[str]:
        found: list[str] = []
        with self._asking():
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix):
                found += [item["Key"].removeprefix(self._prefix) for item in page.get("Contents", [])]
        return sorted(name for name in found if name.endswith((SUFFIX, ASIDE)))

    def read(self, name: str) -> bytes:
        with self._asking():
            body: bytes = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"].read()
        return body

    def write(self, name: str, raw: bytes) -> None:
        with self._asking():
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=raw)

    def delete(self, name: str) -> None:
        with self._asking():
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    def set_aside(self, name: str) -> None:
        source = {"Bucket": self._bucket, "Key": self._prefix + name}
        target = self._prefix + name.removesuffix(SUFFIX) + ASIDE
        with self._asking():
            self._client.copy_object(Bucket=self._bucket, Key=target, CopySource=source)
        self.delete(name)


def _client(settings: S3Settings, limit: float | None) -> Any:
    return botocore.session.get_session().create_client(
        "s3",
        region_name=settings.region,
        endpoint_url=settings.endpoint or None,
        use_ssl=settings.use_https,
        aws_access_key_id=settings.access_key_id or None,  # else where AWS keeps them
        aws_secret_access_key=settings.secret_access_key or None,
        config=Config(
            connect_timeout=min(limit or settings.connect_timeout_s, settings.connect_timeout_s),
            read_timeout=min(limit or settings.request_timeout_s, settings.request_timeout_s),
            retries={"total_max_attempts": 2, "mode": "standard"},
            s3={"addressing_style": "virtual" if settings.use_virtual_addressing else "path"},
            request_checksum_calculation="when_required",  # older servers refuse newer ones; the file has its own
            response_checksum_validation="when_required",
        ),
    )
