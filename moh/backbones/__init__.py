"""Backbones and their wiring: TransNeXt and timm, DiT on diffusers, LLaMA on transformers."""
