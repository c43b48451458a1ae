"""``python -m proxy``."""

from proxy.cli import main

main()
