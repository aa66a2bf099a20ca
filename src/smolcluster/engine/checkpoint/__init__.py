"""Checkpoints: their contents, how they become durable, how other programs read them.

store.py               all checkpoints of a run: save, verify, fall back, delete
snapshot.py            one checkpoint: its contents and files
async_saver.py         saving in the background
sharded_save.py        one checkpoint written by all ranks
safetensors_writer.py  tensors to files; lazy_tensors.py: back, on access
export_hf.py, import_hf.py, tokenizer_files.py    Hugging Face's formats
"""
