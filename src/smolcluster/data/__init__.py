"""Datasets, tokenizers and the sampler, which assigns samples to workers.

    sampler.py     the stream of samples and each worker's share of it
    leases.py      samples leased to workers that may leave: every sample counts once
    dataset.py     from sample numbers to a batch of tensors
    text.py        text -> tokens -> a training and a validation dataset
    sources.py     where text comes from
    chunks.py      splits long text for tokenizers
    tokenizers.py  bytes, characters, GPT-2's and Hugging Face's tokens
    mnist.py       handwritten digits
    cache.py       token files on disk, built once
    download.py    checksummed downloads
    names.py       the values of `data.name`
    example_prompts.py    prompts for a model without a chat template

Importing the package alone imports no torch.
"""
