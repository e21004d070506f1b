"""Conversion of a configuration to the graph of a model's layers, without any training library.

    published_models()                 the models of the papers, at their sizes and batches
    transformer_graph(Transformer())   a dense transformer: encoder, decoder or both
    mixture_graph(MixtureOfExperts())  a transformer with experts in some or all of its blocks
    wide_resnet(WideResNet())          a residual network of bottleneck blocks
    files.load_graph(path)             a Hugging Face ``config.json`` or our own architecture file

All amounts are for one sample. ``docs/estimator/architectures-and-graphs.md`` lists what is
counted and what is not.
"""
