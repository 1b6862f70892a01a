"""What is said of a model that a server can neither run nor emulate."""

import pytest

from meshwright.serving.server.models import EmulatedModel
from meshwright.spec import ServedModel, ServingError


def test_a_model_that_neither_runs_nor_has_a_latency_is_told_what_it_lacks():
    with pytest.raises(ServingError, match=r"Model 'm' has no latency.*Give `model`.*or the `latency` to emulate"):
        EmulatedModel(ServedModel(name="m", slo=1.0))
