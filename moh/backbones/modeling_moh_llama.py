"""Lets transformers load the folder that holds this file, with ``trust_remote_code=True``.

``save_pretrained`` of a MoH LLaMA puts it there. The model's code is the package moh's.
"""

try:
    from moh.backbones.llama import MoHLlamaConfig, MoHLlamaForCausalLM, MoHLlamaModel
except ModuleNotFoundError as error:
    if error.name != "moh":
        raise
    raise ImportError(
        "this model has the attention of the package moh, which is not installed: install it from "
        "a clone of its repository (pip install -e FOLDER)"
    ) from None

__all__ = ["MoHLlamaConfig", "MoHLlamaForCausalLM", "MoHLlamaModel"]
