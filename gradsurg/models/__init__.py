"""Small models to train, one a file: a class or a function that returns a module.

It is called with the input shape, the number of outputs, the fields of its yaml, and the keyword
arguments that the data add (`tasks.base.Data.model_options`). `mlp.py` is an example.
"""
