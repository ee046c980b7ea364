"""kvcompress: KV-cache compression for HuggingFace models, really measured."""
