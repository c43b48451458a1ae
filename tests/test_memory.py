"""The memory of large replies is kept: a process that has served one is not given its pages anew for the next."""

import subprocess
import sys

_PROBE = """
import resource, sys
if sys.argv[1] == "kept":
    from proxy.memory import keep_memory
    keep_memory()
for _ in range(20):
    bytearray(600_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(200):
    [bytearray(600_000) for _ in range(3)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", _PROBE, how], check=True, capture_output=True, text=True).stdout)


def test_large_replies_cost_no_page_faults_once_one_has_been_served() -> None:
    assert faults("kept") < 2000  # of 87,890 pages touched
