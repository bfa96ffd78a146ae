"""The parts of `benchmarks.train_demo`: data, forward and loss, optimizer, checkpoint, evaluation, model card."""
