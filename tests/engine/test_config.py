"""Names in the API: the first is the model's id, the others are aliases."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from noria.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("given", "names"),
    [("", ()), ("one", ("one",)), (" one , two,three ", ("one", "two", "three")), ("one,two,one", ("one", "two"))],
)
def test_served_names(given, names):
    assert EngineConfig(served_model_name=given).served_names == names


@pytest.mark.parametrize("given", [",", "one,", "one,,two"])
def test_an_empty_name_is_a_mistake(given):
    with pytest.raises(ValidationError, match="empty"):
        EngineConfig(served_model_name=given)
