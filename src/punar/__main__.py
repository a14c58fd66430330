"""``python -m punar``."""

from punar.cli import main

main()
