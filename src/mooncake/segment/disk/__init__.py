"""The SSD tier of a segment server: values on local disk, found again after a restart."""
