"""A decode instance in a process of its own: asks for transfer "t", and waits to be killed."""

import contextlib
import sys
import time
from types import SimpleNamespace

from tests.push.instances import Instance, shuffled


def main() -> None:
    prefill = SimpleNamespace(port=int(sys.argv[1]), engine=sys.argv[2])
    with contextlib.ExitStack() as stack:
        decode = Instance(stack, "decode", limit=60)
        decode.pull("d", "t", prefill, shuffled(2, 20))
        time.sleep(0.5)
        print("asked", flush=True)
        time.sleep(120)


if __name__ == "__main__":
    main()
