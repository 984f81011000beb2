"""What is told of an environment that a manager could not make. The outputs are pip's, shortened in the middle."""

from __future__ import annotations

import pytest

from runtime.shim.environment import describe_end

HASHES = """\
ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the package versions, …
    idna==3.7 from https://files.pythonhosted.org/…/idna-3.7-py3-none-any.whl (from -r requirements.txt (line 1)):
        Expected sha256 00
             Got        82fee1fc78add43492d3a1898bfa6d8a904cc97d8427f683ed8e798d07761aa0
"""
CONFLICT = """\
ERROR: Cannot install idna==3.6 and idna==3.7 because these package versions have conflicting dependencies.

The conflict is caused by:
    The user requested idna==3.7
    The user requested idna==3.6

Additional packages available to meet constraints:
    …

To fix this you could try to:
1. loosen the range of package versions you've specified
2. remove package versions to allow pip attempt to solve the dependency conflict

ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/en/latest/topics/dependency-resolution/
"""
NEVER = """\
Looking in links: /opt/wheels
ERROR: Could not find a version that satisfies the requirement idna==99.99 (from versions: 3.6, 3.7)
ERROR: No matching distribution found for idna==99.99
"""
TRACEBACK = """\
    raise InvalidMarker(
pip._vendor.packaging.markers.InvalidMarker: Invalid marker: 'rm', parse error at 'rm'
"""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (HASHES, HASHES.splitlines()[0]),
        (CONFLICT, CONFLICT.splitlines()[0]),
        (NEVER, "ERROR: No matching distribution found for idna==99.99"),
        (TRACEBACK, TRACEBACK.splitlines()[-1]),
        ("  × No solution found when resolving dependencies", "  × No solution found when resolving dependencies"),
        ("", ""),
    ],
    ids=["hashes", "conflict", "never", "traceback", "uv", "nothing"],
)
def test_end_of_what_a_manager_said_has_the_reason_last(said: str, reason: str) -> None:
    told = describe_end(said)

    assert told.endswith(reason)
    assert told.startswith("\n".join(said.splitlines()[-10:]))
