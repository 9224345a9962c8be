"""Whatever is given to a public function, a user without a type checker gets a result or one readable message."""

import pytest

from tests.forking import printed_afresh


@pytest.mark.parametrize("options", [["--few"], pytest.param([], marks=pytest.mark.slow)], ids=["few", "all"])
def test_a_wrong_argument_of_every_public_function_gives_a_result_or_one_readable_message(options):
    assert printed_afresh("from tests.wrong_calls import main; main()", *options) == ""
