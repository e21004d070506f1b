"""PyTorch modules as graphs of layers, by ``torch.export``. Only ``reading`` imports torch."""
