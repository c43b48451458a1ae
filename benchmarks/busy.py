"""``python -m benchmarks.busy FILE``: milliseconds of CPU from the whole reply in FILE to what leaves; a median."""

import statistics
import sys
import time
from pathlib import Path

from proxy.api import Api, Asked
from proxy.rewrite import rewrite_reply
from proxy.unscorable import Rules


def main() -> None:
    asked = Asked(Api.COMPLETIONS, {}, logprobs=True)
    original = Path(sys.argv[1]).read_bytes()
    times = []
    for _ in range(9):
        body = bytes(bytearray(original))  # a fresh object: nothing is cached
        began = time.process_time()
        rewrite_reply(body, Api.COMPLETIONS, Rules(), lambda: asked)
        times.append((time.process_time() - began) * 1e3)
    print(statistics.median(times))


if __name__ == "__main__":
    main()
