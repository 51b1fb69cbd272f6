"""Parts of `examples/train_pair.py`: the corpus, the two models' training and its evaluation."""
