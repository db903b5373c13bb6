"""Texts as a model reads them: from files, through the tokenizer of its checkpoint, to its inputs."""
