"""BLEU, ROUGE-L and CIDEr of captions, by the code that the field reports them with: pycocoevalcap, an extra.

    pip install -r requirements-captions.txt        # and a Java runtime, which its tokenizer is written in

The tokenizer is Stanford's PTBTokenizer, as in the COCO caption challenge (Chen et al. 2015, https://arxiv.org/abs/1504.00325).
METEOR and SPICE are left out: their jars have licences of their own, and SPICE fetches models.
"""

import contextlib
import io
import shutil
from collections.abc import Mapping, Sequence

from trainer.errors import ConfigError

METRICS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr")


def require_metrics() -> None:
    """To be asked before captions are written, which takes longer.

    Raises:
        ConfigError: the package or Java is missing.
    """
    try:
        import pycocoevalcap  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "caption metrics need the package pycocoevalcap: pip install -r requirements-captions.txt"
        ) from error
    if shutil.which("java") is None:
        raise ConfigError(
            "caption metrics need a Java runtime, which pycocoevalcap's tokenizer is written in, and there is no `java` "
            "on the PATH: apt-get install default-jre-headless"
        )


def caption_metrics(captions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Scores of one caption per image against its references; BLEU and ROUGE-L from 0 to 1, CIDEr from 0 to 10.

    Args:
        captions, references: by the same names of images. CIDEr weighs words by how many images' references have them: with
            few images it means little.

    Raises:
        ConfigError: the package or Java is missing; an image without reference.
    """
    require_metrics()
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    missing = [name for name in captions if not references.get(name)]
    if missing or not captions:
        raise ConfigError(f"{missing[0]} has no reference caption" if missing else "there are no captions to score")
    said = {name: [{"caption": _one_line(text)}] for name, text in captions.items()}
    true = {name: [{"caption": _one_line(text)} for text in references[name]] for name in captions}
    with contextlib.redirect_stdout(io.StringIO()):  # the package prints
        tokenizer = PTBTokenizer()
        said_tokens, true_tokens = tokenizer.tokenize(said), tokenizer.tokenize(true)
        bleu = Bleu(4).compute_score(true_tokens, said_tokens)[0]
        rouge = Rouge().compute_score(true_tokens, said_tokens)[0]
        cider = Cider().compute_score(true_tokens, said_tokens)[0]
    return {name: float(value) for name, value in zip(METRICS, [*bleu, rouge, cider], strict=True)}


def _one_line(text: str) -> str:
    """The tokenizer tells captions apart by lines; an empty one would vanish from its output."""
    return " ".join(text.split()) or "."
