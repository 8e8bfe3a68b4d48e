"""How `hocket-tiny`, the model that ships inside the package, is made.

`corpus` collects text and trains the tokenizer, `network` is the model, `kernels` its three hand-
written gradients, `optim` the optimiser, `training` the two stages, `export` the checkpoint,
`evaluation` measures the exported files and `card` writes down what was found. The command is
`tools/train_tiny_model.py`. Nothing here is imported by the serving code.
"""
