"""The verify step of speculative decoding for models with Multi-head Latent Attention."""

__version__ = "0.1.0"
