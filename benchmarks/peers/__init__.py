"""What smolcluster is held against: plain PyTorch, as one would write it by hand. Only the model class is ours."""
