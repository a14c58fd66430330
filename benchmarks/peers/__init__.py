"""What ``benchmarks/peers.py`` runs: the models, the peers as patches that can be taken off, how time and memory are measured, punar's own runs,
and what becomes of the numbers."""
