"""Finding engines by name through a metadata service: the alternative to addresses that are known beforehand.

base         the interface that every back end fulfils
http, etcd, redis   the back ends, one module each; imported when one is asked for
backends     which of them an address means, with the limit of time that every call has
entries      keys and JSON of what is kept there
publication  keeping our own entries there, whatever happens to the service
names        the address behind a name
"""
