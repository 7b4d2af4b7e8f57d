"""`mooncake tenant NAME`: a new credential of a tenant, for its clients and for the master's file."""

import argparse
import sys
from typing import Any

from mooncake.errors import ConfigError
from mooncake.master.tenants.names import wrong_name
from mooncake.security.credential import TENANT_TOKEN, Credential


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tenant",
        help="make a new credential of a tenant",
        description=f"Prints two lines: the credential, which the tenant's clients need in {TENANT_TOKEN}, and what "
        "the master needs in the file of --tenant_credentials_file. It is kept nowhere.",
    )
    parser.add_argument("name", help="the tenant's name")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code.  Raises ConfigError."""
    name = str(arguments.name)
    if wrong := wrong_name(name):
        raise ConfigError(f"{name!r} cannot be a tenant: {wrong}")
    credential, text = Credential.new(name)
    sys.stdout.write(f"for clients: {text}\nfor the master: {name}:{credential.verifier.hex()}\n")
    return 0
