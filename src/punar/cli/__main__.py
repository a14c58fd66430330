"""``python -m punar.cli``."""

from punar.cli import main

main()
