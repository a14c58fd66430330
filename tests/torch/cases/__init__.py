"""Small scripts made after public bug reports about recomputation; each has ``make()``, which returns model, batch and loss function.

Some have a ``step(model, batch, loss_fn)`` of their own, or ``extra_state(model, batch)``, which must equal the plain run's.
"""
