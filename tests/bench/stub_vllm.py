"""The stub engine with the command line of vLLM's API server: `python stub_vllm.py --model M --port P ...`.

With `--exit-code N` among the arguments it fails as a vLLM that does not start.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.proxy import stub_engine


def value(flag: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else default


if __name__ == "__main__":
    if code := value("--exit-code"):
        print("ValueError: this model is too large for me")
        sys.exit(int(code))
    sys.argv[1:] = [value("--port"), "127.0.0.1"]
    stub_engine.main()
