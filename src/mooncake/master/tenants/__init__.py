"""Name spaces with a share of the memory each: what a master does differently when it was told to have tenants."""
