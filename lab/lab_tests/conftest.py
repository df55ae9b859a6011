"""What every test of the lab shares with those of the library."""

from tests.cli.conftest import sqrtdk as sqrtdk
from tests.conftest import _kernel as _kernel
from tests.conftest import _rules_alone as _rules_alone
from tests.conftest import _seed as _seed
from tests.conftest import browser as browser
