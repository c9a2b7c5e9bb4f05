from pathlib import Path

import pytest

from trainer.config.recipe import load_config
from trainer.errors import ConfigError

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.toml"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("privacy.epsilonn=8", "unknown key privacy.epsilonn"),
        ("privacy.target_epsilonn=8", "unknown key privacy.target_epsilonn; did you mean target_epsilon?"),
        ("data.remote.timeout=3", "unknown key data.remote.timeout; did you mean timeout_seconds?"),
        ("init.checkpiont=x", "did you mean checkpoint?"),
        ("trian.num_steps=8", "unknown key trian; did you mean train?"),
        ("model.kind=captionner", "did you mean captioner?"),
        ("privacy.sampling=poison", "did you mean poisson?"),
    ],
)
def test_the_nearest_word_is_said(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RECIPE, [override])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_nothing_is_said_where_nothing_is_like_it() -> None:
    for override in ("model.kind=zebra", "privacy.xyz=1", "train.num_steps=many"):
        with pytest.raises(ConfigError) as caught:
            load_config(RECIPE, [override])
        assert "did you mean" not in str(caught.value)
