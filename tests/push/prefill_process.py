"""A prefill instance in a process of its own, which may be stopped and killed.

Reads JSON lists from stdin, [method of Instance, arguments...], and answers each with a line; ends with its input.
"""

import contextlib
import json
import sys

from tests.push.instances import Instance, known


def main() -> None:
    with contextlib.ExitStack() as stack:
        prefill = Instance(stack, "prefill")
        known(prefill)
        print(json.dumps([prefill.port, prefill.engine]), flush=True)
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            print(json.dumps(getattr(prefill, method)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
