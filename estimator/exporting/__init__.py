"""PyTorch modules as graphs of layers, through ``torch.export``; only ``reading`` imports torch."""
